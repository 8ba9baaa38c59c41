"""Writes a planned sequence as the native matcher's Program (native/program.h)."""

from __future__ import annotations

from typing import Any

import numpy as np

from terra_tf import native
from terra_tf.generation.builder import GraphBuilder
from terra_tf.generation.plan import Plan
from terra_tf.generation.shape_values import sized_by_values
from terra_tf.generation.slots import Slots
from terra_tf.tracegraph.sequence import Sequence
from terra_tf.tracing.trace import (
    Arg,
    Call,
    External,
    Items,
    Kind,
    Node,
    Output,
    Outside,
    Python,
    Result,
    Shape,
)

# ArgKind of native/program.h.
_OUTPUT, _FEED, _CONSTANT, _OBJECT, _PYTHON, _PYTHON_FEED, _LIST, _ARRAY, _SELECT = range(9)
_UNKNOWN_RANK = (-2,)
_SCALARS = (int, float, bool, complex, str, bytes, np.generic)

ArgSpec = tuple[int, int, Any, int, int, tuple[int, ...], bytes, tuple[Any, ...]]


class ProgramWriter:
    """Makes the Program of one sequence."""

    def __init__(self, sequence: Sequence, plan: Plan, slots: Slots, builder: GraphBuilder) -> None:
        """Prepares the writing.

        Args:
          sequence: what is expected of the user's program.
          plan: how it is co-executed.
          slots: numbering that the graph was built with.
          builder: what built the graph; knows shapes and values that are certain.
        """
        self._sequence = sequence
        self._trace = sequence.trace
        self._plan = plan
        self._slots = slots
        self._static = builder.static
        self._known = builder.known
        self._tensors = builder.tensors
        self._by_values = sized_by_values(sequence)

    def write(self, function: str, config: bytes, captures: list[Any]) -> Any:
        """The native Program for a function of that name, config and captured handles."""
        program = native.core.Program()
        for k, node in enumerate(self._trace.nodes):
            self._add_node(program, k, node)
        for output in range(len(self._trace.outputs)):
            self._add_output(program, output)
        for number, position in enumerate(self._plan.boundaries):
            barrier = number in self._plan.barrier.values()
            resume = self._slots.resume(number) if barrier else -1
            program.add_boundary(
                position, self._slots.gate(number), self._slots.done(number), resume
            )
        for number, block in enumerate(self._plan.blocks):
            slot = self._slots.taken(number) if block.optional else -1
            program.add_block(block.start, block.end, slot)
        for tensor in captures:
            program.add_capture(tensor)
        program.num_feeds = self._slots.num_feeds
        program.num_slots = self._slots.count
        program.checked_slot = self._slots.checked
        program.function = function
        program.config = config
        return program

    def _add_output(self, program: Any, output: int) -> None:
        info = self._trace.outputs[output]
        program.add_output(
            info.dtype,
            self._static.get(output, True) and output not in self._sequence.dynamic,
            _dims(info.shape),
            self._slots.fetches.get(output, -1),
            self._plan.gate[output],
            self._known.get(output),
            output in self._by_values,
        )

    def _add_node(self, program: Any, k: int, node: Node) -> None:
        in_place = node.in_place
        attrs = inputs = None
        # The slow path's Python tells tapes by itself, unless it is skipped.
        if node.num_outputs and not in_place and not node.misses:
            attrs = node.attrs
            inputs = tuple(self._recorded_tensor(source) for source in node.inputs)
        program.add_node(
            node.op,
            int(node.call),
            node.misses,
            node.fails,
            in_place,
            self._plan.barrier.get(k, -1),
            [self._arg(arg) for arg in node.args],
            attrs,
            inputs,
            node.first_output,
            node.num_outputs,
            int(node.result if node.call is Call.FAST_PATH else Result.LIST),
            list(node.groups),
            -1 if node.gradient_of is None else node.gradient_of,
        )
        if k in self._plan.shape_values:
            program.follows_from_shapes(k, int(self._plan.shape_values[k]))
        if not in_place and not all(self._static.get(output, True) for output in node.outputs):
            self._infer_shapes(program, k, node)

    def _infer_shapes(self, program: Any, k: int, node: Node) -> None:
        """Has the shapes of the outputs computed from those of the inputs when it is matched."""
        operation = self._tensors[node.first_output].op
        if operation.type != node.op:  # a variable whose value is known
            return
        numbers = tuple(self._recorded_tensor(source) for source in node.inputs)
        program.infer_shapes(k, operation.node_def.SerializeToString(), numbers)

    def _recorded_tensor(self, source: Output | Outside) -> Any:
        """For tapes: the tensor of an input that the program passes as a Python number."""
        if isinstance(source, Outside):
            external = self._trace.externals[source.index]
            return external.tensor if external.kind is Kind.NUMBER else None
        return None

    def _arg(self, arg: Arg) -> ArgSpec:
        if isinstance(arg, Items):
            items = tuple(self._arg(item) for item in arg.items)
            return (_LIST, -1, None, -1, 0, (), b"", items)
        if isinstance(arg, Python):
            return (_PYTHON, -1, arg.value, -1, 0, (), b"", ())
        if isinstance(arg, Output):
            return self._output_arg(arg.index)
        return self._outside_arg(arg.index, self._trace.externals[arg.index])

    def _output_arg(self, output: int) -> ArgSpec:
        feed = self._slots.output_feeds.get(output, -1)
        info = self._trace.outputs[output]
        return (_OUTPUT, output, None, feed, info.dtype, _dims(info.shape), b"", ())

    def _outside_arg(self, index: int, external: External) -> ArgSpec:
        if external.kind is Kind.RESOURCE:
            return (_OBJECT, -1, external.tensor, -1, external.dtype, (), b"", ())
        shape = _dims(external.shape)
        if external.kind is Kind.SELECT:
            feed = self._slots.feed_of_external(index)
            gate = self._plan.select_gate.get(index, 0)
            known = np.array(sorted(external.alternatives), np.int32).tobytes()
            return (_SELECT, feed, None, gate, external.dtype, shape, known, ())
        if external.fed:
            kind = _PYTHON_FEED if external.kind is Kind.NUMBER else _FEED
            feed = self._slots.feed_of_external(index)
            return (kind, feed, external.value, -1, external.dtype, shape, b"", ())
        if external.kind is Kind.NUMBER and not isinstance(external.value, _SCALARS):
            return (_ARRAY, -1, external.value, -1, external.dtype, shape, external.content, ())
        if external.kind is Kind.NUMBER:
            return (_PYTHON, -1, external.value, -1, external.dtype, shape, b"", ())
        return (_CONSTANT, -1, external.tensor, -1, external.dtype, shape, external.content, ())


def _dims(shape: Shape) -> tuple[int, ...]:
    """A shape as the native core has it: -1 for a size that is not always the same."""
    if shape is None:
        return _UNKNOWN_RANK
    return tuple(-1 if size is None else size for size in shape)
