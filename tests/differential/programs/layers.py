"""Keras layers, each trained in the usual custom loop: one row a kind of layer."""

import keras as keras3
import tensorflow as tf

from ..table import program
from ..training import classification, regression, sentences, training_step


def train(terra, keras, model, batches, loss, optimizer=None):
    """Trains for the program's iterations; yields losses, then an inference and the state."""
    optimizer = optimizer or keras.optimizers.SGD(0.05)
    train_step = terra.function(training_step(model, loss, optimizer))
    for x, y in batches:
        yield train_step(x, y)
    yield model(batches[0][0], training=False)
    yield model, optimizer


@program(keras="both")
def layer_batch_normalization(terra):
    """BatchNormalization: the moving averages are written in the forward pass."""
    keras = tf.keras
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input([4]), *layers])
    batches = regression(terra.iterations)
    yield from train(terra, keras, model, batches, keras.losses.MeanSquaredError())


@program(keras="both")
def layer_normalization_gelu(terra):
    """LayerNormalization and gelu with a residual connection."""
    keras = tf.keras
    inputs = keras.Input([4])
    hidden = keras.layers.Dense(4, activation="gelu")(keras.layers.LayerNormalization()(inputs))
    outputs = keras.layers.Dense(1)(keras.layers.Add()([inputs, hidden]))
    model = keras.Model(inputs, outputs)
    batches = regression(terra.iterations)
    yield from train(terra, keras, model, batches, keras.losses.MeanSquaredError())


@program(keras="both")
def layer_dropout(terra):
    """Dropout with and without a seed, and Gaussian noise, from Keras's own streams."""
    keras = tf.keras
    model = keras.Sequential(
        [
            keras.Input([4]),
            keras.layers.GaussianNoise(0.1),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dropout(0.4),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dropout(0.2, seed=7),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    yield from train(terra, keras, model, classification(terra.iterations), loss)


@program(keras="both")
def layer_embedding(terra):
    """An Embedding with a mask, pooled; Adam meets IndexedSlices with repeated rows."""
    keras = tf.keras
    model = keras.Sequential(
        [
            keras.Input([5], dtype="int32"),
            keras.layers.Embedding(20, 4, mask_zero=True),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.05)
    yield from train(terra, keras, model, sentences(terra.iterations), loss, optimizer)


def recurrent_model(keras, layer, **options):
    return keras.Sequential(
        [
            keras.Input([5], dtype="int32"),
            keras.layers.Embedding(20, 4),
            layer(6, **options),
            keras.layers.Dense(1),
        ]
    )


@program(keras="both")
def layer_lstm(terra):
    """An LSTM layer, which makes a loop or a function of its own."""
    keras = tf.keras
    model = recurrent_model(keras, keras.layers.LSTM)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    yield from train(terra, keras, model, sentences(terra.iterations), loss)


@program(keras="both")
def layer_gru_unrolled(terra):
    """A GRU layer unrolled in Python, with recurrent dropout."""
    keras = tf.keras
    model = recurrent_model(keras, keras.layers.GRU, unroll=True, recurrent_dropout=0.2)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    yield from train(terra, keras, model, sentences(terra.iterations), loss)


@program(keras="both")
def layer_stateful_rnn(terra):
    """A stateful recurrent layer, reset between epochs."""
    keras = tf.keras
    layer = keras.layers.SimpleRNN(3, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=[2, 4, 1]), layer, keras.layers.Dense(1)])
    step = terra.function(lambda x: model(x, training=False))
    inputs = tf.random.normal([terra.iterations, 2, 4, 1])
    for turn in range(terra.iterations):
        yield step(inputs[turn])
        if turn % 5 == 4:
            layer.reset_states() if hasattr(layer, "reset_states") else layer.reset_state()
    yield model, layer.states


@program(fallbacks=(0, 1), keras="both")  # a cycle may hold a tensor until it is collected
def layer_attention_block(terra):
    """A Transformer block: MultiHeadAttention with a causal mask, dropout, normalisation."""
    keras = tf.keras
    inputs = keras.Input([5], dtype="int32")
    x = keras.layers.Embedding(20, 8)(inputs)
    attention = keras.layers.MultiHeadAttention(num_heads=2, key_dim=4, dropout=0.1)
    x = keras.layers.LayerNormalization()(x + attention(x, x, use_causal_mask=True))
    x = keras.layers.LayerNormalization()(x + keras.layers.Dense(8, activation="relu")(x))
    outputs = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.01)
    yield from train(terra, keras, model, sentences(terra.iterations), loss, optimizer)


@program(keras="both")
def layer_custom(terra):
    """A layer of the user's own: weights made in build, a plain variable, a running mean."""
    keras = tf.keras

    class Scaled(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")
            self.seen = self.add_weight(
                shape=(4,), trainable=False, initializer="zeros", name="seen"
            )
            self.built = True

        def call(self, x, training=False):
            x = tf.matmul(x, self.kernel)
            if training:
                self.seen.assign(0.9 * self.seen + 0.1 * tf.reduce_mean(x, axis=0))
            return x - self.seen

    model = keras.Sequential([keras.Input([4]), Scaled(), keras.layers.Dense(1)])
    batches = regression(terra.iterations)
    yield from train(terra, keras, model, batches, keras.losses.MeanSquaredError())


@program(keras="both")
def layer_mixed_precision(terra):
    """Layers that compute in bfloat16 and keep float32 weights."""
    keras = tf.keras
    policy = "mixed_bfloat16"
    layers = [keras.layers.Dense(8, activation="relu", dtype=policy), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input([4]), *layers])
    batches = regression(terra.iterations)
    yield from train(terra, keras, model, batches, keras.losses.MeanSquaredError())


@program()
def layer_augmentation(terra):
    """Random flips and contrast of images, whose draws come from a seed generator."""
    augment = keras3.Sequential(
        [keras3.layers.RandomFlip("horizontal", seed=3), keras3.layers.RandomContrast(0.2, seed=4)]
    )
    step = terra.function(lambda images: augment(images, training=True))
    images = tf.random.uniform([terra.iterations, 2, 6, 6, 1])
    for turn in range(terra.iterations):
        yield step(images[turn])
