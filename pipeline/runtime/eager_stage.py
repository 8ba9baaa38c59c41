"""A stage whose Python runs in every micro-batch, plainly or co-executed by `terra_tf`.

For models that cannot be compiled. The stash is what `EagerTape` kept of the forward pass, or the
input where the forward pass is to be repeated.

Co-executed, a stage records on a `tf.GradientTape`, out of which nothing can be taken: what it
keeps stays here, and the micro-batches that the schedule lends to a partner are repeated instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from pipeline import tensorflow_internals
from pipeline.errors import ModelError
from pipeline.runtime.body import BodyResult, StageBody
from pipeline.runtime.eager_tape import EagerTape
from pipeline.runtime.model import raw
from pipeline.runtime.stage import Forward, MicroBatch, Tensors


@dataclass
class _Recorded:
    """What stays here of a forward pass whose stash was kept: the tape without its tensors."""

    tape: Any
    inputs: list[tf.TensorSpec]


@dataclass
class _Repeatable:
    """What stays here of a forward pass that will be repeated.

    Attributes:
        data: the user's.
        num_inputs: how many of the stash's tensors are the inputs; the others are states.
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
        recompute: repeat the forward pass instead of keeping what it made.
        splits: leave the weights' gradients to `weight`.
        sends_back: compute the gradients of the inputs (not on the first stage).
    """

    def __init__(
        self,
        body: StageBody,
        accumulators: Sequence[tf.Variable],
        recompute: bool,
        splits: bool,
        sends_back: bool,
    ) -> None:
        self.body = body
        self.num_traces = 0
        self._accumulators = accumulators
        self._recompute = recompute
        self._splits = splits
        self._sends_back = sends_back
        self._used: set[int] = set()
        self._weights = [raw(weight) for weight in body.weights]
        self._python_seeds: Mapping[int, int] = {}

    def forward(self, inputs: Tensors, data: MicroBatch) -> Forward:
        """See `Stage`."""
        self._seed_python(data)
        if self._recompute:
            return self._forward_to_repeat(inputs, data)
        return self._forward_to_keep(inputs, data)

    def backward(
        self, plan: _Recorded | _Repeatable, stash: Tensors, gradients: Tensors, scale: tf.Tensor
    ) -> tuple[Tensors, Tensors]:
        """See `Stage`."""
        if isinstance(plan, _Recorded):
            inputs = plan.inputs
            found = self._gradients(plan.tape, stash, gradients, scale)
        else:
            inputs = stash[: plan.num_inputs]
            found = self._repeat(plan, stash, gradients, scale)
        sources = self._differentiable(inputs)
        input_gradients = [
            tf.zeros(source.shape, source.dtype) if gradient is None else gradient
            for source, gradient in zip(sources, found[: len(sources)], strict=True)
        ]
        found = found[len(sources) :]
        if self._splits:
            return input_gradients, found
        self._accumulate(found)
        return input_gradients, []

    def weight(self, plan: Any, passed_on: Tensors) -> None:
        """See `Stage`."""
        self._accumulate(passed_on)

    def infer(self, inputs: Tensors, data: MicroBatch) -> BodyResult:
        """See `Stage`."""
        self._seed_python(data)
        return self.body.run_in_place(
            inputs, data.seeds, self._python_seeds, False, data.targets, data.sample_weight
        )

    def used_weights(self) -> list[Any]:
        """See `Stage`."""
        return [w for number, w in enumerate(self.body.weights) if number in self._used]

    # --- the forward pass ----------------------------------------------------------------------

    def _forward_to_keep(self, inputs: Tensors, data: MicroBatch) -> Forward:
        tape = self._new_tape(inputs)
        with tape:
            result = self._run(inputs, data.seeds, data.targets, data.sample_weight)
        stash = tape.finish(_ends(result))
        plan = _Recorded(tape, [tf.TensorSpec(t.shape, t.dtype) for t in inputs])
        return Forward(result.outputs, result.loss, result.layer_losses, stash, plan)

    def _forward_to_repeat(self, inputs: Tensors, data: MicroBatch) -> Forward:
        states = [tf.identity(raw(state)) for state in self.body.states]
        result = self._run(inputs, data.seeds, data.targets, data.sample_weight)
        plan = _Repeatable(data, len(inputs), _fingerprint(result))
        stash = [*inputs, *states]
        return Forward(result.outputs, result.loss, result.layer_losses, stash, plan)

    def _run(
        self, inputs: Tensors, seeds: tf.Tensor, targets: Any, sample_weight: tf.Tensor | None
    ) -> BodyResult:
        return self.body.run_in_place(
            inputs, seeds, self._python_seeds, True, targets, sample_weight
        )

    def _seed_python(self, data: MicroBatch) -> None:
        self._python_seeds = self.body.random.python_seeds(data.seeds.numpy())

    def _new_tape(self, inputs: Tensors) -> Any:
        return EagerTape(inputs, [*self._differentiable(inputs), *self._weights])

    def _differentiable(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs whose gradients are sent back."""
        return [t for t in inputs if t.dtype.is_floating] if self._sends_back else []

    # --- the backward pass ---------------------------------------------------------------------

    def _gradients(
        self, tape: Any, stash: Tensors, gradients: Tensors, scale: tf.Tensor
    ) -> list[tf.Tensor | None]:
        """Of the inputs, then of the weights."""
        losses = [tf.cast(scale, dtype) for dtype in tape.end_types[len(gradients) :]]
        return tape.gradient(stash, [*gradients, *losses])

    def _repeat(
        self, plan: _Repeatable, stash: Tensors, gradients: Tensors, scale: tf.Tensor
    ) -> list[tf.Tensor | None]:
        """The gradients, after the forward pass was run again from the states of then."""
        data = plan.data
        inputs, states = stash[: plan.num_inputs], stash[plan.num_inputs :]
        self._seed_python(data)
        variables = [raw(state) for state in self.body.states]
        now = [tf.identity(variable) for variable in variables]
        _assign(variables, states)
        found, fingerprint = self._run_again(
            inputs, data.seeds, data.targets, data.sample_weight, gradients, scale
        )
        # What the forward pass assigns has been assigned already.
        _assign(variables, now)
        self._check_repeated(plan.fingerprint, fingerprint)
        return found

    def _run_again(
        self,
        inputs: Tensors,
        seeds: tf.Tensor,
        targets: Any,
        sample_weight: tf.Tensor | None,
        gradients: Tensors,
        scale: tf.Tensor,
    ) -> tuple[list[tf.Tensor | None], tf.Tensor]:
        tape = self._new_tape(inputs)
        with tape:
            result = self._run(inputs, seeds, targets, sample_weight)
        stash = tape.finish(_ends(result))
        return self._gradients(tape, stash, gradients, scale), _fingerprint(result)

    def _check_repeated(self, first: tf.Tensor, second: tf.Tensor) -> None:
        tolerance = 1e-5 * (1.0 + tf.abs(first))
        if bool(tf.reduce_any(tf.abs(first - second) > tolerance)):
            names = ", ".join(item.name for item in self.body.items)
            raise ModelError(
                "the backward pass repeated the forward pass of a stage and got other outputs, "
                f"perhaps because one of its entries ({names}) draws random numbers from a source "
                "of its own: use tf.random, keras.random, random or numpy.random, or stash='keep'"
            )

    def _accumulate(self, gradients: Sequence[tf.Tensor | None]) -> None:
        pairs = zip(self._accumulators, gradients, strict=True)
        for number, (accumulator, gradient) in enumerate(pairs):
            if gradient is not None:
                self._used.add(number)
                accumulator.assign_add(tf.cast(gradient, accumulator.dtype))


