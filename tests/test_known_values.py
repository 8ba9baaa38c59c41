"""Sizes, and what a program computes of them, are answered without waiting for the graph."""

import numpy as np
import pytest
import tensorflow as tf
from stepping import clean  # noqa: F401

import terra_tf as terra

pytestmark = pytest.mark.timeout(60)

TOKENS = [tf.constant(np.arange(start, start + 6).reshape(2, 3) % 5) for start in range(8)]


def run(fn):
    """Compares each call with eager; returns the page of explain."""
    step = terra.function(fn)
    for tokens in TOKENS:
        np.testing.assert_array_equal(step(tokens), fn(tokens))
    assert step.stats().coexecuted >= 5
    return terra.explain(step)


def test_arithmetic_of_sizes():
    table = tf.Variable(tf.random.normal([5, 4], seed=1))

    def step(tokens):
        x = tf.gather(table, tokens)
        rows = int(tf.shape(x)[0] * tf.shape(x)[1])
        columns = int(tf.reduce_prod(tf.shape(x)) // rows)
        return tf.reshape(x, [rows, columns]) * float(rows)

    assert "reads inside the step: none" in run(step)


def test_what_depends_on_values_is_still_waited_for():
    def step(tokens):
        most = int(tf.reduce_max(tokens)) + int(tf.shape(tokens)[0])
        return tf.cast(tokens, tf.float32) * float(most)

    page = run(step)
    assert "reads inside the step (each waits for the graph)" in page
    assert "test_known_values.py" in page
    assert "Shape" not in page and "StridedSlice" not in page


def test_sizes_that_vary_are_those_of_the_call():
    @terra.function
    def step(x):
        return tf.reduce_sum(x) / float(tf.shape(x)[0] * 2)

    for size in [3, 3, 3, 4, 3, 5, 4, 6, 7, 3]:
        assert float(step(tf.ones([size]))) == 0.5
    assert step.stats().coexecuted >= 4
