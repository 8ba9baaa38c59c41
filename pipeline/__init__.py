"""Pipeline-parallel training on Horovod, for models written for TensorFlow 2, after BPipe.

    import horovod.tensorflow as hvd
    import pipeline

    hvd.init()
    pipe = pipeline.Pipeline(layers, loss=loss, optimizer=optimizer, num_stages=4,
                             num_microbatches=8, schedule="bpipe")
    loss = pipe.train_step(x, y)

A model is cut into stages, one or more a rank, and a batch into micro-batches that flow through the
stages by a schedule: plain data that can be printed, proven and priced before anything runs.

    print(pipeline.schedules.bpipe(4, 8).grid())
    pipeline.simulate(pipeline.schedules.bpipe(4, 8), {"forward": 1.0, "backward": 2.0})

`pipeline` uses the public names of `terra_tf`, never the other way round.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline import estimation, planning, schedules, simulation
    from pipeline.errors import (
        CheckpointError,
        CommunicationError,
        CommunicationTimeout,
        PipelineError,
        ScheduleError,
    )
    from pipeline.runtime import Pipeline
    from pipeline.schedules import Schedule
    from pipeline.simulation import Costs, Simulation, simulate

from pipeline.communication.process_sets import allow_dynamic_process_sets

# Before `hvd.init()`, which reads it.
allow_dynamic_process_sets()

# Loaded on first use, so that `import pipeline` neither waits for TensorFlow nor configures it.
# Name → the module that has it.
_HOMES = {
    "CheckpointError": "pipeline.errors",
    "CommunicationError": "pipeline.errors",
    "CommunicationTimeout": "pipeline.errors",
    "Costs": "pipeline.simulation",
    "Pipeline": "pipeline.runtime",
    "PipelineError": "pipeline.errors",
    "Schedule": "pipeline.schedules",
    "ScheduleError": "pipeline.errors",
    "Simulation": "pipeline.simulation",
    "simulate": "pipeline.simulation",
}
_MODULES = frozenset({"estimation", "planning", "schedules", "simulation"})

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "CommunicationTimeout",
    "Costs",
    "Pipeline",
    "PipelineError",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "estimation",
    "planning",
    "schedules",
    "simulate",
    "simulation",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"pipeline.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES) | _MODULES)
