"""Builds the graph of a planned sequence.

Ops are added one by one in program order. Variables are handled as values: an assignment gives the
variable a new symbolic value, later reads in the same iteration use that value, and what the
variable itself gets is committed behind the segment's gate. Ops that update variables in place wait
behind the gate as a whole. Order between reads and writes is kept by control edges made by hand.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from terra_tf import tensorflow_internals
from terra_tf.generation.plan import Plan, resources_of
from terra_tf.generation.slots import Slots
from terra_tf.tracegraph.sequence import Sequence
from terra_tf.tracing.effects import Effect, may_fail
from terra_tf.tracing.trace import Kind, Node, Output, Outside

_SMALL = 32  # elements of a tensor that is a shape or part of one


@dataclasses.dataclass
class _Variable:
    """What the graph knows of a variable at one point of the program."""

    value: tf.Tensor | None = None  # symbolic value, if an assignment has made one
    dirty: bool = False  # `value` is not committed yet
    reads: list[tf.Operation] = dataclasses.field(default_factory=list)  # since the last write
    write: tf.Operation | None = None  # the last op that wrote it


@dataclasses.dataclass
class _Segment:
    """The effects between two boundaries."""

    gate: tf.Operation  # a NoOp behind the TerraGate and behind all of the segment that may fail
    effects: list[tf.Operation] = dataclasses.field(default_factory=list)
    fallible: list[tf.Operation] = dataclasses.field(default_factory=list)


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


def _is_certain(operation: tf.Operation) -> bool:
    """Whether all shapes are known, so that they are known to fit."""
    return all(t.shape.is_fully_defined() for t in (*operation.inputs, *operation.outputs))


class GraphBuilder:
    """Adds the ops of one sequence to a graph; see the module's text."""

    def __init__(self, sequence: Sequence, plan: Plan, slots: Slots):
        self._sequence = sequence
        self._trace = sequence.trace
        self._plan = plan
        self._slots = slots
        self.tensors: dict[int, tf.Tensor] = {}  # output -> graph tensor
        self._externals: dict[int, tf.Tensor] = {}
        self._large = _LargeTensors()
        self._variables: dict[int, _Variable] = {}
        self.known: dict[int, tf.Tensor] = {}  # output -> its value, where it is certain
        self._ends: list[tf.Operation] = []  # what the function has to run to its end
        self._all_fallible: list[tf.Operation] = []
        self._untouched: tf.Operation | None = None  # what a variable's first access comes after
        self.static: dict[int, bool] = {}  # output -> its shape is certain before it is computed

    def build(self, graph: tf.Graph, iteration: tf.Tensor) -> tf.Operation:
        """Adds everything; returns the op at which the graph ends."""
        self._graph = graph
        self._iteration = iteration
        boundaries = iter(enumerate(self._plan.boundaries))
        number, position = next(boundaries)
        self._segment = self._open_segment(number)
        for k, node in enumerate(self._trace.nodes):
            while position == k:
                self._close_segment(number)
                number, position = next(boundaries)
                self._segment = self._open_segment(number)
            if not node.misses and not node.in_place:
                self._add_node(k, node)
        self._close_segment(number)
        with graph.control_dependencies(self._all_fallible):
            checked = self._op("TerraSegmentDone", [iteration], slot=self._slots.checked)
        with graph.control_dependencies([*self._ends, checked]):
            return tf.no_op()

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
            with self._after(self._large.before(inputs)):
                operation = tensorflow_internals.create_graph_op(
                    self._graph, node.op, inputs, attrs
                )
            made = list(operation.outputs)
            self._large.made(operation)
            if self._plan.fallible[k] or not _is_certain(operation):
                self._note_fallible(node, operation)
        for output, tensor in zip(node.outputs, made, strict=True):
            self._have(output, tensor)

    def _note_fallible(self, node: Node, operation: tf.Operation) -> None:
        self._all_fallible.append(operation)
        gate = max((self._plan.gate[output] for output in node.outputs), default=0)
        if gate <= self._segment_number:
            self._segment.fallible.append(operation)

    def _have(self, output: int, tensor: tf.Tensor) -> None:
        self.tensors[output] = tensor
        known = tensor.shape.is_fully_defined() and output not in self._sequence.dynamic
        self.static[output] = known and tuple(tensor.shape) == self._trace.outputs[output].shape
        if self._value_is_certain(output, tensor):
            return
        # Whoever asks for a shape that only the graph knows has to get it from the value.
        if output in self._plan.fetched or not self.static[output]:
            self._fetch(output, tensor)

    def _value_is_certain(self, output: int, tensor: tf.Tensor) -> bool:
        """Whether a shape computation needs no graph, since gradient code looks at those a lot."""
        if not self.static[output] or not tensor.dtype.is_integer or tensor.shape.rank > 1:
            return False
        if tensor.shape.num_elements() > _SMALL or tensor.op.type == "TerraFeed":
            return False
        value = tf.get_static_value(tensor)
        if value is None:
            return False
        with tf.init_scope():
            self.known[output] = tf.constant(value, tensor.dtype)
        return True

    def _fetch(self, output: int, tensor: tf.Tensor) -> None:
        slot = self._slots.fetch(output)
        self._ends.append(
            self._op("TerraFetch", [self._iteration, tensor], slot=slot, T=tensor.dtype)
        )

    # --- inputs ---

    def _input(self, source: Output | Outside) -> tf.Tensor:
        if isinstance(source, Outside):
            if source.index not in self._externals:
                self._externals[source.index] = self._external(source.index)
            return self._externals[source.index]
        if source.index not in self.tensors:  # made in place: comes back as a feed
            info = self._trace.outputs[source.index]
            slot = self._slots.feed_of_output(source.index)
            self.tensors[source.index] = self._feed(slot, info.dtype, info.shape)
        return self.tensors[source.index]

    def _external(self, index: int) -> tf.Tensor:
        external = self._trace.externals[index]
        if external.kind is Kind.RESOURCE:
            return tensorflow_internals.capture(self._graph, external.tensor)
        if external.fed:
            slot = self._slots.feed_of_external(index)
            return self._feed(slot, external.dtype, external.shape)
        with tf.init_scope():
            value = external.tensor.numpy()
        return tf.constant(value, dtype=external.dtype, shape=external.shape)

    def _feed(self, slot: int, dtype: int, shape: tuple[int, ...]) -> tf.Tensor:
        operation = self._op("TerraFeed", [self._iteration], slot=slot, dtype=dtype, shape=shape)
        return operation.outputs[0]

    # --- variables ---

    def _variable(self, external: int) -> _Variable:
        return self._variables.setdefault(external, _Variable(write=self._untouched))

    def _after(self, *operations: tf.Operation | None) -> tf.control_dependencies:
        return self._graph.control_dependencies([op for op in operations if op is not None])

    def _read(self, node: Node, inputs: list[tf.Tensor], attrs: dict) -> list[tf.Tensor]:
        (resource,) = resources_of(node, self._sequence)
        variable = self._variable(resource)
        if variable.value is not None:
            value = _read_value(node.op, variable.value, inputs, attrs)
            if may_fail(node.op):
                self._note_fallible(node, value.op)
            return [value]
        with self._after(variable.write):
            operation = tensorflow_internals.create_graph_op(self._graph, node.op, inputs, attrs)
        variable.reads.append(operation)
        if may_fail(node.op):
            self._note_fallible(node, operation)
        return list(operation.outputs)

    def _value(self, resource: int, dtype: tf.DType) -> tf.Tensor:
        variable = self._variable(resource)
        if variable.value is None:
            with self._after(variable.write):
                operation = self._op("ReadVariableOp", [self._externals[resource]], dtype=dtype)
            variable.reads.append(operation)
            return operation.outputs[0]
        return variable.value

    def _assign(self, node: Node, inputs: list[tf.Tensor]) -> None:
        (resource,) = resources_of(node, self._sequence)
        variable = self._variable(resource)
        value = self._of_shape(self._must_have_shape(node, resource), inputs[1])
        if node.op == "AssignAddVariableOp":
            value = tf.raw_ops.AddV2(x=self._value(resource, value.dtype), y=value)
        elif node.op == "AssignSubVariableOp":
            value = tf.raw_ops.Sub(x=self._value(resource, value.dtype), y=value)
        variable.value, variable.dirty = value, True

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
        self._all_fallible.append(checked.op)
        self._segment.fallible.append(checked.op)
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
        found = look(rows, inputs[position])
        self._all_fallible.append(found.op)
        self._segment.fallible.append(found.op)

    def _commit(self, resource: int, variable: _Variable) -> None:
        """Gives a variable its symbolic value, behind the segment's gate."""
        with self._after(self._segment.gate, variable.write, *variable.reads):
            operation = self._op(
                "AssignVariableOp",
                [self._externals[resource], variable.value],
                dtype=variable.value.dtype,
            )
        self._wrote(variable, operation)
        variable.dirty = False

    def _write(self, node: Node, inputs: list[tf.Tensor], attrs: dict) -> list[tf.Tensor]:
        variables = [(r, self._variable(r)) for r in resources_of(node, self._sequence)]
        self._check_indices(node, inputs)
        before: list[tf.Operation | None] = [self._segment.gate]
        for resource, variable in variables:
            if variable.dirty:
                self._commit(resource, variable)
            before += [variable.write, *variable.reads]
        with self._after(*before):
            operation = tensorflow_internals.create_graph_op(self._graph, node.op, inputs, attrs)
        for _, variable in variables:
            variable.value = None
            self._wrote(variable, operation)
        return list(operation.outputs)

    def _wrote(self, variable: _Variable, operation: tf.Operation) -> None:
        variable.write, variable.reads = operation, []
        self._segment.effects.append(operation)

    # --- segments ---

    def _open_segment(self, number: int) -> _Segment:
        self._segment_number = number
        # Every effect of the segment comes after the gate and after all that may still fail in the
        # segment: it happens whole or not at all.
        gate = self._op("TerraGate", [self._iteration], slot=self._slots.gate(number))
        with self._after(gate):
            return _Segment(tf.no_op())

    def _close_segment(self, number: int) -> None:
        for resource, variable in self._variables.items():
            if variable.dirty:
                self._commit(resource, variable)
        segment = self._segment
        if segment.fallible:
            tensorflow_internals.add_control_inputs(self._graph, segment.gate, segment.fallible)
        with self._after(segment.gate, *segment.effects):
            done = self._op("TerraSegmentDone", [self._iteration], slot=self._slots.done(number))
        self._ends.append(done)
        if number in self._plan.barrier.values():
            self._forget_variables(number)

    def _forget_variables(self, number: int) -> None:
        """What runs in place may change any variable: nothing known before counts after it."""
        resumed = self._op("TerraGate", [self._iteration], slot=self._slots.resume(number))
        for variable in self._variables.values():
            variable.value, variable.reads = None, []
            variable.write = resumed
        self._untouched = resumed


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
