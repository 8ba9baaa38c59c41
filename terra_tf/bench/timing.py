"""Step times, from the moments at which iterations started.

A step's time is what passes from one start to the next start of the same step, so it includes what
the program does between them. The first half of a run builds variables, traces and graphs; the
median of the second half is what a long training would see.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class StepTimes:
    """The starts of all iterations of one step in one run, in nanoseconds, in order."""

    starts: list[int] = field(default_factory=list)

    @property
    def iterations(self) -> int:
        """How often the step started."""
        return len(self.starts)

    def second_half(self) -> list[float]:
        """Returns the times between starts, in seconds, of the run's second half."""
        times = [
            (later - earlier) / 1e9
            for earlier, later in zip(self.starts, self.starts[1:], strict=False)
        ]
        return times[len(times) // 2 :]


def median_step_seconds(runs: Iterable[StepTimes]) -> float | None:
    """Returns the median step time over the second halves of all runs of one step.

    Returns:
        None when no run started the step twice.
    """
    times = [seconds for run in runs for seconds in run.second_half()]
    return statistics.median(times) if times else None


def format_seconds(seconds: float) -> str:
    """Returns a time for people: `12.3 s`, `4.56 ms`, `789 us`."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"
