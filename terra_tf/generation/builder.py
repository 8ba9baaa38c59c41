"""Builds the graph of a planned sequence.

Ops are added one by one in program order, block by block (`blocks`) and segment by segment
(`plan`); `variables` knows what each variable holds. There are no automatic control dependencies:
whatever has to come after something else gets a control edge here.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from terra_tf import tensorflow_internals
from terra_tf.generation.blocks import OpenBlock
from terra_tf.generation.compilation import Compilation
from terra_tf.generation.known_values import KnownValues
from terra_tf.generation.plan import Plan, resources_of
from terra_tf.generation.slots import Slots
from terra_tf.generation.variables import Variables
from terra_tf.tracegraph.sequence import Block, Sequence
from terra_tf.tracing.effects import Effect, may_fail
from terra_tf.tracing.trace import Kind, Node, Output, Outside, Shape


class _LargeTensors:
    """Keeps the executor from making all large tensors first that depend on nothing.

    A graph may run in any order that its edges allow; eager frees a tensor after its last use. Each
    large tensor waits until one made a few before it has been used.
    """

    _BYTES = 1 << 20
    _AT_ONCE = 4

    def __init__(self) -> None:
        self._tensors: list[tf.Tensor] = []

    def before(self, inputs: list[tf.Tensor]) -> tf.Operation | None:
        """What an op that may make a large tensor of `inputs` has to come after."""
        if len(self._tensors) < self._AT_ONCE:
            return None
        users = self._tensors[-self._AT_ONCE].consumers()
        return users[-1] if users else None

    def made(self, operation: tf.Operation) -> None:
        """Notes the outputs of an op."""
        for tensor in operation.outputs:
            elements = tensor.shape.num_elements() if tensor.shape.rank is not None else None
            if elements is not None and elements * max(tensor.dtype.size or 1, 1) >= self._BYTES:
                self._tensors.append(tensor)


class _BlockParts:
    """What is collected while the ops of one block are added."""

    def __init__(self) -> None:
        self.large = _LargeTensors()
        self.externals: dict[int, tf.Tensor] = {}
        self.feeds: dict[int, tf.Tensor] = {}  # output of an op in place -> its feed
        self.effects: list[tf.Operation] = []
        self.fallible: list[tf.Operation] = []  # what the segment's effects have to wait for
        self.fallible_later: list[tf.Operation] = []  # what they need not
        self.ends: list[tf.Operation] = []  # what the function has to run, or it is pruned


class GraphBuilder:
    """Adds the ops of one sequence to a graph; see the module's text."""

    def __init__(
        self,
        sequence: Sequence,
        plan: Plan,
        slots: Slots,
        compilation: Compilation | None = None,
    ):
        """Prepares the building.

        Args:
          sequence: what is built.
          plan: how it is co-executed.
          slots: the numbering, which grows.
          compilation: chooses ops for XLA; None: no op is compiled.
        """
        self._compilation = compilation
        self._sequence = sequence
        self._trace = sequence.trace
        self._plan = plan
        self._slots = slots
        self.tensors: dict[int, tf.Tensor] = {}  # output -> graph tensor
        self._known = KnownValues(sequence.trace)
        self.known = self._known.values
        self.static: dict[int, bool] = {}  # output -> its shape is certain before it is computed
        self._always = _BlockParts()  # of the blocks that are never skipped
        self._parts = self._always
        self._ends: list[tf.Operation] = []  # what the function has to run to its end
        self._kept: list[tf.Operation] = []  # what must not be pruned from it
        self._all_fallible: list[tf.Operation] = []

    def build(self, graph: tf.Graph, iteration: tf.Tensor) -> list[tf.Operation]:
        """Adds everything; returns the ops that must not be pruned, the last one first."""
        self._graph = graph
        self._iteration = iteration
        self._variables = Variables(graph, lambda resource: self._input(Outside(resource)))
        boundaries = iter(enumerate(self._plan.boundaries))
        number, position = next(boundaries)
        self._open_segment(number)
        for block_number, block in enumerate(self._plan.blocks):
            while position == block.start and number < len(self._plan.boundaries) - 1:
                self._close_segment(number)
                number, position = next(boundaries)
                self._open_segment(number)
            if block.optional:
                self._add_optional_block(block_number, block)
            else:
                self._add_nodes(block)
            self._cut_span()
        for _ in range(number, len(self._plan.boundaries) - 1):
            self._close_segment(number)
            number, _ = next(boundaries)
            self._open_segment(number)
        self._close_segment(number)
        with graph.control_dependencies(self._all_fallible):
            checked = self._op("TerraSegmentDone", [iteration], slot=self._slots.checked)
        with graph.control_dependencies([*self._ends, checked]):
            return [tf.no_op(), *self._kept]

    # --- blocks ---

    def _add_nodes(self, block: Block) -> None:
        for k in range(block.start, block.end):
            node = self._trace.nodes[k]
            if k in self._plan.barrier:
                slot = self._slots.resume(self._plan.barrier[k])
                self._variables.forget(self._op("TerraGate", [self._iteration], slot=slot))
            if not node.misses and not node.in_place:
                self._add_node(k, node)
        if self._parts is self._always:
            self._end_parts(lambda operations: operations)

    def _add_optional_block(self, number: int, block: Block) -> None:
        nodes = self._trace.nodes[block.start : block.end]
        updated = {
            resource
            for node in nodes
            if node.effect is Effect.WRITE
            for resource in resources_of(node, self._sequence)
        }
        for resource in self._variables.dirty(updated):
            self._effects.append(self._variables.commit(resource, self._gate))
        slot = self._slots.taken(number)
        opened = OpenBlock(self._graph, self._feed(slot, tf.bool.as_datatype_enum, ()))
        self._variables.open_block()
        self._parts = _BlockParts()
        with self._graph.control_dependencies([opened.taken]):
            self._add_nodes(block)
        self._variables.close_block(opened)
        self._end_parts(lambda operations: [opened.end(operations)])
        self._parts = self._always

    def _end_parts(self, end: Callable[[list[tf.Operation]], list[tf.Operation]]) -> None:
        """Hands on what has to come after the block; `end` gives ops that may be waited for."""
        parts = self._parts
        if parts.effects:
            self._effects += end(parts.effects)
        if parts.fallible:
            ends = end(parts.fallible)
            self._fallible += ends
            self._all_fallible += ends
        if parts.fallible_later:
            self._all_fallible += end(parts.fallible_later)
        self._kept += parts.ends
        parts.effects, parts.fallible, parts.fallible_later, parts.ends = [], [], [], []

    # --- ops ---

    def _op(self, op: str, inputs: list[tf.Tensor], **attrs: object) -> tf.Operation:
        return tensorflow_internals.create_graph_op(self._graph, op, inputs, attrs)

    def _add_node(self, k: int, node: Node) -> None:
        inputs = [self._input(source) for source in node.inputs]
        attrs = dict(zip(node.attrs[::2], node.attrs[1::2], strict=True))
        effect = node.effect
        if effect is Effect.READ:
            made = self._read(node, inputs, attrs)
        elif effect is Effect.ASSIGN:
            self._assign(node, inputs)
            made = []
        elif effect is Effect.WRITE:
            made = self._write(node, inputs, attrs)
        else:
            before = self._parts.large.before(inputs)
            with self._graph.control_dependencies([] if before is None else [before]):
                inputs = _summed_in_order(node.op, inputs)
                operation = tensorflow_internals.create_graph_op(
                    self._graph, node.op, inputs, attrs
                )
            made = list(operation.outputs)
            self._parts.large.made(operation)
            if self._plan.fallible[k] or not self._is_certain(node, operation):
                self._note_fallible(node, operation)
            if self._compilation is not None and effect is Effect.PURE:
                self._compilation.consider(operation, may_fail(node.op))
        for output, tensor in zip(node.outputs, made, strict=True):
            self._have(node, output, tensor)

    def _is_certain(self, node: Node, operation: tf.Operation) -> bool:
        """Whether its shapes are known to fit: all are fixed, or checked when it is matched."""
        if self._plan.uncertain.isdisjoint(node.outputs) and self._is_inferable(node):
            return True
        return all(t.shape.is_fully_defined() for t in (*operation.inputs, *operation.outputs))

    def _is_inferable(self, node: Node) -> bool:
        return all(
            not isinstance(source, Output) or source.index not in self._plan.uncertain
            for source in node.inputs
        )

    def _note_fallible(self, node: Node, operation: tf.Operation) -> None:
        gate = max((self._plan.gate[output] for output in node.outputs), default=0)
        if gate <= self._segment:
            self._parts.fallible.append(operation)
        else:
            self._parts.fallible_later.append(operation)

    def _have(self, node: Node, output: int, tensor: tf.Tensor) -> None:
        self.tensors[output] = tensor
        known = tensor.shape.is_fully_defined() and output not in self._sequence.dynamic
        self.static[output] = known and tuple(tensor.shape) == self._trace.outputs[output].shape
        if self.static[output] and self._known.look(node, output, tensor):
            return
        # Whoever asks for a shape that only the graph knows has to get it from the value.
        by_value = output in self._plan.uncertain or all(
            t.shape.is_fully_defined() for t in tensor.op.inputs
        )
        if (
            (by_value and not self.static[output])
            or output in self._plan.fetched
            or output in self._plan.selected
        ):
            self._fetch(output, tensor)

    def _cut_span(self) -> None:
        if self._compilation is not None:
            self._compilation.cut()

    def _fetch(self, output: int, tensor: tf.Tensor) -> None:
        self._cut_span()
        slot = self._slots.fetch(output)
        self._parts.ends.append(
            self._op("TerraFetch", [self._iteration, tensor], slot=slot, T=tensor.dtype)
        )

    # --- inputs ---

    def _input(self, source: Output | Outside) -> tf.Tensor:
        if isinstance(source, Outside):
            for parts in (self._always, self._parts):
                if source.index in parts.externals:
                    return parts.externals[source.index]
            tensor = self._external(source.index)
            is_resource = self._trace.externals[source.index].kind is Kind.RESOURCE
            parts = self._always if is_resource else self._parts
            return parts.externals.setdefault(source.index, tensor)
        if source.index in self.tensors:
            return self.tensors[source.index]
        for parts in (self._always, self._parts):
            if source.index in parts.feeds:
                return parts.feeds[source.index]
        # Made in place: comes back as a feed.
        info = self._trace.outputs[source.index]
        slot = self._slots.feed_of_output(source.index)
        return self._parts.feeds.setdefault(source.index, self._feed(slot, info.dtype, info.shape))

    def _external(self, index: int) -> tf.Tensor:
        external = self._trace.externals[index]
        if external.kind is Kind.RESOURCE:
            with self._graph.control_dependencies(None):
                return tensorflow_internals.capture(self._graph, external.tensor)
        if external.fed:
            slot = self._slots.feed_of_external(index)
            return self._feed(slot, external.dtype, external.shape)
        with tf.init_scope():
            value = external.tensor.numpy()
        return tf.constant(value, dtype=external.dtype, shape=external.shape)

    def _feed(self, slot: int, dtype: int, shape: Shape) -> tf.Tensor:
        shape = tf.TensorShape(shape)
        operation = self._op("TerraFeed", [self._iteration], slot=slot, dtype=dtype, shape=shape)
        return operation.outputs[0]

    # --- variables ---

    def _read(self, node: Node, inputs: list[tf.Tensor], attrs: dict) -> list[tf.Tensor]:
        (resource,) = resources_of(node, self._sequence)
        known = self._variables.known_value(resource)
        if known is not None:
            value = _read_value(node.op, known, inputs, attrs)
            if may_fail(node.op):
                self._note_fallible(node, value.op)
            return [value]
        operation = self._variables.read(resource, lambda: self._op(node.op, inputs, **attrs))
        if may_fail(node.op):
            self._note_fallible(node, operation)
        return list(operation.outputs)

    def _assign(self, node: Node, inputs: list[tf.Tensor]) -> None:
        (resource,) = resources_of(node, self._sequence)
        value = self._of_shape(self._must_have_shape(node, resource), inputs[1])
        if node.op == "AssignAddVariableOp":
            value = tf.raw_ops.AddV2(x=self._variables.value(resource, value.dtype), y=value)
        elif node.op == "AssignSubVariableOp":
            value = tf.raw_ops.Sub(x=self._variables.value(resource, value.dtype), y=value)
        self._variables.assign(resource, value)

    def _must_have_shape(self, node: Node, resource: int) -> tuple[int | None, ...] | None:
        """The shape without which the assignment fails; None if it takes any."""
        shape = tensorflow_internals.variable_shape(self._trace.externals[resource].tensor)
        if node.op != "AssignVariableOp":  # the sum has to have the shape of the variable
            return shape if shape is not None and None not in shape else None
        return shape

    def _of_shape(self, shape: tuple[int | None, ...] | None, value: tf.Tensor) -> tf.Tensor:
        """A value whose shape is checked, in the graph where it is not certain."""
        if shape is None or value.shape.is_fully_defined():
            return value
        checked = tf.ensure_shape(value, shape)
        self._parts.fallible.append(checked.op)
        return checked

    def _check_indices(self, node: Node, inputs: list[tf.Tensor]) -> None:
        """Lets bad indices fail ahead of the gate: a write must not fail behind it, half done."""
        position = tensorflow_internals.input_position(node.op, "indices")
        if position is None:
            return
        (resource, *_) = resources_of(node, self._sequence)
        shape = tensorflow_internals.variable_shape(self._trace.externals[resource].tensor)
        rows = tf.zeros(shape, tf.int8) if "Nd" in node.op else tf.zeros(shape[:1], tf.int8)
        look = tf.gather_nd if "Nd" in node.op else tf.gather
        self._parts.fallible.append(look(rows, inputs[position]).op)

    def _write(self, node: Node, inputs: list[tf.Tensor], attrs: dict) -> list[tf.Tensor]:
        self._check_indices(node, inputs)
        *committed, operation = self._variables.write(
            resources_of(node, self._sequence),
            self._gate,
            lambda: self._op(node.op, inputs, **attrs),
        )
        self._parts.effects += [*committed, operation]
        return list(operation.outputs)

    # --- segments ---

    def _open_segment(self, number: int) -> None:
        self._segment = number
        self._effects: list[tf.Operation] = []
        self._fallible: list[tf.Operation] = []
        # Every effect of the segment comes after the gate and after all that may still fail in the
        # segment: it happens whole or not at all.
        gate = self._op("TerraGate", [self._iteration], slot=self._slots.gate(number))
        with self._graph.control_dependencies([gate]):
            self._gate = tf.no_op()

    def _close_segment(self, number: int) -> None:
        for resource in self._variables.dirty():
            self._effects.append(self._variables.commit(resource, self._gate))
        if self._fallible:
            tensorflow_internals.add_control_inputs(self._graph, self._gate, self._fallible)
        before = [self._gate, *self._effects, *self._ends[-1:]]  # after the segments before it, too
        if number in self._plan.barrier.values():  # what runs in place next may change any variable
            before += self._variables.reads()
        with self._graph.control_dependencies(before):
            done = self._op("TerraSegmentDone", [self._iteration], slot=self._slots.done(number))
        self._ends.append(done)


