"""Where to cut a model into stages, by dynamic programming over (stages, end of the last stage).

Unlike `runtime.partition`, stages may have devices of unequal speed, and a stage may hold no more
than its device's memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.errors import InfeasibleError, PlanningError


def best_cuts(
    seconds: Sequence[float],
    num_stages: int,
    *,
    speeds: Sequence[float] | None = None,
    sizes: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
) -> list[int]:
    """The cuts whose slowest stage is as fast as possible; of these, with the least squares.

    Args:
        seconds: of each item on a device of speed 1.
        num_stages: the number of stages, each of consecutive items, none empty.
        speeds: of each stage's device; None: all 1.
        sizes: bytes that each item takes where it is; None: nothing.
        limits: bytes that each stage may hold; None: without limit.

    Returns:
        The index of the first item of each stage but the first.

    Raises:
        PlanningError: if there are fewer items than stages.
        InfeasibleError: if no cuts keep the limits.
    """
    count = len(seconds)
    if not 1 <= num_stages <= count:
        raise PlanningError(f"{count} items cannot be cut into {num_stages} stages", "stages")
    speeds = speeds or [1.0] * num_stages
    sizes = sizes or [0.0] * count
    limits = limits or [math.inf] * num_stages
    total = _running(seconds)
    held = _running(sizes)
    # best[end]: (slowest stage, sum of squares, cuts) of the first `end` items in so many stages.
    best: list[tuple[float, float, list[int]] | None] = [None] * (count + 1)
    best[0] = (0.0, 0.0, [])
    for stage in range(num_stages):
        new: list[tuple[float, float, list[int]] | None] = [None] * (count + 1)
        for end in range(stage + 1, count - (num_stages - stage - 1) + 1):
            for begin in range(stage, end):
                before = best[begin]
                if before is None or held[end] - held[begin] > limits[stage] * (1 + 1e-12):
                    continue
                cost = (total[end] - total[begin]) / speeds[stage]
                cuts = [*before[2], begin] if stage else []
                found = (max(before[0], cost), before[1] + cost**2, cuts)
                if new[end] is None or found < new[end]:
                    new[end] = found
        best = new
    if best[count] is None:
        raise InfeasibleError(
            f"no cuts into {num_stages} stages keep every stage within its device's memory",
            "too-large",
            f"{num_stages} stages",
        )
    return best[count][2]


def _running(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
