"""Sequences: what becomes of nodes, arguments, shapes, looks and blocks when traces are merged."""

import copy

import numpy as np
import pytest
import tensorflow as tf
from tracegraphs import FLOAT, INT32, Program, chain

from terra_tf.tracegraph.identity import identify
from terra_tf.tracegraph.merging import Comparison, united
from terra_tf.tracegraph.sequence import Block, Sequence
from terra_tf.tracing.effects import Effect
from terra_tf.tracing.trace import Call, Items, Kind, Output, Outside, Python, Result

pytestmark = pytest.mark.timeout(60)


def merged(*traces):
    sequence = Sequence.of(traces[0])
    for trace in traces[1:]:
        sequence.merge(trace)
    return sequence


def teaches(sequence, trace):
    """Whether a trace shows a sequence anything new; merges it."""
    before = sequence.version
    sequence.merge(trace)
    return sequence.version > before


def ops(sequence):
    return [node.op for node in sequence.trace.nodes]


def select(sequence, op, i=0):
    """The select that an op, of which there is one, takes as an input."""
    (node,) = (node for node in sequence.trace.nodes if node.op == op)
    assert isinstance(node.inputs[i], Outside)
    external = sequence.trace.externals[node.inputs[i].index]
    assert external.kind is Kind.SELECT
    return external


def optional(sequence):
    """Blocks by their ops, those that may be skipped in brackets."""
    names = ops(sequence)
    return " ".join(
        f"[{' '.join(names[b.start : b.end])}]" if b.optional else " ".join(names[b.start : b.end])
        for b in sequence.blocks()
    )


# ---------------------------------------------------------------- which nodes can be one


def unary(arg=None, op="Exp", shape=(2,), **more):
    """A trace of one op; `arg` makes its argument."""
    program = Program()
    program.op(op, program.tensor() if arg is None else arg(program), shape=shape, **more)
    return program.trace


def shareable(one, other):
    return Comparison(one, other).shareable(one.nodes[-1], other.nodes[-1])


DIFFERENT = {
    "another op": unary(op="Log"),
    "another entry point": unary(call=Call.EXECUTE),
    "more outputs": unary(outputs=2),
    "a list as result": unary(result=Result.LIST),
    "a nested result": unary(groups=(-1, 2)),
    "a miss": unary(misses=True),
    "a failure": unary(fails=True),
    "another effect": unary(effect=Effect.ASSIGN),
    "an input of another rank": unary(lambda p: p.tensor((2, 2))),
    "an input of another dtype": unary(lambda p: p.tensor(dtype=INT32)),
    "an output of another rank": unary(shape=(2, 1)),
    "a number instead of a tensor": unary(lambda p: p.number(1.0)),
    "an attribute instead of a tensor": unary(lambda p: Python(1.0)),
    "a list instead of a tensor": unary(lambda p: Items((p.tensor(),))),
}

