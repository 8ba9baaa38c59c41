"""Optimizers and their options: slots, clipping, averaging, accumulation, loss scaling."""

import keras as keras3
import tensorflow as tf

from ..table import program
from ..training import mean_squared_error, regression, training_step


def train(terra, keras, optimizer, batches=None):
    """Trains a small network; yields losses, then the model and all slots."""
    model = keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )
    loss_function = keras.losses.MeanSquaredError()
    train_step = terra.function(training_step(model, loss_function, optimizer))
    for x, y in batches or regression(terra.iterations):
        yield train_step(x, y)
    yield model, optimizer


# Rows of it that also run with the legacy Keras.
IN_BOTH = ("sgd_nesterov", "rmsprop_centered", "adamw", "adagrad", "global_clipnorm")
# Row -> (class, options).
STEADY = {
    "sgd_nesterov": ("SGD", {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True}),
    "rmsprop_centered": ("RMSprop", {"learning_rate": 0.01, "momentum": 0.5, "centered": True}),
    "adamw": ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.02}),
    "adam_amsgrad": ("Adam", {"learning_rate": 0.01, "amsgrad": True}),
    "adagrad": ("Adagrad", {"learning_rate": 0.1}),
    "adadelta": ("Adadelta", {"learning_rate": 1.0}),
    "adamax": ("Adamax", {"learning_rate": 0.01}),
    "nadam": ("Nadam", {"learning_rate": 0.01}),
    "ftrl": ("Ftrl", {"learning_rate": 0.1, "l1_regularization_strength": 0.01}),
    "lion": ("Lion", {"learning_rate": 0.01}),
    "clipnorm": ("SGD", {"learning_rate": 0.5, "clipnorm": 0.1}),
    "clipvalue": ("SGD", {"learning_rate": 0.5, "clipvalue": 0.05}),
    "global_clipnorm": ("Adam", {"learning_rate": 0.05, "global_clipnorm": 0.1}),
}


def _add_steady_row(name, kind, options):
    def build(terra):
        yield from train(terra, tf.keras, getattr(tf.keras.optimizers, kind)(**options))

    build.__doc__ = f"{kind} with {', '.join(f'{key}={value}' for key, value in options.items())}."
    program(name=f"optimizer_{name}", keras="both" if name in IN_BOTH else "3")(build)


@program(keras="both", coexecuted=0, fallbacks=(0, None))
def optimizer_ema(terra):
    """Averaged weights that overwrite the weights every fourth step, decided by a variable."""
    options = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 4}
    yield from train(terra, tf.keras, tf.keras.optimizers.SGD(0.1, **options))


@program()
def optimizer_ema_finalized(terra):
    """Averaged weights without overwriting, put in place by hand at the end."""
    optimizer = keras3.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)
    for value in train(terra, keras3, optimizer):
        yield value
    model, _ = value
    optimizer.finalize_variable_values(model.trainable_variables)
    yield model


@program(coexecuted=0, fallbacks=(0, None))
def optimizer_accumulation(terra):
    """The optimizer's own gradient accumulation over three steps."""
    optimizer = keras3.optimizers.Adam(0.01, gradient_accumulation_steps=3)
    yield from train(terra, keras3, optimizer)


@program(coexecuted=0, fallbacks=(0, None))
def gradient_accumulation_by_hand(terra):
    """Gradients added up in variables, applied when a Python counter says so."""
    weights = tf.Variable(tf.random.normal([4, 1]))
    total = tf.Variable(tf.zeros_like(weights))
    optimizer = keras3.optimizers.SGD(0.1, momentum=0.9)
    calls = 0

    @terra.function
    def train_step(x, y):
        nonlocal calls
        calls += 1
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ weights)
        total.assign_add(tape.gradient(loss, weights) / 3.0)
        if calls % 3 == 0:
            optimizer.apply_gradients([(total.read_value(), weights)])
            total.assign(tf.zeros_like(total))
        return loss

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield weights, total, calls, optimizer


def _with_an_infinite_batch(iterations):
    batches = regression(iterations)
    x, y = batches[iterations // 2]
    batches[iterations // 2] = (x, y + float("inf"))
    return batches


@program(coexecuted=0, fallbacks=(0, None))
def optimizer_loss_scale(terra):
    """A dynamic loss scale that one batch with infinite gradients halves."""
    inner = keras3.optimizers.SGD(0.05)
    optimizer = keras3.optimizers.LossScaleOptimizer(inner, 1024.0, dynamic_growth_steps=4)
    weights = keras3.Variable(tf.random.normal([4, 1]))

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ weights)
            scaled = optimizer.scale_loss(loss)
        optimizer.apply([tape.gradient(scaled, weights.value)], [weights])
        return loss

    for x, y in _with_an_infinite_batch(terra.iterations):
        yield train_step(x, y)
    yield weights, optimizer


@program(keras="2", coexecuted=0, fallbacks=(0, None))
def legacy_loss_scale(terra):
    """The legacy Keras: get_scaled_loss, get_unscaled_gradients, one infinite batch."""
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(
        tf.keras.optimizers.SGD(0.05), initial_scale=1024.0, dynamic_growth_steps=4
    )
    weights = tf.Variable(tf.random.normal([4, 1]))

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ weights)
            scaled = optimizer.get_scaled_loss(loss)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, [weights]))
        optimizer.apply_gradients(zip(gradients, [weights], strict=True))
        return loss

    for x, y in _with_an_infinite_batch(terra.iterations):
        yield train_step(x, y)
    yield weights, optimizer.loss_scale, optimizer.inner_optimizer


