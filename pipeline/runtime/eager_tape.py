"""A gradient tape for eager stages that hands out what it keeps, so that it can be lent.

What a `tf.GradientTape` keeps for the backward pass cannot be taken out of it. This one records the
ops of a forward pass itself, keeps of each what its gradient function reads, and gives these
tensors, the *stash*, to whoever holds it meanwhile; `gradient` gets them back. What needs not be
moved is in no stash:

* weights, and what depends on weights and constants alone: made again when it is read;
* tensors of which gradient functions ask the size only: zeros of that size take their place;
* what the gradients of functions (`tf.function`, `tf.custom_gradient`) hold themselves. That stays
  in this process, since nothing can be done about it from outside.

What a gradient function reads is found out the first time that an op of its kind is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from pipeline import tensorflow_internals

# Ops → the inputs, and outputs, that their gradient functions only ask for shape or type.
_SHAPES_OF_INPUTS = {
    **dict.fromkeys(("Add", "AddV2", "Sub"), (0, 1)),
    **dict.fromkeys(("Sum", "Mean", "Reshape", "ExpandDims", "Squeeze", "Cast"), (0,)),
    **dict.fromkeys(("StridedSlice", "Slice", "Pad", "Tile", "BroadcastTo", "GatherV2"), (0,)),
    "SelectV2": (1, 2),
}
_SHAPES_OF_OUTPUTS = {"Mean": (0,), "Sum": (0,)}
# Ops whose gradient functions want None, not zeros, for outputs that nothing depends on.
_WANT_NONE = frozenset(
    {
        "SoftmaxCrossEntropyWithLogits",
        "SparseSoftmaxCrossEntropyWithLogits",
        "FusedBatchNorm",
        "FusedBatchNormV2",
        "FusedBatchNormV3",
    }
)
# Ops that have the same input at every call within a step, where that is a trained variable.
_READS = frozenset({"ReadVariableOp"})

# A kind of op: its type, the inputs without a gradient, the inputs' ranks.
_Kind = tuple[str, tuple[int, ...], tuple[int | None, ...]]
# Kind → positions of the inputs and of the outputs that its gradient function reads.
_read_by: dict[_Kind, tuple[frozenset[int], frozenset[int]]] = {}


@dataclass
class _Op:
    """A recorded op, or a call of a function that knows its own gradient.

    Attributes:
        type: of the op.
        attrs: as TensorFlow hands them to gradient functions.
        inputs: its tensors, until the recording is finished.
        outputs: the same.
        backward: of a function: from the outputs' gradients to the inputs'.
        kept_inputs: where those that the gradient reads will be found, see `_Keeper`.
        kept_outputs: the same.
        output_numbers: of the outputs that gradients may come to, else None.
        input_numbers: of the inputs that gradients go to, else None.
        output_specs: shapes and types.
    """

    type: str
    attrs: Any
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    backward: Callable[..., Any] | None = None
    kept_inputs: list[Any] = field(default_factory=list)
    kept_outputs: list[Any] = field(default_factory=list)
    output_numbers: list[int | None] = field(default_factory=list)
    input_numbers: list[int | None] = field(default_factory=list)
    output_specs: list[tf.TensorSpec] = field(default_factory=list)

    @property
    def skipped(self) -> tuple[int, ...]:
        """The positions of inputs whose gradients nobody wants."""
        return tuple(at for at, number in enumerate(self.input_numbers) if number is None)


class EagerTape:
    """Records the ops run inside `with tape:`; then `finish`, and later `gradient`.

    Args:
        inputs: tensors that come from outside and may be in the stash.
        sources: which of these, and which variables, gradients are wanted for.

    Attributes:
        end_types: of what will be differentiated.
    """

    def __init__(self, inputs: Sequence[tf.Tensor], sources: Sequence[Any]) -> None:
        self._inputs = list(inputs)
        self._sources = [getattr(source, "handle", source) for source in sources]
        self._ops: list[_Op] = []
        self._weights = {id(s) for s in self._sources if s.dtype == tf.resource}
        self.end_types: list[tf.DType] = []
        self._ends: list[int | None] = []
        self._recording: Any = None

    def __enter__(self) -> EagerTape:
        self._recording = tensorflow_internals.recorded_ops(
            self._sources, self._note_op, self._note_function
        )
        self._recording.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._recording.__exit__(*exception)
        self._recording = None

    def _note_op(
        self, op_type: str, inputs: Sequence[Any], attrs: Any, outputs: Sequence[Any]
    ) -> None:
        self._ops.append(_Op(op_type, attrs, tuple(inputs), list(outputs)))

    def _note_function(
        self, name: str, outputs: Sequence[Any], inputs: Sequence[Any], backward: Any
    ) -> None:
        self._ops.append(_Op(name, (), tuple(inputs), list(outputs), backward))

    # --- after the forward pass ----------------------------------------------------------------

    def finish(self, ends: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Ends the recording.

        Args:
            ends: what will be differentiated.

        Returns:
            The stash.
        """
        made = self._ops
        self._number(ends)
        keeper = _Keeper(made, self._inputs, self._weights)
        for op in self._ops:
            keeper.keep(op)
        self._again = keeper.again
        # Nothing but the stash holds tensors from here on.
        self._inputs = self._sources = []
        for op in self._ops:
            op.inputs = op.outputs = ()
        return keeper.stash

    def _number(self, ends: Sequence[tf.Tensor]) -> None:
        """Numbers what gradients flow through, and leaves only the ops that they pass."""
        numbers = {id(source): number for number, source in enumerate(self._sources)}
        self._num_sources = len(self._sources)
        count = len(numbers)
        passed = []
        for op in self._ops:
            op.input_numbers = [numbers.get(id(tensor)) for tensor in op.inputs]
            if op.skipped == tuple(range(len(op.inputs))) or not _is_differentiable(op):
                # A tensor may be reached again by what made it otherwise.
                continue
            op.output_specs = [tf.TensorSpec(t.shape, t.dtype) for t in op.outputs]
            for tensor in op.outputs:
                number = None
                if tensorflow_internals.is_trainable_type(tensor.dtype):
                    number = numbers[id(tensor)] = count
                    count += 1
                op.output_numbers.append(number)
            passed.append(op)
        self._ends = [numbers.get(id(end)) for end in ends]
        self.end_types = [end.dtype for end in ends]
        wanted = set(self._ends)
        needed = []
        for op in reversed(passed):
            if wanted.intersection(n for n in op.output_numbers if n is not None):
                wanted.update(n for n in op.input_numbers if n is not None)
                needed.append(op)
        self._ops = needed[::-1]

    # --- the backward pass ---------------------------------------------------------------------

    def gradient(
        self, stash: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]
    ) -> list[tf.Tensor | None]:
        """The gradients of the sources.

        Args:
            stash: of `finish`.
            upstream: the gradient of each end.
        """
        found: dict[int, Any] = {}
        for number, gradient in zip(self._ends, upstream, strict=True):
            _add(found, number, gradient)
        values = _Values(stash, self._again)
        for op in reversed(self._ops):
            outgoing = [None if n is None else found.pop(n, None) for n in op.output_numbers]
            if all(gradient is None for gradient in outgoing):
                continue
            gradients = _backward(op, outgoing, values)
            for number, gradient in zip(op.input_numbers, gradients, strict=True):
                _add(found, number, gradient)
        return [
            None if found.get(n) is None else tf.convert_to_tensor(found[n])
            for n in range(self._num_sources)
        ]


