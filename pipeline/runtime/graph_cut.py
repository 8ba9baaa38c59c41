"""Cuts a traced graph of a forward and backward pass into pieces that run apart.

A stage is traced once, forward and gradients in one graph. The forward piece then computes the
outputs and the *stash*: every tensor of the forward pass that the backward pass reads. The backward
piece starts from the stash. Where the two part is the policy:

* `keep`: at every forward tensor that a gradient reads; nothing is computed twice.
* `recompute`: at the inputs; the forward is repeated in the backward piece. What cannot be
  repeated, the outputs of stateful ops such as random numbers, is kept.

Two things are never in a stash, because the backward piece can make them at no cost: what depends
on weights alone (it reads the weights again; they only change between steps) and views of what is
in the stash already.

A piece is a list of feeds, a list of fetches and the ops between them. It is run by importing these
ops into the function that is being traced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import tensorflow as tf

from pipeline import tensorflow_internals

# Ops that read how large their input is and not what is in it.
_SIZES = frozenset({"Shape", "ShapeN", "Size", "Rank"})
_COPIES = _SIZES | {"Transpose"}
# Ops whose output is, or costs no more than, another view of their first input's memory.
_VIEWS = frozenset({"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient"})

GraphTensor = tf.Tensor


class TracedGraph:
    """A function's graph, with what is known about its ops.

    Args:
        concrete: the traced function.
        updated: resource handles, as the function captured them, of the variables that the forward
            pass updates; what was read from them cannot be read again.
    """

    def __init__(self, concrete: tf.types.experimental.ConcreteFunction, updated: set[int]) -> None:
        self._graph = concrete.graph
        self._definition = concrete.graph.as_graph_def()
        self._nodes = {node.name: node for node in self._definition.node}
        captured = concrete.captured_inputs
        inner = concrete.inputs[len(concrete.inputs) - len(captured) :]
        # Name of a captured tensor in the graph → the tensor outside.
        self._captured = {tensor.name: outer for tensor, outer in zip(inner, captured, strict=True)}
        self._updated = {
            tensor.op.name
            for tensor, outer in zip(inner, captured, strict=True)
            if id(outer) in updated
        } | self._assigned(inner)
        self._fixed: dict[str, bool] = {}

    def _assigned(self, captured: Iterable[GraphTensor]) -> set[str]:
        """Names of the captured resources that some op of the graph assigns."""
        resources = {tensor.name: tensor.op.name for tensor in captured}
        return {
            resources[value.name]
            for op in self._graph.get_operations()
            if op.type.startswith(("Assign", "ResourceScatter"))
            for value in op.inputs
            if value.name in resources
        }

    def is_fixed(self, op: tf.Operation) -> bool:
        """Whether the op's outputs are the same whenever it runs within one step."""
        known = self._fixed.get(op.name)
        if known is not None:
            return known
        # Without recursion: graphs can be deep.
        order = [op]
        while order:
            current = order[-1]
            if current.name in self._fixed:
                order.pop()
                continue
            waiting = [value.op for value in current.inputs if value.op.name not in self._fixed]
            if waiting and not self._is_base(current):
                order.extend(waiting)
                continue
            self._fixed[current.name] = self._fixed_given_inputs(current)
            order.pop()
        return self._fixed[op.name]

    def _is_base(self, op: tf.Operation) -> bool:
        return op.type in ("Placeholder", "Const")

    def _fixed_given_inputs(self, op: tf.Operation) -> bool:
        if op.type == "Placeholder":
            return op.outputs[0].name in self._captured and op.name not in self._updated
        if op.op_def.is_stateful and op.type != "ReadVariableOp":
            return False
        return all(self._fixed[value.op.name] for value in op.inputs)

    def ancestors(self, fetches: Iterable[GraphTensor]) -> set[str]:
        """Names of the ops whose outputs the fetches depend on, their own included."""
        found: set[str] = set()
        waiting = [tensor.op for tensor in fetches]
        while waiting:
            op = waiting.pop()
            if op.name not in found:
                found.add(op.name)
                waiting.extend(value.op for value in op.inputs)
        return found

    def with_sizes(self, ops: set[str]) -> set[str]:
        """The ops, and those that read the sizes of what they make.

        Gradients ask for many tensors' sizes alone; the stash then holds these and not the tensors.
        """
        return ops | {
            op.name
            for op in self._graph.get_operations()
            if op.type in _SIZES and all(value.op.name in ops for value in op.inputs)
        }

    def piece(
        self,
        fetches: Sequence[GraphTensor],
        is_feed: Callable[[GraphTensor], bool],
        effects: Sequence[tf.Operation] = (),
    ) -> Piece:
        """The ops that the fetches need, back to the tensors that `is_feed` names.

        Args:
            fetches: what the piece computes.
            is_feed: whether a tensor comes from outside.
            effects: ops that the piece runs besides, for what they do.
        """
        feeds: dict[str, GraphTensor] = {}
        ops = {op.name for op in effects}
        seen: set[str] = set()
        waiting = [*fetches, *(tensor for op in effects for tensor in op.inputs)]
        while waiting:
            tensor = waiting.pop()
            if tensor.name in seen or tensor.name in self._captured:
                continue
            seen.add(tensor.name)
            if is_feed(tensor):
                feeds[tensor.name] = tensor
            else:
                ops.add(tensor.op.name)
                waiting.extend(tensor.op.inputs)
        # In the order of the graph, so that equal stages have equal stashes.
        place = {op.name: number for number, op in enumerate(self._graph.get_operations())}
        ordered = sorted(feeds.values(), key=lambda t: (place[t.op.name], t.value_index))
        return Piece(self, ordered, list(fetches), ops)

    def effects(self, given: Sequence[GraphTensor]) -> list[tf.Operation]:
        """The ops that run for what they do (assignments, prints), as far as `given` leads to them.

        Args:
            given: the placeholders that there are values for.
        """
        known = {tensor.name for tensor in given} | set(self._captured)
        return [
            op
            for op in self._graph.control_outputs
            if all(
                f"{name}:0" in known
                for name in self.ancestors(op.inputs)
                if self._nodes[name].op == "Placeholder"
            )
        ]

    def run(
        self,
        ops: set[str],
        feeds: Sequence[GraphTensor],
        values: Sequence[tf.Tensor],
        fetches: Sequence[GraphTensor],
    ) -> list[tf.Tensor]:
        """Imports the ops into the function that is being traced; see `Piece.run`."""
        definition = tf.compat.v1.GraphDef()
        definition.versions.CopyFrom(self._definition.versions)
        definition.library.CopyFrom(self._definition.library)
        for node in self._definition.node:
            if node.name not in ops:
                continue
            copy = definition.node.add()
            copy.CopyFrom(node)
            copy.attr.pop("_class", None)  # a placement beside an op that may not be here
            inputs = [name for name in node.input if not name.startswith("^") or name[1:] in ops]
            del copy.input[:]
            copy.input.extend(inputs)
        given = {feed.name: value for feed, value in zip(feeds, values, strict=True)}
        given.update(self._captured)
        used = {
            name if ":" in name else f"{name}:0" for node in definition.node for name in node.input
        }
        inside = [fetch for fetch in fetches if fetch.name not in given]
        results = iter(
            tf.graph_util.import_graph_def(
                definition,
                input_map={
                    name: tensorflow_internals.capture(value)
                    for name, value in given.items()
                    if name in used
                },
                return_elements=[fetch.name for fetch in inside],
                name="",
            )
            or []
        )
        return [given[f.name] if f.name in given else next(results) for f in fetches]


