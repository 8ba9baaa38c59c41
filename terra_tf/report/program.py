"""What there is to say about a whole program: its steps, the loops that were found, its time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from terra_tf.report.explain import Line, lines_of
from terra_tf.report.findings import StepReport

_COLORS = {"coexecuted": "graph", "traced": "trace", "eager": "boxline"}
_NAMES = {
    "coexecuted": "in co-executed iterations",
    "traced": "in traced iterations",
    "eager": "in iterations that stayed eager",
}
_REST = "outside of iterations"
NO_STEPS = (
    "No iteration was found: no loop computed gradients under a tape, or took its items from "
    "tf.data and called ops, and no Keras model was compiled with run_eagerly=True. "
    "`--step module:function` names a step by hand."
)


@dataclasses.dataclass
class LoopReport:
    """A loop of the program, and what it was found to be.

    Attributes:
      place: "file:line".
      head: its text.
      role: what its turns are.
      reason: why.
    """

    place: str
    head: str
    role: str
    reason: str


@dataclasses.dataclass
class ProgramReport:
    """All about one run of a program.

    Attributes:
      title: of the page.
      seconds: how long it ran.
      steps: those that were run, the one with the most time first.
      loops: those of which anything is known.
      modes: seconds in iterations, by mode.
    """

    title: str
    seconds: float
    steps: list[StepReport]
    loops: list[LoopReport]
    modes: dict[str, float]

    @property
    def shares(self) -> list[tuple[str, float, str]]:
        """(what, share of the time, color) of the whole run."""
        total = max(self.seconds, sum(self.modes.values()), 1e-9)
        found = [
            (_NAMES[mode], self.modes.get(mode, 0.0) / total, color)
            for mode, color in _COLORS.items()
        ]
        rest = max(0.0, 1.0 - sum(share for _, share, _ in found))
        return [item for item in found if item[1] >= 0.001] + [(_REST, rest, "eager")]

    @property
    def summary(self) -> str:
        """The coverage in a sentence."""
        iterations = sum(step.iterations for step in self.steps)
        coexecuted = sum(step.stats.coexecuted for step in self.steps)
        share = coexecuted / max(1, iterations)
        return (
            f"{coexecuted} of {iterations} iterations co-executed ({share:.0%}), "
            f"in {len(self.steps)} steps; the program ran for {self.seconds:.1f} s"
        )


def lines_of_program(program: ProgramReport) -> Iterator[Line]:
    """The program's page as text, line by line; see `explain`."""
    yield [(program.title, "bold")]
    yield [(program.summary, "")]
    yield [(", ".join(f"{share:.0%} {what}" for what, share, _ in program.shares), "dim")]
    if program.loops:
        yield []
        yield [("how iterations were found:", "bold")]
    for loop in program.loops:
        style = "green" if loop.role == "iterations" else "dim"
        yield [(f"  {loop.place}", "cyan"), (f"  {loop.head}", "")]
        yield [(f"      {loop.role}", style), (f": {loop.reason}", "dim")]
    if not program.steps:
        yield []
        yield [(NO_STEPS, "yellow")]
    for step in program.steps:
        yield []
        yield from lines_of(step)


def total_modes(histories: Iterable[dict[str, float]]) -> dict[str, float]:
    """Seconds by mode, of several steps."""
    total: dict[str, float] = {}
    for seconds in histories:
        for mode, spent in seconds.items():
            total[mode] = total.get(mode, 0.0) + spent
    return total


def in_order(steps: Sequence[StepReport]) -> list[StepReport]:
    """Steps that were run, the one with the most iterations first."""
    run = [step for step in steps if step.iterations and step.stats.ops_per_iteration]
    return sorted(run, key=lambda step: -step.iterations)
