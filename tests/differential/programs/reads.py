"""Reads: Python looks at a tensor's value, to print it, to decide, to index, to compute."""

import copy
import pickle

import numpy as np
import tensorflow as tf

from ..table import program
from ..training import mean_squared_error, regression


def linear_model():
    """A variable, and a step that trains it and returns its loss."""
    weights = tf.Variable(tf.random.normal([4, 1]))

    def update(x, y, rate=0.1):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ weights)
        weights.assign_sub(rate * tape.gradient(loss, weights))
        return loss

    return weights, update


@program()
def read_loss_every_step(terra):
    """The loss printed by the caller after every step, in several formats."""
    weights, update = linear_model()
    train_step = terra.function(update)
    for step, (x, y) in enumerate(regression(terra.iterations)):
        loss = train_step(x, y)
        print(f"{step}: {loss:.6f} {loss.numpy()} {float(loss)!r}", loss)
    yield weights


@program(coexecuted=4, fallbacks=(0, 3))
def read_loss_every_fourth_step(terra):
    """The loss printed inside the step, but only sometimes."""
    weights, update = linear_model()
    calls = 0

    @terra.function
    def train_step(x, y):
        nonlocal calls
        calls += 1
        loss = update(x, y)
        if calls % 4 == 0:
            print("step", calls, "loss", loss.numpy())
        return loss

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield weights


@program()
def read_between_two_updates(terra):
    """A value read in the middle of a step, between two updates of the same variable."""
    weights, update = linear_model()
    seen = []

    @terra.function
    def train_step(x, y):
        first = update(x, y)
        seen.append(float(first))
        print("between", weights.numpy().sum())
        second = update(x, y, rate=0.05)
        return first - second

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield weights, seen


@program()
def read_variable_after_write(terra):
    """A variable read as a tensor and as an array before and after its writes in one step."""
    total = tf.Variable([0.0, 1.0])

    @terra.function
    def step(x):
        before = total.numpy()
        total.assign_add(x)
        middle = total.read_value()
        total[1].assign(5.0)
        total.assign_sub([0.5, 0.5])
        return before, middle, total.numpy(), total + 0.0, total.value()

    for turn in range(terra.iterations):
        yield step(tf.constant([1.0, float(turn)]))
    yield total


@program()
def read_in_many_ways(terra):
    """float, int, bool, len, iter, format, tolist, np.asarray, comparison, max, sorted."""

    @terra.function
    def step(x):
        row = tf.reduce_sum(x, axis=0)
        values = [float(row[0]), int(row[1] * 100), bool(row[2] > 0), len(row), f"{row[3]:.3f}"]
        values += [value.numpy() for value in row] + row.numpy().tolist()
        values += [np.asarray(row) * 2, max(row, key=float).numpy(), sorted(float(v) for v in row)]
        return values, str(row), repr(row[0])

    for x, _ in regression(terra.iterations):
        yield step(x)


@program()
def read_shapes_without_values(terra):
    """Shape, rank, dtype, name-free attributes: known without a wait, right all the same."""

    @terra.function
    def step(x):
        y = tf.transpose(x)[:, None]
        facts = [y.shape, y.shape.as_list(), y.shape[0], y.dtype, y.ndim, tf.rank(y)]
        return (
            facts,
            tf.reshape(y, [y.shape[0] * y.shape[1], -1]),
            tf.size(y),
            isinstance(y, tf.Tensor),
        )

    for x, _ in regression(terra.iterations):
        yield step(x)


@program()
def read_index_of_a_list(terra):
    """A Python list indexed by a tensor's value; a dictionary keyed by it."""
    names = ["red", "green", "blue", "grey"]
    counts = {}

    @terra.function
    def step(x):
        winner = tf.argmax(tf.reduce_sum(x, axis=0), output_type=tf.int32)
        name = names[winner]
        counts[int(winner)] = counts.get(int(winner), 0) + 1
        return name, winner, tf.one_hot(winner, 4)

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield counts


@program()
def read_only_for_logging(terra):
    """Norms of all gradients gathered in a list, read after every fifth step only."""
    weights, log = tf.Variable(tf.random.normal([4, 1])), []

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ weights)
        gradient = tape.gradient(loss, weights)
        log.append(tf.norm(gradient))
        weights.assign_sub(0.1 * gradient)

    for step, (x, y) in enumerate(regression(terra.iterations)):
        train_step(x, y)
        if step % 5 == 4:
            print([f"{norm:.5f}" for norm in log[-5:]])
    yield weights, log


@program()
def read_through_protocols(terra):
    """DLPack, the buffer and array protocols, copy, pickle and hash of returned tensors."""
    step = terra.function(lambda x: tf.reduce_sum(x, axis=0) * 2.0)
    for x, _ in regression(terra.iterations):
        row = step(x)
        yield np.array(memoryview(row)), np.from_dlpack(row), row.__array__()
        yield copy.copy(row), copy.deepcopy(row), pickle.loads(pickle.dumps(row.numpy()))
        yield row.device, row.backing_device, isinstance(row, tf.Tensor), row.ref() == row.ref()