class Piece:
    """A part of a traced graph.

    Attributes:
        feeds: the graph's tensors that it starts from.
        fetches: the graph's tensors that it computes.
        ops: names of the ops in it.
    """

    def __init__(
        self,
        graph: TracedGraph,
        feeds: list[GraphTensor],
        fetches: list[GraphTensor],
        ops: set[str],
    ) -> None:
        self._graph = graph
        self.feeds = feeds
        self.fetches = fetches
        self.ops = ops

    def run(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Puts the piece into the function that is being traced.

        Args:
            values: one for each of `feeds`.

        Returns:
            One tensor for each of `fetches`.
        """
        return self._graph.run(self.ops, self.feeds, values, self.fetches)


def stash_boundary(
    graph: TracedGraph,
    forward_ops: set[str],
    recompute: bool,
    copies: Collection[str] = (),
) -> Callable[[GraphTensor], bool]:
    """Which tensors the backward piece is fed with; see the module's first paragraph.

    Args:
        graph: the traced graph.
        forward_ops: the names of the ops of the forward pass.
        recompute: the policy.
        copies: names of ops whose outputs are made anew, of `copies_among`.
    """

    def is_feed(tensor: GraphTensor) -> bool:
        op = tensor.op
        if op.type == "Placeholder":
            return True
        if op.name not in forward_ops or graph.is_fixed(op):
            return False
        if recompute:
            return op.op_def.is_stateful
        return op.type not in _VIEWS and op.name not in copies

    return is_feed


def copies_among(stash: Sequence[GraphTensor]) -> set[str]:
    """The ops of a stash that only copy, in another order, or measure what is in the stash as well.

    A dense layer copies an input of more than two dimensions so, even where the order is the same.
    """
    names = {tensor.name for tensor in stash}
    return {
        tensor.op.name
        for tensor in stash
        if tensor.op.type in _COPIES and _viewed(tensor.op.inputs[0]).name in names
    }


def _viewed(tensor: GraphTensor) -> GraphTensor:
    while tensor.op.type in _VIEWS:
        tensor = tensor.op.inputs[0]
    return tensor
