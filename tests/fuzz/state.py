"""What every fuzzed program starts from: variables, layers, optimizers, Python state, inputs."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

WIDTH = 4  # of all rows and vectors
WORDS = 6  # rows of the embedding table


class Planned(Exception):
    """Raised by a program's own Python, on purpose."""


class State:
    """The objects that a program reads, changes and keeps its results in.

    Programs call it `s`. A vector has the shape [WIDTH], rows have [any number, WIDTH].
    """

    def __init__(self, seed: int, keras_parts: bool) -> None:
        """Makes equal state from equal seeds.

        Args:
            seed: The program's seed.
            keras_parts: Whether to make Keras layers and an optimizer, which takes a while.
        """
        numbers = np.random.RandomState(seed)

        def variable(*shape: int) -> tf.Variable:
            return tf.Variable(numbers.normal(scale=0.5, size=shape).astype(np.float32))

        self.weights, self.bias = variable(WIDTH, WIDTH), variable(WIDTH)
        self.table = variable(WORDS, WIDTH)
        self.experts = [variable(WIDTH) for _ in range(3)]
        self.total, self.count = tf.Variable(0.0), tf.Variable(0)
        self.trainable = [self.weights, self.bias, self.table, *self.experts[:2]]
        # Python state: numbers, texts, tensors that outlive a step, and what they are looked up by.
        self.turn, self.rate, self.flag = 0, 0.1, False
        self.log: list[float] = []
        self.events: list[Any] = []
        self.kept: list[tf.Tensor] = []
        self.named: dict[int, tf.Tensor] = {}
        self.memory = tf.zeros([WIDTH])
        self.previous = tf.zeros([2, WIDTH])
        self.generator = tf.random.Generator.from_seed(seed)
        vectors = tf.constant(numbers.normal(size=(5, WIDTH)).astype(np.float32))
        self.iterator = iter(tf.data.Dataset.from_tensor_slices(vectors).repeat())
        if keras_parts:
            self._make_keras_parts(seed)

    def _make_keras_parts(self, seed: int) -> None:
        self.dense = keras.layers.Dense(WIDTH, activation="tanh")
        self.norm = keras.layers.BatchNormalization()
        for layer in (self.dense, self.norm):
            layer.build([None, WIDTH])
        self.dropout = keras.layers.Dropout(0.3)
        self.metric = keras.metrics.Mean()
        kind = [keras.optimizers.Adam, keras.optimizers.SGD, keras.optimizers.SGD][seed % 3]
        options = [{}, {}, {"momentum": 0.9}][seed % 3]
        self.optimizer = kind(0.05, **options)
        self.trainable += self.dense.trainable_variables + self.norm.trainable_variables
        self.optimizer.build(self.trainable)

    def everything(self) -> dict[str, Any]:
        """All that a program can have changed, to be compared."""
        hidden = ("generator", "iterator", "trainable")
        parts = {name: part for name, part in vars(self).items() if name not in hidden}
        return {**parts, "draw": self.generator.normal([2]), "next": next(self.iterator)}

    # --- what a program calls ---

    def descend(self, gradients: list[Any]) -> None:
        """Plain gradient descent; variables without a gradient stay."""
        for gradient, variable in zip(gradients, self.trainable, strict=True):
            if gradient is not None:
                gradient = tf.clip_by_value(tf.convert_to_tensor(gradient), -1.0, 1.0)
                variable.assign_sub(self.rate * gradient)

    def apply(self, gradients: list[Any]) -> None:
        """One step of the Keras optimizer, over what has a gradient."""
        pairs = zip(gradients, self.trainable, strict=True)
        pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        if pairs:
            self.optimizer.apply_gradients(pairs)

    def keep(self, tensor: tf.Tensor) -> None:
        """Parks a tensor across steps; the oldest of more than three goes."""
        self.kept.append(tensor)
        if len(self.kept) > 3:
            self.events.append(self.kept.pop(0))
        del self.events[:-20]

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Notes when it is entered and how it is left, with an op in between."""
        self.events.append(f"enter {name}")
        try:
            yield
        finally:
            self.total.assign_add(0.25)
            self.events.append(f"leave {name}")

    def noisy(self, x: tf.Tensor) -> tf.Tensor:
        """A `custom_gradient` whose backward function has an effect in Python."""

        @tf.custom_gradient
        def forward(value: tf.Tensor) -> Any:
            def backward(upstream: tf.Tensor) -> tf.Tensor:
                self.events.append("backward")
                return upstream * 0.5

            return tf.sin(value), backward

        return forward(x)

    @tf.function(reduce_retracing=True)
    def compiled(self, x: tf.Tensor) -> tf.Tensor:
        """An inner `tf.function` that reads variables."""
        return tf.tanh(x @ self.weights + self.bias)

    @tf.function
    def compiled_update(self, vector: tf.Tensor) -> tf.Tensor:
        """An inner `tf.function` that writes variables, with a loop and a branch in its graph."""
        for _ in tf.range(2):
            if self.total < 3.0:
                self.total.assign_add(0.5)
            vector = tf.sin(vector)
        self.count.assign_add(1)
        return vector + self.total


def batches(seed: int, sizes: list[int]) -> list[tf.Tensor]:
    """Inputs of a program, one for each step; `sizes` gives the numbers of their rows."""
    numbers = random.Random(seed)
    return [
        tf.constant([[numbers.gauss(0.0, 1.0) for _ in range(WIDTH)] for _ in range(size)])
        for size in sizes
    ]
