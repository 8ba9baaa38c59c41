"""The TraceGraph: which sequence a trace belongs to, which is expected, built and dropped first."""

import pytest
from tracegraphs import Program, chain

from terra_tf.configuration import settings
from terra_tf.tracegraph.graph import TraceGraph

pytestmark = pytest.mark.timeout(60)


def key(name, shapes="shapes", ranks="ranks"):
    """A key as `signature` makes it: all that is known of a call, its shapes, its ranks."""
    return (("all", name), ("shapes", shapes), ("ranks", ranks))


def graph_of(max_graphs=8, build_after=2):
    return TraceGraph(max_graphs, build_after)


class Graph:
    """Stands for a generated graph: what matters is from which state of the sequence it is."""

    def __init__(self, sequence, seconds=0.1):
        self.sequence = sequence.snapshot()
        self.seconds = seconds


def build(sequence):
    """Does as the PythonRunner does when it has generated a graph."""
    sequence.graph = Graph(sequence)
    sequence.builds += 1
    sequence.missed = 0


def stranger(number, length=4):
    """A trace that has nothing in common with those of other numbers."""
    program = Program()
    x = program.tensor()
    for k in range(length):
        x = program.op(f"Op{number}", x, line=k)
    return program.trace


# ---------------------------------------------------------------- which sequence


def test_traces_of_one_structure_are_one_sequence():
    graph = graph_of()
    first = graph.add(key("key"), chain())
    assert graph.add(key("key"), chain()) is first
    assert (first.seen, graph.traces, graph.nodes) == (2, 2, 2)
    assert graph.sequences == (first,)
    assert (graph.branches, graph.loops) == (0, 0)


def test_traces_that_differ_in_a_branch_or_in_shapes_are_one_sequence_too():
    graph = graph_of()
    traces = chain("Exp Neg"), chain("Log Neg"), chain("Exp Neg", shape=(3,)), chain("Neg")
    assert len({id(graph.add(key("key"), trace)) for trace in traces}) == 1
    assert graph.branches == 1


def test_traces_with_little_in_common_are_sequences_of_their_own():
    graph = graph_of()
    one, other = graph.add(key("one"), stranger(1)), graph.add(key("other"), stranger(2))
    assert graph.sequences == (one, other)
    assert graph.add(key("key"), stranger(1)) is one
    assert graph.sequences == (other, one)
    assert graph.nodes == 8


def test_a_trace_is_merged_into_the_sequence_most_like_it():
    graph = graph_of()
    one = graph.add(key("one"), stranger(1))
    graph.add(key("other"), stranger(2))
    mixed = stranger(1)
    mixed.nodes[0].op = "Another"
    assert graph.add(key("other"), mixed) is one


def test_a_trace_that_fell_back_is_merged_into_the_sequence_that_it_left():
    graph = graph_of()
    one, other = graph.add(key("one"), stranger(1)), graph.add(key("other"), stranger(2))
    walked = one.ids[:2]
    mixed = stranger(1, length=2)
    tail = stranger(2)
    mixed.nodes += tail.nodes[2:]
    mixed.outputs += tail.outputs[2:]
    assert graph.add(key("key"), mixed, one, tuple(walked)) is one
    assert graph.sequences == (other, one)
    assert len(one.trace.nodes) == 6


def test_iterations_that_make_variables_are_apart_from_those_that_do_not():
    def making(count):
        trace = chain("Exp Log Neg Sin")
        program = Program()
        program.trace = trace
        for _ in range(count):
            program.op("VarHandleOp", line=50)
        return trace

    graph = graph_of()
    first = graph.add(key("key"), making(1))
    second = graph.add(key("key"), making(0))
    assert first is not second
    assert graph.add(key("key"), making(0)) is second


def test_iterations_that_make_variables_again_and_again_are_a_branch():
    def trace(made):
        program = Program()
        x = program.op("Exp", program.tensor(), line=1)
        for k in range(made):
            program.op("VarHandleOp", line=k + 2)
        for line in (7, 8, 9):
            x = program.op("Neg", x, line=line)
        return program.trace

    graph = graph_of()
    without = graph.add(key("a"), trace(0))
    graph.add(key("a"), trace(0))
    for _ in range(2):
        assert graph.add(key("a"), trace(1), without, without.ids[:1]) is not without
    assert graph.add(key("a"), trace(1), without, without.ids[:1]) is without
    assert len(without.trace.nodes) == 5
    assert graph.add(key("a"), trace(2)) is not without  # the first of its kind


