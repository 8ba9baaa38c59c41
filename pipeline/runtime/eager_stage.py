"""A stage whose Python runs in every micro-batch, plainly or co-executed by `terra_tf`.

For models that cannot be compiled. What a gradient tape records is not a list of tensors that could
be sent elsewhere, so the stash is the input and the backward pass repeats the forward pass, always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from pipeline.errors import ModelError
from pipeline.runtime.body import BodyResult, StageBody
from pipeline.runtime.model import raw
from pipeline.runtime.stage import Forward, MicroBatch, Tensors


@dataclass
class _Replay:
    """What stays here between a forward pass and its backward pass.

    Attributes:
        data: the user's.
        num_inputs: how many of the stash's tensors are the inputs.
        fingerprint: of the outputs, to see whether the forward pass could be repeated.
    """

    data: MicroBatch
    num_inputs: int
    fingerprint: tf.Tensor


class EagerStage:
    """A stage that runs its body's Python; see `Stage` for the methods.

    Args:
        body: what it computes.
        accumulators: for each of the body's weights, the variable its gradients are added to.
        splits: leave the weights' gradients to `weight`.
        sends_back: compute the gradients of the inputs (not on the first stage).
        wrap: applied to both passes, for example `terra_tf.function`.
    """

    def __init__(
        self,
        body: StageBody,
        accumulators: Sequence[tf.Variable],
        splits: bool,
        sends_back: bool,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    ) -> None:
        self.body = body
        self.num_traces = 0
        self._accumulators = accumulators
        self._splits = splits
        self._sends_back = sends_back
        self._used: set[int] = set()
        self._run_forward = wrap(self._forward)
        self._run_backward = wrap(self._backward)

    def forward(self, inputs: Tensors, data: MicroBatch) -> Forward:
        """See `Stage`."""
        states = [tf.identity(raw(state)) for state in self.body.keras_states()]
        result = self._run_forward(inputs, data.seeds, data.targets, data.sample_weight)
        for variable, value in result.updates:
            variable.assign(value)
        stash = [*inputs, data.seeds, *states]
        plan = _Replay(data, len(inputs), _fingerprint(result))
        return Forward(result.outputs, result.loss, result.layer_losses, stash, plan)

    def backward(
        self, plan: _Replay, stash: Tensors, gradients: Tensors, scale: tf.Tensor
    ) -> tuple[Tensors, Tensors]:
        """See `Stage`."""
        inputs, seeds = stash[: plan.num_inputs], stash[plan.num_inputs]
        states = stash[plan.num_inputs + 1 :]
        data = plan.data
        # States that the items assign themselves have been assigned by the forward pass already.
        own = [state for state in self.body.states if isinstance(state, tf.Variable)]
        before = [tf.identity(state) for state in own]
        found, fingerprint = self._run_backward(
            inputs, seeds, states, data.targets, data.sample_weight, gradients, scale
        )
        for state, value in zip(own, before, strict=True):
            state.assign(value)
        self._check_repeated(plan.fingerprint, fingerprint)
        count = len(found) - len(self._accumulators)
        sources = [t for t in inputs if t.dtype.is_floating] if self._sends_back else []
        input_gradients = [
            tf.zeros_like(source) if gradient is None else gradient
            for source, gradient in zip(sources, found[:count], strict=True)
        ]
        if self._splits:
            return input_gradients, found[count:]
        self._accumulate(found[count:])
        return input_gradients, []

    def weight(self, plan: _Replay, passed_on: Tensors) -> None:
        """See `Stage`."""
        self._accumulate(passed_on)

    def infer(self, inputs: Tensors, data: MicroBatch) -> BodyResult:
        """See `Stage`."""
        reads = self.body.read_weights()
        return self.body.run(inputs, reads, data.seeds, False, data.targets, data.sample_weight)

    def used_weights(self) -> list[Any]:
        """See `Stage`."""
        return [w for number, w in enumerate(self.body.weights) if number in self._used]

    def _forward(
        self, inputs: Tensors, seeds: tf.Tensor, targets: Any, sample_weight: tf.Tensor | None
    ) -> BodyResult:
        reads = self.body.read_weights()
        return self.body.run(inputs, reads, seeds, True, targets, sample_weight)

    def _backward(
        self,
        inputs: Tensors,
        seeds: tf.Tensor,
        states: Tensors,
        targets: Any,
        sample_weight: tf.Tensor | None,
        gradients: Tensors,
        scale: tf.Tensor,
    ) -> tuple[list[tf.Tensor | None], tf.Tensor]:
        reads = self.body.read_weights()
        sources = [t for t in inputs if t.dtype.is_floating] if self._sends_back else []
        sources = [*sources, *reads]
        with tf.GradientTape() as tape:
            for source in sources:
                tape.watch(source)
            result = self.body.run(inputs, reads, seeds, True, targets, sample_weight, states)
        losses = [t for t in (result.loss, result.layer_losses) if t is not None]
        outputs = []
        if result.loss is None:
            outputs = [t for t in result.outputs if t.dtype.is_floating]
        weights = [tf.cast(scale, loss.dtype) for loss in losses]
        found = tape.gradient([*outputs, *losses], sources, [*gradients, *weights])
        found = [None if g is None else tf.convert_to_tensor(g) for g in found]
        return found, _fingerprint(result)

    def _check_repeated(self, first: tf.Tensor, second: tf.Tensor) -> None:
        tolerance = 1e-5 * (1.0 + tf.abs(first))
        if bool(tf.reduce_any(tf.abs(first - second) > tolerance)):
            names = ", ".join(item.name for item in self.body.items)
            raise ModelError(
                "the backward pass repeated the forward pass of a stage and got other outputs, "
                f"perhaps because one of its entries ({names}) draws random numbers that cannot be "
                "repeated: use keras.random or layers of Keras 3, or stage_mode='function'"
            )

    def _accumulate(self, gradients: Sequence[tf.Tensor | None]) -> None:
        pairs = zip(self._accumulators, gradients, strict=True)
        for number, (accumulator, gradient) in enumerate(pairs):
            if gradient is not None:
                self._used.add(number)
                accumulator.assign_add(tf.cast(gradient, accumulator.dtype))


def _fingerprint(result: BodyResult) -> tf.Tensor:
    """Two sums of each output, so that outputs which differ can be told apart."""
    parts = [t for t in [*result.outputs, result.loss] if t is not None and t.dtype.is_floating]
    sums = [
        tf.reduce_mean(value)
        for part in parts
        for value in (tf.cast(part, tf.float64), tf.square(tf.cast(part, tf.float64)))
    ]
    return tf.stack(sums) if sums else tf.zeros([0], tf.float64)
