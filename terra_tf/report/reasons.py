"""Why iterations fell back: stable codes, as data.

A code never changes its meaning; what a person reads about it is in REASONS.
"""

from __future__ import annotations

import dataclasses

from terra_tf.tracing.location import Location
from terra_tf.tracing.trace import Node

REASONS: dict[str, tuple[str, str]] = {
    "new-op": (
        "the program called an op, or passed an argument, that no trace has at this place",
        "normal until both sides of a branch were seen; frequent ones cost speed",
    ),
    "unexpected-read": (
        "the program looked at a value that no earlier iteration looked at",
        "happens once for each value; the next graph hands it out",
    ),
    "early-read": (
        "the program looked at a value earlier than before, while effects before it were held back",
        "happens once for each value; the next graph has a boundary there",
    ),
    "kept-tensor": (
        "the program kept a tensor that earlier iterations dropped",
        "happens once for each tensor; the next graph hands it out",
    ),
    "ended-early": (
        "the step ended before the ops that the trace goes on with",
        "normal for the first early return; frequent ones cost speed",
    ),
    "exception": (
        "your program raised an exception inside the step",
        "nothing to do: the step's state is what eager would have",
    ),
    "other-thread": (
        "another thread used a variable or looked at a value of the iteration",
        "steps whose variables other threads use while they run stay eager",
    ),
    "op-error": (
        "an op failed in the graph; it was run again eagerly to raise its error",
        "see the error that was raised",
    ),
}
"""Code -> (what happened, what to think of it)."""


def _op_at(node: Node | None) -> str:
    return "the end" if node is None else f"{node.op or 'a function'} at {node.location}"


@dataclasses.dataclass
class Fallback:
    """One place where iterations left the graph.

    Attributes:
      code: key of REASONS.
      expected: the node that the trace has there, or None at its end.
      location: the user's line at which it happened.
      actual: the node that came instead, once known.
      count: how often.
    """

    code: str
    expected: Node | None
    location: Location
    actual: Node | None = None
    count: int = 1

    def same_place(self, other: Fallback) -> bool:
        """Whether two fallbacks are one cause for a person."""
        return (self.code, self.location) == (other.code, other.location)

    @property
    def expected_text(self) -> str:
        """The op that was expected, with its line in the user's program."""
        return _op_at(self.expected)

    @property
    def actual_text(self) -> str:
        """The op that came, with its line; for what is no op, the line at which it happened."""
        if self.actual is not None or self.code == "ended-early":
            return _op_at(self.actual)
        return str(self.location)

    def __str__(self) -> str:
        text = f"{self.code} at {self.location}: {REASONS[self.code][0]}"
        if self.code in ("new-op", "ended-early"):
            text += f" (expected {self.expected_text}; came {self.actual_text})"
        else:
            text += f" (before {self.expected_text})"
        return text


class FallbackLog:
    """Fallbacks of a step, by place, oldest first; bounded."""

    _LIMIT = 50

    def __init__(self) -> None:
        self.places: list[Fallback] = []
        self._last: Fallback | None = None

    def add(self, fallback: Fallback) -> bool:
        """Counts a fallback; returns whether its place is new."""
        for known in self.places:
            if known.same_place(fallback):
                known.count += 1
                self._last = known
                return False
        self._last = fallback
        if len(self.places) < self._LIMIT:
            self.places.append(fallback)
        return True

    def complete_last(self, actual: Node) -> None:
        """Says what came instead, now that the iteration has been recorded."""
        if self._last is not None and self._last.actual is None:
            self._last.actual = actual
