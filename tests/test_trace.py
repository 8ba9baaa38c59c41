"""Traces as data: how they print, and when one graph can serve two of them."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from terra_tf import native
from terra_tf.runners.python_runner import initialise
from terra_tf.tracing.effects import Effect
from terra_tf.tracing.location import NOWHERE, Location
from terra_tf.tracing.recorder import Recorder
from terra_tf.tracing.trace import (
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
    first_difference,
    same_structure,
)

pytestmark = pytest.mark.timeout(60)

FLOAT, INT32 = 1, 3
LINE = Location((("train.py", 7, "step"), ("train.py", 20, "<module>")))


def node(op, args, first_output=0, num_outputs=1, **more):
    """A node as the fast path makes it; its inputs are the tensors among the arguments."""
    inputs = [x for arg in args for x in (arg.items if isinstance(arg, Items) else [arg])]
    return Node(
        op=op,
        call=more.pop("call", Call.FAST_PATH),
        args=tuple(args),
        inputs=tuple(x for x in inputs if isinstance(x, Output | Outside)),
        attrs=(),
        first_output=first_output,
        num_outputs=num_outputs,
        result=more.pop("result", Result.SINGLE),
        **more,
    )


def tensor(shape=(2, 2), dtype=FLOAT):
    return External(Kind.TENSOR, dtype, shape)


def number(value):
    content = np.float32(value).tobytes()
    return External(Kind.NUMBER, FLOAT, (), tf.constant(value), value, content)


def product(**changes):
    """@0 @ @0, times 2, plus itself: three nodes."""
    trace = Trace(
        nodes=[
            node("MatMul", [Outside(0), Outside(0), Python("transpose_a"), Python(False)], 0),
            node("Mul", [Output(0), Outside(1)], 1, location=LINE),
            node("AddN", [Items((Output(0), Output(1)))], 2),
        ],
        outputs=[OutputInfo(FLOAT, (2, 2))] * 3,
        externals=[tensor(), number(2.0)],
    )
    for position, change in changes.items():
        k = int(position[1:])
        trace.nodes[k] = dataclasses.replace(trace.nodes[k], **change)
    return trace


# ---------------------------------------------------------------- printing


def test_a_node_prints_as_an_assignment():
    assert str(node("MatMul", [Outside(0), Output(3)], 4)) == "%4 = MatMul(@0, %3)"
    assert str(node("Split", [Output(1)], 5, 2)) == "%5, %6 = Split(%1)"
    assert str(node("AssignVariableOp", [Outside(0), Output(1)], 2, 0)) == (
        "() = AssignVariableOp(@0, %1)"
    )
    assert "Mul misses the fast path" in str(node("Mul", [], 0, 0, misses=True))


def test_a_location_prints_the_innermost_line_of_the_user():
    assert str(LINE) == "train.py:7 in step"
    assert str(NOWHERE) == "<no line of yours>"


def test_a_trace_prints_nodes_with_their_lines_and_reads_in_their_place():
    trace = product()
    trace.reads[1] = Read(1, 2, Location((("train.py", 9, "step"),)))
    lines = [line.split() for line in str(trace).splitlines()]
    assert [line[0] for line in lines] == ["0", "1", "read", "2"]
    assert lines[1][1:] == ["%1", "=", "Mul(%0,", "@1)", "train.py:7", "in", "step"]
    assert lines[2] == ["read", "%1", "train.py:9", "in", "step"]


def test_a_read_behind_the_last_node_is_printed_too():
    trace = product()
    trace.reads[2] = Read(2, 3, LINE)
    assert str(trace).splitlines()[-1].split()[:2] == ["read", "%2"]


def test_two_reads_at_one_position_are_both_printed():
    trace = product()
    trace.reads[0] = Read(0, 2, LINE)
    trace.reads[1] = Read(1, 2, LINE)
    text = str(trace)
    assert "read %0" in text and "read %1" in text


def test_producer_finds_the_node_of_every_output():
    trace = Trace(
        nodes=[
            node("Split", [Outside(0)], 0, 3),
            node("NoOp", [], 3, 0),
            node("Mul", [Output(0), Output(2)], 3, 1),
            node("NoOp", [], 4, 0),
            node("TopKV2", [Output(3)], 4, 2),
        ]
    )
    found = [trace.nodes.index(trace.producer(output)) for output in range(6)]
    assert found == [0, 0, 0, 2, 4, 4]


# ---------------------------------------------------------------- comparing hand-made traces


def test_equal_traces_have_the_same_structure():
    assert first_difference(product(), product()) is None
    assert same_structure(product(), product())


def test_values_of_externals_do_not_count():
    other = product()
    other.externals[1] = number(3.0)
    assert first_difference(product(), other) is None


DIFFERENT = {
    "another op": ({"n1": {"op": "RealDiv"}}, 1),
    "another attribute": (
        {"n0": {"args": (Outside(0), Outside(0), Python("transpose_a"), Python(True))}},
        0,
    ),
    "True is not 1": (
        {"n0": {"args": (Outside(0), Outside(0), Python("transpose_a"), Python(0))}},
        0,
    ),
    "another entry point": ({"n1": {"call": Call.EXECUTE}}, 1),
    "another input": (
        {"n1": {"args": (Output(0), Output(0)), "inputs": (Output(0), Output(0))}},
        1,
    ),
    "an outside value instead of an output": (
        {"n1": {"args": (Outside(0), Outside(1)), "inputs": (Outside(0), Outside(1))}},
        1,
    ),
    "fewer items": ({"n2": {"args": (Items((Output(0),)),), "inputs": (Output(0),)}}, 2),
    "more outputs": ({"n2": {"num_outputs": 2}}, 2),
    "a list as result": ({"n2": {"result": Result.LIST}}, 2),
    "a nested result": ({"n2": {"groups": (-1, 2)}}, 2),
    "a miss": ({"n1": {"misses": True}}, 1),
    "a failure": ({"n1": {"fails": True}}, 1),
}


def test_an_op_that_a_sequence_runs_in_place_serves_one_that_needs_not_be():
    in_place = product(n1={"effect": Effect.LOCAL})
    assert same_structure(in_place, product())
    assert first_difference(product(), in_place) == 1  # but not the other way round


@pytest.mark.parametrize("case", DIFFERENT)
def test_first_difference_is_the_first_node_that_differs(case):
    changes, position = DIFFERENT[case]
    assert first_difference(product(), product(**changes)) == position
    assert first_difference(product(**changes), product()) == position
    assert not same_structure(product(), product(**changes))


@pytest.mark.parametrize(
    "external",
    [tensor((2, 3)), tensor((2, 2, 1)), tensor(dtype=INT32), External(Kind.SMALL, FLOAT, (2, 2))],
    ids=["shape", "rank", "dtype", "kind"],
)
def test_external_of_another_kind_shape_or_dtype_is_a_difference_at_its_first_use(external):
    other = product()
    other.externals[0] = external
    assert first_difference(product(), other) == 0


def test_resources_are_told_apart_by_identity():
    one, two = tf.Variable(1.0), tf.Variable(1.0)

    def reading(variable):
        handle = External(Kind.RESOURCE, 20, (), variable.handle, variable.handle)
        read = node("ReadVariableOp", [Outside(0)], effect=Effect.READ)
        return Trace(nodes=[read], outputs=[OutputInfo(FLOAT, ())], externals=[handle])

    assert same_structure(reading(one), reading(one))
    assert first_difference(reading(one), reading(two)) == 0


def test_a_longer_trace_differs_behind_the_shorter_ones_end():
    longer = product()
    longer.nodes.append(node("Neg", [Output(2)], 3))
    assert first_difference(product(), longer) == 3
    assert first_difference(longer, product()) == 3
    assert first_difference(Trace(), Trace()) is None
    assert first_difference(Trace(), product()) == 0


def test_what_runs_in_place_takes_any_inputs():
    def printing(*inputs):
        return Trace(
            nodes=[node("PrintV2", inputs, 0, 0, effect=Effect.LOCAL)], externals=[tensor()]
        )

    assert same_structure(printing(Outside(0)), printing())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1.0, 1.0, True),
        (1.0, 1, False),
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
    def calling(value):
        return Trace(nodes=[node("Op", [Python("attribute"), Python(value)], 0, 0)])

    assert same_structure(calling(one), calling(other)) is same


# ---------------------------------------------------------------- comparing recorded traces


def recorded(function, *arguments):
    """The trace of one call."""
    initialise()
    recorder = Recorder([x for x in arguments if isinstance(x, tf.Tensor)])
    recorder.start()
    try:
        function(*arguments)
        return recorder.finish()
    finally:
        native.core.leave()


WEIGHTS = tf.Variable(tf.ones([3, 3]))


def dense(x, factor=2.0, transpose=False, extra=0):
    y = tf.matmul(x, WEIGHTS, transpose_b=transpose) * factor
    for _ in range(extra):
        y = tf.nn.relu(y)
    return tf.reduce_sum(y + tf.constant([1.0, 2.0, 3.0]) * factor)


def test_recorded_traces_agree_where_only_values_differ():
    trace = recorded(dense, tf.ones([2, 3]))
    assert same_structure(trace, recorded(dense, tf.zeros([2, 3])))
    assert same_structure(trace, recorded(dense, tf.ones([2, 3]), 7.5))
    WEIGHTS.assign_add(tf.ones([3, 3]))
    assert same_structure(trace, recorded(dense, tf.ones([2, 3])))


def test_recorded_traces_differ_where_attribute_op_shape_or_dtype_does():
    trace = recorded(dense, tf.ones([2, 3]))
    ops = [n.op for n in trace.nodes]
    matmul, add = ops.index("MatMul"), ops.index("AddV2")

    def position(*arguments):
        return first_difference(trace, recorded(dense, *arguments))

    assert position(tf.ones([2, 3]), 2.0, True) == matmul
    assert position(tf.ones([4, 3])) == matmul
    assert position(tf.ones([2, 3]), tf.constant(2.0)) == ops.index("Mul")
    extra = position(tf.ones([2, 3]), 2.0, False, 1)
    assert ops.index("Mul") < extra <= add


def test_recorded_traces_of_different_variables_differ():
    other = tf.Variable(tf.ones([3, 3]))

    def reading(variable):
        return recorded(lambda: tf.reduce_sum(variable * 2.0))

    assert first_difference(reading(WEIGHTS), reading(other)) == 0
    assert same_structure(reading(other), reading(other))


def test_recorded_traces_differ_by_which_earlier_value_an_op_takes():
    def pick(index):
        def step(x):
            values = [x + 1.0, x * 2.0]
            return tf.exp(values[index])

        return recorded(step, tf.ones([2]))

    assert first_difference(pick(0), pick(1)) == 2
