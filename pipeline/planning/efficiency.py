"""SE_N: which share of its speed a data-parallel worker keeps beside N - 1 others."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import HybridError
from pipeline.planning.checks import number


@dataclass(frozen=True)
class ScalingPoints:
    """SE_N by measured points; between two of them a straight line in log N.

    Attributes:
        points: number of workers → step time of one worker over that of all.

    Raises:
        HybridError: if there is none, or a number cannot be.
    """

    points: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.points:
            raise HybridError("SE_N has no points, field 'efficiency'", "missing-field", "SE_N")
        for workers, value in self.points.items():
            number(workers, "SE_N", "workers", HybridError, positive=True)
            number(value, f"SE_{workers}", "efficiency", HybridError, positive=True)
        object.__setattr__(self, "points", dict(sorted({1: 1.0, **self.points}.items())))

    def __call__(self, workers: int) -> float:
        """SE_N; beyond the last point that of the last one, which favours data parallelism."""
        counts = list(self.points)
        if workers >= counts[-1]:
            return self.points[counts[-1]]
        after = bisect.bisect_left(counts, workers)
        if counts[after] == workers:
            return self.points[workers]
        low, high = counts[after - 1], counts[after]
        share = math.log(workers / low) / math.log(high / low)
        return self.points[low] * (1 - share) + self.points[high] * share


@dataclass(frozen=True)
class RingModel:
    """SE_N from link figures: gradients are reduced in a ring after, or partly beside, a step.

    A ring of N moves 2 (N-1)/N of the bytes over every link in 2 (N-1) messages.

    Attributes:
        step_seconds: of one worker.
        gradient_bytes: that are reduced in each step.
        bandwidth: bytes per second of the slowest link.
        latency: seconds of each message.
        overlap: the share of the reduction that hides behind the step.
    """

    step_seconds: float
    gradient_bytes: float
    bandwidth: float
    latency: float = 0.0
    overlap: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step_seconds", "bandwidth"):
            number(getattr(self, name), "ring model", name, HybridError, positive=True)
        for name in ("gradient_bytes", "latency", "overlap"):
            number(getattr(self, name), "ring model", name, HybridError)
        if self.overlap > 1:
            raise HybridError(f"overlap is a share, not {self.overlap}", "share", "overlap")

    def reduction_seconds(self, workers: int) -> float:
        """The time of the reduction."""
        return ring_seconds(self.gradient_bytes, workers, self.bandwidth, self.latency)

    def __call__(self, workers: int) -> float:
        """SE_N."""
        exposed = (1 - self.overlap) * self.reduction_seconds(workers)
        return self.step_seconds / (self.step_seconds + exposed)


def ring_seconds(size: float, workers: int, bandwidth: float, latency: float) -> float:
    """The time of a ring all-reduce of `size` bytes over so many workers."""
    if workers < 2:
        return 0.0
    return 2 * (workers - 1) * (size / workers / bandwidth + latency)