def _add(found: dict[int, Any], number: int | None, gradient: Any) -> None:
    if number is None or gradient is None:
        return
    before = found.get(number)
    if before is not None:
        gradient = tf.convert_to_tensor(before) + tf.convert_to_tensor(gradient)
    found[number] = gradient


def _is_differentiable(op: _Op) -> bool:
    return op.backward is not None or tensorflow_internals.has_gradient(op.type)


def _backward(op: _Op, outgoing: Sequence[Any], values: _Values) -> Sequence[Any]:
    """The gradients of an op's inputs."""
    if op.type not in _WANT_NONE:
        outgoing = [
            _zeros(spec) if gradient is None else gradient
            for spec, gradient in zip(op.output_specs, outgoing, strict=True)
        ]
    if op.backward is not None:
        found = op.backward(*outgoing)
    else:
        inputs, outputs = values.of(op.kept_inputs), values.of(op.kept_outputs)
        found = tensorflow_internals.op_gradient(
            op.type, op.attrs, inputs, outputs, outgoing, op.skipped
        )
    return found if isinstance(found, (list, tuple)) else [found]


def _zeros(spec: tf.TensorSpec) -> tf.Tensor | None:
    return None if spec.dtype in (tf.resource, tf.variant) else tf.zeros(spec.shape, spec.dtype)


# --- what is kept --------------------------------------------------------------------------------


class _Stashed(int):
    """The position of a tensor in the stash."""


@dataclass(frozen=True)
class _Again:
    """An output of an op that is run again: the op's position among those, and the output's."""

    op: int
    output: int


