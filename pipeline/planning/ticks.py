"""Seconds as whole numbers, which the solver needs, without loss where that is possible."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

MOST_TICKS = 10**10
"""Longer horizons would make the solver's sums too large."""
ROUNDED_TICKS = 10**8
"""The horizon if times have to be rounded: a tick is then 1e-8 of it."""


@dataclass(frozen=True)
class Ticks:
    """A unit of time.

    Attributes:
        seconds: of one tick.
        is_exact: whether every time given was a whole number of ticks.
    """

    seconds: float
    is_exact: bool

    @classmethod
    def for_times(cls, times: Iterable[float], horizon: float) -> Ticks:
        """A unit for these times, the largest that is exact if there is one.

        Args:
            times: in seconds; meant as the decimal numbers that they print as.
            horizon: the longest time that has to be expressed.
        """
        different = {time for time in times if time > 0 and math.isfinite(time)}
        if not different or horizon <= 0:
            return cls(1.0, True)
        # Twelve digits: what comes after them is what floating-point division left.
        values = [Fraction(f"{time:.12g}") for time in different]
        denominator = math.lcm(*(value.denominator for value in values))
        if denominator <= 10**18:
            step = math.gcd(*(int(value * denominator) for value in values))
            unit = Fraction(step, denominator)
            if horizon / unit <= MOST_TICKS:
                return cls(float(unit), True)
        return cls(horizon / ROUNDED_TICKS, False)

    def count(self, seconds: float) -> int:
        """The nearest number of ticks."""
        return round(seconds / self.seconds)
