"""Random numbers of the model's items: set anew for every item and micro-batch.

What an item draws depends on the pipeline's seed, the item's index, the layer's own seed, the step
and the micro-batch, and on nothing that differs between schedules, partitions, stage modes or runs.
So a forward pass that is repeated draws the same numbers again. This holds for

* layers of Keras 3 and calls of `keras.random`, whose states are variables that get a value;
* TensorFlow's own random ops (`tf.random`, `tf.nn.dropout`, `tf.random.Generator`, `tf_keras`),
  which are replaced by their stateless counterparts while an item runs;
* Python's `random` and `numpy.random`, where an item's Python runs in every micro-batch.

Each source has a row of two 32-bit numbers for a micro-batch; rows travel with the micro-batch.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from pipeline import tensorflow_internals

if TYPE_CHECKING:
    from pipeline.runtime.model import Item


def derived_seed(*parts: Any) -> int:
    """A number below 2**31 that only depends on the parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


@contextmanager
def python_random(seed: int) -> Iterator[None]:
    """Seeds Python's and NumPy's random numbers inside; the program's own go on afterwards."""
    python, array = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


@contextmanager
def building_numbers(seed: int) -> Iterator[None]:
    """Random numbers for a layer that makes its weights inside: of Python, NumPy and TensorFlow.

    Layers that build others draw these ones' seeds from Python.
    """
    numbers = itertools.count(1)

    def next_seed(own: int) -> tf.Tensor:
        return tf.constant([seed + (next(numbers) << 32), own], tf.int64)

    with python_random(seed), tensorflow_internals.random_ops_from(next_seed):
        yield


class RandomStates:
    """The sources of random numbers of some items.

    Args:
        items: whose they are.
        seed: the pipeline's.
    """

    def __init__(self, items: Sequence[Item], seed: int) -> None:
        # For each row: the item, the Keras state that it is the value of (None: TensorFlow's ops),
        # and what it is derived from.
        self.states: list[tuple[Item, keras.Variable | None, tuple[Any, ...]]] = []
        for item in items:
            number = 0
            for layer in item.keras_layers():
                for generator in tensorflow_internals.seed_generators(layer):
                    own = tensorflow_internals.own_seed(generator)
                    origin = (seed, item.index, number, own)
                    self.states.append((item, generator.state, origin))
                    number += 1
            shared = tensorflow_internals.global_seed_state()
            self.states.append((item, shared, (seed, item.index, "global")))
            self.states.append((item, None, (seed, item.index, "tensorflow")))

    def values(self, step: int, microbatch: int) -> np.ndarray:
        """The states for a micro-batch: uint32, one row of two for each of `states`."""
        rows = [
            hashlib.blake2b(repr((*origin, step, microbatch)).encode(), digest_size=8).digest()
            for _, _, origin in self.states
        ]
        return np.frombuffer(b"".join(rows), np.uint32).reshape(-1, 2)

    def mapping(self, item: Item, values: tf.Tensor) -> list[tuple[keras.Variable, tf.Tensor]]:
        """The item's Keras states with their values, as `keras.StatelessScope` takes them."""
        return [
            (variable, values[row])
            for row, (other, variable, _) in enumerate(self.states)
            if other is item and variable is not None
        ]

    @contextmanager
    def keras_state_kept(self) -> Iterator[None]:
        """Puts the state of `keras.random` calls outside the pipeline back afterwards."""
        shared = tensorflow_internals.global_seed_state()
        before = tf.identity(shared.value)
        try:
            yield
        finally:
            shared.assign(before)

    @contextmanager
    def tensorflow_ops(self, item: Item, values: tf.Tensor) -> Iterator[None]:
        """Has TensorFlow's random ops inside draw what the item's row says."""
        row = next(n for n, (o, v, _) in enumerate(self.states) if o is item and v is None)
        with tensorflow_internals.random_ops_from(Draws(values[row]).next):
            yield

    def python_seeds(self, values: np.ndarray) -> dict[int, int]:
        """Seeds for Python's random numbers: item's index → seed."""
        return {
            item.index: derived_seed("python", *map(int, values[row]))
            for row, (item, variable, _) in enumerate(self.states)
            if variable is None
        }


_INSIDE = 1 << 40  # added to seeds of what is counted by a variable for a graph


class _Counters(threading.local):
    """The variable that counts in this thread, where one was needed. Functions may capture it."""

    variable: tf.Variable | None = None


_counters = _Counters()


class Draws:
    """Seeds for TensorFlow's random ops in one item, one after the other.

    In the graph that a stage is traced into, the number of the op makes the difference. Elsewhere,
    eagerly or in a graph inside (the body of a loop, which draws in every turn), a variable counts.

    Args:
        row: the item's.
    """

    def __init__(self, row: tf.Tensor) -> None:
        self._row = tf.cast(row, tf.int64)
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._count = 0
        if _counters.variable is not None:
            _counters.variable.assign(self._row)

    def next(self, own: int) -> tf.Tensor:
        """The next seed: int64 of the shape [2].

        Args:
            own: the seed that the op was given by the user, else 0.
        """
        if not tf.executing_eagerly() and self._graph is tf.compat.v1.get_default_graph():
            self._count += 1
            return self._row + tf.constant([self._count, own], tf.int64)
        counted = self._counter().assign_add(tf.constant([1, 0], tf.int64))
        # Inside a graph, both ways of counting are in use.
        apart = 0 if self._graph is None else _INSIDE
        return tf.convert_to_tensor(counted) + tf.constant([0, own + apart], tf.int64)

    def _counter(self) -> tf.Variable:
        if _counters.variable is None:
            with tf.init_scope():
                _counters.variable = tf.Variable(tf.zeros([2], tf.int64), trainable=False)
            with tf.init_scope() if self._graph is None else self._graph.as_default():
                _counters.variable.assign(self._row)
        return _counters.variable
