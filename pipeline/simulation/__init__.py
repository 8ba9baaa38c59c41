"""The simulator: what a schedule takes in time and memory, before anything runs.

result = pipeline.simulate(schedule, pipeline.Costs(forward=1.0, backward=2.0, evict=0.1))
print(result)
result.plot("timeline.png")
"""

from pipeline.simulation.costs import Costs, links_between_nodes
from pipeline.simulation.result import Simulation
from pipeline.simulation.simulator import simulate

__all__ = ["Costs", "Simulation", "links_between_nodes", "simulate"]
