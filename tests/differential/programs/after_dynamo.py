"""What changes behind a trace's back: modes, aliases, limits, objects; after Dynamo's tests."""

import copy
import itertools
import random

import keras as keras3
import numpy as np
import tensorflow as tf

from ..cases import case
from ..table import program
from ..training import descend, mean_squared_error, regression

UNLIMITED = {"fallbacks": (0, None), "coexecuted": 10}
SCALE = 1.0  # read by a step as a global


# --- modes ---------------------------------------------------------------------------------------


@program(iterations=20, **UNLIMITED)
def flip_training_and_inference(terra):
    """One step trains or evaluates by a flag: dropout, batch statistics, updates."""
    layers = [
        keras3.layers.Dense(6),
        keras3.layers.BatchNormalization(),
        keras3.layers.Dropout(0.4),
    ]
    model = keras3.Sequential([keras3.Input([4]), *layers, keras3.layers.Dense(1)])
    optimizer = keras3.optimizers.SGD(0.05)

    @terra.function
    def step(x, y, training):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, model(x, training=training))
        if training:
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )
        return loss

    for turn, (x, y) in enumerate(regression(terra.iterations)):
        yield step(x, y, training=turn % 5 != 4)
    yield model, optimizer


@program(iterations=18, **UNLIMITED)
def flip_trainable(terra):
    """Layers are frozen and thawed between steps; the optimizer keeps all slots."""
    model = keras3.Sequential([keras3.Input([4]), keras3.layers.Dense(5), keras3.layers.Dense(1)])
    optimizer = keras3.optimizers.Adam(0.05)
    optimizer.build(model.trainable_variables)

    @terra.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss, len(variables)

    for turn, (x, y) in enumerate(regression(terra.iterations)):
        model.layers[0].trainable = turn // 4 % 2 == 0
        yield step(x, y)
    yield model, optimizer


@case([1.0, True], [1.0, False], [2.0, True], [2.0, None])
def flip_attribute_flags(s, x, flag):
    """An attribute that exists at times, holds a number at times and a tensor at others."""
    if flag is None:
        vars(s).pop("extra", None)
    else:
        s.extra = s.v * 2.0 if flag else x
    return s.v * x + getattr(s, "extra", 0.5)


# --- aliases -------------------------------------------------------------------------------------


@program(iterations=20, **UNLIMITED)
def alias_of_arguments(terra):
    """Two arguments are one tensor in some steps: watched, and each with its gradient."""
    one, other = tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])

    @terra.function
    def step(a, b):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(a)
            y = a * b + tf.sin(b)
        return tape.gradient(y, a), tape.gradient(y, b), a is b

    for turn in range(terra.iterations):
        yield step(one, one if turn % 4 == 3 else other)


@program(iterations=20, **UNLIMITED)
def alias_of_variables(terra):
    """Two names are one variable in some steps: a write by one is seen by the other."""
    v, w = tf.Variable([1.0, 2.0]), tf.Variable([0.5, 0.25])

    @terra.function
    def step(a, b):
        a.assign(b * 2.0)
        b.assign_sub(tf.sin(a))
        a.assign_add(b)
        return a + b

    for turn in range(terra.iterations):
        yield step(*[(v, w), (v, w), (w, v), (v, v)][turn % 4])
    yield v, w


@program(iterations=20, **UNLIMITED)
def alias_within_a_list(terra):
    """A list holds some tensors twice, others once, and is changed by the step."""

    @terra.function
    def step(items):
        items[0] = items[0] + items[1]
        items.append(items[0] * items[-1])
        return [a is b for a, b in itertools.combinations(items, 2)], tf.add_n(items)

    for turn in range(terra.iterations):
        a, b = tf.constant([1.0]), tf.constant([float(turn)])
        items = [a, b, a] if turn % 3 else [a, a, b]
        yield step(items), items


@program(iterations=20, **UNLIMITED)
def alias_of_layers(terra):
    """Weights are tied, untied and swapped by replacing a layer in a list."""
    first, second = (tf.keras.layers.Dense(4, activation="tanh") for _ in range(2))
    for layer in (first, second):
        layer.build([None, 4])
    layers = [first, second]

    @terra.function
    def step(x, y):
        with tf.GradientTape() as tape:
            for layer in layers:
                x = layer(x)
            loss = mean_squared_error(y, x)
        variables = [variable for layer in layers for variable in layer.trainable_variables]
        descend(variables, tape.gradient(loss, variables))
        return loss

    for turn, (x, y) in enumerate(regression(terra.iterations)):
        layers[:] = [[first, second], [first, second], [first, first], [second, first]][turn % 4]
        yield step(x, y)
    yield first, second


# --- limits --------------------------------------------------------------------------------------


def many_paths(terra, path, **options):
    """Steps along one of seven paths; `path(turn)` is its number."""
    w = tf.Variable([1.0, 2.0])
    ops = [tf.sin, tf.cos, tf.tanh, tf.abs, tf.square, tf.sigmoid, tf.exp]

    @terra.function(**options)
    def step(x, number):
        for op in [tf.identity, *ops[: number + 1]]:
            x = ops[number](op(x)) * w
        w.assign_sub(0.01 * x)
        return tf.reduce_sum(x)

    for turn in range(terra.iterations):
        yield step(tf.constant([0.5, 0.1]), path(turn))
    yield w


