"""Describes the arguments and results of a library call.

A pattern says what an argument has to be like, a recipe how a result is made; both are tuples that
`native/bind_delegation.cc` reads. Tensors among the arguments are leaves, numbered in order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from terra_tf import tensorflow_internals
from terra_tf.delegation.state import StateBuilder
from terra_tf.tensorflow_internals import EagerTensor, dtype_and_shape

Pattern = tuple[Any, ...]
Recipe = tuple[Any, ...]
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_PARTS = {tf.IndexedSlices: ("_values", "_indices", "_dense_shape")}


class Undescribable(Exception):
    """A value of a kind that a delegated call cannot take or make."""


class Arguments:
    """What a call was made with.

    Attributes:
      leaves: the tensors.
      objects: everything else whose state may matter.
    """

    def __init__(self, walk: Any):
        self._walk = walk
        self.leaves: list[Any] = []
        self.objects: list[Any] = []

    def pattern(self, x: Any) -> Pattern:
        """The pattern of one argument.

        Raises:
          Undescribable: it cannot be compared.
        """
        kind = type(x)
        if kind is EagerTensor:
            return self._tensor(x)
        if kind in _PLAIN:
            return ("value", x)
        if isinstance(x, np.ndarray):
            raise Undescribable("a NumPy array among the arguments")
        if kind is list or isinstance(x, tuple):
            return ("sequence", kind, tuple(self.pattern(item) for item in x))
        if kind is dict:
            return ("mapping", self._named(x))
        if kind in _PARTS:
            parts = {name: getattr(x, name) for name in _PARTS[kind]}
            return ("instance", kind, self._named(parts))
        self.objects.append(x)
        return ("value", x)

    def _named(self, named: dict[Any, Any]) -> tuple[tuple[Any, Pattern], ...]:
        return tuple((name, self.pattern(value)) for name, value in named.items())

    def _tensor(self, x: Any) -> Pattern:
        leaf = len(self.leaves)
        self.leaves.append(x)
        attributes = self._named(vars(x))
        shape = self._walk.known_shape(x)
        dtype = x._datatype_enum()
        if shape is None:
            dtype, shape = dtype_and_shape(x)
        output = self._walk.own_output(x)
        feed = self._walk.feed_of(x)
        source = ("output", output) if output >= 0 else ("feed", feed) if feed >= 0 else ("any", -1)
        return ("tensor", leaf, *source, dtype, None if shape is False else shape, attributes)


class Results:
    """Makes recipes for what a call returned.

    Attributes:
      outputs: which outputs of the call's nodes are handed out.
    """

    def __init__(
        self,
        walk: Any,
        leaves: list[Any],
        own: frozenset[int],
        state: StateBuilder,
        made_by_python: Callable[[Any], bool],
    ):
        """Prepares recipes.

        Args:
          walk: the walk.
          leaves: the tensors among the call's arguments.
          own: outputs of the nodes that the call has run.
          state: what the call can reach.
          made_by_python: tells of a tensor whether the call has made it of Python values.
        """
        self._made_by_python = made_by_python
        self._state = state
        self._walk = walk
        self._leaves = {id(leaf): number for number, leaf in enumerate(leaves)}
        self._own = own
        self.outputs: set[int] = set()

    def recipe(self, x: Any) -> Recipe:
        """The recipe of a value.

        Args:
          x: the value.

        Raises:
          Undescribable: it cannot be made again.
        """
        kind = type(x)
        if kind is EagerTensor:
            return self._tensor(x)
        if kind is list or isinstance(x, tuple):
            return ("sequence", kind if kind in (list, tuple) else _maker(kind), self._all(x))
        if kind is dict:
            return ("mapping", tuple(x), self._all(x.values()))
        if kind in _PARTS:
            return ("make", kind, self._all(getattr(x, name) for name in _PARTS[kind]))
        if kind in _PLAIN or (self._state.reaches(x) and _is_weakly_referable(x)):
            return ("value", x)
        handle = tensorflow_internals.handle_of_lazy_read(x)
        variable = None if handle is None else self._state.variable_with(handle)
        if variable is None:
            raise Undescribable(f"a result of type {kind.__name__}")
        return ("make", tensorflow_internals.lazy_read, (("value", variable),))

    def _all(self, items: Any) -> tuple[Recipe, ...]:
        return tuple(self.recipe(item) for item in items)

    def _tensor(self, x: Any) -> Recipe:
        if id(x) in self._leaves:
            return ("leaf", self._leaves[id(x)])
        output = self._walk.own_output(x)
        if output < 0 and self._made_by_python(x):
            return ("value", x)
        if output < 0:
            raise Undescribable("a tensor that no op of the call has made")
        if output not in self._own:
            raise Undescribable("a tensor from before the call")
        self.outputs.add(output)
        attributes = tuple((name, self.recipe(value)) for name, value in vars(x).items())
        return ("output", output, attributes)


def _maker(kind: type) -> Any:
    make = getattr(kind, "_make", None)
    if make is None:
        raise Undescribable(f"a result of type {kind.__name__}")
    return lambda *items: make(items)


def _is_weakly_referable(x: Any) -> bool:
    try:
        weakref.ref(x)
    except TypeError:
        return False
    return not isinstance(x, np.ndarray)