ALIKE = {
    "the same": unary(),
    "an input of another size": unary(lambda p: p.tensor((3,))),
    "an output of another size": unary(shape=(3,)),
    "a small tensor": unary(lambda p: p.tensor(kind=Kind.SMALL)),
    "an op's output": unary(lambda p: p.op("Neg", p.tensor())),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_nodes_that_differ_in_more_than_values_are_two(case):
    assert not shareable(unary(), DIFFERENT[case])
    assert not shareable(DIFFERENT[case], unary())


@pytest.mark.parametrize("case", ALIKE)
def test_nodes_that_differ_in_sizes_and_sources_can_be_one(case):
    assert shareable(unary(), ALIKE[case])
    assert shareable(ALIKE[case], unary())


def test_what_runs_in_place_takes_any_inputs():
    def printing(*inputs):
        program = Program()
        given = [program.tensor() for _ in inputs]
        program.op("PrintV2", *given, outputs=0, effect=Effect.LOCAL)
        return program.trace

    assert shareable(printing(1), printing())
    assert shareable(unary(effect=Effect.LOCAL), unary())
    assert shareable(unary(), unary(effect=Effect.BARRIER))


def test_lists_of_different_length_can_be_one():
    def packed(count):
        return unary(lambda p: Items(tuple(p.tensor() for _ in range(count))), op="Pack")

    assert shareable(packed(2), packed(3))
    assert shareable(packed(3), packed(2))


def test_resources_are_told_apart_by_identity():
    one, two = tf.Variable(1.0), tf.Variable(1.0)

    def reading(variable):
        return unary(lambda p: p.variable(variable), op="ReadVariableOp", effect=Effect.READ)

    assert shareable(reading(one), reading(one))
    assert not shareable(reading(one), reading(two))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1.0, 1.0, True),
        (1.0, 1, False),
        (True, 1, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        ("a", "a", True),
        ([1, 2], [1, 2], True),
        ([1, 2], (1, 2), False),
        ([1, 2], [1, True], False),
        (None, None, True),
        (tf.float32, tf.float32, True),
        (tf.float32, tf.float64, False),
        (np.array([1, 2]), np.array([1, 2]), False),  # no single truth value: never the same
    ],
)
def test_python_values_of_a_call_are_compared_by_type_and_value(one, other, same):
    assert shareable(unary(lambda p: Python(one)), unary(lambda p: Python(other))) is same


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [(1.0, 2.0, True), (1, 2, True), (1, 2.0, False), ([1, 2], [3, 4], True), ([1], [1, 2], False)],
)
def test_numbers_are_compared_by_form(one, other, same):
    assert shareable(unary(lambda p: p.number(one)), unary(lambda p: p.number(other))) is same


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ((2, 3), (2, 3), (2, 3)),
        ((2, 3), (4, 3), (None, 3)),
        ((None, 3), (4, 3), (None, 3)),
        ((2, 3), (2,), None),
        (None, (2,), None),
        ((), (), ()),
    ],
)
def test_united_shapes_leave_open_what_differs(one, other, both):
    assert united(one, other) == united(other, one) == both


# ---------------------------------------------------------------- values and shapes


def test_a_number_that_differs_is_fed_from_then_on():
    sequence = merged(chain(factor=2.0), chain(factor=2.0))
    assert not sequence.trace.externals[1].varies and sequence.version == 0
    assert teaches(sequence, chain(factor=3.0))
    assert sequence.trace.externals[1].varies
    assert not teaches(sequence, chain(factor=4.0))


def test_what_varied_in_the_prefix_of_a_fallback_varies():
    other = chain()
    other.externals[1].varies = True
    sequence = merged(chain(), other)
    assert sequence.trace.externals[1].varies and sequence.version == 1


def test_sizes_that_differ_are_left_open():
    sequence = merged(chain("Exp Log"), chain("Exp Log", shape=(5,)))
    assert ops(sequence) == ["Mul", "Exp", "Log"]
    assert sequence.trace.externals[0].shape == (None,)
    assert [info.shape for info in sequence.trace.outputs] == [(None,)] * 3
    assert sequence.dynamic == {0, 1, 2}
    assert not teaches(sequence, chain("Exp Log", shape=(7,)))


def test_only_what_differs_is_left_open():
    sequence = merged(chain(shape=(4, 3)), chain(shape=(5, 3)))
    assert sequence.trace.externals[0].shape == (None, 3)


def test_an_output_of_another_rank_is_a_node_of_its_own():
    sequence = merged(chain("Sum"), chain("Sum", shape=(2, 2)))
    assert sorted(ops(sequence)) == ["Mul", "Mul", "Sum", "Sum"]
    assert sequence.branches >= 1


# ---------------------------------------------------------------- branches


def test_a_trace_that_is_known_teaches_nothing():
    sequence = merged(chain("Exp Log"), chain("Exp Log"))
    assert (sequence.version, sequence.seen) == (0, 2)
    assert [node.count for node in sequence.trace.nodes] == [2, 2, 2]
    assert sequence.cuts == set()
    assert sequence.blocks() == [Block(0, 3, False)]
    assert (sequence.branches, sequence.loops) == (0, 0)


def fork(taken, *, last="Neg"):
    """One of several ops, or none, and one that takes the result."""
    program = Program()
    x = program.op("Mul", program.tensor(), program.number(2.0), line=1)
    if taken:
        x = program.op(taken, x, line={"Exp": 2, "Log": 3, "Sin": 4}[taken])
    program.op(last, x, line=9)
    return program.trace


