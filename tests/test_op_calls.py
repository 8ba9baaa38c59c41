"""Calls of TensorFlow's functions around ops, skipped where nothing differs; eager is the truth.

The step of each test calls such functions on tensors, variables and plain values, and something
about a call changes once it is known.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import gen_math_ops

import terra_tf as terra
from terra_tf.runners.retreat import Retreat

WARM = 6


@pytest.fixture(autouse=True)
def never_retreats(monkeypatch):
    """The step may not decide by the clock that it stays eager."""
    monkeypatch.setattr(Retreat, "stay_eager", lambda self: False)


class Box:
    """What the step calls with; a test changes it."""

    def __init__(self, **values):
        vars(self).update(values)


def bits(value):
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()


def outcome(step, *args):
    try:
        return bits(step(*args))
    except Exception as error:
        return type(error)


def numbers(turn, shape=(3, 4)):
    return tf.constant(np.random.default_rng(turn).normal(size=shape), tf.float32)


def check(step, change, box, turns=2 * WARM, argument=numbers):
    """Compares an eager and a co-executed step whose `box` changes in between.

    Returns:
      The stats of the co-executed one.
    """
    co_executed = terra.function(step)
    for turn in range(turns):
        if turn == WARM:
            delegated = co_executed.stats().delegated_calls
            assert delegated > 0
            change(box)
        x = argument(turn)
        assert outcome(co_executed, x) == outcome(step, x), turn
    terra.sync()
    return co_executed.stats()


# name -> (function of a tensor and of what the box holds, the values that it holds in turn)
FUNCTIONS = {
    "matmul": (lambda x, v: tf.matmul(x, x, transpose_b=v), [True, True, False]),
    "reduce_sum": (lambda x, v: tf.reduce_sum(x, axis=v), [0, 1, None, [0, 1], -1, (0,)]),
    "keepdims": (lambda x, v: tf.reduce_mean(x, 1, keepdims=v), [True, False]),
    "reshape": (lambda x, v: tf.reshape(x, v), [[2, 6], (2, 6), [-1], [3, -1], [4, 3]]),
    "transpose": (lambda x, v: tf.transpose(x, v), [[1, 0], [0, 1], None]),
    "getitem": (
        lambda x, v: x[v],
        [
            *(1, -1, slice(None, 2), slice(1, None, 2), (slice(None), 0), (Ellipsis, 1)),
            *((None, 0), (0, 1), tf.newaxis, slice(0, -1), True if False else 0),
        ],
    ),
    "add a number": (lambda x, v: x + v, [1.0, 2.0, 1, -0.0, 0.0, 1e30, True and 3]),
    "number first": (lambda x, v: v * x, [1.0, 2.0, 3]),
    "power": (lambda x, v: tf.abs(x) ** v, [2.0, 0.5, 2]),
    "compared": (lambda x, v: tf.cast(x > v, tf.int32), [0.0, 0.5]),
    "cast": (lambda x, v: tf.cast(x, v), [tf.float64, tf.int32, "float16", tf.float32]),
    "split": (lambda x, v: tf.split(x, v, axis=1), [2, 4, [1, 3], [2, 2]]),
    "unstack": (lambda x, v: tf.unstack(x, axis=v), [0, 1]),
    "concat": (lambda x, v: tf.concat([x, x * 2.0], v), [0, 1, -1]),
    "stack": (lambda x, v: tf.stack([x, x], axis=v), [0, 1, 2]),
    "one_hot": (lambda x, v: tf.one_hot(tf.argmax(x, 1), v), [4, 5]),
    "softmax": (lambda x, v: tf.nn.softmax(x, axis=v), [-1, 0, 1]),
    "pad": (lambda x, v: tf.pad(x, v), [[[1, 1], [0, 0]], [[0, 2], [1, 0]]]),
    "where": (lambda x, v: tf.where(x > 0, x, v), [0.0, 1.0]),
    "clip": (lambda x, v: tf.clip_by_value(x, -v, v), [0.5, 1.0]),
    "einsum": (lambda x, v: tf.einsum(v, x, x), ["ij,kj->ik", "ij,ij->i", "ij,ij->ij"]),
    "dropout": (lambda x, v: tf.nn.experimental.stateless_dropout(x, v, [1, 2]), [0.5, 0.2]),
    "shape": (lambda x, v: tf.shape(x)[v] + tf.rank(x), [0, 1]),
    "top_k": (lambda x, v: list(tf.math.top_k(x, v)), [1, 2]),
    "wrong": (lambda x, v: tf.matmul(x, tf.ones([v, 2])), [4, 5, 4]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_changed_plain_arguments_are_seen(name):
    function, values = FUNCTIONS[name]
    rng = random.Random(name)
    box = Box(value=values[0])

    def step(x):
        y = tf.sin(x)
        return [function(y, box.value), function(tf.tanh(y), box.value)]

    co_executed = terra.function(step)
    for turn in range(40):
        if turn >= WARM and rng.random() < 0.5:
            box.value = rng.choice(values)
        x = numbers(turn)
        assert outcome(co_executed, x) == outcome(step, x), (turn, box.value)
    assert co_executed.stats().delegated_calls > 10


def replaced(name, make):
    return lambda box: setattr(box, name, make())


def variable(value):
    return tf.Variable(np.full((4, 4), value, np.float32))


CHANGES = {
    "a small constant": (
        lambda box, x: tf.multiply(tf.sin(x), box.c) + box.c,
        lambda: Box(c=tf.constant([1.0, 2.0, 3.0, 4.0])),
        replaced("c", lambda: tf.constant([5.0, 2.0, 3.0, 4.0])),
    ),
    "a large constant": (
        lambda box, x: tf.matmul(tf.sin(x), box.c),
        lambda: Box(c=tf.ones([4, 3000])),
        replaced("c", lambda: tf.ones([4, 3000]) * 2),
    ),
    "an equal constant": (
        lambda box, x: tf.sin(x) * box.c,
        lambda: Box(c=tf.constant(2.0)),
        replaced("c", lambda: tf.constant(2.0)),
    ),
    "a constant of another dtype": (
        lambda box, x: tf.cast(tf.sin(x) > 0, tf.float32) + tf.cast(box.c, tf.float32),
        lambda: Box(c=tf.constant(2.0)),
        replaced("c", lambda: tf.constant(3)),
    ),
    "another variable": (
        lambda box, x: tf.matmul(tf.sin(x), box.w) @ box.w,
        lambda: Box(w=variable(0.5)),
        replaced("w", lambda: variable(0.25)),
    ),
    "an assigned variable": (
        lambda box, x: tf.matmul(tf.sin(x), box.w) + box.w[0],
        lambda: Box(w=variable(0.5)),
        lambda box: box.w.assign(box.w * 3.0),
    ),
    "a tensor in the place of a variable": (
        lambda box, x: tf.matmul(tf.sin(x), box.w),
        lambda: Box(w=variable(0.5)),
        replaced("w", lambda: tf.ones([4, 4])),
    ),
    "an array in the place of a tensor": (
        lambda box, x: tf.matmul(tf.sin(x), box.w),
        lambda: Box(w=tf.ones([4, 4])),
        replaced("w", lambda: np.full((4, 4), 2, np.float32)),
    ),
    "the same tensor twice": (
        lambda box, x: tf.add(tf.sin(x), box.pick([tf.sin(x), tf.cos(x)])),
        lambda: Box(pick=lambda both: both[0]),
        lambda box: setattr(box, "pick", lambda both: both[1]),
    ),
    "arguments swapped": (
        lambda box, x: tf.subtract(*box.order([tf.sin(x), tf.cos(x)])),
        lambda: Box(order=list),
        lambda box: setattr(box, "order", lambda both: both[::-1]),
    ),
    "a keyword in the place of a position": (
        lambda box, x: box.call(tf.sin(x)),
        lambda: Box(call=lambda x: tf.reduce_max(x, 1)),
        lambda box: setattr(box, "call", lambda x: tf.reduce_max(x, axis=0)),
    ),
}


@pytest.mark.parametrize("taped", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name, taped):
    call, make, change = CHANGES[name]
    box = make()

    def step(x):
        if not taped:
            return call(box, x)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.reduce_sum(call(box, x))
        sources = [x, *(v for v in vars(box).values() if isinstance(v, tf.Variable))]
        return [y, *tape.gradient(y, sources)]

    check(step, change, box)


def test_most_calls_of_a_step_written_in_ops_are_delegated():
    w, b = tf.Variable(tf.ones([4, 4])), tf.Variable(tf.zeros([4]))

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for _ in range(5):
                h = tf.nn.tanh(tf.matmul(h, w) + b)
            loss = tf.reduce_mean(tf.square(h))
        for v, g in zip([w, b], tape.gradient(loss, [w, b]), strict=True):
            v.assign_sub(0.1 * g)
        return loss

    co_executed = terra.function(step)
    for turn in range(10):
        co_executed(numbers(turn))
    before = co_executed.stats().delegated_calls
    co_executed(numbers(0))
    # Three calls of each turn, the mean of the squares, the gradient, two products.
    assert co_executed.stats().delegated_calls - before >= 15


def test_sizes_that_vary():
    def step(x):
        y = tf.sin(x)
        return tf.reduce_sum(tf.reshape(y * 2.0, [-1, 2]) + y[0, 0], 0), tf.transpose(y)

    co_executed = terra.function(step)
    for turn in range(40):
        x = numbers(turn, (turn % 7 + 1, 4))
        assert outcome(co_executed, x) == outcome(step, x), turn


@pytest.mark.parametrize("where", ["device", "graph", "function", "no conversion"])
def test_what_surrounds_a_call_matters(where):
    """Within another device's scope, a graph or a function, the call is as it is without Terra."""
    box = Box(where="plain")

    def around(x):
        y = tf.sin(x)
        if box.where == "device":
            with tf.device("CPU:0"):
                return y + tf.matmul(y, y, transpose_b=True)[0, 0]
        if box.where == "graph":
            with tf.Graph().as_default():
                made = tf.add(tf.constant(1.0), 2.0)
            return y + float(not tf.is_tensor(made) or not hasattr(made, "numpy"))
        if box.where == "function":
            return tf.function(lambda t: t + tf.matmul(t, t, transpose_b=True)[0, 0])(y)
        if box.where == "no conversion":
            return tf.add(y, np.float32(1.0))
        return tf.add(y, tf.matmul(y, y, transpose_b=True)[0, 0])

    check(around, lambda box: setattr(box, "where", where), box)


