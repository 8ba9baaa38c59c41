"""Data and training steps that many programs share, so that each shows only its own subject."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Batches = list[tuple[tf.Tensor, tf.Tensor]]


def regression(batches: int, size: int = 8, features: int = 4, seed: int = 3) -> Batches:
    """Batches of (inputs, targets) of a noisy linear function."""
    numbers = np.random.RandomState(seed)
    weights = numbers.normal(size=(features, 1))
    pairs = []
    for _ in range(batches):
        x = numbers.normal(size=(size, features))
        y = x @ weights + 0.1 * numbers.normal(size=(size, 1))
        pairs.append((_float32(x), _float32(y)))
    return pairs


def classification(
    batches: int, size: int = 8, features: int = 4, classes: int = 3, seed: int = 3
) -> Batches:
    """Batches of (inputs, integer labels), a cluster a class."""
    numbers = np.random.RandomState(seed)
    centres = numbers.normal(size=(classes, features))
    pairs = []
    for _ in range(batches):
        labels = numbers.randint(classes, size=size)
        x = centres[labels] + 0.3 * numbers.normal(size=(size, features))
        pairs.append((_float32(x), tf.constant(labels, tf.int32)))
    return pairs


def sentences(
    batches: int, size: int = 6, length: int = 5, words: int = 20, seed: int = 3
) -> Batches:
    """Batches of (word numbers, binary labels): is the first word in the upper half?"""
    numbers = np.random.RandomState(seed)
    pairs = []
    for _ in range(batches):
        ids = numbers.randint(words, size=(size, length))
        pairs.append((tf.constant(ids, tf.int32), _float32(ids[:, :1] >= words // 2)))
    return pairs


def images(batches: int, size: int = 4, classes: int = 3, seed: int = 3) -> Batches:
    """Batches of (8x8 images with one channel, integer labels)."""
    numbers = np.random.RandomState(seed)
    pairs = []
    for _ in range(batches):
        labels = numbers.randint(classes, size=size)
        pixels = numbers.normal(size=(size, 8, 8, 1)) + labels[:, None, None, None]
        pairs.append((_float32(pixels), tf.constant(labels, tf.int32)))
    return pairs


def _float32(array: np.ndarray) -> tf.Tensor:
    return tf.constant(array.astype(np.float32))


def mean_squared_error(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """The mean over all elements."""
    return tf.reduce_mean(tf.square(targets - outputs))


def descend(variables: Sequence, gradients: Sequence, rate: float = 0.1) -> None:
    """Plain gradient descent."""
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(rate * gradient)


def training_step(model: Any, loss_function: Callable, optimizer: Any) -> Callable:
    """The loop body that nearly every custom Keras training loop has."""

    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return train_step


class Mlp(tf.Module):
    """A dense network of plain variables."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weights = [
            tf.Variable(tf.random.normal([one, other], stddev=0.5), name=f"weights{index}")
            for index, (one, other) in enumerate(itertools.pairwise(sizes))
        ]
        self.biases = [
            tf.Variable(tf.zeros([size]), name=f"bias{index}")
            for index, size in enumerate(sizes[1:])
        ]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        for weights, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = tf.nn.relu(tf.matmul(x, weights) + bias)
        return tf.matmul(x, self.weights[-1]) + self.biases[-1]
