"""A stage: one rank's part of the model, with its forward and backward passes.

`FunctionStage` compiles them, each once; `eager_stage.EagerStage` runs Python every time. Both have
the methods of `Stage`, with the stash handed out and in, so that whoever holds it may send it
elsewhere in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from pipeline.runtime.body import BodyResult, StageBody
from pipeline.runtime.plan import Plan, Tensors, cut_trace, trace_stage


@dataclass
class MicroBatch:
    """The user's data of one micro-batch, as far as a stage reads it, and its random states.

    Attributes:
        targets: y, on the last stage, else None.
        sample_weight: on the last stage, if given.
        seeds: of `RandomStates.values`.
        leaves: whether the schedule lends its stash to another rank.
    """

    targets: Any
    sample_weight: tf.Tensor | None
    seeds: tf.Tensor
    leaves: bool = False

    def flat(self, inputs: Sequence[tf.Tensor]) -> Tensors:
        """The inputs and all that is here, in the order in which traces take them."""
        parts = [*inputs, *tf.nest.flatten([self.targets, self.sample_weight]), self.seeds]
        return [part for part in parts if part is not None]


@dataclass
class Forward:
    """What a forward pass hands out.

    Attributes:
        outputs: the flat outputs.
        loss: the micro-batch's mean loss on the last stage, else None.
        layer_losses: the sum of what layers add, or None.
        stash: what the backward pass needs and may be sent elsewhere.
        plan: what it needs besides, which stays here.
        held_bytes: bytes of tensors in the plan, where the stash cannot be taken out of it.
    """

    outputs: Tensors
    loss: tf.Tensor | None
    layer_losses: tf.Tensor | None
    stash: Tensors
    plan: Any
    held_bytes: int = 0


class Stage(Protocol):
    """What the executor needs of a stage.

    Attributes:
        body: what it computes.
        num_traces: how often something was traced so far.
    """

    body: StageBody
    num_traces: int

    def forward(self, inputs: Tensors, data: MicroBatch) -> Forward:
        """The forward pass of training; states are assigned."""

    def backward(
        self, plan: Any, stash: Tensors, gradients: Tensors, scale: tf.Tensor
    ) -> tuple[Tensors, Any]:
        """The backward pass; adds to the accumulators, unless that is left to `weight`.

        Args:
            plan: of the forward pass.
            stash: of the forward pass.
            gradients: of the differentiable outputs; none on the last stage.
            scale: what the micro-batch's losses are multiplied by; float64.

        Returns:
            The gradients of the differentiable inputs, and what `weight` needs.
        """

    def weight(self, plan: Any, passed_on: Any) -> None:
        """Adds the weights' gradients to the accumulators, where that is an action of its own."""

    def infer(self, inputs: Tensors, data: MicroBatch) -> BodyResult:
        """The forward pass without training."""

    def used_weights(self) -> list[Any]:
        """The body's weights that some loss was found to depend on so far."""


