"""Programs that switch at random where a trace does not expect it, as MegEngine's trace tests do.

All rows share a head (two ops), a tail (a loss, its gradient, an update), and pick one of several
middles in each step. What differs between the middles is the row's subject.
"""

import random

import tensorflow as tf

from ..table import program


def switching(name, subject, *middles):
    """A row whose steps pick one of the middles; each is called with (x, state)."""

    def build(terra):
        s = {"w": tf.Variable([0.5, -1.0, 2.0]), "other": tf.Variable(tf.ones([3])), "calls": 0}

        @terra.function
        def step(x):
            middle = random.choice(middles)
            with tf.GradientTape() as tape:
                hidden = middle(tf.sin(x) * s["w"], s)
                loss = tf.reduce_mean(tf.cast(hidden, tf.float32) ** 2)
            s["w"].assign_sub(0.1 * tape.gradient(loss, s["w"]))
            return loss, hidden

        for turn in range(terra.iterations):
            yield step(tf.constant([[1.0, 2.0, 3.0]]) * float(turn % 5))
        yield s

    build.__name__, build.__doc__ = f"switching_{name}", subject
    build.__module__ = __name__
    program(iterations=30, coexecuted=14, fallbacks=(0, None))(build)


def count(x, s):
    s["calls"] += 1
    return x * float(s["calls"])


def write(x, s):
    s["other"].assign_add(tf.reduce_mean(x, axis=0))
    return x * s["other"]


def caught(x, s):
    try:
        return tf.ensure_shape(x, [2, 3])
    except (ValueError, tf.errors.InvalidArgumentError):
        s["calls"] -= 1
        return x + 1.0


@tf.custom_gradient
def reversed_gradient(x):
    return tf.identity(x), lambda upstream: -upstream


switching("op", "Another op with the same operands.", lambda x, s: x + 1.0, lambda x, s: x - 1.0)
switching("no_op_at_all", "An op more or less.", lambda x, s: x, lambda x, s: tf.tanh(x))
switching("op_twice", "The same op once, twice or three times.", *(
    lambda x, s, n=n: [x := tf.tanh(x) for _ in range(n)][-1] for n in (1, 2, 3)))  # fmt: skip
switching("attribute", "An attribute of an op: axes, a flag.", *(
    lambda x, s, flag=flag: tf.matmul(x, x, transpose_a=flag, transpose_b=not flag)
    for flag in (True, False)))  # fmt: skip
switching("axis", "An axis that is an operand.", *(
    lambda x, s, axis=axis: tf.reduce_sum(x, axis=axis) for axis in (0, 1)))  # fmt: skip
switching("number", "A Python number that is an operand.", lambda x, s: x * random.random(), count)
switching("dtype", "The dtype of an intermediate value.", *(
    lambda x, s, dtype=dtype: tf.cast(x, dtype) * tf.constant(3, dtype)
    for dtype in (tf.float32, tf.float64, tf.bfloat16)))  # fmt: skip
switching("rank", "The rank of an intermediate value.", *(
    lambda x, s, shape=shape: tf.reshape(x, shape) * 2.0
    for shape in ([3], [1, 3], [1, 1, 3, 1])))  # fmt: skip
switching("length", "The length of an intermediate value.", lambda x, s: tf.tile(
    x, [random.randint(1, 5), 1]))  # fmt: skip
switching("producer", "The same op with operands from elsewhere.", lambda x, s: x * s["w"],
    lambda x, s: x * s["other"], lambda x, s: s["w"] * x, lambda x, s: x * x)  # fmt: skip
switching("effect", "A write in the middle, or none.", write, lambda x, s: x * s["other"])
switching("random_draw", "A random draw in the middle, or none, or two.",
    lambda x, s: x * 1.5, lambda x, s: x + tf.random.normal([3]),
    lambda x, s: tf.nn.dropout(x + tf.random.uniform([3], seed=4), 0.5))  # fmt: skip
switching("read", "A value is read in the middle and put back as a constant, or not.",
    lambda x, s: x * 2.0, lambda x, s: tf.constant(x.numpy()) * x)  # fmt: skip
switching("gradient_only", "The same forward values, another backward function.",
    lambda x, s: tf.identity(x), lambda x, s: reversed_gradient(x),
    lambda x, s: tf.stop_gradient(x) + s["w"] * 0.0)  # fmt: skip
switching(
    "exception", "An op in a `try` that fails, or is not there.", caught, lambda x, s: x - 1.0
)
switching("order", "Two independent ops in either order.",
    lambda x, s: (a := tf.sin(x)) * 2.0 + tf.cos(x) * a,
    lambda x, s: (b := tf.cos(x)) * 2.0 + tf.sin(x) * b)  # fmt: skip


@program(iterations=24, coexecuted=1, fallbacks=(0, None))
def switching_to_plain_eager(terra):
    """A part of the step is excluded from co-execution in some steps."""
    w = tf.Variable([1.0, 2.0])

    @terra.function
    def step(x):
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x * w)
            if random.random() < 0.4:
                with terra.disable():
                    hidden = tf.sin(hidden) * w
            loss = tf.reduce_sum(hidden * w)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    for turn in range(terra.iterations):
        yield step(tf.constant([1.0, 0.1 * turn]))
    yield w


@program(iterations=24, coexecuted=1, fallbacks=(0, None))
def switching_between_inner_functions(terra):
    """A step calls one of two functions that are accelerated themselves, or neither."""
    w = tf.Variable([1.0, 2.0])
    inner = [terra.function(lambda x: tf.sin(x) * w), terra.function(lambda x: w.assign_sub(x) + x)]

    @terra.function
    def step(x):
        for function in random.sample(inner, random.randrange(3)):
            x = tf.tanh(function(x))
        w.assign_add(0.1 * x)
        return x

    for turn in range(terra.iterations):
        yield step(tf.constant([1.0, 0.1 * turn]))
        if turn % 4 == 3:
            yield inner[0](tf.constant([0.5, 0.25]))
    yield w


@program(iterations=24, coexecuted=1, fallbacks=(0, None))
def switching_exceptions_anywhere(terra):
    """Python raises behind the k-th op, for a random k; the next step goes on from there."""
    w = tf.Variable([1.0, 2.0])

    @terra.function
    def step(x, k):
        for turn in range(5):
            w.assign_sub(0.1 * tf.sin(x * w))
            x = x + tf.random.uniform([2])
            if turn == k:
                raise KeyError(turn)
        return x

    for turn in range(terra.iterations):
        try:
            yield step(tf.constant([1.0, 0.1 * turn]), random.randrange(12))
        except KeyError as error:
            yield error, w
    yield w
