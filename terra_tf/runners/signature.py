"""What is known of an iteration before it runs: how its step was called.

The key only picks which op sequence to expect. It holds shapes and dtypes of tensors and arrays and
the values of flags, but not numbers, which differ from call to call without changing the sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import numpy as np
import tensorflow as tf

from terra_tf.tensorflow_internals import EagerTensor, dtype_and_shape

_DEEPEST = 16
_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)


Key = tuple[Hashable, ...]  # from fine to coarse


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Key, list[Any]]:
    """The key of a call, and the tensors among its arguments.

    The key has three parts, the later ones for when the earlier ones have not been seen before: all
    that is known; dtypes and shapes of the tensors alone; their dtypes and ranks.
    """
    tensors: list[Any] = []
    key = tuple([_key(value, tensors) for value in args])
    if kwargs:
        key += tuple([(name, _key(value, tensors)) for name, value in kwargs.items()])
    shapes = tuple([dtype_and_shape(tensor) for tensor in tensors])
    ranks = tuple([(dtype, len(shape)) for dtype, shape in shapes])
    return (("all", key), ("shapes", shapes), ("ranks", ranks)), tensors


def _key(value: Any, tensors: list[Any], depth: int = 0) -> Hashable:
    kind = type(value)
    if depth > _DEEPEST:  # a list may even hold itself
        return kind
    depth += 1
    if kind is EagerTensor:
        tensors.append(value)
        return dtype_and_shape(value)
    if kind is tuple or kind is list:
        return tuple([_key(item, tensors, depth) for item in value])
    if kind is dict:
        return tuple([(name, _key(item, tensors, depth)) for name, item in value.items()])
    if kind is np.ndarray:
        return (value.dtype.str, value.shape)
    if kind is bool or value is None or kind is str:
        return value
    if isinstance(value, _COMPOSITE):
        parts = tf.nest.flatten(value, expand_composites=True)
        return (kind, tuple([_key(part, tensors) for part in parts]))
    return (kind, id(value)) if _has_variables(kind) else kind


@functools.lru_cache(maxsize=1024)
def _has_variables(kind: type) -> bool:
    """Whether another object of the type means other variables (a model, an optimizer)."""
    return issubclass(kind, (tf.Variable, tf.Module)) or hasattr(kind, "variables")
