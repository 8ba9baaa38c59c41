"""What an optimizer keeps beside the weights, found by weight and by name."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from pipeline.runtime.model import raw


class OptimizerSlots:
    """What an optimizer keeps, by weight and by name.

    A slot is an attribute of the optimizer that lists one variable for each weight (`_momentums`),
    in the order in which it was built; the others (`iterations`, the loss scale) are shared.

    Args:
        optimizer: of Keras 3 or tf_keras, built.
        weights: what it was built for, in order.
    """

    def __init__(self, optimizer: Any, weights: list[Any]) -> None:
        self._number = {id(weight): number for number, weight in enumerate(weights)}
        self._slots: dict[str, list[Any]] = {}
        self._shared: dict[str, Any] = {}
        if hasattr(optimizer, "get_slot_names"):  # of tf_keras.optimizers.legacy
            for name in optimizer.get_slot_names() if weights else ():
                self._slots[name] = [optimizer.get_slot(raw(weight), name) for weight in weights]
            self._shared = {"iterations": optimizer.iterations} if weights else {}
            return
        inner = getattr(optimizer, "inner_optimizer", None)
        for prefix, part in (("", optimizer), ("inner_", inner)):
            if part is not None and weights:
                self._find(part, prefix, len(weights))

    def _find(self, optimizer: Any, prefix: str, count: int) -> None:
        for name, value in sorted(vars(optimizer).items()):
            if isinstance(value, (keras.Variable, tf.Variable)):
                self._shared[f"{prefix}{name.lstrip('_')}"] = value
            elif name.startswith("_trainable_variables") or name == "_variables":
                continue
            elif (
                isinstance(value, (list, tuple))
                and len(value) == count
                and all(isinstance(part, (keras.Variable, tf.Variable)) for part in value)
            ):
                self._slots[f"{prefix}{name.lstrip('_')}"] = list(value)

    def names(self) -> list[str]:
        """The names of the slots."""
        return sorted(self._slots)

    def of_weight(self, weight: Any) -> dict[str, Any]:
        """A weight's slots by name; none if it is not trained."""
        number = self._number.get(id(weight))
        if number is None:
            return {}
        return {name: variables[number] for name, variables in self._slots.items()}

    def shared(self) -> dict[str, Any]:
        """What is kept for all weights."""
        return dict(self._shared)
