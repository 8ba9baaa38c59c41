"""The tape of eager stages: TensorFlow's gradients, and a stash that can be away meanwhile."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline import tensorflow_internals
from pipeline.runtime.eager_tape import EagerTape
from pipeline.runtime.model import raw

RANDOM = np.random.default_rng(0)
X = tf.constant(RANDOM.normal(size=(3, 4, 8)).astype("float32"))
IMAGES = tf.constant(RANDOM.normal(size=(3, 8, 8, 2)).astype("float32"))
INNER = tf.function(lambda x: tf.nn.softmax(tf.sin(x) * x))


@tf.custom_gradient
def doubled_backward(x):
    return tf.identity(x), lambda upstream: 2.0 * upstream


def branches(x):
    return tf.sqrt(tf.abs(x)) if float(tf.reduce_sum(x)) > 0 else tf.exp(x)


def several(x):
    a, b = tf.split(x, 2, axis=-1)
    values, _ = tf.math.top_k(x, 2)
    return tf.concat([a * b, tf.stop_gradient(a) * b, values, a[:, :, ::2]], -1) + tf.zeros([1])


class Module(tf.Module):
    """Uses variables as they are, whole, in parts, in lists, more than once."""

    def __init__(self):
        super().__init__()
        self.scale = tf.Variable(RANDOM.normal(size=8).astype("float32"))
        self.matrix = tf.Variable(RANDOM.normal(size=(8, 8)).astype("float32"))
        self.table = tf.Variable(RANDOM.normal(size=(9, 8)).astype("float32"))

    def __call__(self, x):
        rows = tf.nn.embedding_lookup(self.table, [[1, 2, 3, 1]] * 3)
        y = tf.concat([x * self.scale, x @ self.matrix, rows], -1) + self.matrix[0, 0]
        return y * tf.concat([self.scale, self.scale, self.scale + 1.0], 0) + tf.add_n(
            [self.scale[0], self.scale[1]]
        )


# Name → input, layers.
PROGRAMS = {
    "module": (X, [Module()]),
    "dense": (X, [keras.layers.Dense(5, "gelu"), keras.layers.Dense(3, "silu")]),
    "attention": (X, [keras.layers.MultiHeadAttention(2, 4), keras.layers.LayerNormalization()]),
    "convolution": (
        IMAGES,
        [
            keras.layers.Conv2D(4, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.MaxPool2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ],
    ),
    "recurrent": (X, [keras.layers.LSTM(6, return_sequences=True), keras.layers.GRU(3)]),
    "dropout": (X, [keras.layers.Dropout(0.5, seed=1), lambda x: tf.nn.dropout(x * x, 0.5)]),
    "half": (
        X,
        [
            keras.layers.Dense(5, dtype="mixed_float16"),
            keras.layers.Dense(3, "tanh", dtype="mixed_bfloat16"),
        ],
    ),
    "functions": (X, [INNER, doubled_backward, lambda x: INNER(x) * x, tf.recompute_grad(tf.exp)]),
    "python": (X, [branches, several, lambda x: x + x + x]),
    "shared": (X, [lambda x: tf.einsum("abc,abd->acd", x, x), tf.linalg.norm]),
}


def call(layers, x):
    for layer in layers:
        if isinstance(layer, keras.layers.MultiHeadAttention):
            x = layer(x, x)
        else:
            x = layer(x, **({"training": True} if isinstance(layer, keras.Layer) else {}))
    return x


def weights_of(layers):
    return [
        raw(weight)
        for layer in layers
        if hasattr(layer, "trainable_variables")
        for weight in layer.trainable_variables
    ]


def repeated(layers, x):
    """The same numbers at each call."""
    for layer in layers:
        for part in tensorflow_internals.sublayers(layer) if hasattr(layer, "built") else ():
            for generator in tensorflow_internals.seed_generators(part):
                generator.state.assign([1, 2])
    numbers = iter(range(1, 99))
    with tensorflow_internals.random_ops_from(lambda own: tf.constant([next(numbers), own])):
        return call(layers, x)


def recorded(layers, x, upstream_of=tf.ones_like):
    """Output, stash, and a function from the stash to gradients."""
    weights = weights_of(layers)
    tape = EagerTape([x], [x, *weights])
    with tape:
        out = repeated(layers, x)
    stash = tape.finish([out])
    return out, stash, lambda tensors: tape.gradient(tensors, [upstream_of(out)])


def varied(out):
    """An upstream gradient that no normalization cancels, which would leave rounding alone."""
    return tf.cast(
        tf.reshape(tf.sin(tf.range(tf.size(out), dtype=tf.float32)), out.shape), out.dtype
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_tensorflows_tape(name):
    x, layers = PROGRAMS[name]
    call(layers, x)
    for turn in range(2):
        out, stash, gradient = recorded(layers, x, varied)
        away = [tf.constant(tensor.numpy()) for tensor in stash]  # other tensors, the same values
        found = gradient(away)
        with tf.GradientTape() as tape:
            tape.watch(x)
            truth = repeated(layers, x)
        sources = [x, *weights_of(layers)]
        expected = tape.gradient(truth, sources, varied(truth))
        np.testing.assert_array_equal(out, truth)
        expected = [b if b is None else tf.convert_to_tensor(b) for b in expected]
        # Some are zero but for rounding (of a bias of keys, say): as much as in the largest.
        rounding = 1e-6 * max(float(tf.reduce_max(tf.abs(b))) for b in expected if b is not None)
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None), turn
            if a is not None:
                np.testing.assert_allclose(
                    tf.cast(a, tf.float64), tf.cast(b, tf.float64), rtol=1e-5, atol=rounding
                )


def size(tensors):
    return sum(map(tensorflow_internals.nbytes, tensors))


def test_stash_is_about_what_a_graph_would_keep():
    layers = [keras.layers.Dense(64, "tanh") for _ in range(3)]
    x = tf.ones([4, 64])
    call(layers, x)
    _, stash, _ = recorded(layers, x)
    assert size(stash) <= 4 * size([x]), "the input and three outputs"


def test_weights_and_their_copies_are_in_no_stash():
    layers = [keras.layers.Dense(500, dtype="mixed_float16")]
    x = tf.ones([1, 300])
    call(layers, x)
    _, stash, _ = recorded(layers, x)
    assert size(stash) < 4000


def test_what_was_lent_is_not_kept():
    import gc
    import weakref

    layers = [lambda x: tf.tanh(tf.tanh(x)) + 1.0]
    out, stash, gradient = recorded(layers, tf.ones([50]))
    copies = [tf.constant(tensor.numpy()) for tensor in stash]
    alive = [weakref.ref(tensor) for tensor in stash]
    del stash, out
    gc.collect()
    assert [one() for one in alive if one() is not None] == []
    assert gradient(copies)[0].shape == [50]
