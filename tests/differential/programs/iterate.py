"""`terra.iterate`: the body of the user's loop is the iteration."""

import contextlib

import keras as keras3
import tensorflow as tf

from ..table import program
from ..training import mean_squared_error, regression


def linear_step(weights, x, y):
    with tf.GradientTape() as tape:
        loss = mean_squared_error(y, x @ weights)
    weights.assign_sub(0.1 * tape.gradient(loss, weights))
    return loss


@program()
def iterate_over_a_dataset(terra):
    """A training loop over a batched dataset, unchanged but for the loop's head."""
    ((x, y),) = regression(1, size=8 * terra.iterations)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(32, seed=3).batch(8)
    model = keras3.Sequential([keras3.Input([4]), keras3.layers.Dense(1)])
    optimizer = keras3.optimizers.Adam(0.05)
    losses = []
    for step, (inputs, targets) in enumerate(terra.iterate(dataset)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs, training=True) - targets) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(loss)
        if step % 4 == 3:
            print(f"step {step} loss {loss:.6f}")
    yield losses, model, optimizer


@program(coexecuted=3, fallbacks=(0, None))
def iterate_with_continue(terra):
    """`continue` in the middle of the body for some batches."""
    weights, losses = tf.Variable(tf.ones([4, 1])), []
    for turn, (x, y) in enumerate(terra.iterate(regression(terra.iterations))):
        if turn % 5 == 4:
            losses.append(None)
            continue
        losses.append(linear_step(weights, x, y))
    yield losses, weights


@program(coexecuted=4, fallbacks=(0, 1))
def iterate_with_break(terra):
    """`break` in the middle of the body, after the first of two updates; `else` not reached."""
    weights, total = tf.Variable(tf.ones([4, 1])), tf.Variable(0.0)
    for turn, (x, y) in enumerate(terra.iterate(regression(terra.iterations))):
        loss = linear_step(weights, x, y)
        if turn == 8:
            break
        total.assign_add(loss)
    else:
        print("never here")
    yield loss, weights, total


@program(coexecuted=4, fallbacks=(0, 1))
def iterate_with_exception(terra):
    """An exception in the body leaves the loop; the caller sees what came before it."""
    weights, total = tf.Variable(tf.ones([4, 1])), tf.Variable(0.0)
    try:
        for turn, (x, y) in enumerate(terra.iterate(regression(terra.iterations))):
            loss = linear_step(weights, x, y)
            if turn == 8:
                raise RuntimeError("the body fails")
            total.assign_add(loss)
    except RuntimeError as error:
        yield error
    yield weights, total


@program(coexecuted=4, fallbacks=(0, 1))
def iterate_returns_from_inside(terra):
    """A function returns from the middle of the loop; the source is closed."""
    weights, closed = tf.Variable(tf.ones([4, 1])), []

    def batches():
        try:
            yield from regression(terra.iterations)
        finally:
            closed.append(True)

    def train():
        with contextlib.closing(batches()) as source:
            for turn, (x, y) in enumerate(terra.iterate(source)):
                loss = linear_step(weights, x, y)
                if turn == 9:
                    return loss

    yield train(), weights, closed


@program(iterations=18, coexecuted=6)
def iterate_several_epochs(terra):
    """A loop of epochs around the accelerated loop, evaluation between, both in one function."""
    weights, history = tf.Variable(tf.ones([4, 1])), []
    batches = regression(terra.iterations // 3)
    for epoch in range(3):
        losses = [linear_step(weights, x, y) for x, y in terra.iterate(batches)]
        mean = tf.reduce_mean(tf.stack(losses))
        history.append(float(mean))
        print(f"epoch {epoch}: {history[-1]:.5f} {weights.numpy().sum():.5f}")
    yield history, weights


@program()
def iterate_over_python_numbers(terra):
    """A loop over Python numbers, which enter the computation."""
    position = tf.Variable([0.0, 0.0])
    path = []
    speeds = [0.1 * k for k in range(terra.iterations)]
    for step, speed in enumerate(terra.iterate(speeds)):
        position.assign_add([speed, float(step)])
        path.append((step, tf.norm(position)))
    yield path, position


@program(coexecuted=6, fallbacks=(0, None))
def iterate_around_a_function(terra):
    """A decorated function inside an accelerated loop: it belongs to the loop."""
    weights, losses = tf.Variable(tf.ones([4, 1])), []
    step = terra.function(lambda x, y: linear_step(weights, x, y))
    for x, y in terra.iterate(regression(terra.iterations)):
        losses.append(step(x, y) * 2.0)
    yield losses, weights


@program(coexecuted=4, fallbacks=(0, None))
def iterate_carries_tensors(terra):
    """Locals of the loop carry tensors from one turn to the next."""
    state, best = tf.zeros([4]), tf.constant(float("inf"))
    for x, _ in terra.iterate(regression(terra.iterations)):
        state = 0.5 * state + tf.reduce_mean(x, axis=0)
        best = tf.minimum(best, tf.norm(state))
    yield state, best