def test_a_patched_op_is_seen(monkeypatch):
    """From the next iteration on: modules are looked at once in each."""

    def step(x):
        return tf.matmul(tf.sin(x), x, transpose_b=True)

    original = gen_math_ops.mat_mul

    def twice(*args, **keywords):
        return original(*args, **keywords) * 2.0

    check(step, lambda _: monkeypatch.setattr(gen_math_ops, "mat_mul", twice), None)


def test_attributes_of_a_tensor_stay_with_it():
    def step(x):
        y = tf.sin(x)
        y.mine = "kept"
        z = tf.add(y, 1.0)
        assert y.mine == "kept" and not hasattr(z, "mine")
        return z

    check(step, lambda _: None, None)


def test_a_tape_that_begins_late_records_what_it_should():
    box = Box(late=False)
    v = tf.Variable(2.0)

    def step(x):
        y = tf.square(tf.sin(x))
        with tf.GradientTape(watch_accessed_variables=not box.late) as tape:
            tape.watch(y)
            z = tf.reduce_sum(tf.multiply(y, v) + tf.square(y))
        gradients = tape.gradient(z, [y, v], unconnected_gradients="zero")
        return [z, *gradients]

    check(step, lambda box: setattr(box, "late", True), box)


def test_functions_stay_what_they_are():
    def step(x):
        return tf.matmul(x, x, transpose_b=True) + 1.0

    before, plus = tf.matmul, tf.Tensor.__add__
    check(step, lambda _: None, None)
    assert tf.matmul is before and tf.Tensor.__add__ is plus
    assert tf.function(tf.matmul)(tf.ones([2, 2]), tf.ones([2, 2])).shape == (2, 2)


