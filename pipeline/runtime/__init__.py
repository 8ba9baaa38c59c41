"""The runtime: from a list of layers and a schedule to training steps in real processes.

pipeline, coexecution               `Pipeline`, what a user calls
settings, places, connection,
deployment                          what happens before the first step
model, structure, partition         the list of layers, what flows, where it is cut
body, random_numbers                what a stage computes
graph_cut, plan, stage              how its passes are compiled
eager_stage, eager_tape             how they run where Python runs every time
executor, ledger                    one rank's line of the schedule, and the stashes it holds
optimizer, metrics, checkpoint      after the backward pass
report, timeline                    what it tells
"""

from pipeline.runtime.pipeline import Pipeline
from pipeline.runtime.report import Report

__all__ = ["Pipeline", "Report"]
