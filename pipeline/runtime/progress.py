"""How far training is: what a checkpoint keeps beside the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from pipeline.runtime.model import raw


@dataclass
class Progress:
    """Counts since the beginning, and since the last step of the optimizer.

    Attributes:
        steps: the calls of `train_step` so far.
        calls: those since the last step of the optimizer.
        samples: of these calls, over all replicas.
        reference: the samples of the first of these calls: gradients are scaled for so many.
        loss_scale: what losses are multiplied by; 0 if that is not known yet.
        seed: of the pipeline's random numbers.
        position: the user's own, of plain data: where the next batch comes from.
    """

    steps: int = 0
    calls: int = 0
    samples: float = 0.0
    reference: float = 0.0
    loss_scale: float = 0.0
    seed: int = 0
    position: Any = None

    def copy(self, **changes: Any) -> Progress:
        """The same, with some changed."""
        return Progress(**{**asdict(self), **changes})


class Boundary:
    """The latest moment between two steps of the optimizer, of which all weights still are.

    A step changes states such as BatchNorm's from its first forward pass on, the weights only at
    its end. So this holds the states as they were.

    Args:
        progress: at that moment.
        states: this rank's variables that no optimizer changes.
    """

    def __init__(self, progress: Progress, states: Sequence[Any]) -> None:
        self.progress = progress.copy()
        self.states = {id(state): tf.identity(raw(state)) for state in states}
