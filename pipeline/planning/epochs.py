"""E(B): the epochs that training to a target takes, by the global batch size.

As a table, as a curve fitted to a table, or measured: `measure_epochs` trains a model of the user's
at several batch sizes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import HybridError
from pipeline.planning.checks import number

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class EpochTable:
    """E(B) by points; between two of them a straight line in log B, log E.

    Outside of the points nothing is known: how E(B) goes on after the last is the very question.

    Attributes:
        points: global batch → epochs.

    Raises:
        HybridError: if there is none, or a number cannot be.
    """

    points: Mapping[float, float]

    def __post_init__(self) -> None:
        if not self.points:
            raise HybridError("E(B) has no points, field 'epochs'", "missing-field", "epochs")
        for batch, epochs in self.points.items():
            number(batch, "E(B)", "batch", HybridError, positive=True)
            number(epochs, f"E({batch!r})", "epochs", HybridError, positive=True)
        object.__setattr__(self, "points", dict(sorted(self.points.items())))

    def __call__(self, batch: float) -> float:
        """The epochs at a global batch.

        Raises:
            HybridError: if it lies outside of the points.
        """
        batches = list(self.points)
        if not batches[0] <= batch <= batches[-1]:
            raise HybridError(
                f"E({batch:g}) is not known: the table goes from {batches[0]:g} to {batches[-1]:g}"
                "; measure more points, or fit a curve to them (EpochFit.of)",
                "unknown-batch",
                f"E({batch:g})",
            )
        after = bisect.bisect_left(batches, batch)
        if batches[after] == batch:
            return self.points[batches[after]]
        low, high = batches[after - 1], batches[after]
        share = math.log(batch / low) / math.log(high / low)
        return self.points[low] ** (1 - share) * self.points[high] ** share


@dataclass(frozen=True)
class EpochFit:
    """E(B) = floor + slope · B.

    Steps to a target fall as S = S_min (1 + B_crit / B) with the batch size (McCandlish et al., An
    Empirical Model of Large-Batch Training, arXiv 1812.06162); epochs are B · S over the samples, a
    straight line in B. `floor` is what small batches take, `floor / slope` the batch at which twice
    as many are needed.
    """

    floor: float
    slope: float

    def __post_init__(self) -> None:
        number(self.floor, "E(B)", "floor", HybridError, positive=True)
        number(self.slope, "E(B)", "slope", HybridError)

    def __call__(self, batch: float) -> float:
        """The epochs at a global batch."""
        return self.floor + self.slope * batch

    @classmethod
    def of(cls, points: Mapping[float, float]) -> EpochFit:
        """The curve with the least squares of relative errors, `floor` and `slope` not negative.

        Raises:
            HybridError: if there are fewer than two points.
        """
        table = EpochTable(points)
        if len(table.points) < 2:
            raise HybridError("a curve needs at least two points of E(B)", "points", "epochs")
        # Rows (1, B) / E against 1: relative errors, since the largest batches need most epochs.
        rows = [(1 / e, b / e) for b, e in table.points.items()]
        aa, ab, bb = (
            math.fsum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1))
        )
        ta, tb = (math.fsum(row[i] for row in rows) for i in (0, 1))
        determinant = aa * bb - ab * ab
        floor = (ta * bb - tb * ab) / determinant
        slope = (tb * aa - ta * ab) / determinant
        if slope < 0:
            floor, slope = ta / aa, 0.0
        smallest = 1e-9 * min(table.points.values())
        if floor < smallest:
            floor, slope = smallest, (tb - smallest * ab) / bb
        return cls(floor, slope)


def measure_epochs(
    build: Callable[[int], keras.Model],
    train: tuple[Any, Any],
    validation: tuple[Any, Any],
    batches: Sequence[int],
    target: float,
    *,
    metric: str = "accuracy",
    most_epochs: int = 200,
    seeds: Sequence[int] = (0,),
) -> EpochTable:
    """Trains to a target at several batch sizes and counts the epochs.

    Args:
        build: gives a new compiled Keras model for a batch size (which may set its learning rate).
        train: inputs and targets to train on.
        validation: inputs and targets that the target is meant for.
        batches: the global batch sizes.
        target: the value of the metric to reach or exceed.
        metric: of those that the model was compiled with; greater has to be better.
        most_epochs: after which training is given up.
        seeds: of the runs at each batch size; the mean of their epochs counts.

    Returns:
        The table; between two epochs the line through the metric's values counts.

    Raises:
        HybridError: if a batch size never reaches the target, naming it.
    """
    import keras

    points: dict[float, float] = {}
    for batch in batches:
        counts = []
        for seed in seeds:
            keras.utils.set_random_seed(seed)
            model = build(batch)
            before = 0.0
            for epoch in range(1, most_epochs + 1):
                model.fit(*train, batch_size=batch, epochs=1, verbose=0)
                scores = model.evaluate(*validation, verbose=0, return_dict=True)
                if metric not in scores:
                    raise HybridError(
                        f"the model has no metric {metric!r}; it has {', '.join(scores)}", "metric"
                    )
                now = scores[metric]
                if now >= target:
                    share = (target - before) / (now - before) if now > before else 1.0
                    counts.append(epoch - 1 + max(0.01, min(1.0, share)))
                    break
                before = now
            else:
                raise HybridError(
                    f"batch size {batch} did not reach {metric} {target:g} in {most_epochs} epochs"
                    f"; the last value was {before:.4g}",
                    "not-reached",
                    f"E({batch})",
                )
        points[float(batch)] = math.fsum(counts) / len(counts)
    return EpochTable(points)