def _summed_in_order(op: str, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """The inputs of an op, changed so that a sum adds them in the order in which eager does.

    AddN sums into the memory of the first input that nothing else uses any more, and takes this one
    first: in a graph the order would depend on which of the other ops have already run. Nothing
    else uses the product, so it always is the one.
    """
    numbers = inputs and (inputs[0].dtype.is_floating or inputs[0].dtype.is_complex)
    if op != "AddN" or len(inputs) < 3 or not numbers:
        return inputs
    return [tf.raw_ops.Mul(x=inputs[0], y=tf.ones([], inputs[0].dtype)), *inputs[1:]]


def _read_value(op: str, value: tf.Tensor, inputs: list[tf.Tensor], attrs: dict) -> tf.Tensor:
    """What a reading op gives for a variable whose value is known symbolically."""
    if op == "ReadVariableOp":
        return value
    if op == "ResourceGather":
        batch_dims = attrs.get("batch_dims") or 0
        return tf.gather(value, inputs[1], axis=batch_dims, batch_dims=batch_dims)
    if op == "ResourceGatherNd":
        return tf.gather_nd(value, inputs[1])
    if op == "VariableShape":
        return tf.shape(value, out_type=attrs.get("out_type") or tf.int32)
    assert op == "VarIsInitializedOp", op
    return tf.constant(True)
