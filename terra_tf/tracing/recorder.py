"""Records an iteration that runs in plain eager mode.

The native hooks call `on_call`, `on_miss` and `on_error` after each op call and `on_read` when the
program looks at a value; TensorFlow's op callbacks add what the call itself does not show: complete
attributes and inputs after conversion. The recorder holds no tensor of the program alive.
"""

from __future__ import annotations

import bisect
import enum
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from terra_tf import native, tensorflow_internals
from terra_tf.configuration import settings
from terra_tf.tensorflow_internals import EagerTensor, dtype_and_shape
from terra_tf.tracing.effects import (
    INTEGERS,
    ON_VARIABLES,
    Effect,
    effect_of,
    makes_shape_of_values,
    may_fail,
    runs_in_place,
)
from terra_tf.tracing.handlers import Loop, may_be_handled
from terra_tf.tracing.location import user_location
from terra_tf.tracing.trace import (
    Arg,
    Call,
    External,
    Items,
    Kind,
    Node,
    Output,
    OutputInfo,
    Outside,
    Python,
    Read,
    Result,
    Trace,
)

_RESOURCE, _VARIANT, _STRING = 20, 21, 7
_SUM_OF_GRADIENTS = "AddN"  # called by tapes outside of any gradient function
_UNSIZED = frozenset({_RESOURCE, _VARIANT, _STRING})


class Ran(enum.IntEnum):
    """How a call ran; numbers as in native/session.h."""

    RECORDED = 0
    NESTED = 1  # it called ops of its own, e.g. for a forward-mode derivative
    IN_PLACE = 2  # at the end of a walk, before the recorder was there