def test_a_sequence_does_not_grow_without_bound():
    """A program that is different each time, but for its beginning."""
    graph = graph_of(max_graphs=2)
    for number in range(80):
        program = Program()
        x = program.tensor()
        for k in range(40):
            x = program.op("Exp", x, line=k)
        for k in range(80):
            x = program.op(f"Op{number}", x, line=50 + k)
        graph.add(key("key"), program.trace)
    assert all(len(sequence.trace.nodes) < 3000 for sequence in graph.sequences)
    assert len(graph.sequences) <= 8


# ---------------------------------------------------------------- building


def test_a_graph_is_worth_building_after_enough_agreeing_traces():
    graph = graph_of(build_after=3)
    for ready in (False, False, True, True):
        assert graph.ready(graph.add(key("key"), chain())) is ready


def test_no_graph_is_built_while_every_trace_shows_another_way():
    graph = graph_of()
    ways = ["Exp Neg", "Log Neg", "Sin Neg"]
    for way in ways:
        sequence = graph.add(key("key"), chain(way))
        assert not graph.ready(sequence)
    assert graph.ready(graph.add(key("key"), chain(ways[0])))


def test_at_some_time_a_graph_is_built_even_so():
    graph = graph_of()
    ready = []
    for number in range(12):
        sequence = graph.add(
            key("key"), chain(f"Op{number} Exp Log Neg", lines=f"{number + 10} 50 51 52")
        )
        ready.append(graph.ready(sequence))
    assert ready == sorted(ready)
    assert not ready[3] and ready[8]


def test_a_sequence_with_a_graph_is_ready_whatever_comes():
    graph = graph_of()
    sequence = graph.add(key("key"), chain("Exp Neg"))
    build(sequence)
    graph.add(key("key"), chain("Log Neg"))
    assert graph.ready(sequence)


def test_a_graph_is_outdated_once_a_trace_showed_something_new():
    graph = graph_of()
    sequence = graph.add(key("key"), chain("Exp Neg"))
    assert graph.outdated(sequence)  # there is none
    build(sequence)
    assert not graph.outdated(sequence)
    graph.add(key("key"), chain("Exp Neg"))
    assert not graph.outdated(sequence)
    graph.add(key("key"), chain("Log Neg"))
    assert graph.outdated(sequence)
    build(sequence)
    assert not graph.outdated(sequence)
    for way in ("Exp Neg", "Log Neg", "Exp Neg"):
        graph.add(key("key"), chain(way))
        assert not graph.outdated(sequence)


def test_the_more_graphs_were_built_the_more_has_to_be_new():
    graph = graph_of()
    sequence = graph.add(key("key"), chain("Exp Neg"))
    waited, number = [], 0
    for _ in range(5):
        build(sequence)
        count = 0
        while not graph.outdated(sequence):
            graph.add(key("key"), chain(f"Op{number} Neg", lines=f"{number + 10} 9"))
            number, count = number + 1, count + 1
        waited.append(count)
    assert waited == [1, 1, 2, 4, 8]


# ---------------------------------------------------------------- expecting


def test_the_expected_sequence_is_the_latest_that_this_key_went():
    graph = graph_of()
    assert graph.expected(key("small")) is None
    small = graph.add(key("small", "2", "1"), stranger(1))
    large = graph.add(key("large", "9", "2"), stranger(2))
    assert graph.expected(key("small", "2", "1")) is small
    assert graph.expected(key("large", "9", "2")) is large
    assert graph.expected(key("other", "5", "3")) is None
    branch = graph.add(key("small", "2", "1"), stranger(3))
    assert graph.expected(key("small", "2", "1")) is branch
    assert graph.expected(key("large", "9", "2")) is large
    graph.use(key("small", "2", "1"), small)
    assert graph.expected(key("small", "2", "1")) is small


def test_a_call_that_is_new_in_part_expects_by_what_is_known():
    graph = graph_of()
    one = graph.add(key("one", "2", "vector"), stranger(1))
    other = graph.add(key("other", "2x2", "matrix"), stranger(2))
    assert graph.expected(key("new", "2", "vector")) is one
    assert graph.expected(key("new", "7", "vector")) is one  # another length
    assert graph.expected(key("new", "7x7", "matrix")) is other
    assert graph.expected(key("one", "7x7", "matrix")) is one  # the whole counts most
    assert graph.expected(key("new", "7x7x7", "cube")) is None


