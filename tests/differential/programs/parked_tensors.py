"""Tensors parked across steps: on objects, in containers, in closures, in generators."""

import collections

import keras as keras3
import tensorflow as tf

from ..table import program
from ..training import mean_squared_error, regression


@program()
def parked_recurrent_state(terra):
    """A recurrent state on `self`, from step to step, with truncated gradients."""

    class Trainer:
        def __init__(self):
            self.weights = tf.Variable(tf.random.normal([4, 4]) * 0.5)
            self.state = tf.zeros([8, 4])

        def train_step(self, x):
            with tf.GradientTape() as tape:
                state = tf.tanh(self.state @ self.weights + x)
                loss = tf.reduce_mean(state**2)
            self.weights.assign_sub(0.1 * tape.gradient(loss, self.weights))
            self.state = state
            return loss

    trainer = Trainer()
    train_step = terra.function(trainer.train_step)
    for turn, (x, _) in enumerate(regression(terra.iterations)):
        yield train_step(x)
        if turn == 7:
            trainer.state = tf.zeros([8, 4])
    yield trainer


@program(coexecuted=6, fallbacks=(0, None))
def parked_in_a_window(terra):
    """The last three losses in a deque; their mean scales the next update."""
    weights, window = tf.Variable(tf.ones([4, 1])), collections.deque(maxlen=3)

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ weights)
        window.append(loss)
        scale = tf.reduce_mean(tf.stack(list(window)))
        weights.assign_sub(0.05 * tape.gradient(loss, weights) / (1.0 + scale))
        return scale

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield weights, window


@program()
def parked_in_a_growing_list(terra):
    """All losses in a list that is read when training is over, newest first."""
    weights, losses = tf.Variable(tf.ones([4, 1])), []

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ weights)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        losses.append({"loss": loss, "weights": weights.read_value()})

    for x, y in regression(terra.iterations):
        train_step(x, y)
    yield [float(entry["loss"]) for entry in reversed(losses)], losses


@program()
def parked_average(terra):
    """A moving average that is a tensor in a dictionary, replaced by every step."""
    state = {"average": tf.zeros([4]), "count": 0}

    @terra.function
    def step(x):
        state["average"] = 0.9 * state["average"] + 0.1 * tf.reduce_mean(x, axis=0)
        state["count"] += 1
        return tf.norm(state["average"])

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield state


@program()
def parked_in_a_generator(terra):
    """A generator of the user's holds a tensor between steps; it is sent the next input."""

    def smoothing():
        average = yield None
        while True:
            average = 0.5 * average + 0.5 * (yield average)

    smoother = smoothing()
    next(smoother)
    step = terra.function(lambda x: smoother.send(tf.reduce_sum(x, axis=0)) * 2.0)
    for x, _ in regression(terra.iterations):
        yield step(x)


@program(coexecuted=4, fallbacks=(0, None))
def parked_old_ones_used_again(terra):
    """Tensors of many steps ago come back in any order; others are dropped unread."""
    kept = {}

    @terra.function
    def step(turn, x):
        kept[turn] = tf.reduce_sum(x, axis=0)
        oldest = kept.pop(turn - 3) if turn >= 3 else kept[0]
        return oldest - kept[turn]

    for turn, (x, _) in enumerate(regression(terra.iterations)):
        result = step(turn, x)
        if turn % 4 == 0:
            yield result
    yield kept


@program()
def parked_double_buffer(terra):
    """Two tensors change places in every step: this step's output is last step's spare."""
    front, back = tf.ones([4]), tf.zeros([4])

    @terra.function
    def step(x):
        nonlocal front, back
        front, back = back + tf.reduce_mean(x, axis=0), front * 0.5
        return front - back

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield front, back


@program()
def parked_on_a_layer(terra):
    """A Keras layer that keeps its last activations as an attribute for a penalty later."""

    class Remembering(keras3.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = keras3.layers.Dense(4)
            self.last = None

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            outputs = self.dense(x)
            if self.last is not None:
                outputs = outputs + 0.1 * self.last
            self.last = tf.stop_gradient(outputs)
            return outputs

    layer = Remembering()
    layer.build((8, 4))
    optimizer = keras3.optimizers.SGD(0.05)

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, layer(x))
        optimizer.apply(tape.gradient(loss, layer.trainable_weights), layer.trainable_weights)
        return loss

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield layer, layer.last


@program()
def parked_returned_later(terra):
    """A pipeline in Python: each call returns the result of the call before."""
    pending = [tf.zeros([])]

    @terra.function
    def step(x):
        pending.append(tf.reduce_sum(x**2))
        return pending.pop(0)

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield pending
