"""The data of one step of one rank: what goes in, what comes out, and what happened when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from pipeline.runtime.ledger import Peak
from pipeline.runtime.stage import Tensors


@dataclass
class StepData:
    """The micro-batches of one step, as far as this rank reads them.

    Attributes:
        inputs: the flat x of each micro-batch, on the first stage's rank.
        targets: y of each micro-batch, on the last stage's rank.
        sample_weights: of each micro-batch, if given, on the last stage's rank.
        sizes: the number of samples of each micro-batch.
        scales: what each micro-batch's losses are multiplied by before they are differentiated.
        step: counts the calls of `train_step`; random numbers depend on it.
    """

    inputs: list[Tensors] | None
    targets: list[Any] | None
    sample_weights: list[tf.Tensor] | None
    sizes: list[int]
    scales: list[float]
    step: int


class Event(NamedTuple):
    """What a rank did and when.

    Attributes:
        action: the text of the action.
        kind: `compute`, `wait`, `send` or `receive`.
        begin: nanoseconds of the host's monotonic clock.
        end: the same.
    """

    action: str
    kind: str
    begin: int
    end: int


@dataclass
class StepResult:
    """What a run of the line made.

    Attributes:
        loss: the sum over micro-batches of losses times samples, with what this rank's layers add.
        outputs: the last stage's flat outputs of each micro-batch, if wanted.
        peak: of the ledger.
        events: in the order in which they ended.
        exposed: seconds that computation waited while a transfer was under way.
        stash_bytes: the largest of this rank's own stashes.
    """

    loss: float = 0.0
    outputs: list[Tensors] = field(default_factory=list)
    peak: Peak = Peak()
    events: list[Event] = field(default_factory=list)
    exposed: float = 0.0
    stash_bytes: int = 0

    @property
    def compute_seconds(self) -> float:
        """The time spent in stages."""
        return 1e-9 * sum(end - begin for _, kind, begin, end in self.events if kind == "compute")

    @property
    def transfer_seconds(self) -> float:
        """The time that transfers took, overlapped or not."""
        return 1e-9 * sum(
            end - begin for _, kind, begin, end in self.events if kind in ("send", "receive")
        )