def test_a_branch_is_blocks_of_which_one_is_taken_and_a_select():
    sequence = merged(fork("Exp"), fork("Log"))
    assert sequence.version == 1
    assert ops(sequence) == ["Mul", "Exp", "Log", "Neg"]
    assert optional(sequence) == "Mul [Exp] [Log] Neg"
    assert [node.count for node in sequence.trace.nodes] == [2, 1, 1, 2]
    assert select(sequence, "Neg").alternatives == {1, 2}
    assert sequence.trace.nodes[2].inputs == (Output(0),)
    assert sequence.producers == [0, 1, 2, 3]
    assert sequence.branches == 1


def test_a_select_widens_and_then_every_way_is_known():
    sequence = merged(fork("Exp"), fork("Log"), fork(None))
    assert select(sequence, "Neg").alternatives == {0, 1, 2}
    version = sequence.version
    for taken in ("Exp", None, "Log", "Exp"):
        assert not teaches(sequence, fork(taken))

    assert sequence.version == version
    assert teaches(sequence, fork("Sin"))
    assert sequence.version == version + 1


def test_a_branch_with_nothing_on_the_other_side():
    for order in ((None, "Exp"), ("Exp", None)):
        sequence = merged(*map(fork, order))
        assert optional(sequence) == "Mul [Exp] Neg"
        assert select(sequence, "Neg").alternatives == {0, 1}


def joined(taken, *, second):
    """Two ops behind a branch; the second takes what the first does, or its own result."""
    program = Program()
    start = program.op("Mul", program.tensor(), program.number(2.0), line=1)
    x = program.op(taken, start, line={"Exp": 2, "Log": 3}[taken])
    first = program.op("Neg", x, line=8)
    program.op("Sub", x, {"same": x, "start": start, "first": first}[second], line=9)
    return program.trace


def test_inputs_that_always_take_the_same_share_a_select():
    sequence = merged(*(joined(taken, second="same") for taken in ("Exp", "Log", "Exp")))
    shared = select(sequence, "Neg")
    assert select(sequence, "Sub", 0) is shared and select(sequence, "Sub", 1) is shared


def test_inputs_that_once_took_something_else_share_no_select():
    sequence = merged(
        joined("Exp", second="same"), joined("Log", second="same"), joined("Log", second="start")
    )
    assert select(sequence, "Sub", 0) is select(sequence, "Neg")
    other = select(sequence, "Sub", 1)
    assert other is not select(sequence, "Neg")
    assert other.alternatives == {0, 1, 2}
    assert select(sequence, "Neg").alternatives == {1, 2}
    # Which of two selects has to take what follows is a matter of the position alone.
    for taken, second in (("Exp", "same"), ("Log", "start"), ("Exp", "start"), ("Log", "same")):
        assert not teaches(sequence, joined(taken, second=second))


def test_a_tensor_from_outside_or_from_an_op_is_a_select():
    program = Program()
    program.op("Mul", program.tensor(), program.number(2.0), line=1)
    program.op("Neg", program.tensor(), line=9)
    sequence = merged(fork(None), program.trace)
    assert select(sequence, "Neg").alternatives == {0}


def outsiders(same):
    program = Program()
    x = program.tensor()
    program.op("Sub", x, x if same else program.tensor(), line=1)
    return program.trace


def test_one_tensor_from_outside_is_not_two():
    known = merged(outsiders(True), outsiders(True))
    assert known.version == 0
    for order in ((True, False), (False, True)):
        sequence = merged(*map(outsiders, order))
        assert sequence.version == 1
        assert (
            any(
                sequence.trace.externals[source.index].kind is Kind.SELECT
                for source in sequence.trace.nodes[0].inputs
            )
            or len(set(sequence.trace.nodes[0].inputs)) == 2
        )
        for same in (True, False):
            assert not teaches(sequence, outsiders(same))


