"""Sums of several tensors add them in eager's order, whichever memory is free when."""

import numpy as np
import pytest
import tensorflow as tf
from stepping import clean  # noqa: F401

import terra_tf as terra

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("count", [2, 3, 4, 8, 9, 10, 17, 18])
@pytest.mark.parametrize("free", ["first", "second", "third", "last", "none", "all"])
def test_add_n(count, free):
    """Terms that are not free are also used elsewhere, so that nothing can be summed into them."""
    numbers = np.random.default_rng(count)
    inputs = [
        tf.constant(numbers.normal(size=64) * 10.0 ** numbers.integers(-3, 4), tf.float32)
        for _ in range(count)
    ]
    kept = {
        "first": range(1, count),
        "second": [k for k in range(count) if k != 1],
        "third": [k for k in range(count) if k != 2],
        "last": range(count - 1),
        "none": range(count),
        "all": [],
    }[free]

    def fn(*inputs):
        terms = [tf.sin(x) * 1.7 for x in inputs]
        return tf.add_n(terms), [terms[k] for k in kept]

    step = terra.function(fn)
    for turn in range(6):
        changed = [x + turn for x in inputs]
        ours, theirs = step(*changed), fn(*changed)
        assert ours[0].numpy().tobytes() == theirs[0].numpy().tobytes()
    assert step.stats().coexecuted >= 3