class _Keeper:
    """Replaces the tensors of recorded ops by where they will be found.

    Args:
        made: all ops of the forward pass.
        inputs: of the stage.
        weights: the ids of the weights' handles.
    """

    def __init__(self, made: Sequence[_Op], inputs: Sequence[Any], weights: set[int]) -> None:
        self.stash: list[tf.Tensor] = []
        self.again: list[_Op] = []
        self._places: dict[int, Any] = {}
        # What changes with the micro-batch: the inputs, and what is made of them.
        self._varying = {id(tensor) for tensor in inputs}
        self._makers: dict[int, tuple[_Op, int]] = {}
        for op in made:
            reads_weight = op.type in _READS and id(op.inputs[0]) in weights
            if not reads_weight and (
                op.backward is not None
                or tensorflow_internals.is_stateful(op.type)
                or any(id(tensor) in self._varying for tensor in op.inputs)
            ):
                self._varying.update(map(id, op.outputs))
            else:
                for position, tensor in enumerate(op.outputs):
                    self._makers[id(tensor)] = op, position
        self._repeated: dict[int, int] = {}

    def keep(self, op: _Op) -> None:
        """Keeps what the gradient of the op needs."""
        if op.backward is not None:
            return
        reads_inputs, reads_outputs = _reads(op)
        shapes = _SHAPES_OF_INPUTS.get(op.type, ()), _SHAPES_OF_OUTPUTS.get(op.type, ())
        op.kept_inputs = self._kept(op.inputs, reads_inputs, shapes[0])
        op.kept_outputs = self._kept(op.outputs, reads_outputs, shapes[1])

    def _kept(self, tensors: Sequence[Any], read: frozenset[int], shapes: Any) -> list[Any]:
        kept: list[Any] = []
        for position, tensor in enumerate(tensors):
            if position not in read:
                kept.append(None)
            elif position in shapes and id(tensor) in self._varying:
                kept.append(tf.TensorSpec(tensor.shape, tensor.dtype))
            else:
                kept.append(self._place(tensor))
        return kept

    def _place(self, tensor: Any) -> Any:
        if id(tensor) in self._varying:
            if id(tensor) not in self._places:
                self._places[id(tensor)] = _Stashed(len(self.stash))
                self.stash.append(tensor)
            return self._places[id(tensor)]
        maker = self._makers.get(id(tensor))
        if maker is None:
            return tensor  # a constant, or a variable's handle
        return _Again(self._repeat(maker[0]), maker[1])

    def _repeat(self, op: _Op) -> int:
        """Enters an op that is to be run again, after what it needs."""
        if id(op) not in self._repeated:
            inputs = [self._place(tensor) for tensor in op.inputs]
            self._repeated[id(op)] = len(self.again)
            self.again.append(_Op(op.type, op.attrs, (), (), kept_inputs=inputs))
            self.again[-1].output_numbers = [None] * len(op.outputs)
        return self._repeated[id(op)]


class _Values:
    """The tensors of kept places, in one backward pass."""

    def __init__(self, stash: Sequence[tf.Tensor], again: Sequence[_Op]) -> None:
        self._stash = stash
        self._again = again
        self._repeated: dict[int, Sequence[Any]] = {}

    def of(self, places: Sequence[Any]) -> list[Any]:
        """For each place its tensor."""
        return [self._value(place) for place in places]

    def _value(self, place: Any) -> Any:
        if isinstance(place, _Stashed):
            return self._stash[place]
        if isinstance(place, tf.TensorSpec):
            return _zeros(place)
        if not isinstance(place, _Again):
            return place
        if place.op not in self._repeated:
            op = self._again[place.op]
            self._repeated[place.op] = tensorflow_internals.run_op(
                op.type, self.of(op.kept_inputs), op.attrs, len(op.output_numbers)
            )
        return self._repeated[place.op][place.output]


# --- what gradient functions read ----------------------------------------------------------------


class _Watched(list):
    """A list that notes which positions are read."""

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__(items)
        self.read: set[int] = set()

    def __getitem__(self, key: Any) -> Any:
        self.read.update(range(len(self))[key] if isinstance(key, slice) else [key % len(self)])
        return super().__getitem__(key)

    def __iter__(self) -> Any:
        self.read.update(range(len(self)))
        return super().__iter__()


def _reads(op: _Op) -> tuple[frozenset[int], frozenset[int]]:
    """What an op's gradient function reads, of inputs and outputs; tried out once a kind."""
    kind = op.type, op.skipped, tuple(tensor.shape.rank for tensor in op.inputs)
    if kind not in _read_by:
        inputs, outputs = _Watched(op.inputs), _Watched(op.outputs)
        none = op.type in _WANT_NONE
        outgoing = [
            None if none and position else _zeros(spec)
            for position, spec in enumerate(op.output_specs)
        ]
        tensorflow_internals.op_gradient(op.type, op.attrs, inputs, outputs, outgoing, op.skipped)
        _read_by[kind] = frozenset(inputs.read), frozenset(outputs.read)
    return _read_by[kind]
