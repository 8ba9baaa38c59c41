"""Random streams: each draw is eager's, in the step and, when it is over, outside."""

import random

import keras as keras3
import numpy as np
import tensorflow as tf

from ..table import program
from ..training import regression


@program()
def random_global_seed(terra):
    """Ops without a seed of their own under the global seed, five distributions."""

    @terra.function
    def step():
        return [
            tf.random.normal([3]),
            tf.random.uniform([2, 2]),
            tf.random.truncated_normal([4], stddev=2.0),
            tf.random.uniform([3], maxval=10, dtype=tf.int32),
            tf.random.normal([2], dtype=tf.float64),
        ]

    for _ in range(terra.iterations):
        yield step(), tf.random.uniform([1])


@program()
def random_op_seeds(terra):
    """Ops with a seed of their own, whose stream lives in a kernel, inside and outside."""

    @terra.function
    def step():
        first = tf.random.uniform([3], seed=5)
        second = tf.random.normal([2], seed=5)
        return first, second, tf.random.uniform([3], seed=5)

    for turn in range(terra.iterations):
        yield step()
        if turn % 4 == 3:
            yield tf.random.uniform([3], seed=5)


@program()
def random_generators(terra):
    """tf.random.Generator: one split off another, skip, the global one, reset between steps."""
    first = tf.random.Generator.from_seed(3)
    second = first.split(2)[1]

    @terra.function
    def step():
        draws = [first.normal([2]), second.uniform([3]), first.binomial([2], 5.0, 0.5)]
        draws += [tf.random.get_global_generator().truncated_normal([2]), second.make_seeds(2)]
        first.skip(3)
        return draws

    for turn in range(terra.iterations):
        yield step()
        if turn == 6:
            first.reset_from_seed(9)
        yield second.normal([1])
    yield first.state, second.state


@program()
def random_stateless(terra):
    """Stateless ops whose seed is a Python counter, a tensor, and a fold of both."""
    key = tf.constant([3, 7])

    @terra.function
    def step(turn):
        folded = tf.random.experimental.stateless_fold_in(key, turn)
        left, right = tf.unstack(tf.random.split(folded, 2))
        return tf.random.stateless_normal([2], [turn, 1]), [
            tf.random.stateless_uniform([2], left),
            tf.random.stateless_categorical([[0.0, 1.0]], 3, right),
            tf.random.stateless_truncated_normal([2], seed=folded),
        ]

    for turn in range(terra.iterations):
        yield step(turn)


@program()
def random_in_place_kinds(terra):
    """Shuffle, categorical, gamma and Poisson: kernels that keep a state of their own."""
    rows = tf.range(6)

    @terra.function
    def step():
        order = tf.random.shuffle(rows)
        return order, [
            tf.random.categorical(tf.math.log([[0.2, 0.8]]), 4),
            tf.random.gamma([2], 2.0),
            tf.random.poisson([2], 3.0),
            tf.random.shuffle(rows, seed=3),
        ]

    for _ in range(terra.iterations):
        yield step()


@program()
def random_dropout_in_raw_tf(terra):
    """tf.nn.dropout with gradients through it."""
    weights = tf.Variable(tf.random.normal([4, 8]))

    @terra.function
    def step(x):
        with tf.GradientTape() as tape:
            hidden = tf.nn.dropout(x @ weights, rate=0.3)
            loss = tf.reduce_mean(tf.nn.dropout(hidden, rate=0.5, seed=11) ** 2)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield weights


@program()
def random_initializers_in_step(terra):
    """Keras initialisers called in the step, with a seed and without one."""
    unseeded, seeded = keras3.initializers.GlorotUniform(), keras3.initializers.HeNormal(seed=3)

    @terra.function
    def step():
        return unseeded([2, 3]), seeded([2, 3]), tf.initializers.Orthogonal(seed=1)([3, 3])

    for _ in range(terra.iterations):
        yield step()


@program()
def random_keras_streams(terra):
    """keras.random with the global seed generator, with one's own, and with integers."""
    seeds = keras3.random.SeedGenerator(5)

    @terra.function
    def step(x):
        return [
            keras3.random.normal([2]),
            keras3.random.uniform([2], seed=seeds),
            keras3.random.dropout(x, 0.5, seed=seeds),
            keras3.random.shuffle(x, seed=seeds),
            keras3.random.randint([3], 0, 9, seed=4),
        ]

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield seeds.state


@program()
def random_reseeded_between(terra):
    """The global seed is set again between steps: the stream starts anew."""
    step = terra.function(lambda: (tf.random.normal([3]), tf.random.uniform([2], seed=1)))
    for turn in range(terra.iterations):
        if turn in (5, 9):
            tf.random.set_seed(77)
        yield step()


@program(coexecuted=4, fallbacks=(0, None))
def random_seeded_in_step(terra):
    """The global seed is set inside the step from a Python counter."""
    calls = 0

    @terra.function
    def step():
        nonlocal calls
        calls += 1
        tf.random.set_seed(calls // 2)
        return tf.random.normal([3]), tf.random.uniform([2])

    for _ in range(terra.iterations):
        yield step()


@program(coexecuted=0, fallbacks=(0, None))
def random_draws_on_one_path(terra):
    """A step that draws on one path only: what is drawn later must not shift."""
    step_order = [True, True, False, True, False, False]

    @terra.function
    def step(turn, x):
        if step_order[turn % 6]:
            x = x + tf.random.normal([8, 4])
        keep = tf.random.uniform([8, 1]) < 0.5
        return tf.where(keep, x, 0.0)

    for turn, (x, _) in enumerate(regression(terra.iterations)):
        yield step(turn, x)


@program(coexecuted=0, fallbacks=(0, None))
def random_replay_sampling(terra):
    """A replay buffer in Python, sampled with `random` and NumPy in the step."""
    buffer = []
    weights = tf.Variable(tf.ones([4, 1]))

    @terra.function
    def step(x):
        buffer.append(x)
        chosen = random.choices(buffer, k=3) + [buffer[np.random.randint(len(buffer))]]
        batch = tf.concat(chosen, axis=0)
        weights.assign_sub(0.01 * tf.reduce_mean(batch, axis=0)[:, None])
        return tf.reduce_sum(batch @ weights)

    for x, _ in regression(terra.iterations, size=2):
        yield step(x)
    yield weights