class FunctionStage:
    """A stage whose passes are compiled graphs.

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
        # What a plan, or a function without training, is made for → what was made.
        self._plans: dict[_Signature, Plan] = {}
        self._inferences: dict[_Signature, Callable[..., Any]] = {}

    def forward(self, inputs: Tensors, data: MicroBatch) -> Forward:
        """See `Stage`."""
        plan = self._made_for(self._plans, self._make_plan, inputs, data)
        outputs, losses, stash = plan.forward(*data.flat(inputs))
        losses = list(losses)
        loss = losses.pop(0) if plan.has_loss else None
        kept = plan, data.flat([])[:-1]
        return Forward(list(outputs), loss, losses[0] if losses else None, list(stash), kept)

    def backward(
        self, plan: tuple[Plan, Tensors], stash: Tensors, gradients: Tensors, scale: tf.Tensor
    ) -> tuple[Tensors, Tensors]:
        """See `Stage`."""
        functions, data = plan
        input_gradients, passed_on = functions.backward(*stash, *data, *gradients, scale)
        return list(input_gradients), list(passed_on)

    def weight(self, plan: tuple[Plan, Tensors], passed_on: Tensors) -> None:
        """See `Stage`."""
        functions, _ = plan
        functions.weight(*passed_on)

    def infer(self, inputs: Tensors, data: MicroBatch) -> BodyResult:
        """See `Stage`."""
        inference = self._made_for(self._inferences, self._make_inference, inputs, data)
        outputs, loss, added = inference(*data.flat(inputs))
        return BodyResult(list(outputs), loss, added)

    def used_weights(self) -> list[Any]:
        """See `Stage`."""
        return [
            weight
            for number, weight in enumerate(self.body.weights)
            if any(plan.used[number] for plan in self._plans.values())
        ]

    def _make_inference(self, signature: _Signature) -> Callable[..., Any]:
        def infer(*flat: tf.Tensor) -> tuple[Tensors, tf.Tensor | None, tf.Tensor | None]:
            inputs, targets, sample_weight, seeds = signature.pack(flat)
            reads = self.body.read_weights()
            result = self.body.run(inputs, reads, seeds, False, targets, sample_weight)
            return result.outputs, result.loss, result.layer_losses

        return tf.function(infer, autograph=False).get_concrete_function(*signature.specs())

    def _make_plan(self, signature: _Signature) -> Plan:
        specs = signature.pack(signature.specs())
        trace = trace_stage(self.body, self._sends_back, *specs)
        return Plan(trace, cut_trace(trace, self._recompute, self._splits), self._accumulators)

    def _made_for(
        self,
        made: dict[_Signature, Any],
        make: Callable[[_Signature], Any],
        inputs: Tensors,
        data: MicroBatch,
    ) -> Any:
        """What was made for such inputs; made now if there is none yet."""
        wanted = _Signature.of(inputs, data)
        for signature, found in made.items():
            if signature.covers(wanted):
                return found
        exactly = wanted
        for signature in made:
            # What has varied once is left open from then on, so that it is not traced again.
            wanted = wanted.widened(signature)
        if wanted != exactly:
            # Where a size is open, no layer can tell while it is traced that it does not fit.
            self._make_inference(exactly)
        self.num_traces += 1
        made[wanted] = make(wanted)
        return made[wanted]


@dataclass(frozen=True)
class _Signature:
    """Types and shapes of what a forward pass is called with; None for a size that is open.

    Attributes:
        parts: for each flat tensor its type and shape, first dimension open.
        num_inputs: how many of them are inputs.
        structure: how the others are nested.
    """

    parts: tuple[tuple[tf.DType, tuple[int | None, ...]], ...]
    num_inputs: int
    structure: Any

    @classmethod
    def of(cls, inputs: Tensors, data: MicroBatch) -> _Signature:
        """The signature of a call."""
        flat = data.flat(inputs)
        parts = [(t.dtype, (None, *t.shape[1:]) if t.shape.rank else ()) for t in flat[:-1]]
        parts.append((flat[-1].dtype, tuple(flat[-1].shape)))  # the random states: no batch
        rest = [data.targets, data.sample_weight]
        return cls(tuple(parts), len(inputs), _Nested(rest))

    def covers(self, other: _Signature) -> bool:
        """Whether a plan for this signature takes the other's tensors."""
        return self._alike(other) and all(
            mine in (None, theirs)
            for (_, shape), (_, other_shape) in zip(self.parts, other.parts, strict=True)
            for mine, theirs in zip(shape, other_shape, strict=True)
        )

    def widened(self, other: _Signature) -> _Signature:
        """This signature, open where the other one differs."""
        if not self._alike(other):
            return self
        parts = tuple(
            (dtype, tuple(a if a == b else None for a, b in zip(shape, other_shape, strict=True)))
            for (dtype, shape), (_, other_shape) in zip(self.parts, other.parts, strict=True)
        )
        return _Signature(parts, self.num_inputs, self.structure)

    def specs(self) -> list[tf.TensorSpec]:
        """The flat parts as TensorFlow has them."""
        return [tf.TensorSpec(shape, dtype) for dtype, shape in self.parts]

    def pack(self, flat: Sequence[Any]) -> tuple[list[Any], Any, Any, Any]:
        """Flat parts as inputs, targets, sample weights and random states."""
        targets, sample_weight = self.structure.pack(flat[self.num_inputs : -1])
        return list(flat[: self.num_inputs]), targets, sample_weight, flat[-1]

    def _alike(self, other: _Signature) -> bool:
        mine = [(dtype, len(shape)) for dtype, shape in self.parts]
        theirs = [(dtype, len(shape)) for dtype, shape in other.parts]
        return (
            mine == theirs
            and self.num_inputs == other.num_inputs
            and self.structure == other.structure
        )


class _Nested:
    """How a structure is nested, with None where it has nothing; equal and hashed by that."""

    def __init__(self, structure: Any) -> None:
        self._filled = tf.nest.map_structure(lambda part: part is not None, structure)

    def pack(self, flat: Sequence[Any]) -> Any:
        """The structure with these parts, None where it has nothing."""
        parts = iter(flat)
        return tf.nest.map_structure(lambda filled: next(parts) if filled else None, self._filled)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nested) and self._filled == other._filled

    def __hash__(self) -> int:
        return hash(repr(self._filled))