def test_a_select_leaves_open_sizes_that_differ():
    def trace(wide):
        program = Program()
        x = program.tensor((2, 3))
        if wide:
            x = program.op("Tile", x, line=2, shape=(4, 3))
        program.op("Neg", x, line=3, shape=(4 if wide else 2, 3))
        return program.trace

    sequence = merged(trace(False), trace(True))
    assert select(sequence, "Neg").shape == (None, 3)
    assert sequence.dynamic == {1}


def test_the_variable_of_a_merged_node_is_the_same_external():
    variable = tf.Variable([1.0, 2.0])

    def trace(*lines):
        program = Program()
        handle = program.variable(variable)
        for line in lines:
            program.op("ReadVariableOp", handle, line=line, effect=Effect.READ)
        return program.trace

    sequence = merged(trace(1), trace(1, 2), trace(2))
    assert len(sequence.trace.externals) == 1
    assert [node.inputs for node in sequence.trace.nodes] == [(Outside(0),)] * 2


def test_nodes_of_a_branch_refer_to_what_they_took_there():
    def trace(taken):
        program = Program()
        x = program.op("Mul", program.tensor(), program.number(2.0), line=1)
        if taken:
            program.op("Exp", x, line=2)
            y = program.op("Log", x, line=3)
            x = program.op("Sub", Items((y, x)), program.tensor(), line=4)
        program.op("Neg", x, line=5)
        return program.trace

    sequence = merged(trace(False), trace(True))
    assert ops(sequence) == ["Mul", "Exp", "Log", "Sub", "Neg"]
    subtraction = sequence.trace.nodes[3]
    assert subtraction.args[0] == Items((Output(2), Output(0)))
    assert subtraction.inputs[:2] == (Output(2), Output(0))
    external = sequence.trace.externals[subtraction.inputs[2].index]
    assert external.kind is Kind.TENSOR and subtraction.inputs[2].index not in (0, 1)


def test_the_forward_node_of_a_backward_one_moves_with_it():
    def trace(taken):
        program = Program()
        x = program.op("Sin", program.tensor(), line=5)
        if taken:
            program.op("Exp", x, line=2)
        program.op("Cos", x, line=9, gradient_of=0)
        if taken:
            program.op("Tan", x, line=9, gradient_of=1)
        return program.trace

    for order in ((False, True), (True, False)):
        sequence = merged(*map(trace, order))
        found = {n.op: n.gradient_of for n in sequence.trace.nodes if n.gradient_of is not None}
        assert {op: ops(sequence)[k] for op, k in found.items()} == {"Cos": "Sin", "Tan": "Exp"}


def test_a_backward_node_that_was_not_always_the_same_ones_is_nobodys():
    def trace(forward):
        program = Program()
        x = program.op("Sin", program.tensor(), line=1)
        x = program.op("Exp", x, line=2)
        program.op("Cos", x, line=9, gradient_of=forward)
        return program.trace

    sequence = merged(trace(0), trace(0))
    assert sequence.trace.nodes[-1].gradient_of == 0
    version = sequence.version
    trace_of_another = trace(1)
    identify(trace_of_another)
    # As a walk may have matched it: by what it takes, not by whose gradient it is.
    sequence.merge(trace_of_another, tuple(sequence.ids))
    assert ops(sequence) == ["Sin", "Exp", "Cos"]
    assert sequence.trace.nodes[-1].gradient_of is None
    assert sequence.version > version


def test_ids_stay_when_nodes_are_added():
    sequence = merged(chain("Exp Neg", lines="2 9"))
    before = dict(zip(ops(sequence), sequence.ids, strict=True))
    sequence.merge(chain("Log Sin Neg", lines="3 4 9"))
    after = dict(zip(ops(sequence), sequence.ids, strict=True))
    assert {op: after[op] for op in before} == before
    assert len(set(sequence.ids)) == len(sequence.trace.nodes) == 5


def test_what_a_walk_has_matched_is_not_guessed_anew():
    """Two lines alike: only the walk knows which of the two calls it was."""

    def trace(*lines):
        return chain(" ".join(["Exp"] * len(lines)), lines=" ".join(map(str, lines)))

    sequence = merged(trace(3, 3))
    sequence.merge(trace(3))
    assert [node.count for node in sequence.trace.nodes] == [2, 2, 1]
    walked = (sequence.ids[0], sequence.ids[2])
    sequence.merge(trace(3), walked)
    assert [node.count for node in sequence.trace.nodes] == [3, 2, 2]