@program()
def optimizer_constraints(terra):
    """Weight constraints, decay of some weights only, and a variable with a multiplier."""
    model = keras3.Sequential(
        [keras3.Input([4]), keras3.layers.Dense(4, kernel_constraint="max_norm", name="hidden")]
    )
    optimizer = keras3.optimizers.SGD(0.5, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    loss_function = keras3.losses.MeanSquaredError()
    train_step = terra.function(training_step(model, loss_function, optimizer))
    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield model, optimizer


@program(keras="both")
def optimizer_missing_gradients(terra):
    """A variable that the loss does not reach: its gradient is None and is filtered."""
    keras = tf.keras
    used, unused = tf.Variable(tf.ones([4, 1])), tf.Variable(tf.ones([2]))
    optimizer = keras.optimizers.SGD(0.1)

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ used)
        gradients = tape.gradient(loss, [used, unused])
        pairs = [(g, v) for g, v in zip(gradients, (used, unused), strict=True) if g is not None]
        optimizer.apply_gradients(pairs)
        return loss, [g is None for g in gradients]

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield used, unused


@program()
def rate_changes_each_step(terra):
    """A learning rate that is a Python float, another one in each step."""
    weights = tf.Variable(tf.random.normal([4, 1]))

    @terra.function
    def train_step(x, y, rate):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ weights)
        weights.assign_sub(rate * tape.gradient(loss, weights))
        return loss

    for step, (x, y) in enumerate(regression(terra.iterations)):
        yield train_step(x, y, 0.3 / (1 + step))
    yield weights


@program(fallbacks=(0, 2), coexecuted=6)
def rate_drops_late(terra):
    """A Python learning rate on an object: constant for seven steps, then divided by ten."""

    class Settings:
        rate = 0.3

    weights = tf.Variable(tf.random.normal([4, 1]))

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ weights)
        weights.assign_sub(Settings.rate * tape.gradient(loss, weights))
        return loss

    for step, (x, y) in enumerate(regression(terra.iterations)):
        if step >= 7:
            Settings.rate = 0.03
        yield train_step(x, y), Settings.rate
    yield weights


@program(keras="both")
def rate_is_a_variable(terra):
    """A rate in a variable, warmed up by the step; the optimizer's own is assigned outside."""
    keras = tf.keras
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    scale = tf.Variable(0.1)
    loss_function = keras.losses.MeanSquaredError()

    @terra.function
    def train_step(x, y):
        scale.assign(tf.minimum(1.0, scale + 0.2))
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x)) * scale
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, tf.convert_to_tensor(optimizer.learning_rate)

    for step, (x, y) in enumerate(regression(terra.iterations)):
        if step % 4 == 3:
            optimizer.learning_rate = 0.1 / step
        yield train_step(x, y)
    yield model, optimizer, scale


@program(coexecuted=5, fallbacks=(0, 3), keras="both")  # which values are looked at varies
def rate_schedules(terra):
    """Keras schedules: exponential, cosine with restarts, piecewise; three optimizers."""
    keras = tf.keras
    schedules = keras.optimizers.schedules
    optimizers = [
        keras.optimizers.SGD(schedules.ExponentialDecay(0.3, 3, 0.5, staircase=True)),
        keras.optimizers.SGD(schedules.CosineDecayRestarts(0.3, 4)),
        keras.optimizers.Adam(schedules.PiecewiseConstantDecay([4, 8], [0.1, 0.05, 0.01])),
    ]
    models = [keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]) for _ in optimizers]
    loss_function = keras.losses.MeanSquaredError()
    steps = [training_step(m, loss_function, o) for m, o in zip(models, optimizers, strict=True)]
    train_step = terra.function(lambda x, y: [step(x, y) for step in steps])
    for x, y in regression(terra.iterations):
        yield train_step(x, y)
        yield [tf.convert_to_tensor(o.learning_rate) for o in optimizers]
    yield models, optimizers


for _name, (_kind, _options) in STEADY.items():
    _add_steady_row(_name, _kind, _options)
