"""The TraceGraph: how traces are merged, which sequence is expected, what is dropped first."""

import numpy as np
import pytest
import tensorflow as tf

from terra_tf.tracegraph.graph import TraceGraph
from terra_tf.tracegraph.sequence import Sequence
from terra_tf.tracing.location import Location
from terra_tf.tracing.trace import (
    Call,
    External,
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

FLOAT = tf.float32.as_datatype_enum


def trace(ops="Exp", *, shape=(2,), inner=None, factor=2.0, reads=(), kept=None):
    """A chain of ops on @0; the first one multiplies by the number @1.

    `inner` is the shape of what the ops make, `reads` are (output, position) pairs.
    """
    nodes = [node("Mul", [Outside(0), Outside(1)], 0)]
    nodes += [node(op, [Output(k)], k + 1) for k, op in enumerate(ops.split())]
    content = np.float32(factor).tobytes()
    result = Trace(
        nodes=nodes,
        outputs=[OutputInfo(FLOAT, inner or shape)] * len(nodes),
        externals=[
            External(Kind.TENSOR, FLOAT, shape),
            External(Kind.NUMBER, FLOAT, (), tf.constant(factor), factor, content),
        ],
        kept=dict(kept or {}),
    )
    for output, position in reads:
        result.reads[output] = Read(output, position, Location((("a.py", position, "step"),)))
    return result


def node(op, inputs, output):
    args = (*inputs, Python("attribute"), Python(1))
    return Node(op, Call.FAST_PATH, args, tuple(inputs), (), output, 1, Result.SINGLE)


def key(name):
    """A key as `signature` makes it: all that is known of a call, and its shapes alone."""
    return (("whole", name), ("shapes", name))


def graph_of(max_graphs=8, build_after=2):
    return TraceGraph(max_graphs, build_after)


# ---------------------------------------------------------------- merging


def test_traces_of_one_structure_are_one_sequence():
    graph = graph_of()
    first = graph.add(key("key"), trace())
    assert graph.add(key("key"), trace()) is first
    assert (first.seen, graph.traces, graph.nodes) == (2, 2, 2)
    assert graph.sequences == (first,)


def test_traces_of_different_structure_are_sequences_of_their_own():
    graph = graph_of()
    found = [
        graph.add(key("key"), t) for t in (trace("Exp"), trace("Log"), trace("Exp", shape=(3,)))
    ]
    assert len(set(map(id, found))) == 3
    assert graph.sequences == tuple(found)
    assert graph.nodes == 6
    assert graph.add(key("key"), trace("Log")) is found[1]
    assert graph.sequences == (found[0], found[2], found[1])


def test_a_graph_is_worth_building_after_enough_agreeing_traces():
    graph = graph_of(build_after=3)
    for ready in (False, False, True, True):
        assert graph.ready(graph.add(key("key"), trace())) is ready


def test_an_external_that_differs_is_fed_from_then_on():
    sequence = Sequence.of(trace(factor=2.0))
    sequence.graph = built = object()
    sequence.merge(trace(factor=2.0))
    assert not sequence.trace.externals[1].varies
    assert sequence.graph is built
    sequence.merge(trace(factor=3.0))
    assert sequence.trace.externals[1].varies
    assert sequence.graph is None  # it had the 2.0 baked in
    sequence.graph = built
    sequence.merge(trace(factor=4.0))
    assert sequence.graph is built


def test_what_varied_in_the_prefix_of_a_fallback_varies():
    sequence = Sequence.of(trace())
    sequence.graph = object()
    other = trace()
    other.externals[1].varies = True
    sequence.merge(other)
    assert sequence.trace.externals[1].varies
    assert sequence.graph is None


def test_reads_are_united_at_their_earliest_position():
    sequence = Sequence.of(trace("Exp Log Neg", reads=[(1, 3)]))
    sequence.graph = built = object()
    sequence.merge(trace("Exp Log Neg", reads=[(1, 4)]))
    assert {o: r.position for o, r in sequence.reads.items()} == {1: 3}
    assert sequence.graph is built  # a later look is served too
    sequence.merge(trace("Exp Log Neg", reads=[(1, 2)]))
    assert {o: r.position for o, r in sequence.reads.items()} == {1: 2}
    assert sequence.graph is None
    sequence.graph = built
    sequence.merge(trace("Exp Log Neg", reads=[(3, 4)]))
    assert {o: r.position for o, r in sequence.reads.items()} == {1: 2, 3: 4}
    assert sequence.graph is None
    sequence.graph = built
    sequence.merge(trace("Exp Log Neg"))
    assert len(sequence.reads) == 2 and sequence.graph is built


def test_kept_tensors_are_united_by_position():
    sequence = Sequence.of(trace(kept={2: frozenset({1})}))
    sequence.graph = built = object()
    sequence.merge(trace(kept={2: frozenset()}))
    assert sequence.graph is built
    sequence.merge(trace(kept={2: frozenset({0})}))
    assert sequence.kept == {2: {0, 1}}
    assert sequence.graph is None
    sequence.merge(trace(kept={1: frozenset({0})}))
    assert sequence.kept == {1: {0}, 2: {0, 1}}


def test_output_shapes_that_differ_become_dynamic():
    sequence = Sequence.of(trace("Where"))
    sequence.graph = built = object()
    sequence.merge(trace("Where", inner=(2,)))
    assert sequence.dynamic == set() and sequence.graph is built
    sequence.merge(trace("Where", inner=(5,)))
    assert sequence.dynamic == {0, 1}
    assert sequence.graph is None
    sequence.graph = built
    sequence.merge(trace("Where", inner=(7,)))
    assert sequence.graph is built


def test_merging_changes_neither_trace_that_was_merged_in():
    one, other = trace(kept={2: frozenset({1})}), trace(reads=[(1, 2)], kept={2: frozenset({0})})
    sequence = Sequence.of(one)
    sequence.merge(other)
    assert one.reads == {} and one.kept == {2: {1}}
    assert set(other.reads) == {1} and other.kept == {2: {0}}


def test_producers_name_the_node_of_each_output():
    sequence = Sequence.of(trace("Exp Log"))
    assert sequence.producers == [0, 1, 2]


# ---------------------------------------------------------------- expecting


def test_the_expected_sequence_is_the_latest_that_this_key_went():
    graph = graph_of()
    assert graph.expected(key("small")) is None
    small = graph.add(key("small"), trace(shape=(2,)))
    large = graph.add(key("large"), trace(shape=(9,)))
    assert graph.expected(key("small")) is small
    assert graph.expected(key("large")) is large
    assert graph.expected(key("other")) is None
    branch = graph.add(key("small"), trace("Log", shape=(2,)))
    assert graph.expected(key("small")) is branch
    assert graph.expected(key("large")) is large
    graph.use(key("small"), small)
    assert graph.expected(key("small")) is small


# ---------------------------------------------------------------- dropping


def add_built(graph, number):
    """Adds the sequence number so-and-so and pretends that its graph was generated."""
    sequence = graph.add(key(number), trace(shape=(number + 1,)))
    sequence.graph = object()
    graph.use(key(number), sequence)
    return sequence


def test_the_least_recently_used_graph_is_dropped_first_and_one_at_a_time():
    graph = graph_of(max_graphs=3)
    alive = []
    for number in range(10):
        alive.append(add_built(graph, number))
        alive = alive[-3:]
        assert [s for s in graph.sequences if s.graph is not None] == alive
    assert graph.expected(key(0)) is None
    assert graph.expected(key(9)) is alive[-1]


def test_use_keeps_a_sequence():
    graph = graph_of(max_graphs=3)
    first, second, third = (add_built(graph, number) for number in range(3))
    graph.use(key(0), first)
    fourth = add_built(graph, 3)
    assert [s for s in graph.sequences if s.graph is not None] == [third, first, fourth]
    assert graph.expected(key(1)) is None
    assert graph.expected(key(0)) is first
    assert second not in graph.sequences


def test_the_sequence_in_use_is_never_dropped():
    graph = graph_of(max_graphs=1)
    for number in range(4):
        sequence = add_built(graph, number)
        assert graph.sequences[-1] is sequence
        assert graph.expected(key(number)) is sequence
    assert [s for s in graph.sequences if s.graph is not None] == [sequence]


def test_sequences_without_a_graph_are_bounded_and_do_not_drop_graphs_at_once():
    graph = graph_of(max_graphs=2)
    built = add_built(graph, 0)
    for number in range(1, 7):
        graph.add(key(number), trace(shape=(number + 1,)))
    assert built in graph.sequences
    for number in range(7, 50):
        graph.add(key(number), trace(shape=(number + 1,)))
        assert len(graph.sequences) <= 8
    assert [s.trace.externals[0].shape for s in graph.sequences] == [
        (n + 1,) for n in range(42, 50)
    ]


def test_keys_that_share_a_sequence_are_bounded_too():
    """A step called with another text each time must not make the TraceGraph grow."""
    graph = graph_of(max_graphs=2)
    for number in range(5000):
        graph.add(key(f"text {number}"), trace())
    assert len(graph._by_key) <= 1000
    assert graph.expected(key("text 4999")) is graph.sequences[-1]


def test_a_dropped_sequence_that_comes_back_is_learned_anew():
    graph = graph_of(max_graphs=1)
    first = add_built(graph, 0)
    add_built(graph, 1)
    assert first not in graph.sequences
    again = graph.add(key(0), trace(shape=(1,)))
    assert again is not first and again.seen == 1
    assert graph.expected(key(0)) is again


def test_a_tracegraph_prints_a_line_a_sequence():
    graph = graph_of()
    graph.add(key("a"), trace("Exp"))
    graph.add(key("a"), trace("Exp"))
    add_built(graph, 5)
    lines = str(graph).splitlines()
    assert lines[0] == "TraceGraph of 3 traces, 2 op sequences"
    assert lines[1].strip() == "2 nodes, seen 2 times, no graph"
    assert lines[2].strip() == "2 nodes, seen 1 times, graph"
