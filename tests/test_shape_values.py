"""What Python asks of shapes is answered without the graph, and with the same values."""

import numpy as np
import pytest
import tensorflow as tf

import terra_tf as terra
from terra_tf.runners.retreat import Retreat

pytestmark = pytest.mark.timeout(60)

SIZES = [3, 5, 2, 7, 4, 6, 3, 1, 8, 5, 2, 9]


@pytest.fixture(autouse=True)
def never_retreats(monkeypatch):
    monkeypatch.setattr(Retreat, "stay_eager", lambda self: False)


def batch(size):
    return tf.constant(np.random.RandomState(size).randn(size, 4).astype(np.float32))


def check(make):
    """Compares with eager; returns the step's fetches in the last half, and its stats.

    Args:
      make: returns a step, which takes a tensor and gives what is compared, and its variables.
    """
    inputs = [batch(size) for size in SIZES * 2]
    function, variables = make()
    expected = [function(x) for x in inputs]
    step, others = make()
    step = terra.function(step)
    results = [step(x) for x in inputs[: len(inputs) // 2]]
    terra.sync()
    before = step.stats().fetches
    results += [step(x) for x in inputs[len(inputs) // 2 :]]
    fetches = step.stats().fetches - before
    for a, b in zip(tf.nest.flatten(expected), tf.nest.flatten(results), strict=True):
        assert type(a) is type(b)
        np.testing.assert_array_equal(a, b)
    for a, b in zip(variables, others, strict=True):
        np.testing.assert_array_equal(a, b)
    return fetches, step.stats()


def layer(x, w):
    return tf.nn.relu(tf.matmul(x, w)) * 0.5


def weights():
    return tf.Variable(np.random.RandomState(0).randn(4, 4).astype(np.float32))


def test_sizes_that_differ_are_answered_without_the_graph():
    def make():
        w = weights()

        def step(x):
            h = layer(x, w)
            rows, columns = tf.unstack(tf.shape(h))
            half = tf.shape(h, out_type=tf.int64)[0] // 2
            count = int(rows) * int(columns) + int(tf.size(h)) + int(tf.rank(h)) + int(half)
            if tf.shape(h)[0] > 4:
                h = h[: tf.shape(h)[0] - 1]
            mean = tf.reduce_sum(h) / float(tf.cast(tf.shape(h)[0], tf.float32))
            w.assign_sub(0.01 * tf.matmul(x[: int(tf.shape(h)[0])], h, transpose_a=True))
            return mean, count

        return step, [w]

    fetches, stats = check(make)
    assert stats.coexecuted >= 12
    assert fetches == 0


def test_a_shape_behind_a_write_is_known_before_the_write_is_made():
    def make():
        w = weights()

        def step(x):
            w.assign_add(tf.ones([4, 4]))
            h = layer(x, w)
            n = int(tf.shape(h)[0])
            w.assign_sub(0.5 * tf.ones([4, 4]) / n)
            return tf.reduce_sum(h), n

        return step, [w]

    fetches, stats = check(make)
    assert stats.coexecuted >= 12
    assert fetches == 0


def test_a_size_that_an_op_in_place_takes_needs_no_graph():
    def make():
        w = weights()
        draws = tf.random.Generator.from_seed(3)

        def step(x):
            h = layer(x, w)
            noise = draws.normal([tf.shape(h)[0], 4])
            w.assign_sub(0.01 * tf.matmul(noise, h, transpose_a=True))
            return tf.reduce_mean(h + noise)

        return step, [w]

    fetches, stats = check(make)
    assert stats.coexecuted >= 12
    assert fetches == 0


def test_a_size_that_depends_on_values_is_waited_for():
    def make():
        w = weights()

        def step(x):
            h = layer(x, w)
            kept = tf.boolean_mask(h, h[:, 0] > 0.0)
            n = int(tf.shape(kept)[0])
            w.assign_sub(0.01 * tf.ones([4, 4]) * (n + 1.0))
            return tf.reduce_sum(kept), n

        return step, [w]

    fetches, stats = check(make)
    assert stats.coexecuted >= 12
    assert fetches >= len(SIZES)


def test_a_size_that_is_itself_a_value_is_waited_for_behind_a_write():
    def make():
        w = weights()

        def step(x):
            w.assign_add(tf.ones([4, 4]))
            n = tf.cast(tf.reduce_max(x) * 0.0 + 1.0 + tf.reduce_sum(w) * 0.0, tf.int32)
            z = tf.fill([n + 2], 1.5)
            size = int(tf.shape(z)[0])
            w.assign_sub(0.5 * tf.ones([4, 4]) / size)
            return tf.reduce_sum(z), size

        return step, [w]

    fetches, stats = check(make)
    assert stats.coexecuted >= 12
    assert stats.fallen_back <= 2


def test_several_shapes_at_once():
    def make():
        w = weights()

        def step(x):
            h = layer(x, w)
            a, b = tf.raw_ops.ShapeN(input=[h, tf.transpose(h)])
            total = int(tf.reduce_prod(a)) + int(b[1]) + int(tf.reduce_max(tf.concat([a, b], 0)))
            w.assign_sub(0.001 * total * tf.ones([4, 4]))
            return tf.reduce_sum(h), total, a, b

        return step, [w]

    fetches, stats = check(make)
    assert stats.coexecuted >= 12
    assert fetches == 0


def test_arithmetic_that_fails_raises_what_eager_raises():
    w = weights()
    total = tf.Variable(0)

    @terra.function
    def step(x):
        h = layer(x, w)
        per_row = int(12 // tf.shape(h)[0])
        total.assign_add(per_row)
        return h

    for size in SIZES:
        step(batch(size))
    assert step.stats().coexecuted >= 6
    known = int(total)
    with pytest.raises(tf.errors.InvalidArgumentError, match="(?i)division by zero"):
        step(tf.zeros([0, 4]))
        terra.sync()
    assert int(total) == known
    assert step(batch(3)).shape == (3, 4)
    assert int(total) == known + 4


def test_a_fallback_behind_such_a_value_keeps_it():
    log = []
    w = weights()

    @terra.function
    def step(x, also):
        n = tf.shape(layer(x, w))[0]
        twice = n * 2
        log.append(int(twice))
        w.assign_add(tf.ones([4, 4]))
        if also:
            twice = twice + tf.cast(tf.reduce_sum(x) * 0.0, tf.int32)
        w.assign_sub(tf.ones([4, 4]) * tf.cast(n, tf.float32))
        return n, twice

    for turn, size in enumerate(SIZES):
        n, twice = step(batch(size), turn in (8, 10))
        assert (int(n), int(twice), log[-1]) == (size, 2 * size, 2 * size)
    assert step.stats().fallen_back >= 1
    expected = weights() + float(len(SIZES) - sum(SIZES))
    np.testing.assert_allclose(w, expected, rtol=1e-5)
