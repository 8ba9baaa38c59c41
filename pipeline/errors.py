"""The exceptions that `pipeline` raises by itself.

Each refusal is also a `ValueError`, so that a caller who knows nothing of this module catches it.
"""

from __future__ import annotations


class PipelineError(Exception):
    """Base of all errors that come from pipeline and not from your program."""


class ScheduleError(PipelineError, ValueError):
    """A schedule, or its text, that cannot be run as it stands.

    Attributes:
        code: a stable name of the fault, for example `deadlock` or `load-after-backward`.
        rank: the line where the fault shows, or None if it concerns the whole schedule.
        position: the index of the action at fault in that line, or None.

    The message says what is wrong and, where there is one place to point at, shows the schedule
    with an arrow, `<--`, at the fault.
    """

    def __init__(
        self,
        message: str,
        code: str = "malformed",
        rank: int | None = None,
        position: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.rank = rank
        self.position = position


class CommunicationError(PipelineError, RuntimeError):
    """Another rank has ended, gave up, or sent what does not fit.

    The message names what this rank was at, for which micro-batch and with which rank, and what has
    happened there. The pipeline is broken after it; make a new one, in new processes if a process
    has ended: `terra-pipeline run --restarts` launches the job again, `Pipeline(checkpoint=...)`
    has it go on.
    """


class CommunicationTimeout(CommunicationError, TimeoutError):
    """A message did not come within the pipeline's `timeout` seconds.

    The message names the ranks that do not answer at all, or what the others are doing. They may be
    stopped, may be much slower, or may not be in the same call (all ranks of a replica have to call
    `train_step`, `evaluate` and `predict` equally often). Raise `timeout` if a stage may rightly
    take that long.
    """


class ModelError(PipelineError, ValueError):
    """An entry of the model's list does not work in a pipeline; the message says which and why."""


class UsageError(PipelineError, ValueError):
    """An argument or a call that cannot work, found before anything was sent."""


class BatchError(PipelineError, ValueError):
    """The ranks of a replica were given different batches; found before weights were changed."""


class CheckpointError(PipelineError, ValueError):
    """A file that is no checkpoint, is damaged, or is of another model; the message says which."""


class PlanningError(PipelineError, ValueError):
    """Something that the planner was given cannot be planned with; found before any solving.

    Attributes:
        code: a stable name of the fault, for example `cycle` or `negative`.
        where: the node, device or field at fault, or None if it concerns the whole.
    """

    def __init__(self, message: str, code: str = "malformed", where: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.where = where


class GraphError(PlanningError):
    """An `OpGraph` that is none: a cycle, a time that is no time, an edge to nowhere."""


class ClusterError(PlanningError):
    """A `Cluster` that is none: without devices, or with a memory, speed or link that is none."""


class InfeasibleError(PlanningError):
    """No placement or plan exists: something fits nowhere; the message says what and by how much.

    Give the devices more memory, add devices, or loosen what must share a device.
    """


class PlacementError(PlanningError):
    """A `Placement` that breaks a rule; the re-check found it and names the node."""


class HybridError(PlanningError):
    """A hybrid model lacks something, E(B) for example, or holds a number that cannot be."""