class Recorder:
    """Fills one Trace. Enter it with `start`, leave it with `finish` or `abandon`."""

    def __init__(
        self,
        arguments: Sequence[Any] = (),
        prefix: Trace | None = None,
        loop: Loop | None = None,
        since: int | None = None,
    ):
        """Makes a recorder.

        Args:
          arguments: tensors that were passed to the step; they are always fed.
          loop: where the loop is whose body is recorded, if it is one.
          prefix: what the iteration has done already, when it begins as a co-executed one.
          since: `tensorflow_internals.next_id()` at the iteration's start; None for now.
        """
        self._since = tensorflow_internals.next_id() if since is None else since
        self._loop = loop
        self._region = None if loop is None else loop.code
        self.trace = prefix if prefix is not None else Trace()
        self._alive: dict[
            int, tuple[int, weakref.ref[Any]]
        ] = {}  # id(tensor) -> output, the tensor
        self._externals: dict[int, int] = {}  # id(tensor) -> external, for those held in _held
        self._held: list[Any] = []
        self._arguments = {id(tensor) for tensor in arguments}
        self._seen: list[tuple[Any, ...]] = []  # op callbacks of the call in progress
        self._callback = self._on_op  # one object, so that it can be removed again
        self._uncertain: set[int] = set()  # outputs whose shape depends on values
        # (op type, what a node of it takes) -> those nodes; see _taken
        self._takers: dict[tuple[str, Output | Outside | int], list[int]] = {}
        self._gradient: Any = None  # what gradient is being computed
        self._forward: int | None = None  # of which node that is
        self._effects_seen = prefix is not None
        for position, node in enumerate(self.trace.nodes):
            self._note_inputs(position, node)

    # --- life ---

    def start(self) -> None:
        """Begins to record this thread."""
        tensorflow_internals.add_op_callback(self._callback)
        native.core.enter_record(self)

    def _stop(self) -> None:
        native.core.enter_plain()
        tensorflow_internals.remove_op_callback(self._callback)

    def finish(self) -> Trace:
        """Ends the recording; the tensors that the program kept become plain ones."""
        self._note_kept()
        self.abandon()
        return self.trace

    def abandon(self) -> None:
        """Ends the recording without a trace."""
        self._stop()
        for _, reference in list(self._alive.values()):
            tensor = reference()
            if tensor is not None:
                native.core.materialise(tensor)
        self._alive.clear()
        self._held.clear()

    def adopt_output(self, tensor: Any, output: int) -> None:
        """Makes a tensor known that an earlier node of the prefix has made."""
        self._remember(tensor, output)

    def adopt_external(self, tensor: Any, index: int) -> None:
        """Makes a tensor known that was external number `index` of the prefix."""
        self._externals[id(tensor)] = index
        self._held.append(tensor)

    # --- called by the native hooks ---

    def on_call(self, call: int, args: tuple[Any, ...], result: Any, ran: int) -> int:
        """Adds the node of a call that succeeded; returns the number of its first output.

        Args:
          call: the entry point, as in Call.
          args: its arguments.
          result: what it returned.
          ran: how it ran, as in Ran.
        """
        op = _op_name(args[1 if call == Call.FAST_PATH else 2])
        seen, self._seen = self._seen, []
        returned = _as_list(result)
        effect = self._effect(op, Call(call), args)
        if ran != Ran.RECORDED and effect is Effect.PURE:
            effect = Effect.LOCAL
        elif ran == Ran.IN_PLACE and not runs_in_place(effect):
            effect = Effect.BARRIER
        if runs_in_place(effect):
            node = self._in_place_node(op, Call(call), args)
        elif call == Call.FAST_PATH:
            node = self._fast_path_node(op, args, seen)
        else:
            node = self._execute_node(op, Call(call), args)
        node.effect = effect
        node.first_output = len(self.trace.outputs)
        node.num_outputs = len(returned)
        node.result = _result_kind(result)
        node.groups = _groups(result)
        node.location = user_location(self._region)
        if node.in_place:
            self._note_kept()
        self._effects_seen |= effect is not Effect.PURE
        node.gradient_of = self._gradient_of(op)
        self._note_inputs(len(self.trace.nodes), node)
        self.trace.nodes.append(node)
        self._note_uncertain(node)
        for i, tensor in enumerate(returned):
            self.trace.outputs.append(OutputInfo(*dtype_and_shape(tensor)))
            self._remember(tensor, node.first_output + i)
        return node.first_output

    def on_miss(self, call: int, args: tuple[Any, ...], _: None, ran: int) -> int:
        """Notes that the fast path refused a call."""
        self._seen = []
        self.trace.nodes.append(
            Node(
                op=_op_name(args[1]),
                call=Call(call),
                args=(),
                inputs=(),
                attrs=(),
                first_output=len(self.trace.outputs),
                num_outputs=0,
                result=Result.NONE,
                misses=True,
                location=user_location(self._region),
            )
        )
        return -1

    def on_error(self, call: int, args: tuple[Any, ...], _: None, ran: int) -> int:
        """Adds the node of a call that raised: it runs in place, so that it can raise again."""
        op = _op_name(args[1 if call == Call.FAST_PATH else 2])
        self._seen = []
        effect = self._effect(op, Call(call), args)
        node = self._in_place_node(op, Call(call), args)
        node.effect = Effect.LOCAL if effect in (Effect.PURE, Effect.LOCAL) else Effect.BARRIER
        node.fails = True
        node.first_output = len(self.trace.outputs)
        node.location = user_location(self._region)
        self._note_kept()
        self.trace.nodes.append(node)
        return -1

    def on_read(self, output: int) -> None:
        """Notes the first look at a value."""
        if output not in self.trace.reads:
            if self._effects_seen:  # else nothing can have become visible
                self._note_kept()
            self.trace.reads[output] = Read(
                output, len(self.trace.nodes), user_location(self._region)
            )

    def _on_op(self, *seen: Any, **more: Any) -> None:
        if more.get("graph") is None:  # else something is being traced into a graph
            self._seen.append(seen)

    def _gradient_of(self, op: str) -> int | None:
        """The forward node whose gradient the call in progress belongs to."""
        finished = tensorflow_internals.gradient_finished()
        forward = tensorflow_internals.gradient_in_progress()
        if forward is None and op == _SUM_OF_GRADIENTS:
            forward = finished
        if forward is self._gradient:
            return self._forward
        self._gradient = forward
        self._forward = None if forward is None else self._forward_node(*forward)
        return self._forward

    def _note_inputs(self, position: int, node: Node) -> None:
        for source in dict.fromkeys(node.inputs):
            self._takers.setdefault((node.op, self._taken(source)), []).append(position)

    def _taken(self, source: Output | Outside) -> Output | Outside | int:
        """What a source is known by when a tape hands it back: small tensors by their id."""
        if isinstance(source, Outside):
            external = self.trace.externals[source.index]
            if external.kind in (Kind.SMALL, Kind.NUMBER):
                return id(external.tensor)
        return source

    def _forward_node(self, op: str, inputs: Any, outputs: Any) -> int | None:
        for tensor in outputs or ():
            output = self._output_of(tensor) if type(tensor) is EagerTensor else None
            if output is not None:
                return self.trace.producer_position(output)
        # The latest node that takes all of what the tape still has.
        sources = [self._known_source(x) for x in inputs or () if type(x) is EagerTensor]
        takers = [self._takers[op, x] for x in sources if (op, x) in self._takers]
        if not takers:
            return None
        for position in reversed(min(takers, key=len)):
            if all(_holds(positions, position) for positions in takers):
                return position
        return None

    def _known_source(self, tensor: Any) -> Output | Outside | int:
        output = self._output_of(tensor)
        if output is not None:
            return Output(output)
        external = self._externals.get(id(tensor))
        return id(tensor) if external is None else Outside(external)

    # --- nodes ---

    def _note_uncertain(self, node: Node) -> None:
        if self._takes_uncertain(node) or makes_shape_of_values(node.op):
            self._uncertain.update(node.outputs)

    def _takes_uncertain(self, node: Node) -> bool:
        return any(isinstance(s, Output) and s.index in self._uncertain for s in node.inputs)

    def _effect(self, op: str, call: Call, args: tuple[Any, ...]) -> Effect:
        effect = effect_of(op)
        inputs = _tensors(args[3:] if call is Call.FAST_PATH else args[3])
        if runs_in_place(effect):
            # E.g. a function of a dataset that uses a variable sees what was written to it before.
            return Effect.BARRIER if any(map(self._is_variable, inputs)) else effect
        fallible = may_fail(op) or self._is_uncertain(inputs) or self._takes_numbers(inputs)
        if fallible and (settings.sync or may_be_handled(self._loop)):
            # The handler has to see the error, so the op runs where the handler is.
            return Effect.LOCAL if effect is Effect.PURE else Effect.BARRIER
        if tensorflow_internals.placed_elsewhere():
            return Effect.LOCAL if effect is Effect.PURE else Effect.BARRIER
        if effect in ON_VARIABLES:
            resources = [x for x in inputs if x.dtype.as_datatype_enum == _RESOURCE]
            # A variable that was made in this very step lives in Python's half.
            if any(map(self._is_made_here, resources)):
                return Effect.LOCAL
            if effect is not Effect.READ and not self._checks_itself(op, effect, resources, inputs):
                return Effect.BARRIER
        return effect

    def _is_variable(self, tensor: Any) -> bool:
        """Whether it is the handle of a variable that graphs may write."""
        return tensorflow_internals.is_variable_handle(tensor) and not self._is_made_here(tensor)

    def _is_made_here(self, handle: Any) -> bool:
        """Whether this iteration has made a resource."""
        if id(handle) in self._alive:
            return True
        number = tensorflow_internals.tensor_id(handle)
        if number <= self._since:
            return False
        self.trace.made_aside.add(number)  # in a block of plain eager mode, or in a function
        return True

    def _checks_itself(
        self, op: str, effect: Effect, resources: list[Any], inputs: list[Any]
    ) -> bool:
        """Whether all that could make a write fail can be checked before it is made."""
        shape = tensorflow_internals.variable_shape(resources[0])
        certain = shape is not None and None not in shape
        if effect is Effect.ASSIGN:
            return certain or (op == "AssignVariableOp" and not self._is_uncertain(inputs))
        if tensorflow_internals.input_position(op, "indices") is not None:
            return certain
        return op.startswith("ResourceApply") and not self._is_uncertain(inputs)

    def _takes_numbers(self, inputs: list[Any]) -> bool:
        """Whether sizes or axes come from outside: others than these may not fit."""
        return any(
            x.dtype.as_datatype_enum in INTEGERS and self._output_of(x) is None for x in inputs
        )

    def _is_uncertain(self, inputs: list[Any]) -> bool:
        return any(self._output_of(x) in self._uncertain for x in inputs)

    def _in_place_node(self, op: str, call: Call, args: tuple[Any, ...]) -> Node:
        name = "" if tensorflow_internals.op_def(op) is None and call is not Call.FAST_PATH else op
        inputs = _tensors(args[3:] if call is Call.FAST_PATH else args[3])
        known = [self._output_of(x) for x in inputs]
        sources = tuple(Output(output) for output in known if output is not None)
        return Node(name, call, (), sources, (), 0, 0, Result.NONE)

    def _fast_path_node(self, op: str, args: tuple[Any, ...], seen: list[tuple[Any, ...]]) -> Node:
        # Nested ops of the call (a Python function's body) are seen first, so ours is the last one.
        _, inputs, attrs, _, *_ = next(s for s in reversed(seen) if _op_name(s[0]) == op)
        rest = args[3:]
        takes_list = tensorflow_internals.list_inputs(op)
        count = len(takes_list)
        flat = iter(inputs)
        spec: list[Arg] = []
        sources: list[Output | Outside] = []
        for position, value in enumerate(rest):
            if position >= count:
                spec.append(Python(_frozen(value)))
            elif takes_list[position] and isinstance(value, (list, tuple)):
                items = tuple(self._source(x, next(flat)) for x in value)
                spec.append(Items(items))
                sources.extend(items)
            else:
                source = self._source(value, next(flat))
                spec.append(source)
                sources.append(source)
        return Node(
            op, Call.FAST_PATH, tuple(spec), tuple(sources), tuple(attrs), 0, 0, Result.NONE
        )

    def _execute_node(self, op: str, call: Call, args: tuple[Any, ...]) -> Node:
        inputs, attrs = args[3], args[4]
        sources = tuple(self._source(x, x) for x in inputs)
        spec = (Items(sources), Python(_frozen(attrs)))
        return Node(op, call, spec, sources, tuple(attrs or ()), 0, 0, Result.NONE)

    def _source(self, passed: Any, tensor: Any) -> Output | Outside:
        """Names an op input: `passed` is what the program gave, `tensor` what the op got."""
        if type(passed) is not EagerTensor:
            return self._new_external(
                External(
                    Kind.NUMBER,
                    *dtype_and_shape(tensor),
                    tensor,
                    _frozen(passed),
                    _content(tensor),
                )
            )
        output = self._output_of(passed)
        if output is not None:
            return Output(output)
        if id(passed) in self._externals:
            return Outside(self._externals[id(passed)])
        dtype, shape = dtype_and_shape(passed)
        if dtype == _RESOURCE:
            external = External(Kind.RESOURCE, dtype, shape, passed, passed)
        elif self._is_small(passed, dtype, shape):
            external = External(Kind.SMALL, dtype, shape, passed, passed, _content(passed))
            return self._new_external(external)
        else:
            external = External(Kind.TENSOR, dtype, shape)
        source = self._new_external(external)
        self._externals[id(passed)] = source.index
        self._held.append(passed)
        return source

    def _output_of(self, tensor: Any) -> int | None:
        """The output that a tensor is, if an op of this iteration made it."""
        known = self._alive.get(id(tensor))
        if known is not None:
            return known[0]
        shared = native.core.recorded_output(tensor)  # another tensor with the same handle
        return shared if shared >= 0 else None

    def _is_small(self, tensor: Any, dtype: int, shape: tuple[int, ...]) -> bool:
        if dtype in _UNSIZED or id(tensor) in self._arguments:
            return False
        return tensor.dtype.size * int(np.prod(shape, dtype=np.int64)) <= settings.constant_bytes

    def _new_external(self, external: External) -> Outside:
        self.trace.externals.append(external)
        return Outside(len(self.trace.externals) - 1)

    # --- what the program keeps ---

    def _remember(self, tensor: Any, output: int) -> None:
        key = id(tensor)
        alive = self._alive

        def forget(_: Any) -> None:
            alive.pop(key, None)

        alive[key] = (output, weakref.ref(tensor, forget))

    def _kept_now(self) -> frozenset[int]:
        return frozenset(output for output, _ in self._alive.values())

    def _note_kept(self) -> None:
        position = len(self.trace.nodes)
        known = self.trace.kept.get(position, frozenset())
        self.trace.kept[position] = known | self._kept_now()


