"""What an optimizer keeps beside the weights, found by weight and by name."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline import tensorflow_internals
from pipeline.runtime.model import raw

_None = type(None)


class Counter:
    """A number that an optimizer counts in Python, to be read and assigned as a variable is.

    Nadam of tf_keras has one.

    Args:
        optimizer: whose it is.
        name: of the attribute.
    """

    shape = tf.TensorShape([])
    dtype = tf.int64

    def __init__(self, optimizer: Any, name: str) -> None:
        self._optimizer, self._name = optimizer, name

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(getattr(self._optimizer, self._name), dtype or np.int64)

    def assign(self, value: Any) -> None:
        """Has the optimizer count on from another number."""
        setattr(self._optimizer, self._name, int(value))


class OptimizerSlots:
    """What an optimizer keeps, by weight and by name.

    A slot is an attribute of the optimizer that lists a variable for each weight (`_momentums`), or
    None where a weight has none, in the order in which it was built; the others (`iterations`, the
    loss scale) are shared, and so is what an optimizer counts in Python.

    Args:
        optimizer: of Keras 3 or tf_keras, built.
        weights: what it was built for, in order.
    """

    def __init__(self, optimizer: Any, weights: list[Any]) -> None:
        self._number = {id(weight): number for number, weight in enumerate(weights)}
        # Name → for each weight the slot, or None.
        self._slots: dict[str, list[Any]] = {}
        self._shared: dict[str, Any] = {}
        if hasattr(optimizer, "get_slot_names"):  # of tf_keras.optimizers.legacy
            if weights:
                self._find_legacy(optimizer, weights)
            return
        inner = getattr(optimizer, "inner_optimizer", None)
        for prefix, part in (("", optimizer), ("inner_", inner)):
            if part is not None and weights:
                self._find(part, prefix, len(weights))

    def _find(self, optimizer: Any, prefix: str, count: int) -> None:
        self._find_shared(optimizer, prefix)
        for name, value in sorted(vars(optimizer).items()):
            if name.startswith("_trainable_variables") or name == "_variables":
                continue
            if (
                isinstance(value, (list, tuple))
                and len(value) == count
                and any(part is not None for part in value)
                and all(isinstance(part, (keras.Variable, tf.Variable, _None)) for part in value)
            ):
                self._slots[f"{prefix}{name.lstrip('_')}"] = list(value)

    def _find_legacy(self, optimizer: Any, weights: list[Any]) -> None:
        for name in optimizer.get_slot_names():
            self._slots[name] = [optimizer.get_slot(raw(weight), name) for weight in weights]
        self._find_shared(optimizer, "")
        for name, value in tensorflow_internals.legacy_settings(optimizer).items():
            if isinstance(value, tf.Variable):  # not a schedule
                self._shared[f"setting_{name}"] = value

    def _find_shared(self, optimizer: Any, prefix: str) -> None:
        settings = optimizer.get_config()
        for name, value in sorted(vars(optimizer).items()):
            plain = name.lstrip("_")
            # TensorFlow's own marks on what it tracks begin with `_self_`.
            counts = type(value) is int and plain not in settings and not name.startswith("_self_")
            if isinstance(value, (keras.Variable, tf.Variable)):
                self._shared[f"{prefix}{plain}"] = value
            elif counts:
                self._shared[f"{prefix}{plain}"] = Counter(optimizer, name)

    def of_weight(self, weight: Any) -> dict[str, Any]:
        """A weight's slots by name; none if it is not trained."""
        number = self._number.get(id(weight))
        if number is None:
            return {}
        return {
            name: variables[number]
            for name, variables in sorted(self._slots.items())
            if variables[number] is not None
        }

    def shared(self) -> dict[str, Any]:
        """What is kept for all weights."""
        return dict(self._shared)
