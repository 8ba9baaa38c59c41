"""Plans: where effects may become visible in the middle of an iteration, and what leaves the graph.

The traces are recorded from small steps, so the tests state what a program needs, by its source.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import terra_tf as terra
from terra_tf.generation.plan import make_plan

pytestmark = pytest.mark.timeout(60)


class Planned:
    """The plan of a step that was called once, or once for each of `ways`, its last argument."""

    def __init__(self, function, *arguments, ways=None):
        step = terra.function(function)
        if ways is None:
            step(*arguments)
        for way in ways or ():
            step(*arguments, way)
            step._region.runner.tracegraph.sequences[0].graph = None  # so that it is traced again
        (self.sequence,) = (s.snapshot() for s in step._region.runner.tracegraph.sequences)
        self.plan = make_plan(self.sequence)
        self.trace = self.sequence.trace
        self.end = len(self.trace.nodes)

    def position(self, op):
        (k,) = [k for k, node in enumerate(self.trace.nodes) if node.op == op and not node.misses]
        return k

    def output(self, op):
        return self.trace.nodes[self.position(op)].first_output

    def gate(self, op):
        return self.plan.gate[self.output(op)]

    def fetched(self):
        """Op types of what leaves the graph."""
        return sorted(self.trace.producer(output).op for output in self.plan.fetched)


@pytest.fixture
def weights():
    return tf.Variable([1.0, 2.0])


X = tf.constant([3.0, 4.0])


def descend(variable, gradient, rate=0.5):
    """An update by a kernel that changes the variable in place."""
    tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)


def test_a_pure_step_has_its_only_boundary_at_the_end():
    planned = Planned(lambda x: tf.exp(x) + 1.0, X)
    assert planned.plan.boundaries == [planned.end]
    assert planned.plan.gate == [0, 0]
    assert planned.fetched() == ["AddV2"]
    assert planned.plan.barrier == {}


def test_a_step_without_any_op_has_one_boundary():
    planned = Planned(lambda x: 5, X)
    assert planned.plan.boundaries == [0]
    assert planned.plan.fetched == set()


def test_reads_before_any_effect_need_no_boundary(weights):
    def step(x):
        loss = tf.reduce_sum(x * weights)
        if float(loss) > 0:
            descend(weights, tf.exp(x))
        return loss

    planned = Planned(step, X)
    assert planned.plan.boundaries == [planned.end]
    assert "Sum" in planned.fetched()


def test_a_read_behind_a_write_in_place_needs_a_boundary_right_before_it(weights):
    def step(x):
        descend(weights, x)
        total = tf.reduce_sum(weights.read_value())
        if float(total) > -100:  # only the kernel knows the new value
            return tf.exp(x)
        return x

    planned = Planned(step, X)
    assert planned.plan.boundaries == [planned.position("Exp"), planned.end]
    assert planned.gate("ReadVariableOp") == 1
    assert planned.gate("Sum") == 1
    assert planned.gate("Exp") == 0
    assert planned.fetched() == ["Exp", "Sum"]


def test_a_read_of_a_value_before_the_write_needs_none(weights):
    def step(x):
        before = tf.reduce_sum(weights.read_value())
        descend(weights, x)
        float(before)
        return tf.exp(x)

    planned = Planned(step, X)
    assert planned.plan.boundaries == [planned.end]
    assert planned.gate("Sum") == 0


def test_several_reads_behind_one_write_share_a_boundary(weights):
    def step(x):
        descend(weights, x)
        value = weights.read_value()
        float(tf.reduce_sum(value))
        float(tf.reduce_max(value))
        value.numpy()
        return x + 1.0

    planned = Planned(step, X)
    # The first one already opened the gate of the write.
    assert planned.plan.boundaries == [planned.position("Max"), planned.end]


def test_each_write_in_place_with_a_read_behind_it_has_its_boundary(weights):
    def step(x):
        descend(weights, x)
        float(tf.reduce_sum(weights.read_value()))
        descend(weights, tf.exp(x))
        float(tf.reduce_max(weights.read_value()))
        return tf.sin(x)

    planned = Planned(step, X)
    assert planned.plan.boundaries == [
        planned.position("Exp"),
        planned.position("Sin"),
        planned.end,
    ]
    assert (planned.gate("Sum"), planned.gate("Max")) == (1, 2)


def test_values_of_assignments_are_forwarded_so_reads_need_no_boundary(weights):
    def step(x):
        weights.assign(x * 2.0)
        float(tf.reduce_sum(weights.read_value()))
        weights.assign_add(x)
        float(tf.reduce_max(weights.read_value()))
        weights.assign_sub(tf.exp(x))
        float(tf.reduce_min(weights.read_value()))
        return tf.sin(x)

    planned = Planned(step, X)
    assert planned.plan.boundaries == [planned.end]
    assert set(planned.plan.gate) == {0}


def test_an_assignment_of_a_value_behind_a_write_is_behind_its_gate(weights):
    other = tf.Variable([0.0, 0.0])

    def step(x):
        descend(weights, x)
        other.assign(weights.read_value())
        float(tf.reduce_sum(other.read_value()))
        return tf.exp(x)

    planned = Planned(step, X)
    assert planned.gate("Sum") == 1
    assert planned.plan.boundaries == [planned.position("Exp"), planned.end]


def test_assign_add_to_a_variable_that_a_kernel_wrote_is_behind_its_gate(weights):
    def step(x):
        descend(weights, x)
        weights.assign_add(x)
        float(tf.reduce_sum(weights.read_value()))
        return tf.exp(x)

    planned = Planned(step, X)
    assert planned.gate("Sum") == 1
    assert planned.plan.boundaries == [planned.position("Exp"), planned.end]


def test_an_assignment_makes_a_variable_known_again(weights):
    def step(x):
        descend(weights, x)
        weights.assign(x)
        float(tf.reduce_sum(weights.read_value()))
        return tf.exp(x)

    planned = Planned(step, X)
    assert planned.gate("Sum") == 0
    assert planned.plan.boundaries == [planned.end]


def test_writes_to_one_variable_do_not_hold_up_reads_of_another(weights):
    other = tf.Variable([5.0, 6.0])

    def step(x):
        descend(weights, x)
        float(tf.reduce_sum(other.read_value()))
        return tf.exp(x)

    planned = Planned(step, X)
    assert planned.plan.boundaries == [planned.end]


def test_a_slot_that_a_kernel_updates_beside_the_weights_counts_as_written(weights):
    slot = tf.Variable([0.0, 0.0])

    def step(x):
        tf.raw_ops.ResourceApplyMomentum(
            var=weights.handle, accum=slot.handle, lr=0.1, grad=x, momentum=0.9
        )
        float(tf.reduce_sum(slot.read_value()))
        return tf.exp(x)

    planned = Planned(step, X)
    assert planned.plan.boundaries == [planned.position("Exp"), planned.end]


def test_a_py_function_is_a_barrier_behind_a_boundary(weights):
    def step(x):
        weights.assign(x)
        y = tf.py_function(lambda v: v + weights, [tf.exp(x)], tf.float32)
        return y + weights.read_value()

    planned = Planned(step, X)
    call = planned.position("EagerPyFunc")
    assert planned.plan.boundaries == [call, planned.end]
    assert planned.plan.barrier == {call: 0}
    assert "Exp" in planned.fetched()  # its input
    assert planned.gate("ReadVariableOp") == 1  # it may have changed the variable
    assert "EagerPyFunc" not in planned.fetched()  # it did not run in the graph


def test_a_variable_that_nothing_touched_before_a_barrier_is_behind_it_too(weights):
    def change():
        weights.assign_add([1.0, 1.0])

    def step(x):
        tf.py_function(change, [], [])
        float(tf.reduce_sum(weights.read_value()))
        return tf.exp(x)

    planned = Planned(step, X)
    call = planned.position("EagerPyFunc")
    assert planned.plan.boundaries == [call, planned.end]
    assert planned.gate("Sum") == 1


def test_two_barriers_in_a_row_have_a_boundary_each():
    def step(x):
        tf.py_function(lambda: None, [], [])
        tf.py_function(lambda: None, [], [])
        return tf.exp(x)

    planned = Planned(step, X)
    calls = [k for k, node in enumerate(planned.trace.nodes) if node.op == "EagerPyFunc"]
    assert len(calls) == 2
    assert sorted(planned.plan.barrier) == calls
    assert planned.plan.boundaries == [*calls, planned.end]


def test_an_op_in_place_that_touches_no_variable_is_no_barrier(weights):
    def step(x):
        descend(weights, x)
        noise = tf.random.uniform([2])
        return noise + x

    planned = Planned(step, X)
    assert planned.plan.boundaries == [planned.end]
    assert planned.plan.barrier == {}


def test_an_op_in_place_that_takes_a_value_behind_a_write_needs_a_boundary(weights):
    def step(x):
        descend(weights, x)
        tf.print(weights.read_value(), output_stream="file:///dev/null")
        return tf.exp(x)

    planned = Planned(step, X)
    # The text that is printed is made by StringFormat, which runs in place, too.
    assert planned.plan.boundaries == [planned.position("StringFormat"), planned.end]


def test_what_python_keeps_is_fetched_and_what_it_drops_is_not():
    parked = []

    def step(x):
        parked.append(tf.exp(x))
        return tf.sin(tf.cos(x))

    planned = Planned(step, X)
    assert planned.fetched() == ["Exp", "Sin"]


def test_what_python_still_holds_at_a_boundary_is_fetched(weights):
    """After the gate is open the prefix cannot be replayed any more: its values must be there."""

    def step(x):
        later = tf.exp(x)
        dropped = tf.sin(x)
        del dropped
        descend(weights, later)
        float(tf.reduce_sum(weights.read_value()))
        return tf.cos(later)

    planned = Planned(step, X)
    assert planned.fetched() == ["Cos", "Exp", "Sum"]


# ---------------------------------------------------------------- branches


def test_an_assignment_in_a_branch_waits_for_what_was_written_before_it(weights):
    """Where the branch is not taken, the variable has the value from before it."""

    def step(x, taken):
        descend(weights, x)
        if taken:
            weights.assign(x)
        float(tf.reduce_sum(weights.read_value()))
        return tf.exp(x)

    planned = Planned(step, X, ways=[True, False])
    assert planned.gate("Sum") == 1
    assert planned.plan.boundaries == [planned.position("Exp"), planned.end]
    always = Planned(step, X, ways=[True, True])
    assert always.gate("Sum") == 0


def test_a_select_waits_for_whatever_it_may_be(weights):
    def step(x, taken):
        if taken:
            descend(weights, x)
            y = weights.read_value()
        else:
            y = tf.sin(x)
        return tf.exp(y)

    planned = Planned(step, X, ways=[True, False])
    (gate,) = planned.plan.select_gate.values()
    assert gate == planned.gate("ReadVariableOp") == planned.gate("Exp") == 1
    assert planned.plan.selected >= {planned.output("Identity"), planned.output("Sin")}
    assert planned.gate("Sin") == 0


def test_a_read_that_only_some_iterations_do_has_its_boundary(weights):
    def step(x, taken):
        descend(weights, x)
        total = tf.reduce_sum(weights.read_value())
        if taken:
            float(total)
        return tf.exp(x)

    for ways in ([True, False], [False, True]):
        planned = Planned(step, X, ways=ways)
        assert planned.plan.boundaries == [planned.position("Exp"), planned.end]
        assert "Sum" in planned.fetched()


def test_a_boundary_in_a_block_cuts_it(weights):
    def step(x, taken):
        y = tf.exp(x)
        if taken:
            descend(weights, y)
            y = weights.read_value()
            float(tf.reduce_sum(y))
            y = tf.sin(y)
        return tf.cos(y)

    planned = Planned(step, X, ways=[True, False])
    inner = planned.position("Sin")
    assert planned.plan.boundaries == [inner, planned.end]
    edges = [block.start for block in planned.plan.blocks]
    assert inner in edges
    assert [block.optional for block in planned.plan.blocks] == [False, True, True, False]
    assert planned.plan.blocks[-1].end == planned.end


def test_blocks_cover_all_nodes_and_no_boundary_is_inside_one(weights):
    def step(x, turns):
        for turn in range(turns):
            x = tf.sin(x + weights)
            if turn % 2:
                tf.py_function(lambda: None, [], [])
            descend(weights, x * 0.1)
        float(tf.reduce_sum(weights.read_value()))
        return x

    planned = Planned(step, X, ways=[3, 5, 1, 4])
    blocks = planned.plan.blocks
    assert blocks[0].start == 0 and blocks[-1].end == planned.end
    assert all(a.end == b.start for a, b in itertools.pairwise(blocks))
    assert all(
        not block.start < boundary < block.end
        for block in blocks
        for boundary in planned.plan.boundaries
    )
    assert planned.plan.boundaries == sorted(planned.plan.boundaries)
    assert set(planned.plan.barrier) == {
        k for k, node in enumerate(planned.trace.nodes) if node.op == "EagerPyFunc"
    }


def test_planning_leaves_the_sequence_as_it_is(weights):
    def step(x, turns):
        for _ in range(turns):
            x = tf.sin(x) + 1.0
        tf.print(x, output_stream="file:///dev/null")
        return x

    step = terra.function(step)
    for turns in (3, 5, 2):
        step(X, turns)
    (sequence,) = step._region.runner.tracegraph.sequences
    before = str(sequence.trace), len(sequence.trace.externals)
    make_plan(sequence.snapshot())
    assert (str(sequence.trace), len(sequence.trace.externals)) == before


def test_a_plan_prints_its_boundaries(weights):
    def step(x):
        descend(weights, x)
        float(tf.reduce_sum(weights.read_value()))
        return tf.exp(x)

    planned = Planned(step, X)
    position = planned.position("Exp")
    outputs = len(planned.plan.gate)
    assert str(planned.plan) == (
        f"boundaries at {position}, {planned.end}; 2 fetched of {outputs} outputs"
    )


def test_programs_with_boundaries_compute_what_eager_computes(weights):
    """The plans above, put to work: one step with all of them."""
    slot = tf.Variable([0.0, 0.0])

    looks = []

    def change():
        slot.assign_add(weights * 0.5)

    def program(x):
        descend(weights, x * 0.1)
        looks.append(float(tf.reduce_sum(weights.read_value())))
        weights.assign_add(x)
        tf.py_function(change, [], [])
        looks.append(slot.numpy().tolist())
        tf.raw_ops.ResourceApplyMomentum(
            var=weights.handle, accum=slot.handle, lr=0.1, grad=x, momentum=0.9
        )
        looks.append(slot.numpy().tolist())
        return weights + slot

    def run(function):
        weights.assign([1.0, 2.0])
        slot.assign([0.0, 0.0])
        looks.clear()
        results = [function(X * float(turn)).numpy().tolist() for turn in range(6)]
        return results, list(looks), weights.numpy().tolist(), slot.numpy().tolist()

    step = terra.function(program)
    expected = run(program)
    assert run(step) == expected
    assert step.stats().coexecuted >= 3
    assert np.isfinite(expected[0]).all()