@program(iterations=40, **UNLIMITED)
def limit_reached_and_old_paths_return(terra):
    """More paths than graphs may be kept; the first one is used all along."""
    yield from many_paths(terra, lambda turn: turn // 4 % 7 if turn % 2 else 0, max_graphs=2)


@program(iterations=40, **UNLIMITED)
def limit_of_one_graph(terra):
    """One graph may be kept; two paths take it in turns, in stretches of five."""
    yield from many_paths(terra, lambda turn: turn // 5 % 2, max_graphs=1)


@program(iterations=40, coexecuted=8, fallbacks=(0, None))
def limit_reached_at_random(terra):
    """Paths at random, two of them far likelier than the others."""
    yield from many_paths(terra, lambda _: min(random.randrange(14), 6), max_graphs=3)


@program(iterations=24, coexecuted=8, fallbacks=(0, None))
def limit_of_shapes(terra):
    """A new length in nearly every step, more than graphs are kept, with gradients."""
    w = tf.Variable([0.5, -0.5])

    @terra.function(max_graphs=2)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x * w)[: x.shape[0] // 2 + 1])
        w.assign_sub(tape.gradient(loss, w))
        return loss, x.shape[0]

    for turn in range(terra.iterations):
        yield step(tf.ones([1 + turn * 7 % 23, 2]) * 0.1 * turn)
    yield w


# --- objects -------------------------------------------------------------------------------------


@program(iterations=20, **UNLIMITED)
def change_of_a_global(terra):
    """A global number and a function that the step calls by name are replaced between steps."""
    global SCALE
    helper = {"now": tf.sin}

    @terra.function
    def step(x):
        return helper["now"](x) * SCALE

    for turn in range(terra.iterations):
        SCALE = 1.0 + turn // 6
        helper["now"] = tf.cos if turn // 5 % 2 else tf.sin
        yield step(tf.constant([1.0, 2.0]))


@program(iterations=20, **UNLIMITED)
def change_of_a_class(terra):
    """A method of the model's class is replaced, then an instance gets one of its own."""

    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable([1.0, 2.0])

        def __call__(self, x):
            return self.activation(x * self.w)

        def activation(self, x):
            return tf.sin(x)

    model = Model()

    @terra.function
    def step(x):
        y = model(x)
        model.w.assign_sub(0.1 * y)
        return y

    for turn in range(terra.iterations):
        if turn == 7:
            Model.activation = lambda self, x: tf.cos(x) + 1.0
        if turn == 14:
            model.activation = tf.tanh
        yield step(tf.constant([1.0, 2.0]))
    yield model.w


@program(iterations=20, **UNLIMITED)
def change_of_an_equal_object(terra):
    """The model is replaced by a deep copy, whose variables are others with equal values."""
    holder = {"model": keras3.Sequential([keras3.Input([4]), keras3.layers.Dense(1)])}
    models = [holder["model"]]

    @terra.function
    def step(x, y):
        variables = holder["model"].trainable_variables
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, holder["model"](x))
        descend(variables, tape.gradient(loss, variables))
        return loss

    for turn, (x, y) in enumerate(regression(terra.iterations)):
        if turn in (7, 12):
            holder["model"] = copy.deepcopy(holder["model"])
            models.append(holder["model"])
        yield step(x, y)
    yield models


@case([1, 2.0], [1.0, 2], [True, 2.0], [np.float64(1.0), np.int32(2)], [tf.constant(1.0), 2.0])
def change_of_an_argument_type(s, a, b):
    """The same numbers as int, float, bool, NumPy scalar and tensor."""
    s.v.assign_add(tf.cast(a, tf.float32))
    return s.v * tf.cast(b, tf.float32), tf.constant(a), tf.convert_to_tensor(b)


@case([{"a": 1.0, "b": 2.0}], [{"b": 2.0, "a": 1.0}], [{"a": 1.0}], [{"a": 1.0, "b": None}])
def change_of_a_dictionary(s, items):
    """Keys in another order, fewer of them, a value that is None."""
    for key, value in items.items():
        if value is not None:
            s.v.assign(s.v * 0.5 + value if key == "a" else s.v - value)
    return s.v * float(len(items))


@program(iterations=20, **UNLIMITED)
def change_of_an_array_in_place(terra):
    """The caller writes into an array between steps, the step into another one of its own."""
    rates, seen = np.ones([2], np.float32), np.zeros([2], np.float32)
    w = tf.Variable([1.0, 2.0])

    @terra.function
    def step(x, rates):
        w.assign_sub(rates * x)
        seen[:] += (w * 1.0).numpy()
        return w * seen

    for turn in range(terra.iterations):
        rates[turn % 2] *= 0.5
        yield step(tf.constant([1.0, 0.5]), rates), seen
    yield w


@program(iterations=20, **UNLIMITED)
def change_of_the_layers_of_a_model(terra):
    """Layers are added to a list and taken from it: more variables, then fewer."""
    layers = []

    @terra.function
    def step(x, y):
        with tf.GradientTape() as tape:
            for weights in layers:
                x = tf.tanh(x @ weights)
            loss = mean_squared_error(y, x)
        descend(layers, tape.gradient(loss, layers))
        return loss

    for turn, (x, y) in enumerate(regression(terra.iterations)):
        if turn in (0, 5, 10):
            layers.append(tf.Variable(tf.random.normal([4, 4])))
        if turn == 15:
            del layers[0]
        yield step(x, y)
    yield layers