def test_tensors_of_python_values_and_settled_ones():
    box = Box(values=[1.0, 2.0])

    def step(x):
        y = tf.sin(x)
        first = float(y[0, 0])  # has its value from here on
        return [y * first, tf.add(y, y[0, 0]), tf.concat([y[0, :2], box.values], 0)]

    check(step, lambda box: setattr(box, "values", [3.0, 4.0]), box)


def test_what_an_assignment_gives():
    """A view of the variable; one that the program keeps is its own."""
    v, w = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    kept = []

    def step(x):
        y = tf.sin(x)
        view = v.assign_add(y)
        other = v.assign_sub(0.5 * y)
        assert view is not other and type(view).__name__ == "_UnreadVariable"
        assert not hasattr(other, "mine")
        other.mine = len(kept)
        kept.append(view)
        nothing = w.assign(tf.reduce_sum(view * 0.1), read_value=False)
        assert nothing is None
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v.assign(v * 0.9) * v)
        return [view + 1.0, other, w, tape.gradient(loss, v)]

    results, expected = [], []
    for run, outcomes in ((terra.function(step), results), (step, expected)):
        v.assign([1.0, 2.0])
        w.assign(3.0)
        kept.clear()
        for turn in range(12):
            outcomes.append(outcome(run, numbers(turn, (2,))))
        assert len({id(view) for view in kept}) == 12
    assert results == expected


