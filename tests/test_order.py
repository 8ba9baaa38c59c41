"""The order of reads and writes in generated graphs.

A graph's ops run in any order that its edges allow, so a missing edge shows only once in a while,
as a lost write. Here the graphs are examined instead of run: whatever blocks an iteration takes,
the accesses to a variable are in a line, and what runs in place comes after all writes before it.
"""

import contextlib
import graphlib
import itertools
import random

import numpy as np
import pytest
import tensorflow as tf

import terra_tf as terra
from tests.test_branches import PROGRAMS, run


class Unreachable(Exception):
    """No iteration takes these blocks together: one takes a tensor out of another, skipped one."""


class Order:
    """Which ops of a graph run under some decisions of its blocks, and what each comes after.

    Attributes:
      after: op name -> names of ops that are certain to have run before; only ops that run.
    """

    def __init__(self, graph, rng, taken):
        self._rng, self._taken = rng, taken
        self._decisions = {}
        self._alive = set()  # names of tensors
        self.after = {}
        operations = {operation.name: operation for operation in graph.get_operations()}
        edges = {
            name: [op.name for op in (*(t.op for t in o.inputs), *o.control_inputs)]
            for name, o in operations.items()
        }
        for name in graphlib.TopologicalSorter(edges).static_order():
            self._visit(operations[name])

    def _visit(self, operation):
        inputs = [t for t in operation.inputs if t.name in self._alive]
        if operation.type == "Merge":
            if not inputs:
                raise Unreachable
            (chosen,) = inputs  # exactly one of its sides is there
            before = [chosen.op]
        elif len(inputs) < len(operation.inputs):
            return
        else:
            before = [t.op for t in inputs]
        if any(op.name not in self.after for op in operation.control_inputs):
            return
        before += operation.control_inputs
        self.after[operation.name] = set().union(
            *({op.name} | self.after[op.name] for op in before)
        )
        outputs = operation.outputs
        if operation.type == "Switch":
            outputs = outputs[1:] if self._decide(operation.inputs[1].op) else outputs[:1]
        self._alive.update(t.name for t in outputs)

    def _decide(self, operation):
        if operation.type == "LogicalOr":
            return any(self._decide(t.op) for t in operation.inputs)
        assert operation.type == "TerraFeed"
        return self._decisions.setdefault(operation.name, self._rng.random() < self._taken)


def accesses(graph):
    """Per variable, the ops that take its handle, as they were added."""
    users = {}
    for operation in graph.get_operations():
        for tensor in operation.inputs:
            if tensor.dtype == tf.resource:
                users.setdefault(tensor.name, []).append(operation)
    return users


def orders(graph, rng):
    """Orders under decisions that an iteration may take, drawn at random."""
    found = []
    for turn in range(300):
        with contextlib.suppress(Unreachable):
            found.append(Order(graph, rng, taken=turn % 10 / 10 + 0.05))
        if len(found) == 40:
            break
    assert len(found) >= 10
    return found


def graphs_of(make, turns, path, seed):
    """The graphs that a program of test_branches had in the end."""
    steps = []

    def wrap(step):
        steps.append(terra.function(step))
        return steps[-1]

    run(make, turns, path / "printed.txt", seed, wrap)
    sequences = steps[0]._region.runner.tracegraph.sequences
    return [sequence.graph.concrete.graph for sequence in sequences if sequence.graph is not None]


def check_order(graph, rng):
    users = accesses(graph)
    # The last one says that nothing has failed, not that effects are done.
    *done, _ = [op for op in graph.get_operations() if op.type == "TerraSegmentDone"]
    for order in orders(graph, rng):
        for operations in users.values():
            alive = [op for op in operations if op.name in order.after]
            for a, b in itertools.combinations(alive, 2):
                if a.type == b.type == "ReadVariableOp":
                    continue
                in_line = a.name in order.after[b.name] or b.name in order.after[a.name]
                assert in_line, f"{a.name} and {b.name} may run in any order"
        for earlier, later in itertools.pairwise(done):
            assert earlier.name in order.after[later.name], f"{later.name} may come too early"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_accesses_to_a_variable_are_in_a_line(program, tmp_path):
    found = graphs_of(program, 40, tmp_path, seed=7)
    assert found
    for graph in found:
        check_order(graph, random.Random(1))


def test_a_conditional_write_of_a_later_segment_lets_no_earlier_one_overtake(tmp_path):
    """Three writes, each of which an iteration makes or not, and Python between them."""

    def make(_):
        v = tf.Variable(np.float32([1, 2]))

        def python():
            v.assign_add([1, 1])

        def step(rng):
            x = v * 1.0
            for turn in range(3):
                if rng.random() < 0.5:
                    tf.py_function(python, [], [])
                if rng.random() < 0.5:
                    x = tf.sin(x + turn)
                    v.assign(x)
            return x

        return step, [v]

    (graph,) = graphs_of(make, 60, tmp_path, seed=3)
    (assigned,) = accesses(graph).values()
    assert sum(op.type == "AssignVariableOp" for op in assigned) >= 3
    check_order(graph, random.Random(2))
