"""The planner: which parallelism to launch, and where each operation should run.

    graph = OpGraph.profile(step, x, y)                   # measured, or OpGraph.load(path)
    placement = place(graph, Cluster.uniform(2, bandwidth=50e9), seconds=60)
    print(placement)
    placed = execute(placement, step)                     # the same results, on both devices

After Pal et al., "Optimizing Multi-GPU Parallelization Strategies for Deep Learning Training"
(arXiv 1907.13257): `place` is their DLPlacer, `HybridModel` their model of end-to-end time, and
`plan` searches what `pipeline` can run:

    found = plan(layers, loss, optimizer, Cluster.local_ranks(4), (x, y))
    print(found)                                          # the table, and why the winner wins
    found.save("plan.json")                               # for Pipeline.from_plan on the ranks
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipeline.errors import (
    ClusterError,
    GraphError,
    HybridError,
    InfeasibleError,
    PlacementError,
    PlanningError,
)
from pipeline.planning.cluster import Cluster, Device, Link
from pipeline.planning.efficiency import RingModel, ScalingPoints
from pipeline.planning.epochs import EpochFit, EpochTable, measure_epochs
from pipeline.planning.graph import Edge, Op, OpGraph
from pipeline.planning.hybrid import HybridModel, Strategy
from pipeline.planning.model_costs import LayerCosts
from pipeline.planning.placement import Placement
from pipeline.planning.training_plan import Plan

if TYPE_CHECKING:
    from pipeline.planning.execution import execute, logical_cluster
    from pipeline.planning.placer import place
    from pipeline.planning.planner import plan, search

# Loaded on first use: what needs the solver or TensorFlow. Name → the module that has it.
_HOMES = {
    "execute": "pipeline.planning.execution",
    "logical_cluster": "pipeline.planning.execution",
    "place": "pipeline.planning.placer",
    "plan": "pipeline.planning.planner",
    "search": "pipeline.planning.planner",
}

__all__ = [
    "Cluster",
    "ClusterError",
    "Device",
    "Edge",
    "EpochFit",
    "EpochTable",
    "GraphError",
    "HybridError",
    "HybridModel",
    "InfeasibleError",
    "LayerCosts",
    "Link",
    "Op",
    "OpGraph",
    "Placement",
    "PlacementError",
    "Plan",
    "PlanningError",
    "RingModel",
    "ScalingPoints",
    "Strategy",
    "execute",
    "logical_cluster",
    "measure_epochs",
    "place",
    "plan",
    "search",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pipeline.planning' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