def test_merging_changes_neither_the_other_trace_nor_a_snapshot():
    sequence = merged(fork("Exp"), fork("Log"))
    snapshot = sequence.snapshot()
    described = describe(snapshot)
    assert described == describe(sequence)
    other = fork(None)
    other.externals[0].shape = (5,)
    before = str(other), copy.copy(other.externals[0].shape), list(other.outputs)
    sequence.merge(other)
    sequence.merge(chain("Sin Cos", factor=9.0, lines="4 5"))
    sequence.generalise_selects()
    assert describe(snapshot) == described != describe(sequence)
    assert (str(other), other.externals[0].shape, other.outputs) == before
    snapshot.merge(fork("Sin"))
    assert "Sin" in ops(snapshot)


def describe(sequence):
    trace = sequence.trace
    externals = [(x.kind, x.shape, x.varies, x.alternatives) for x in trace.externals]
    nodes = [(n.op, n.args, n.inputs, n.effect, n.count, n.first_output) for n in trace.nodes]
    rest = sequence.ids, sequence.reads, sequence.kept, sequence.dynamic, sequence.cuts
    return nodes, externals, list(trace.outputs), copy.deepcopy(rest), list(sequence.producers)


# ---------------------------------------------------------------- in place


def test_what_runs_in_place_in_one_trace_does_in_all_and_takes_what_any_took():
    def trace(both, effect):
        program = Program()
        x = program.op("Mul", program.tensor(), program.number(2.0), line=1)
        y = program.op("Exp", x, line=2)
        program.op("Print", *([x, y] if both else [y]), line=3, outputs=0, effect=effect)
        return program.trace

    sequence = merged(trace(False, Effect.LOCAL), trace(True, Effect.LOCAL))
    assert ops(sequence) == ["Mul", "Exp", "Print"]
    assert sequence.trace.nodes[2].inputs == (Output(0), Output(1))
    assert sequence.version == 1
    assert not teaches(sequence, trace(False, Effect.LOCAL))

    assert teaches(sequence, trace(False, Effect.BARRIER))
    assert sequence.trace.nodes[2].effect is Effect.BARRIER
    assert not teaches(sequence, trace(True, Effect.LOCAL))
    assert sequence.trace.nodes[2].effect is Effect.BARRIER


def test_an_op_that_had_to_run_in_place_once_does_from_then_on():
    sequence = merged(unary(), unary(effect=Effect.LOCAL))
    assert sequence.version == 1 and sequence.trace.nodes[0].in_place
    assert sequence.trace.nodes[0].args == ()
    assert not teaches(sequence, unary())
    assert sequence.trace.nodes[0].in_place


def test_a_list_whose_length_differs_is_taken_in_place():
    def trace(count):
        program = Program()
        made = [program.op("Exp", program.tensor(), line=k) for k in range(3)]
        program.op("AddN", Items(tuple(made[:count])), line=9)
        return program.trace

    sequence = merged(trace(2), trace(3))
    assert sequence.trace.nodes[3].effect is Effect.LOCAL
    assert sequence.trace.nodes[3].inputs == (Output(0), Output(1), Output(2))


# ---------------------------------------------------------------- looks


def test_every_place_where_a_value_is_looked_at_is_known():
    def trace(*positions):
        program = Program()
        x = program.op("Mul", program.tensor(), program.number(2.0))
        for k, op in enumerate(("Exp", "Log", "Neg")):
            if k + 1 in positions:
                program.read(Output(0))
            x = program.op(op, x, line=k)
        return program.trace

    sequence = merged(trace(2), trace(2))
    assert set(sequence.reads) == {(0, 2)} and sequence.version == 0
    assert teaches(sequence, trace(3))
    assert set(sequence.reads) == {(0, 2), (0, 3)}
    assert not teaches(sequence, trace())
    assert set(sequence.reads) == {(0, 2), (0, 3)}