def test_custom_gradients_see_the_variables_that_their_functions_read():
    w = tf.Variable([[1.0, 0.5], [0.2, 1.0]])
    forward = tf.recompute_grad(lambda x: tf.tanh(tf.matmul(x, w) + w[0]))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(forward(forward(tf.sin(x))) ** 2)
        gradient = tape.gradient(loss, w)
        w.assign_sub(0.1 * gradient)
        return [loss, gradient]

    start = w.numpy()
    results, expected = [], []
    for run, outcomes in ((terra.function(step), results), (step, expected)):
        w.assign(start)
        for turn in range(12):
            outcomes.append(outcome(run, numbers(turn, (3, 2))))
    assert results == expected


def test_values_that_follow_from_shapes_follow_from_these_shapes():
    def step(x):
        shape = tf.shape(tf.sin(x))
        return tf.reshape(x, [shape[0] * shape[1]]), shape + shape[::-1], tf.size(x) * shape[0]

    co_executed = terra.function(step)
    for turn in range(40):
        x = numbers(turn, (turn % 5 + 1, turn % 3 + 1))
        assert outcome(co_executed, x) == outcome(step, x), turn


def test_whoever_stands_before_the_entry_points_is_asked_every_time(monkeypatch):
    from tensorflow.python import pywrap_tfe

    original, calls = pywrap_tfe.TFE_Py_FastPathExecute, []

    def step(x):
        return tf.matmul(tf.sin(x), x, transpose_b=True)

    def entry(*args):
        calls.append(args[1])
        return original(*args)

    def change(_):
        monkeypatch.setattr(pywrap_tfe, "TFE_Py_FastPathExecute", entry)

    check(step, change, None)
    assert calls.count("Sin") == calls.count("MatMul") == 2 * WARM  # in eager and as a step
