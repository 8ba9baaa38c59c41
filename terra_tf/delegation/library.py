"""Puts stand-ins in the place of library functions whose calls may be delegated.

A library's functions are replaced on its classes once it has been imported, so that a program that
never uses `tf_keras` does not pay for it. TensorFlow's own functions around ops stay what they are
and call a stand-in.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import tensorflow as tf

from terra_tf import native, tensorflow_internals
from terra_tf.delegation.learning import LibraryFunction, learn
from terra_tf.delegation.state import StateBuilder

_LIBRARIES = ("keras", "tf_keras")
_done: set[str] = set()


def stand_in_for_libraries() -> None:
    """Stands in for the functions of all libraries that have been imported by now."""
    if not _done:
        _done.add("tensorflow")
        tensorflow_internals.install_tape_hooks(native.core.TapeHook)
        gradient = LibraryFunction(
            "tf.GradientTape.gradient", True, tensorflow_internals.gradient_ends
        )
        _replace(tf.GradientTape, "gradient", gradient, tensorflow_internals.gradient_begins)
        for module in tensorflow_internals.modules_of_ops():
            native.core.watch_module(module)
        for _, cell in tensorflow_internals.op_functions():
            cell.cell_contents = _op_function(cell.cell_contents)
        for name in tensorflow_internals.VARIABLE_FUNCTIONS:
            kind = tensorflow_internals.PlainVariable
            setattr(kind, name, _op_function(vars(kind)[name]))
    for library in _LIBRARIES:
        if library in sys.modules and library not in _done:
            _done.add(library)
            for kind, name, listed in tensorflow_internals.library_functions(library):
                function = LibraryFunction(f"{library}.{kind.__name__}.{name}")
                _replace(kind, name, function, None, listed)


def _replace(
    kind: type, name: str, function: LibraryFunction, before: Any = None, listed: int = -1
) -> None:
    original = vars(kind)[name]
    hook = native.core.LibraryCall(
        original, functools.partial(learn, function, original), before, listed
    )
    setattr(kind, name, hook)


def _op_function(original: Any) -> Any:
    return native.core.OpFunction(original, _thread_state, tensorflow_internals.unread)


def _thread_state() -> Any:
    """The State of the thread's eager execution; None where each op runs somebody's Python."""
    names = tensorflow_internals.ENTRY_POINTS
    entry_points = map(tensorflow_internals.entry_point, names)
    if not all(isinstance(entry, native.core.Hook) for entry in entry_points):
        return None
    builder = StateBuilder()
    builder.add(tensorflow_internals.thread_state())
    return builder.state