def test_looks_and_kept_values_move_with_the_nodes():
    def trace(taken):
        program = Program()
        x = program.op("Mul", program.tensor(), program.number(2.0), line=1)
        if taken:
            program.op("Exp", x, line=2)
        y = program.op("Neg", x, line=3)
        program.read(y)
        program.keep(x)
        program.op("Tan", y, line=4)
        program.keep(y)
        return program.trace

    sequence = merged(trace(False))
    assert set(sequence.reads) == {(1, 2)} and sequence.kept == {2: {0}, 3: {1}}
    sequence.merge(trace(True))
    assert ops(sequence) == ["Mul", "Exp", "Neg", "Tan"]
    assert set(sequence.reads) == {(2, 3)}
    assert sequence.kept == {3: {0}, 4: {2}}
    assert not teaches(sequence, trace(False))
    assert set(sequence.reads) == {(2, 3)}


def test_kept_tensors_are_united_by_position():
    def trace(*held):
        made = chain()
        made.kept[2] = frozenset(held)
        return made

    sequence = merged(trace(1), trace())
    assert sequence.version == 0
    assert teaches(sequence, trace(0))
    assert sequence.kept == {2: {0, 1}}


# ---------------------------------------------------------------- loops


def loop(turns):
    """A loop, and an op that takes what it leaves."""
    program = Program()
    x = program.op("Mul", program.tensor(), program.number(2.0), line=1)
    for _ in range(turns):
        x = program.op("Sin", program.op("Exp", x, line=2), line=3)
    program.op("Neg", x, line=9)
    return program.trace


def test_a_loop_of_varying_length_is_a_chain_of_blocks():
    sequence = merged(loop(3), loop(5), loop(4))
    assert ops(sequence) == ["Mul", *["Exp", "Sin"] * 5, "Neg"]
    assert optional(sequence) == "Mul [Exp Sin] [Exp Sin] [Exp Sin] [Exp Sin] [Exp Sin] Neg"
    assert sequence.loops == 1
    # Outputs 2, 4, ... are those of the turns' last ops.
    assert select(sequence, "Neg").alternatives >= {6, 8, 10}


def test_what_some_turns_showed_holds_for_all():
    """Turns that no trace has left the loop after can be the last ones, too."""
    sequence = merged(loop(5), loop(3), loop(2))
    assert sequence.selected_outputs() >= {2, 4, 6, 8, 10}


def test_selects_of_some_turns_are_those_of_all():
    """In the loop's body an input is whatever the branch before it has left."""

    def trace(*taken):
        program = Program()
        x = program.op("Mul", program.tensor(), program.number(2.0), line=1)
        for yes in taken:
            if yes:
                x = program.op("Exp", x, line=2)
            x = program.op("Sin", x, line=3)
        return program.trace

    sequence = merged(trace(1, 1, 1, 1), trace(1, 0, 0, 1))
    sequence.generalise_selects()
    sines = [node for node in sequence.trace.nodes if node.op == "Sin"]
    kinds = [sequence.trace.externals[n.inputs[0].index].kind for n in sines]
    assert kinds == [Kind.SELECT] * 4
    assert optional(sequence) == "Mul [Exp] Sin [Exp] Sin [Exp] Sin [Exp] Sin"


def test_a_sequence_prints_its_blocks():
    assert str(merged(fork("Exp"), fork("Log"))) == (
        "4 nodes in 4 blocks, 2 of them optional; seen 2 times, no graph"
    )


def test_similarity_is_the_share_of_known_nodes():
    sequence = merged(chain("Exp Log Neg"))
    assert sequence.similarity(identified(chain("Exp Log Neg"))) == 1.0
    assert sequence.similarity(identified(chain("Exp Sin Cos"))) == 0.5
    assert sequence.similarity(identified(Program().trace)) == 0.0
    assert merged(Program().trace).similarity(identified(Program().trace)) == 1.0


def identified(trace):
    Sequence.of(trace)
    return trace


def test_dtype_of_a_select_is_that_of_its_sources():
    assert select(merged(fork("Exp"), fork(None)), "Neg").dtype == FLOAT
