"""What a value looks like to a user, as plain data that two runs can be compared by.

`snapshot` takes a value apart into leaves, each with a path such as `[0].losses[3]`. Python state
is copied and variables are read at once. Tensors are only kept: `resolve` reads them later, since
reading a tensor makes Python wait for the graph, and a harness that waits after each step would
never see a program run ahead.
"""

import dataclasses
import re
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

# What the eager runtime writes around a kernel's own message.
_MESSAGE_FRAME = re.compile(r"^\{\{function_node [^}]*\}\} ?|\s*\[Op:\w+\].*$", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One comparable value.

    Attributes:
        kind: What it is: Python type, or class, dtype, shape and device of a tensor.
        data: The value: bytes of an array, or text.
        text: The value for a person to read.
        array: The array itself, for a comparison with a tolerance.
    """

    kind: str
    data: bytes | str
    text: str
    array: np.ndarray | None = None


Snapshot = dict[str, "Leaf | tf.Tensor"]


def snapshot(value: Any) -> Snapshot:
    """Takes `value` apart without reading a tensor."""
    return dict(_leaves(value, "", ()))


def resolve(taken: Snapshot) -> dict[str, Leaf]:
    """Reads the tensors of a snapshot."""
    return {
        path: _tensor_leaf(leaf) if isinstance(leaf, tf.Tensor) else leaf
        for path, leaf in taken.items()
    }


def differences(
    expected: dict[str, Leaf], actual: dict[str, Leaf], tolerance: float = 0.0
) -> list[str]:
    """Says, a line each, in which leaves two resolved snapshots differ."""
    lines = []
    for path in [*expected, *(path for path in actual if path not in expected)]:
        name = path or "the value"
        if path not in actual:
            lines.append(f"{name}: missing; expected {expected[path].text}")
        elif path not in expected:
            lines.append(f"{name}: unexpected; got {actual[path].text}")
        else:
            lines.extend(
                f"{name}: {line}" for line in _differ(expected[path], actual[path], tolerance)
            )
    return lines


def _differ(expected: Leaf, actual: Leaf, tolerance: float) -> Iterator[str]:
    if expected.kind != actual.kind:
        yield f"expected {expected.kind}, got {actual.kind}"
    elif expected.kind.startswith("op error "):
        # A kernel's message may come with more words around it, never with fewer.
        if _MESSAGE_FRAME.sub("", expected.data) not in actual.data:
            yield f"expected the message {expected.text!r}, got {actual.text!r}"
    elif expected.data != actual.data and not _close(expected, actual, tolerance):
        yield f"expected {expected.text}, got {actual.text}{_distance(expected, actual)}"


def _close(expected: Leaf, actual: Leaf, tolerance: float) -> bool:
    if not tolerance or expected.array is None or expected.array.dtype.kind != "f":
        return False
    return np.allclose(actual.array, expected.array, rtol=tolerance, atol=tolerance, equal_nan=True)


def _distance(expected: Leaf, actual: Leaf) -> str:
    if expected.array is None or expected.array.dtype.kind not in "fiu" or not expected.array.size:
        return ""
    gap = np.abs(expected.array.astype(np.float64) - actual.array.astype(np.float64))
    changed = int(np.count_nonzero(gap != 0))
    return f" ({changed} of {gap.size} differ, by up to {np.max(gap):.3g})"


def _leaves(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yields (path, leaf or unread tensor); `above` has the ids of the objects that hold it."""
    if id(value) in above:
        yield path, Leaf("cycle", str(above.index(id(value))), "a cycle")
        return
    above = (*above, id(value))
    if isinstance(value, tf.Tensor):
        yield path, value
    elif isinstance(value, (np.ndarray, np.generic)):
        yield path, _array_leaf(type(value).__name__, np.array(value))
    elif _is_variable(value):
        yield path, _array_leaf(f"{type(value).__name__} {value.name}", np.array(value.numpy()))
    elif isinstance(value, (Mapping, list, tuple, deque, set, frozenset)):
        yield from _container_leaves(value, path, above)
    elif isinstance(value, BaseException):
        kind = "op error" if isinstance(value, tf.errors.OpError) else "exception"
        yield path, Leaf(f"{kind} {type(value).__name__}", str(value), str(value))
    elif isinstance(value, _PLAIN):
        yield path, Leaf(type(value).__name__, repr(value), repr(value))
    elif isinstance(value, (type, types.FunctionType, types.MethodType)):
        yield path, Leaf(type(value).__name__, value.__qualname__, value.__qualname__)
    else:
        yield from _object_leaves(value, path, above)


_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice),
    *(tf.TensorShape, tf.DType, np.dtype),
)


def _container_leaves(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    name = type(value).__name__
    if isinstance(value, Mapping):
        # The order of keys is a part of the value: a program can see it.
        yield path, Leaf(name, repr(list(value)), f"{name} with the keys {list(value)}")
        items = ((f"[{key!r}]", item) for key, item in value.items())
    else:
        if isinstance(value, (set, frozenset)):
            value = sorted(value, key=repr)
        yield path, Leaf(name, str(len(value)), f"{name} of {len(value)}")
        items = ((f"[{index}]", item) for index, item in enumerate(value))
    for suffix, item in list(items):
        yield from _leaves(item, path + suffix, above)


def _object_leaves(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    name = type(value).__name__
    yield path, Leaf("object", name, f"an object of class {name}")
    if tf.is_tensor(value):
        parts = dict(enumerate(tf.nest.flatten(value, expand_composites=True)))
    elif _is_keras_object(value):
        variables = value.variables
        parts = {"variables": list(variables() if callable(variables) else variables)}
    elif isinstance(value, tf.Module) or type(value).__module__.startswith(f"{__package__}."):
        parts = {key: part for key, part in vars(value).items() if not key.startswith("_")}
    else:
        raise TypeError(f"cannot compare {name} objects: yield the parts of it that matter")
    for key, part in parts.items():
        yield from _leaves(part, f"{path}.{key}", above)


def _is_variable(value: Any) -> bool:
    """True for TensorFlow's variables and Keras 3's, which are no subclass of them."""
    return hasattr(value, "assign") and hasattr(value, "numpy")


def _is_keras_object(value: Any) -> bool:
    """True for layers, models, metrics, optimizers and seed generators of both generations."""
    if isinstance(value, tf.Module) and not hasattr(value, "add_weight"):
        return False
    return hasattr(value, "variables") or type(value).__name__ == "Generator"


def _tensor_leaf(tensor: tf.Tensor) -> Leaf:
    kind = f"{type(tensor).__name__} on {tensor.device}"
    if tensor.dtype in (tf.variant, tf.resource):
        return Leaf(f"{kind} {tensor.dtype.name}{list(tensor.shape)}", "", "an opaque tensor")
    array = np.array(tensor.numpy())
    if tuple(tensor.shape) != array.shape or np.dtype(tensor.dtype.as_numpy_dtype) != array.dtype:
        kind += f" that says {tensor.dtype.name}{list(tensor.shape)} and holds"
    return _array_leaf(kind, array)


def _array_leaf(name: str, array: np.ndarray) -> Leaf:
    data = repr(array.tolist()) if array.dtype == object else array.tobytes()
    text = np.array2string(array, threshold=12, precision=9, separator=", ").replace("\n", "")
    return Leaf(f"{name} {array.dtype}{list(array.shape)}", data, text, array)
