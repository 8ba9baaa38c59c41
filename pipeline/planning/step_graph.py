"""StepGraph: a traced TensorFlow step as nodes that can be profiled, placed and run.

A step is a `tf.function`, a plain callable, a step of `terra_tf` (its Python is traced, as
`tf.function` would) or a `ConcreteFunction`, for example one of those that `terra_tf` generated.
Of its nodes, inputs are everywhere and constants are copied to where they are needed; everything
else that the results or side effects need is an operation of the `OpGraph`. What touches a variable
is bound to the device where the variable lives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.errors import PlanningError
from pipeline.planning.graph import Edge, Op, OpGraph

_FREE = frozenset({"Placeholder", "Const"})


class StepGraph:
    """The nodes of a step.

    Args:
        fn: the step.
        args: what it is called with; shapes are taken from them.

    Raises:
        PlanningError: if it cannot be traced with these arguments.

    Attributes:
        concrete: the traced function.
        names: the names of its operations, each after those that it needs.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        args = tf.nest.map_structure(_as_tensor, tuple(args))
        self.concrete = _trace(fn, args)
        self.graph_def = self.concrete.graph.as_graph_def()
        self.nodes = {node.name: node for node in self.graph_def.node}
        self.flat_args(args)  # refuses what would not fit later
        operations = self.concrete.graph.get_operations()
        self._operations = {operation.name: operation for operation in operations}
        needed = self._needed()
        self.names = [n for n in self._topological() if n in needed and not self.is_free(n)]

    def is_free(self, name: str) -> bool:
        """Whether a node is an input or a constant, which every device has."""
        return self.nodes[name].op in _FREE

    def flat_args(self, args: Sequence[Any]) -> list[tf.Tensor]:
        """The tensors among the arguments, in the order of the graph's inputs."""
        args = tf.nest.map_structure(_as_tensor, tuple(args))
        flat = tf.nest.flatten(args, expand_composites=True)
        tensors = [part for part in flat if isinstance(part, tf.Tensor)]
        wanted = len(self.concrete.inputs) - len(self.concrete.captured_inputs)
        if len(tensors) != wanted:
            raise PlanningError(
                f"the step takes {wanted} tensors, its arguments hold {len(tensors)}; pass tensors "
                "or arrays, the same as when it was traced",
                "arguments",
            )
        return tensors

    def inputs_of(self, name: str) -> list[tuple[str, int]]:
        """The nodes that a node needs, with the number of the output; -1: an order alone."""
        return [_parse(text) for text in self.nodes[name].input]

    def output_bytes(self, name: str, output: int) -> float:
        """The size of an output by its shape; 0 where the shape is open."""
        if output < 0:
            return 0.0
        tensor = self._operations[name].outputs[output]
        if tensor.dtype in (tf.resource, tf.variant, tf.string):
            return 0.0
        elements = tensor.shape.num_elements()
        return 0.0 if elements is None else float(elements * tensor.dtype.size)

    def op_graph(self, seconds: dict[str, float]) -> OpGraph:
        """The graph of the operations, with their times by name."""
        positions = {name: number for number, name in enumerate(self.names)}
        homes = self._homes()
        nodes = []
        sizes: dict[tuple[str, str], dict[int, float]] = {}
        for name in self.names:
            outputs = range(len(self._operations[name].outputs))
            held = sum(self.output_bytes(name, output) for output in outputs)
            nodes.append(Op(name, seconds.get(name, 0.0), held, device=homes.get(name)))
            for source, output in self.inputs_of(name):
                if source in positions:
                    size = self.output_bytes(source, output)
                    sizes.setdefault((source, name), {})[output] = size
        return OpGraph(nodes, (Edge(*pair, sum(of.values())) for pair, of in sizes.items()))

    def _homes(self) -> dict[str, int]:
        """For operations that touch a variable, the number of the device where it lives."""
        captured = self.concrete.captured_inputs
        internal = self.concrete.inputs[len(self.concrete.inputs) - len(captured) :]
        homes = {}
        for inside, outside in zip(internal, captured, strict=True):
            if inside.dtype == tf.resource:
                found = re.search(r"(\d+)$", outside.device or "")
                homes[inside.op.name] = int(found[1]) if found else 0
        found_for = {}
        for name in self.names:
            for source, output in self.inputs_of(name):
                if output >= 0 and source in homes:
                    found_for[name] = homes[source]
        return found_for

    def _needed(self) -> set[str]:
        """The nodes that results and side effects need."""
        graph = self.concrete.graph
        waiting = [tensor.op.name for tensor in self.concrete.outputs]
        waiting += [operation.name for operation in graph.control_outputs]
        needed: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name not in needed:
                needed.add(name)
                waiting += [source for source, _ in self.inputs_of(name)]
        return needed

    def _topological(self) -> list[str]:
        import graphlib

        needs = {name: {source for source, _ in self.inputs_of(name)} for name in self.nodes}
        try:
            return list(graphlib.TopologicalSorter(needs).static_order())
        except graphlib.CycleError as error:
            raise PlanningError(
                "the step's graph has a cycle (a loop of TensorFlow 1); trace it with control flow "
                f"of version 2: {error.args[1][:3]}",
                "cycle",
            ) from None


def _as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value


def _trace(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    if hasattr(fn, "captured_inputs"):  # a ConcreteFunction
        return fn
    if not callable(fn):
        raise PlanningError(f"the step must be callable, not {fn!r}", "no-step")
    if not hasattr(fn, "get_concrete_function"):
        from terra_tf import Step

        plain = fn.__wrapped__ if isinstance(fn, Step) else fn
        fn = tf.function(plain, autograph=False)
    return fn.get_concrete_function(*args)


def _parse(text: str) -> tuple[str, int]:
    """A node's input: `name`, `name:1`, or `^name` for an order without a tensor."""
    if text.startswith("^"):
        return text[1:], -1
    name, _, output = text.partition(":")
    return name, int(output or 0)
