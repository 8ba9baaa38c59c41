"""What runs between the iterations sees finished state, and what it changes is seen."""

import pathlib
import tempfile

import keras as keras3
import tensorflow as tf

from ..table import program
from ..training import mean_squared_error, regression, training_step


def small_model(keras):
    return keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    )


@program()
def between_variable_reads_and_writes(terra):
    """A variable read and assigned by the caller after every step."""
    weights = tf.Variable(tf.ones([4, 1]))

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ weights)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))

    for step, (x, y) in enumerate(regression(terra.iterations)):
        train_step(x, y)
        yield weights.numpy(), tf.reduce_sum(weights), weights
        if step % 3 == 1:
            weights.assign(weights * 0.5)
    yield weights


@program(keras="both")
def between_get_and_set_weights(terra):
    """Weights taken with get_weights, put back with set_weights when the loss got worse."""
    keras = tf.keras
    model, optimizer = small_model(keras), keras.optimizers.Adam(0.3)
    train_step = terra.function(training_step(model, keras.losses.MeanSquaredError(), optimizer))
    best, kept = float("inf"), model.get_weights()
    for x, y in regression(terra.iterations):
        loss = float(train_step(x, y))
        if loss < best:
            best, kept = loss, model.get_weights()
        else:
            model.set_weights(kept)
        yield loss, kept
    yield model, optimizer


@program(keras="both")
def between_checkpoints(terra):
    """A tf.train.Checkpoint saved after every fourth step; the second one is restored later."""
    keras = tf.keras
    model, optimizer = small_model(keras), keras.optimizers.SGD(0.1, momentum=0.9)
    train_step = terra.function(training_step(model, keras.losses.MeanSquaredError(), optimizer))
    with tempfile.TemporaryDirectory() as folder:
        saved = []
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        for step, (x, y) in enumerate(regression(terra.iterations)):
            yield train_step(x, y)
            if step % 4 == 2:
                saved.append(checkpoint.write(str(pathlib.Path(folder, f"step{step}"))))
                reader = tf.train.load_checkpoint(saved[-1])
                shapes = reader.get_variable_to_shape_map()
                yield {name: reader.get_tensor(name) for name in sorted(shapes)}
        checkpoint.restore(saved[1])
        yield model, optimizer
        for x, y in regression(3, seed=5):
            yield train_step(x, y)
    yield model, optimizer


@program()
def between_model_files(terra):
    """A model saved as a file, weights saved and loaded, between steps."""
    model, optimizer = small_model(keras3), keras3.optimizers.Adam(0.05)
    train_step = terra.function(training_step(model, keras3.losses.MeanSquaredError(), optimizer))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.keras")
        weights = pathlib.Path(folder, "model.weights.h5")
        for step, (x, y) in enumerate(regression(terra.iterations)):
            train_step(x, y)
            if step == 5:
                model.save(path)
                model.save_weights(weights)
            if step == 8:
                model.load_weights(weights)
        yield keras3.models.load_model(path).get_weights()
    yield model, optimizer


@program(keras="both")
def between_evaluation(terra):
    """An eager evaluation of the model, not accelerated, after every third step."""
    keras = tf.keras
    model, optimizer = small_model(keras), keras.optimizers.Adam(0.05)
    loss_function = keras.losses.MeanSquaredError()
    train_step = terra.function(training_step(model, loss_function, optimizer))
    held_out = regression(1, size=16, seed=3)[0]
    for step, (x, y) in enumerate(regression(terra.iterations)):
        train_step(x, y)
        if step % 3 == 2:
            yield loss_function(held_out[1], model(held_out[0], training=False))
            print("validation mean", float(tf.reduce_mean(model(held_out[0]))))
    yield model, optimizer


@program(coexecuted=4, fallbacks=(0, 3))
def between_attribute_replaced(terra):
    """A layer's activation and the loss function are replaced half way."""
    model, optimizer = small_model(keras3), keras3.optimizers.SGD(0.1)
    losses = {"now": keras3.losses.MeanSquaredError()}

    @terra.function
    def train_step(x, y):
        return training_step(model, losses["now"], optimizer)(x, y)

    for step, (x, y) in enumerate(regression(terra.iterations)):
        if step == terra.iterations // 2:
            model.layers[0].activation = keras3.activations.relu
            losses["now"] = keras3.losses.MeanAbsoluteError()
        yield train_step(x, y)
    yield model


@program()
def between_eager_training(terra):
    """The same model trained by an accelerated step and by an eager one in turn."""
    model, optimizer = small_model(keras3), keras3.optimizers.Adam(0.05)
    eager_step = training_step(model, keras3.losses.MeanSquaredError(), optimizer)
    train_step = terra.function(training_step(model, keras3.losses.MeanSquaredError(), optimizer))
    for x, y in regression(terra.iterations):
        yield train_step(x, y), eager_step(x, y)
    yield model, optimizer


@program()
def between_parameters_averaged(terra):
    """Polyak averaging by the caller, eager, of variables that steps are still writing."""
    weights = tf.Variable(tf.random.normal([4, 1]))
    average = tf.Variable(weights.read_value())

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ weights)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return tf.reduce_sum(average)

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
        average.assign(0.8 * average + 0.2 * weights)
    yield weights, average


@program()
def between_ops_take_the_variable_itself(terra):
    """After each step, an op that reads the variable inside TensorFlow, without a reading op."""
    weights = tf.Variable(tf.ones([4, 4]))

    @terra.function
    def step():
        weights.assign(tf.tanh(weights) * 0.99)

    for _ in range(terra.iterations):
        step()
        yield float(tf.reduce_sum(weights))
