"""The user's batch, checked and split into micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.errors import UsageError
from pipeline.runtime.structure import flatten


def num_samples(batch: Any, what: str) -> int:
    """The number of samples, which is the length of every array in the batch.

    Raises:
        ValueError: if there is no array, or lengths differ.
    """
    parts = [part for part in flatten(batch) if part is not None]
    lengths = {len(part) if np.ndim(part) else None for part in parts}
    if not parts or None in lengths:
        raise UsageError(f"{what} must be arrays whose first dimension counts the samples")
    if len(lengths) > 1:
        raise UsageError(f"the arrays of {what} have different numbers of samples: {lengths}")
    return lengths.pop()


def check_batch(x: Any, others: dict[str, Any], least: int) -> int:
    """The number of samples of a batch.

    Args:
        x: the inputs.
        others: what else has one entry a sample, by name; None is left out, but for `y`.
        least: the fewest samples that can be split.

    Raises:
        ValueError: if the batch cannot be split.
    """
    count = num_samples(x, "x")
    if "y" in others and others["y"] is None:
        raise UsageError("y is None; pass the targets on every rank, and x for a loss without any")
    for name, part in others.items():
        if part is not None and num_samples(part, name) != count:
            raise UsageError(f"x has {count} samples, {name} has {num_samples(part, name)}")
    if count < least:
        raise UsageError(
            f"the batch has {count} samples and cannot be split into {least} micro-batches; give "
            "more samples or fewer micro-batches"
        )
    return count


def sizes_of(count: int, num_microbatches: int) -> list[int]:
    """The micro-batches' sizes; they differ by one at most, the larger ones first."""
    return [
        count // num_microbatches + (number < count % num_microbatches)
        for number in range(num_microbatches)
    ]


def split(batch: Any, sizes: list[int]) -> list[Any]:
    """The micro-batches, as tensors in the batch's structure."""
    ends = np.cumsum([0, *sizes])
    return [
        tf.nest.map_structure(
            lambda part, begin=begin, end=end: tf.convert_to_tensor(part[begin:end]), batch
        )
        for begin, end in zip(ends, ends[1:], strict=False)
    ]