class CoexecutedStage(EagerStage):
    """An eager stage whose passes `terra_tf.function` co-executes.

    Args:
        body: see `EagerStage`, like the following.
        accumulators: see there.
        recompute: see there.
        splits: see there.
        sends_back: see there.
        wrap: `terra_tf.function`.
    """

    def __init__(
        self,
        body: StageBody,
        accumulators: Sequence[tf.Variable],
        recompute: bool,
        splits: bool,
        sends_back: bool,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        super().__init__(body, accumulators, recompute, splits, sends_back)
        # Shapes of the inputs → bytes that a forward pass keeps.
        self._bytes: dict[tuple[Any, ...], int] = {}
        self._run = wrap(self._run)  # type: ignore[method-assign]
        self._record = wrap(self._record_plainly)
        self._gradients = wrap(self._gradients)  # type: ignore[method-assign]
        self._run_again = wrap(self._record_again)  # type: ignore[method-assign]

    def forward(self, inputs: Tensors, data: MicroBatch) -> Forward:
        """See `Stage`."""
        self._seed_python(data)
        if self._recompute or data.leaves:
            return self._forward_to_repeat(inputs, data)
        shapes = tuple((*t.shape, t.dtype) for t in inputs)
        if shapes not in self._bytes:
            # What a tape of TensorFlow's keeps cannot be seen, so the first one is of our own.
            made = self._plainly(inputs, data)
            self._bytes[shapes] = sum(map(tensorflow_internals.nbytes, made.stash))
            return made
        result, tape = self._record(inputs, data.seeds, data.targets, data.sample_weight)
        plan = _Recorded(tape, [tf.TensorSpec(t.shape, t.dtype) for t in inputs])
        return Forward(
            result.outputs, result.loss, result.layer_losses, [], plan, self._bytes[shapes]
        )

    def _plainly(self, inputs: Tensors, data: MicroBatch) -> Forward:
        tape = EagerTape(inputs, [*self._differentiable(inputs), *self._weights])
        with tape:
            result = self.body.run_in_place(
                inputs, data.seeds, self._python_seeds, True, data.targets, data.sample_weight
            )
        stash = tape.finish(_ends(result))
        plan = _Recorded(tape, [tf.TensorSpec(t.shape, t.dtype) for t in inputs])
        return Forward(result.outputs, result.loss, result.layer_losses, stash, plan)

    def _new_tape(self, inputs: Tensors) -> Any:
        return _TensorFlowTape([*self._differentiable(inputs), *self._weights])

    def _record_plainly(
        self, inputs: Tensors, seeds: tf.Tensor, targets: Any, sample_weight: tf.Tensor | None
    ) -> tuple[BodyResult, Any]:
        tape = self._new_tape(inputs)
        with tape:
            result = EagerStage._run(self, inputs, seeds, targets, sample_weight)
        tape.finish(_ends(result))
        return result, tape

    def _record_again(
        self,
        inputs: Tensors,
        seeds: tf.Tensor,
        targets: Any,
        sample_weight: tf.Tensor | None,
        gradients: Tensors,
        scale: tf.Tensor,
    ) -> tuple[list[tf.Tensor | None], tf.Tensor]:
        result, tape = self._record_plainly(inputs, seeds, targets, sample_weight)
        return EagerStage._gradients(self, tape, [], gradients, scale), _fingerprint(result)


class _TensorFlowTape:
    """A `tf.GradientTape` with the methods of `EagerTape`; it keeps its stash to itself."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self._sources = list(sources)
        self._tape = tf.GradientTape()
        self._ends: list[tf.Tensor] = []

    def __enter__(self) -> None:
        self._tape.__enter__()
        for source in self._sources:
            self._tape.watch(source)

    def __exit__(self, *exception: Any) -> None:
        self._tape.__exit__(*exception)

    def finish(self, ends: Sequence[tf.Tensor]) -> Tensors:
        """See `EagerTape`."""
        self._ends = list(ends)
        return []

    @property
    def end_types(self) -> list[tf.DType]:
        """See `EagerTape`."""
        return [end.dtype for end in self._ends]

    def gradient(
        self, stash: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]
    ) -> list[tf.Tensor | None]:
        """See `EagerTape`."""
        found = self._tape.gradient(self._ends, self._sources, list(upstream))
        return [None if g is None else tf.convert_to_tensor(g) for g in found]


def _ends(result: BodyResult) -> Tensors:
    """What is differentiated: the outputs, unless there is a loss, then the losses."""
    losses = [t for t in (result.loss, result.layer_losses) if t is not None]
    if result.loss is not None:
        return losses
    return [*(t for t in result.outputs if t.dtype.is_floating), *losses]


def _assign(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _fingerprint(result: BodyResult) -> tf.Tensor:
    """Two sums of each output, so that outputs which differ can be told apart."""
    parts = [t for t in [*result.outputs, result.loss] if t is not None and t.dtype.is_floating]
    sums = [
        tf.reduce_mean(value)
        for part in parts
        for value in (tf.cast(part, tf.float64), tf.square(tf.cast(part, tf.float64)))
    ]
    return tf.stack(sums) if sums else tf.zeros([0], tf.float64)