# ---------------------------------------------------------------- dropping


def add_built(graph, number):
    """Adds the sequence number so-and-so and pretends that its graph was generated."""
    sequence = graph.add(numbered(number), stranger(number))
    build(sequence)
    graph.use(numbered(number), sequence)
    return sequence


def numbered(number):
    return key(number, number, number)


def test_the_least_recently_used_graph_is_dropped_first_and_one_at_a_time():
    graph = graph_of(max_graphs=3)
    alive = []
    for number in range(10):
        alive.append(add_built(graph, number))
        alive = alive[-3:]
        assert [s for s in graph.sequences if s.graph is not None] == alive
    assert graph.expected(numbered(0)) is None
    assert graph.expected(numbered(9)) is alive[-1]


def test_many_nodes_drop_the_least_recently_used_sequence(monkeypatch):
    monkeypatch.setattr(settings, "max_nodes", 20)
    graph = graph_of()
    first, second = (graph.add(key(k), stranger(k, 8)) for k in range(2))
    graph.use(key(0), first)
    third = graph.add(key(2), stranger(2, 8))
    assert graph.sequences == (first, third)
    assert graph.expected(key(0)) is first
    large = graph.add(key(3), stranger(3, 50))  # alone above the limit: still kept
    assert graph.sequences == (large,)


def test_long_builds_drop_the_least_recently_used_graph(monkeypatch):
    monkeypatch.setattr(settings, "max_build_seconds", 10.0)
    graph = graph_of()
    built = [graph.add(key(k), stranger(k)) for k in range(3)]
    bare = graph.add(key(8), stranger(8))
    for sequence in built:
        sequence.graph = Graph(sequence, 4.0)
    graph.use(key(2), built[2])
    assert graph.sequences == (built[1], bare, built[2])


def test_use_keeps_a_sequence():
    graph = graph_of(max_graphs=3)
    first, second, third = (add_built(graph, number) for number in range(3))
    graph.use(numbered(0), first)
    fourth = add_built(graph, 3)
    assert [s for s in graph.sequences if s.graph is not None] == [third, first, fourth]
    assert graph.expected(numbered(1)) is None
    assert graph.expected(numbered(0)) is first
    assert second not in graph.sequences


def test_the_sequence_in_use_is_never_dropped():
    graph = graph_of(max_graphs=1)
    for number in range(4):
        sequence = add_built(graph, number)
        assert graph.sequences[-1] is sequence
        assert graph.expected(numbered(number)) is sequence
    assert [s for s in graph.sequences if s.graph is not None] == [sequence]


def test_sequences_without_a_graph_are_bounded_and_do_not_drop_graphs_at_once():
    graph = graph_of(max_graphs=2)
    built = add_built(graph, 0)
    for number in range(1, 7):
        graph.add(numbered(number), stranger(number))
    assert built in graph.sequences
    for number in range(7, 50):
        graph.add(numbered(number), stranger(number))
        assert len(graph.sequences) <= 8
    assert [s.trace.nodes[0].op for s in graph.sequences] == [f"Op{n}" for n in range(42, 50)]


def test_keys_that_share_a_sequence_are_bounded_too():
    """A step called with another text each time must not make the TraceGraph grow."""
    graph = graph_of(max_graphs=2)
    for number in range(5000):
        graph.add(key(f"text {number}"), chain())
    assert len(graph._by_key) <= 1000
    assert graph.expected(key("text 4999")) is graph.sequences[-1]


def test_a_dropped_sequence_that_comes_back_is_learned_anew():
    graph = graph_of(max_graphs=1)
    first = add_built(graph, 0)
    add_built(graph, 1)
    assert first not in graph.sequences
    again = graph.add(numbered(0), stranger(0))
    assert again is not first and again.seen == 1
    assert graph.expected(numbered(0)) is again


def test_a_tracegraph_prints_a_line_a_sequence():
    graph = graph_of()
    graph.add(key("a"), chain("Exp"))
    graph.add(key("a"), chain("Exp"))
    add_built(graph, 5)
    lines = str(graph).splitlines()
    assert lines[0] == "TraceGraph of 3 traces, 2 op sequences"
    assert lines[1].strip() == "2 nodes in 1 blocks, 0 of them optional; seen 2 times, no graph"
    assert lines[2].strip() == "4 nodes in 1 blocks, 0 of them optional; seen 1 times, graph"
