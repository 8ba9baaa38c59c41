"""What a stage computes: its items one after the other.

For a graph the body is a function without side effects: weights are read once and state, such as
BatchNorm's moving averages, comes back as new values instead of being assigned, so that whoever
traces the body decides what happens to them; for layers of Keras 3, `keras.StatelessScope` does
that. Other variables (`tf.Module`, `tf_keras`) are read and assigned as their owners do.

Where Python runs in every micro-batch, all variables are read and assigned by their owners, as in
any eager program.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from pipeline import tensorflow_internals
from pipeline.errors import ModelError
from pipeline.runtime.model import Item, Key, Model, raw
from pipeline.runtime.random_numbers import RandomStates, python_random
from pipeline.runtime.structure import Spec, flatten_with_masks


@dataclass
class BodyResult:
    """What one run of a body made.

    Attributes:
        outputs: the flat outputs; on the last stage with a loss, the predictions.
        loss: the mean loss of the samples, on the last stage; else None.
        layer_losses: the sum of what layers add (regularizers, `add_loss`), or None.
        updates: variables of Keras 3 that are to change, with their new values.
    """

    outputs: list[tf.Tensor]
    loss: tf.Tensor | None = None
    layer_losses: tf.Tensor | None = None
    updates: list[tuple[keras.Variable, tf.Tensor]] = field(default_factory=list)


class StageBody:
    """A run of consecutive items, at the end of the model with the loss.

    Args:
        model: the whole model.
        items: the stage's.
        spec: of its input.
        loss: called as `loss(y_true, y_pred)` after the last item, or None for other stages.
    """

    def __init__(
        self,
        model: Model,
        items: Sequence[Item],
        spec: Spec,
        loss: Callable[..., Any] | None,
    ) -> None:
        self.items = list(items)
        self.spec = spec
        self.loss = loss
        self.weights = model.variables_of(items, trainable=True)
        self.states = model.variables_of(items, trainable=False)
        self.random = RandomStates(items, model.seed)
        keys = model.keys()
        self._keys: dict[int, Key] = {id(w): keys[id(w)] for w in self.weights}

    def read_weights(self) -> list[tf.Tensor | tf.Variable]:
        """For each of `weights`, what to differentiate by: the value once read, or the variable."""
        return [
            tf.convert_to_tensor(raw(weight)) if isinstance(weight, keras.Variable) else weight
            for weight in self.weights
        ]

    def run(
        self,
        inputs: Sequence[tf.Tensor],
        weights: Sequence[Any],
        seeds: tf.Tensor,
        training: bool,
        targets: Any = None,
        sample_weight: tf.Tensor | None = None,
    ) -> BodyResult:
        """Computes the stage's outputs, assigning nothing of Keras 3.

        Args:
            inputs: the flat inputs.
            weights: of `read_weights`.
            seeds: of `random.values`.
            training: as in Keras.
            targets: y of the micro-batch, on the last stage; None computes no loss.
            sample_weight: handed to the loss.
        """
        values = {
            id(variable): value
            for variable, value in zip(self.weights, weights, strict=True)
            if isinstance(variable, keras.Variable)
        }
        keras_states = [state for state in self.states if isinstance(state, keras.Variable)]
        values.update((id(state), tf.convert_to_tensor(raw(state))) for state in keras_states)
        begin = dict(values)

        flowing: Any = self.spec.pack(list(inputs))
        added: list[tf.Tensor] = []
        for item in self.items:
            flowing, losses = self._call(item, flowing, values, seeds, training)
            added += losses
        result = self._result(flowing, added, targets, sample_weight)
        result.updates = [
            (state, values[id(state)])
            for state in keras_states
            if values[id(state)] is not begin[id(state)]
        ]
        return result

    def run_in_place(
        self,
        inputs: Sequence[tf.Tensor],
        seeds: tf.Tensor,
        python_seeds: Mapping[int, int],
        training: bool,
        targets: Any = None,
        sample_weight: tf.Tensor | None = None,
    ) -> BodyResult:
        """Computes the stage's outputs as an eager program; see `run`.

        Args:
            inputs: the flat inputs.
            seeds: of `random.values`.
            python_seeds: of `random.python_seeds`.
            training: as in Keras.
            targets: y of the micro-batch, on the last stage; None computes no loss.
            sample_weight: handed to the loss.
        """
        flowing: Any = self.spec.pack(list(inputs))
        added: list[tf.Tensor] = []
        with self.random.keras_state_kept():
            for item in self.items:
                for layer in item.parts:
                    if isinstance(layer, keras.Layer):
                        tensorflow_internals.clear_added_losses(layer)
                for state, value in self.random.mapping(item, seeds):
                    state.assign(value)
                with (
                    self.random.tensorflow_ops(item, seeds),
                    python_random(python_seeds[item.index]),
                    tensorflow_internals.inner_functions("copy"),
                ):
                    flowing = item.call(flowing, training)
                for layer in item.parts:
                    if isinstance(layer, keras.Layer):
                        added += tensorflow_internals.added_losses(layer)
                added += self._other_losses(item, {})
        return self._result(flowing, added, targets, sample_weight)

    def _result(
        self,
        flowing: Any,
        added: list[tf.Tensor],
        targets: Any,
        sample_weight: tf.Tensor | None,
    ) -> BodyResult:
        loss = layer_losses = None
        if self.loss is not None and targets is not None:
            loss = self._loss(targets, flowing, sample_weight)
        if added:
            dtype = loss.dtype if loss is not None else added[0].dtype
            layer_losses = tf.add_n([tf.cast(value, dtype) for value in added])
        return BodyResult(flatten_with_masks(flowing), loss, layer_losses)

    def _call(
        self,
        item: Item,
        inputs: Any,
        values: dict[int, tf.Tensor],
        seeds: tf.Tensor,
        training: bool,
    ) -> tuple[Any, list[tf.Tensor]]:
        """One item's output and the losses it adds; `values` is brought up to date."""
        variables = [
            variable
            for variable in item.variables(True) + item.variables(False)
            if isinstance(variable, keras.Variable)
        ]
        mapping = [(variable, values[id(variable)]) for variable in variables]
        mapping += self.random.mapping(item, seeds)
        with (
            keras.StatelessScope(mapping, collect_losses=True) as scope,
            self.random.tensorflow_ops(item, seeds),
            tensorflow_internals.inner_functions("inline"),
        ):
            outputs = item.call(inputs, training)
        for variable in variables:
            if not variable.trainable:
                values[id(variable)] = scope.get_current_value(variable)
        return outputs, [*scope.losses, *self._other_losses(item, values)]

    def _other_losses(self, item: Item, values: Mapping[int, Any]) -> list[tf.Tensor]:
        """What regularizers add, and layers that are not of Keras 3.

        Args:
            item: whose weights they are.
            values: of weights, by `id`, where they are not to be read.
        """
        losses: list[tf.Tensor] = []
        for variable in item.variables(True):
            # Where a weight is shared, its first holder alone adds its penalty.
            at_home = self._keys[id(variable)][0] == item.index
            regularizer = getattr(variable, "regularizer", None)
            if isinstance(variable, keras.Variable) and at_home and regularizer is not None:
                losses.append(regularizer(values.get(id(variable), variable)))
        for part in item.parts:
            if not isinstance(part, keras.Layer):
                losses += list(getattr(part, "losses", ()))
        return losses

    def _loss(self, targets: Any, predictions: Any, sample_weight: tf.Tensor | None) -> tf.Tensor:
        if sample_weight is None:
            loss = self.loss(targets, predictions)
        else:
            if not _takes_sample_weight(self.loss):
                raise ModelError(
                    "sample weights were given, but the loss does not take `sample_weight`; use a "
                    "keras.losses.Loss, or a function loss(y_true, y_pred, sample_weight)"
                )
            loss = self.loss(targets, predictions, sample_weight=sample_weight)
        loss = tf.convert_to_tensor(loss)
        if loss.shape.rank != 0:
            raise ModelError(
                f"the loss has the shape {loss.shape}; it has to be the mean over the samples"
            )
        return loss


def _takes_sample_weight(loss: Callable[..., Any]) -> bool:
    if isinstance(loss, keras.losses.Loss):
        return True
    try:
        parameters = inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return True
    return "sample_weight" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
