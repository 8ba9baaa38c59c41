"""The only module that touches TensorFlow's and Keras's private API.

Everything else of `pipeline` uses public names or the functions below. Each states which private
name it needs; `tests/pipeline/test_tensorflow_internals.py` has a test for each, so that a new
release shows at once which one it broke.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.random import seed_generator
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python.eager import context


def sublayers(layer: Any) -> list[Any]:
    """A Keras layer and all layers in it, from the outside in (`Layer._flatten_layers`)."""
    return list(layer._flatten_layers())


def seed_generators(layer: Any) -> list[keras.random.SeedGenerator]:
    """The sources of random numbers of a Keras 3 layer itself (`Layer._seed_generators`)."""
    return list(layer._seed_generators)


def global_seed_state() -> keras.Variable:
    """The state of Keras's source of random numbers for calls without a seed of their own."""
    return seed_generator.global_seed_generator().state


def own_seed(generator: keras.random.SeedGenerator) -> int | None:
    """The seed that the user gave to a generator, or None (`SeedGenerator._initial_seed`)."""
    return generator._initial_seed


def initializer_seed(initializer: Any) -> Any:
    """The seed that the user gave to an initializer, or None (`_init_seed`)."""
    return getattr(initializer, "_init_seed", None)


def keras_mask(tensor: Any) -> Any:
    """The mask that a Keras layer attached to its output, or None (`_keras_mask`)."""
    return getattr(tensor, "_keras_mask", None)


def set_keras_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask, as the layer that made it would have (`_keras_mask`)."""
    tensor._keras_mask = mask


def capture(tensor: Any) -> Any:
    """A tensor as one of the function that is being traced (`FuncGraph.capture`)."""
    return tf.compat.v1.get_default_graph().capture(tensor)


@functools.cache
def _exact_options() -> context.FunctionCallOptions:
    config = context.context().config
    config.allow_soft_placement = True
    rewrite = config.graph_options.rewrite_options
    off = rewriter_config_pb2.RewriterConfig.OFF
    rewrite.remapping = off
    rewrite.arithmetic_optimization = off
    rewrite.constant_folding = off
    return context.FunctionCallOptions(config_proto=config)


@contextmanager
def exact_graphs() -> Iterator[None]:
    """Compiled functions called inside compute each op as it stands (`function_call_options`).

    Otherwise Grappler fuses and reorders ops depending on what else a function returns, and the
    same forward pass would round differently where it is kept and where it is recomputed.
    """
    eager = context.context()
    before = eager.function_call_options
    eager.function_call_options = _exact_options()
    try:
        yield
    finally:
        eager.function_call_options = before


def nbytes(tensor: Any) -> int:
    """The size of an eager tensor's data, without a copy (`EagerTensor._num_elements`)."""
    return tensor._num_elements() * tensor.dtype.size


@contextmanager
def direct_updates(optimizer: Any) -> Iterator[None]:
    """Inside, an optimizer of Keras 3 updates variables itself (`_backend_update_step`).

    Otherwise it goes through `tf.distribute`, and then the graph that it is called in is never
    freed, and with it the memory of every variable that the graph uses.
    """
    parts = [
        part
        for part in (optimizer, getattr(optimizer, "inner_optimizer", None))
        if isinstance(part, keras.optimizers.Optimizer) and hasattr(part, "_backend_update_step")
    ]
    for part in parts:

        def update(
            gradients: Any, variables: Any, learning_rate: Any, update_step: Any = part.update_step
        ) -> None:
            for gradient, variable in zip(gradients, variables, strict=True):
                update_step(gradient, getattr(variable, "value", variable), learning_rate)

        vars(part)["_backend_update_step"] = update
    try:
        yield
    finally:
        for part in parts:
            del vars(part)["_backend_update_step"]


class _SharedVariable(keras.Variable):
    """A `keras.Variable` that is another view of a `tf.Variable` (`Variable._initialize`)."""

    def _initialize(self, value: Any) -> None:
        self._value = value


def as_keras_variable(variable: tf.Variable) -> keras.Variable:
    """A view of a `tf.Variable` for optimizers of Keras 3, which take no others."""
    name = variable.name.split(":")[0].replace("/", "_")
    return _SharedVariable(variable, dtype=variable.dtype.name, trainable=True, name=name)
