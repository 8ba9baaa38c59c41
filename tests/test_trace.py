"""Traces as data: how they print, what is said of their parts."""

import numpy as np
import pytest
import tensorflow as tf

from terra_tf.tracing.location import NOWHERE, Location
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
)

pytestmark = pytest.mark.timeout(60)

FLOAT = 1
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


def product():
    """@0 @ @0, times 2, plus itself: three nodes."""
    return Trace(
        nodes=[
            node("MatMul", [Outside(0), Outside(0), Python("transpose_a"), Python(False)], 0),
            node("Mul", [Output(0), Outside(1)], 1, location=LINE),
            node("AddN", [Items((Output(0), Output(1)))], 2),
        ],
        outputs=[OutputInfo(FLOAT, (2, 2))] * 3,
        externals=[tensor(), number(2.0)],
    )


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


def test_a_place_is_the_region_without_what_called_it():
    called = Location((("a.py", 3, "layer"), ("a.py", 9, "step"), ("b.py", 1, "<module>")), 2)
    elsewhere = Location((("a.py", 3, "layer"), ("a.py", 9, "step"), ("c.py", 5, "main")), 2)
    assert called != elsewhere
    assert called.place == elsewhere.place == (("a.py", 3, "layer"), ("a.py", 9, "step"))


@pytest.mark.parametrize(
    ("external", "fed"),
    [
        (External(Kind.TENSOR, FLOAT, ()), True),
        (External(Kind.SELECT, FLOAT, ()), True),
        (External(Kind.SMALL, FLOAT, ()), False),
        (External(Kind.NUMBER, FLOAT, (), varies=True), True),
        (External(Kind.RESOURCE, 20, ()), False),
    ],
    ids=lambda x: x.kind.value if isinstance(x, External) else None,
)
def test_what_may_differ_from_call_to_call_is_fed(external, fed):
    assert external.fed is fed


def test_variables_made_are_counted():
    made = [node("VarHandleOp", [], 0), node("Mul", [Output(0)], 1), node("VarHandleOp", [], 2)]
    assert Trace(nodes=made).variables_made == 2
    assert Trace().variables_made == 0
