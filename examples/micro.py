"""Five micro programs: each builds a small model and returns one training step, as users write it.

Nothing in a step is made for Terra or for `tf.function`. A function here makes a program anew; like
`build` of the scripts in `paper`, it returns the step, the batches that it takes, and a function
that gives all variables which training changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

CLASSES = 10
WIDTH = 64
TIME_STEPS = 16

Step = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
Batches = Sequence[tuple[tf.Tensor, tf.Tensor]]
Variables = Callable[[], Sequence[tf.Variable | keras.Variable]]
Training = tuple[Step, Batches, Variables]


# --- plain TensorFlow ---


def raw_mlp() -> Training:
    sizes = [WIDTH, WIDTH, WIDTH, WIDTH, WIDTH, CLASSES]
    weights = [_weight(size, after) for size, after in zip(sizes, sizes[1:], strict=False)]
    biases = [tf.Variable(tf.zeros([size])) for size in sizes[1:]]
    variables = weights + biases

    def train_step(x, y):
        with tf.GradientTape() as tape:
            for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
                x = tf.nn.relu(tf.matmul(x, weight) + bias)
            logits = tf.matmul(x, weights[-1]) + biases[-1]
            loss = _cross_entropy(y, logits)
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.05 * gradient)
        return loss

    return train_step, _batches(32, WIDTH), lambda: variables


def lstm_loop() -> Training:
    features, batch = 32, 16
    kernel = _weight(features, 4 * WIDTH)
    recurrent = _weight(WIDTH, 4 * WIDTH)
    bias = tf.Variable(tf.zeros([4 * WIDTH]))
    head = _weight(WIDTH, CLASSES)
    variables = [kernel, recurrent, bias, head]

    def train_step(x, y):
        with tf.GradientTape() as tape:
            hidden = cell = tf.zeros([batch, WIDTH])
            for t in range(TIME_STEPS):
                gates = tf.matmul(x[:, t], kernel) + tf.matmul(hidden, recurrent) + bias
                write, forget, new, output = tf.split(gates, 4, axis=1)
                cell = tf.sigmoid(forget + 1.0) * cell + tf.sigmoid(write) * tf.tanh(new)
                hidden = tf.sigmoid(output) * tf.tanh(cell)
            loss = _cross_entropy(y, tf.matmul(hidden, head))
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return train_step, _batches(batch, TIME_STEPS, features), lambda: variables


def _weight(rows: int, columns: int) -> tf.Variable:
    return tf.Variable(tf.random.normal([rows, columns], stddev=(2.0 / rows) ** 0.5))


def _cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(losses)


# --- Keras ---


def keras_mlp() -> Training:
    model = keras.Sequential([keras.Input((WIDTH,))])
    for _ in range(4):
        model.add(keras.layers.Dense(WIDTH, activation="relu"))
    model.add(keras.layers.Dense(CLASSES))
    return _keras_training(model, keras.optimizers.Adam(1e-3), _batches(32, WIDTH))


def transformer() -> Training:
    layers = keras.layers
    inputs = keras.Input((TIME_STEPS, WIDTH))
    normal = layers.LayerNormalization()(inputs)
    attended = layers.MultiHeadAttention(num_heads=4, key_dim=WIDTH // 4)(normal, normal)
    x = layers.Add()([inputs, layers.Dropout(0.1)(attended)])
    inner = layers.Dense(2 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
    x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(WIDTH)(inner))])
    outputs = layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.01)
    return _keras_training(model, optimizer, _batches(16, TIME_STEPS, WIDTH))


def cnn() -> Training:
    # Smooth activations: at the kink of a ReLU, one rounding error can switch a unit, and with it
    # the course of the training.
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(16, 3, padding="same", activation="gelu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="gelu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    return _keras_training(model, optimizer, _batches(16, 16, 16, 3))


def _keras_training(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, batches: Batches
) -> Training:
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return train_step, batches, lambda: model.variables + optimizer.variables


def _batches(size: int, *shape: int, count: int = 64) -> Batches:
    """Normal random inputs around a centre for each class, with the classes as labels.

    A fifth of the labels is wrong. So the loss soon falls and then stays far from zero, where a
    rounding error would be a large part of it.
    """
    numbers = np.random.default_rng(7)
    centres = 0.3 * numbers.normal(size=(CLASSES, *shape))
    pairs = []
    for _ in range(count):
        classes = numbers.integers(CLASSES, size=size)
        inputs = centres[classes] + numbers.normal(size=(size, *shape))
        wrong = numbers.random(size) < 0.2
        labels = np.where(wrong, numbers.integers(CLASSES, size=size), classes)
        pairs.append((tf.constant(inputs, tf.float32), tf.constant(labels, tf.int32)))
    return pairs
