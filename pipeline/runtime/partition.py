"""Where the model is cut: into consecutive items for each virtual stage.

    uniform      as many items in each, as far as that goes
    parameters   the largest number of trainable numbers in a stage as small as possible
    time         the same for the measured time of forward and backward
    explicit     the index of the first item of each later virtual stage

Costs are measured on one rank, item by item on copies that are dropped again, so that no process
has to hold the whole model.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.errors import ModelError
from pipeline.runtime.model import Item, Model, raw
from pipeline.runtime.structure import flatten, spec_of

_REPEATS = 3


def check_cuts(cuts: Sequence[int], num_items: int, num_parts: int) -> list[int]:
    """Explicit cuts, checked.

    Raises:
        ValueError: if they do not place every item exactly once, saying which is at fault.
        TypeError: if they are not integers.
    """
    cuts = list(cuts)
    for cut in cuts:
        if isinstance(cut, bool) or not isinstance(cut, (int, np.integer)):
            raise TypeError(f"cut indices must be integers, not {cut!r}")
    if len(cuts) != num_parts - 1:
        raise ModelError(
            f"{num_parts} stages (times chunks) need {num_parts - 1} cut indices, the first layer "
            f"of each later one; {len(cuts)} were given: {cuts}"
        )
    ends = [0, *cuts, num_items]
    for number, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        if end <= begin or end > num_items:
            raise ModelError(
                f"the cuts {cuts} give virtual stage {number} the layers {begin} to {end - 1} of "
                f"{num_items}: every layer must be placed exactly once and no stage may be empty"
            )
    return [int(cut) for cut in cuts]


def uniform_cuts(num_items: int, num_parts: int) -> list[int]:
    """As many items in each part; the first ones get one more where it does not divide."""
    sizes = [num_items // num_parts + (part < num_items % num_parts) for part in range(num_parts)]
    return np.cumsum(sizes)[:-1].tolist()


def balanced_cuts(costs: Sequence[float], num_parts: int) -> list[int]:
    """The cuts with the smallest largest cost of a part; of these, with the smallest squares.

    Dynamic programming over (number of parts, end of the last), O(parts · items²).
    """
    count = len(costs)
    total = np.concatenate([[0.0], np.cumsum(costs)])
    # best[end]: (largest cost, sum of squares, cuts) of the first `end` items in so many parts.
    best: list[Any] = [None, *((total[end], total[end] ** 2, []) for end in range(1, count + 1))]
    for parts in range(2, num_parts + 1):
        new: list[Any] = [None] * (count + 1)
        for end in range(parts, count + 1):
            for begin in range(parts - 1, end):
                largest, squares, cuts = best[begin]
                cost = total[end] - total[begin]
                found = (max(largest, cost), squares + cost**2, [*cuts, begin])
                if new[end] is None or found < new[end]:
                    new[end] = found
        best = new
    return best[count][2]


def measure_costs(model: Model, inputs: Any, by_time: bool) -> list[float]:
    """Each item's cost: its trainable numbers, or the seconds of its forward and backward pass.

    Args:
        model: the whole model; what is not built stays so.
        inputs: x of one micro-batch.
        by_time: which of both.
    """
    costs = []
    seen: set[int] = set()
    flowing = tf.nest.map_structure(tf.convert_to_tensor, inputs)
    spec = spec_of(flowing)
    for item in model.items:
        probe = item if item.is_built else _copy(item)
        try:
            next_spec = probe.build(spec, model.seed, model.eager)
        except Exception as error:
            raise ModelError(
                f"entry {item.index} of the model, {item.name}, cannot be built for the input "
                f"{spec.describe()}: {error}"
            ) from error
        if by_time:
            seconds, flowing = _measure(probe, flowing, model.eager)
            costs.append(seconds)
        else:
            weights = [w for w in probe.variables(True) if id(w) not in seen]
            seen |= {id(weight) for weight in weights}
            # An item costs something even without weights, so that runs of such items spread.
            costs.append(1.0 + sum(int(np.prod(weight.shape)) for weight in weights))
        spec = next_spec
    return costs


def _copy(item: Item) -> Item:
    """An item like it whose layer is another object."""
    if isinstance(item.layer, keras.Layer):
        try:
            return Item(item.index, type(item.layer).from_config(item.layer.get_config()))
        except Exception:  # a layer of the user's without a config of its own
            pass
    try:
        return Item(item.index, copy.deepcopy(item.layer))
    except Exception:
        return item


def _measure(item: Item, inputs: Any, eager: bool) -> tuple[float, Any]:
    """Seconds of one forward and backward pass, and the output."""

    def step(inputs: Any) -> tuple[Any, list[tf.Tensor]]:
        sources = [t for t in flatten(inputs) if t.dtype.is_floating]
        sources += [raw(weight) for weight in item.variables(True)]
        with tf.GradientTape() as tape:
            for source in sources:
                tape.watch(source)
            outputs = item.call(inputs, True)
        ends = [t for t in flatten(outputs) if t.dtype.is_floating]
        found = tape.gradient(ends, sources) if ends and sources else []
        return outputs, [tf.reduce_sum(tf.convert_to_tensor(g)) for g in found if g is not None]

    run = step if eager else tf.function(step, autograph=False)
    outputs, _ = run(inputs)
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        run(inputs)
        times.append(time.perf_counter() - begin)
    return min(times), outputs