def _holds(ascending: Sequence[int], number: int) -> bool:
    place = bisect.bisect_left(ascending, number)
    return place < len(ascending) and ascending[place] == number


def _op_name(op: Any) -> str:
    return op.decode() if isinstance(op, bytes) else op


def _frozen(value: Any) -> Any:
    """A value that stays as it is now; lists and arrays can be changed by whoever passed them."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)([_frozen(item) for item in value])
    return value


def _as_list(result: Any) -> list[Any]:
    if result is None:
        return []
    if not isinstance(result, (list, tuple)):
        return [result]
    return [x for item in result for x in (item if isinstance(item, list) else [item])]


def _groups(result: Any) -> tuple[int, ...]:
    """How an op with several outputs, some of them lists, returns them."""
    if not isinstance(result, list) or not any(isinstance(item, list) for item in result):
        return ()
    return tuple(len(item) if isinstance(item, list) else -1 for item in result)


def _tensors(args: Any) -> list[Any]:
    """The tensors among call arguments."""
    found = []
    for arg in args:
        if type(arg) is EagerTensor:
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += _tensors(arg)
    return found


def _result_kind(result: Any) -> Result:
    if result is None:
        return Result.NONE
    return Result.LIST if isinstance(result, (list, tuple)) else Result.SINGLE


def _content(tensor: Any) -> bytes:
    if tensor.dtype.as_datatype_enum in _UNSIZED:
        return b""
    return np.asarray(tensor.numpy()).tobytes()
