"""Decides whether the turns of a loop are iterations, from what they did.

How boundaries are found, as `terra explain` prints it:

1. A turn that records a `GradientTape` and computes gradients *by itself* (not in a loop inside it
   that does so) is an iteration: a training step.
2. A turn whose item was fetched by TensorFlow ops (a `tf.data.Dataset`, anything around one) and
   which calls ops is an iteration: an evaluation step, a prediction, preprocessing.
3. A loop around such loops is none: epochs, folds, episodes. What it does between the inner loops
   becomes an iteration of its own where that takes a good part of its time.
4. Any other loop is a part of the loop around it that is one. Where none is, the loop with the most
   turns in a nest is taken, if its turns call at least `FEW_OPS` ops.

A loop that begins inside a tape, a `tf.function`, or an iteration of another loop that has not been
split is a part of what it is in. The decision is made by what was seen, once, and reported; where
it is wrong, the program is slower than it could be and nothing else.
"""

from __future__ import annotations

import dataclasses
import enum

FEW_OPS = 8  # per turn, from which on an iteration may pay
FEW_OPS_OF_DATA = 3  # the same where items come from TensorFlow, the fetching not counted
_SHARE = 0.2  # of a loop's time that the part between inner loops has to take
_ENOUGH_TURNS = 2


class Role(enum.Enum):
    """What a loop's turns are."""

    WATCHED = "not decided yet"
    STEP = "iterations"
    PART = "part of the iterations of the loop around it"
    OUTER = "a loop around iterations"
    SILENT = "no TensorFlow in it"


@dataclasses.dataclass
class Activity:
    """What happened in a stretch of a thread's time.

    Attributes:
      ops: op calls.
      tapes: gradient tapes that began.
      gradients: gradient functions of ops that ran eagerly.
      seconds: how long it took.
    """

    ops: int = 0
    tapes: int = 0
    gradients: int = 0
    seconds: float = 0.0

    def __sub__(self, other: Activity) -> Activity:
        return Activity(
            self.ops - other.ops,
            self.tapes - other.tapes,
            self.gradients - other.gradients,
            self.seconds - other.seconds,
        )

    def add(self, other: Activity) -> None:
        """Adds another stretch."""
        self.ops += other.ops
        self.tapes += other.tapes
        self.gradients += other.gradients
        self.seconds += other.seconds


@dataclasses.dataclass
class Evidence:
    """What is known of the turns of a loop.

    Attributes:
      turns: how many were watched.
      executions: how often the loop was entered.
      total: all that happened in its turns.
      own: the part outside of inner loops that are, or are around, iterations.
    """

    turns: int = 0
    executions: int = 0
    total: Activity = dataclasses.field(default_factory=Activity)
    own: Activity = dataclasses.field(default_factory=Activity)

    @property
    def turns_per_execution(self) -> float:
        """Mean number of turns."""
        return self.turns / max(1, self.executions)

    @property
    def ops_per_turn(self) -> float:
        """Mean number of ops outside of inner iterations."""
        return self.own.ops / max(1, self.turns)


def judge_turn(own: Activity, fetched: int, around_steps: bool) -> tuple[Role, str] | None:
    """Judges a loop by one of its turns.

    Args:
      own: what the turn did outside of inner loops that are, or are around, iterations.
      fetched: op calls that fetched the turn's item.
      around_steps: whether there were such inner loops.

    Returns:
      The role and why, or None where the turn does not say.
    """
    if own.tapes and own.gradients:
        return Role.STEP, "its turns record a tape and compute gradients"
    if around_steps:
        return Role.OUTER, "there are iterations inside its turns"
    if fetched and own.ops - fetched >= FEW_OPS_OF_DATA:
        return Role.STEP, "its items come from TensorFlow and its turns call ops"
    return None


def works_between(evidence: Evidence) -> bool:
    """Whether what a loop does between inner iterations is worth an iteration of its own."""
    return (
        evidence.turns >= _ENOUGH_TURNS
        and evidence.ops_per_turn >= FEW_OPS
        and evidence.own.seconds >= _SHARE * evidence.total.seconds
    )


def may_be_step(evidence: Evidence) -> bool:
    """Whether a loop that nothing else speaks for does enough in a turn."""
    return evidence.turns >= _ENOUGH_TURNS and evidence.ops_per_turn >= FEW_OPS
