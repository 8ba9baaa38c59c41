"""Lists what a library call depends on besides its arguments: the State of what it can reach.

From the callee and the objects among the arguments, attributes and containers are followed. What
is found is written into a native State (`native/state.h`), which later says within microseconds
whether all of it is as it was. Tensors and functions are compared by identity, plain values by
value, containers by their contents.
"""

from __future__ import annotations

import collections
import functools
import threading
import types
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from terra_tf import native, tensorflow_internals
from terra_tf.tensorflow_internals import EagerTensor

_MOST_OBJECTS = 20_000
_MOST_ARRAY_BYTES = 4096
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range)
_CONTAINERS = (list, tuple, dict, set)
_OPAQUE = (
    EagerTensor,
    np.generic,
    np.dtype,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.GetSetDescriptorType,
    property,
    weakref.ref,
)


class TooMuch(Exception):
    """What the call can reach is too much to be watched, or cannot be watched at all."""


class StateBuilder:
    """Fills a State from some roots."""

    def __init__(self) -> None:
        self.state = native.core.State()
        self.places: list[Any] = []  # per entry: what it is of, for messages
        self._classes: set[type] = set()
        self._containers: dict[int, int] = {}  # id -> entry
        self._parents: list[tuple[int, dict[Any, Any]]] = []  # entry, what it holds
        self._listed: set[int] = set()  # ids of items of lists and tuples
        self._seen: set[int] = set()
        self._held: list[Any] = []  # keeps `_seen` true while it is filled
        self._alone: set[int] = set()  # ids of objects that no entry keeps alive
        self._queue: list[Any] = []

    def add(self, roots: Iterable[Any]) -> None:
        """Adds everything that can be reached from `roots`.

        Raises:
          TooMuch: it cannot be watched.
        """
        for root in roots:
            self._alone.add(id(root))
            self._queue.append(root)
        while self._queue:
            self._visit(self._queue.pop())
        self._compare_containers_by_contents()

    def _visit(self, x: Any) -> None:
        kind = type(x)
        # The class itself is asked, since a proxy claims to be of the class that it wraps.
        if kind in _PLAIN or issubclass(kind, _OPAQUE) or id(x) in self._seen:
            return
        if tensorflow_internals.is_immutable(kind):
            return
        if len(self._seen) > _MOST_OBJECTS:
            raise TooMuch("more objects than can be watched")
        self._seen.add(id(x))
        self._held.append(x)
        if kind is types.FunctionType:
            self._visit_function(x)
        elif kind is types.MethodType:
            self._follow(x.__self__, x.__func__)
        elif kind is functools.partial:
            self._follow(x.func, x.args, x.keywords)
        elif issubclass(kind, tuple):
            if not all(type(item) in _PLAIN for item in x):
                self._visit_sequence(x)
        elif issubclass(kind, dict):
            if not all(map(_is_plain, x)):
                raise TooMuch("a dictionary whose keys are objects")
            self._parents.append((self._entry(self.state.add_dict(x), x), x))
            self._queue += x.values()
        elif issubclass(kind, list):
            self._visit_sequence(x)
            if not tensorflow_internals.has_no_more_than_items(kind):
                self._attributes(x)
        elif issubclass(kind, (set, frozenset)):
            self._entry(self.state.add_set(x), x)
        elif issubclass(kind, np.ndarray):
            if x.nbytes > _MOST_ARRAY_BYTES:
                raise TooMuch("a NumPy array of more than a few values")
            self._entry(self.state.add_array(x), x)
        elif issubclass(kind, threading.local):
            self._visit_local(x)
        else:
            self._visit_object(x)

    def _entry(self, number: int, of: Any) -> int:
        self.places.append(of)
        if type(of) in _CONTAINERS:
            self._containers[id(of)] = number
        return number

    def _compare_containers_by_contents(self) -> None:
        """Lets a container take the place of another one with the same contents.

        Not of one that several things share: these have to go on sharing it.
        """
        holders = collections.Counter(
            id(value) for _, named in self._parents for value in named.values()
        )
        for number, named in self._parents:
            for name, value in named.items():
                child = self._containers.get(id(value))
                shared = holders[id(value)] > 1 or id(value) in self._listed
                if child is not None and not shared:
                    self.state.set_transient(number, name, child)

    def _visit_sequence(self, x: Any) -> None:
        number = self._entry(self.state.add_sequence(x), x)
        self._listed.update(map(id, x))
        for position, item in enumerate(x):
            child = None
            if tensorflow_internals.is_made_anew(item):
                child = self._attributes(item, transient=True)
            if child is None:
                self._queue.append(item)
            else:
                self.state.set_transient_item(number, position, child)

    def _follow(self, *values: Any) -> None:
        """Follows what no entry holds: a closure, a slot, what a proxy wraps."""
        for value in values:
            try:
                weakref.ref(value)
            except TypeError:
                self.state.keep(value)
            self._alone.add(id(value))
            self._queue.append(value)

    def _visit_function(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            try:
                self._follow(cell.cell_contents)
            except ValueError:  # not filled yet
                continue

    def _visit_local(self, local: threading.local) -> None:
        self.state.keep(local)  # a module may let go of it
        number = self._entry(self.state.add_local(local), local)
        self._parents.append((number, vars(local)))
        for name, value in vars(local).items():
            if tensorflow_internals.only_names_things(name):
                self.state.ignore(number, name)
            else:
                self._child(number, name, value)

    def _visit_object(self, x: Any) -> None:
        wrapped = getattr(x, "__wrapped__", None)  # a proxy around a container
        if isinstance(wrapped, (dict, list, tuple)):
            self._follow(wrapped)
        self._attributes(x)
        for name in _slots(type(x)):
            value = getattr(x, name, None)
            if not isinstance(value, types.MemberDescriptorType):
                self._follow(value)

    def _attributes(self, x: Any, transient: bool = False) -> int | None:
        try:
            attributes = vars(x)
        except TypeError:
            return None
        held = id(x) not in self._alone
        number = self._entry(self.state.add_object(x, transient, held), x)
        self._parents.append((number, attributes))
        if type(x) not in self._classes:
            self._classes.add(type(x))
            self._entry(self.state.add_class(type(x)), type(x))
        for name, value in attributes.items():
            if transient and name in tensorflow_internals.LAYERS_OF_CALLS:
                self._layer_of_call(value)
                continue
            if not tensorflow_internals.is_bookkeeping(x, name):
                self._child(number, name, value)
            elif isinstance(name, str):
                self.state.ignore(number, name)
        return number

    def _child(self, parent: int, name: str, value: Any) -> None:
        """Follows an attribute; one that is made anew all the time is compared by its contents."""
        kept = tensorflow_internals.call_context_keys(value)
        if kept is None:
            self._queue.append(value)
            return
        if isinstance(value, dict):
            child = self._entry(self.state.add_dict(value), value)
            self._parents.append((child, value))
            for key in value:
                if key not in kept:
                    self.state.ignore(child, key)
            for key in set(kept).intersection(value):
                if key in tensorflow_internals.LAYERS_OF_CALLS:
                    self._layer_of_call(value[key])
                else:
                    self._queue.append(value[key])
        else:
            child = self._attributes(value, transient=True)
        if child is not None:
            self.state.set_transient(parent, name, child)

    def _layer_of_call(self, layer: Any) -> None:
        """Which one it is matters to calls inside of its own, and little of how it is."""
        if layer is None:
            return
        number = self._entry(self.state.add_object(layer, False, False), layer)
        for name in vars(layer):
            if name != tensorflow_internals.ASKED_OF_LAYERS_OF_CALLS:
                self.state.ignore(number, name)

    def reaches(self, x: Any) -> bool:
        """Whether an object is among what was found."""
        return id(x) in self._seen

    def variable_with(self, handle: Any) -> Any:
        """The variable with a handle, if it was found; else None."""
        for x in self._held:
            if isinstance(x, tf.Variable) and x.handle is handle:
                return x
        return None

    def difference(self) -> str:
        """Says what differed when the State was asked last whether it holds."""
        number, key = self.state.difference()
        if number < 0:
            return "nothing"
        owner = type(self.places[number]).__name__
        return f"{owner}.{key}" if isinstance(key, str) else f"the contents of a {owner}"


def _is_plain(x: Any) -> bool:
    """Whether a value holds no objects: a State may keep it."""
    return all(map(_is_plain, x)) if type(x) is tuple else type(x) in _PLAIN


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
