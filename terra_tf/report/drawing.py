"""A TraceGraph as something that can be drawn: blocks of rows, a row for each line of the user's.

A sequence has thousands of ops and a person a few hundred lines, so the ops that one line of the
program calls in a row are one Row. Blocks are the generated graph's: what an iteration takes or
skips, with how often it did.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import linecache
import os
from typing import TYPE_CHECKING

import tensorflow as tf

from terra_tf import native
from terra_tf.tracing.effects import Effect
from terra_tf.tracing.trace import Kind, Node, OutputInfo, Outside

if TYPE_CHECKING:
    from terra_tf.generation.generated import GeneratedGraph
    from terra_tf.tracegraph.sequence import Sequence


@dataclasses.dataclass
class Row:
    """Ops that one line of the program calls one after the other.

    Attributes:
      place: "file.py:12 in function".
      source: the text of the line.
      ops: op type -> how many, in order of appearance.
      in_place: how many of them run in place, by op type.
      writes: how many write variables, behind a gate.
      backward: how many belong to gradients.
      feeds: what Python hands to the graph here, as text.
      fetches: what Python gets from it here, as text.
      calls: library calls of which these ops are made and whose Python is skipped.
      boundary: whether a gate stands before the row.
    """

    place: str
    source: str
    ops: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    in_place: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    writes: int = 0
    backward: int = 0
    feeds: list[str] = dataclasses.field(default_factory=list)
    fetches: list[str] = dataclasses.field(default_factory=list)
    calls: list[str] = dataclasses.field(default_factory=list)
    boundary: bool = False


@dataclasses.dataclass
class DrawnBlock:
    """Rows that an iteration runs all or none of.

    Attributes:
      rows: in program order.
      optional: whether an iteration may skip it.
      taken: how often it was run: by traces and by co-executed iterations.
      skipped: how often it was skipped.
    """

    rows: list[Row]
    optional: bool
    taken: int = 0
    skipped: int = 0


@dataclasses.dataclass
class Drawing:
    """One sequence of a TraceGraph.

    Attributes:
      title: which it is.
      blocks: in program order.
      generated: whether a graph was generated from it.
      ops: op calls in it, all blocks together.
    """

    title: str
    blocks: list[DrawnBlock]
    generated: bool
    ops: int

    def __str__(self) -> str:
        lines = [self.title]
        for block in self.blocks:
            mark = f"  [taken {block.taken}, skipped {block.skipped}]" if block.optional else ""
            for row in block.rows:
                indent = "    | " if block.optional else "  "
                lines.append(f"{indent}{row.place}: {sum(row.ops.values())} ops{mark}")
                mark = ""
        return "\n".join(lines)


def draw(sequence: Sequence, number: int) -> Drawing:
    """Makes the drawing of a sequence: of its latest graph, where it has one."""
    graph = sequence.graph
    shown = sequence if graph is None else graph.sequence
    ops = sum(not node.misses for node in shown.trace.nodes)
    phase = "co-executed" if graph is not None else "traced only"
    title = f"op sequence {number}: {ops} ops, {sequence.seen} traces, {phase}"
    title += f" {sequence.completed} times" if graph is not None else ""
    blocks = [
        DrawnBlock(_rows(shown, graph, start, end), optional, taken, skipped)
        for start, end, optional, taken, skipped in _blocks(shown, graph)
    ]
    return Drawing(title, [block for block in blocks if block.rows], graph is not None, ops)


def _blocks(
    sequence: Sequence, graph: GeneratedGraph | None
) -> list[tuple[int, int, bool, int, int]]:
    nodes = sequence.trace.nodes
    if graph is None:
        counted = [(b.start, b.end, b.optional, 0, 0) for b in sequence.blocks()]
    else:
        counted = graph.program.block_counts()
    found = []
    for start, end, optional, taken, skipped in counted:
        if start < end:
            traced = nodes[start].count
            missed = max(0, sequence.seen - traced)
            found.append((start, end, optional, taken + traced, skipped + missed))
    return found


def _rows(sequence: Sequence, graph: GeneratedGraph | None, start: int, end: int) -> list[Row]:
    nodes = sequence.trace.nodes
    boundaries = set() if graph is None else set(graph.plan.boundaries)
    reads: dict[int, list[str]] = {}
    for read in sequence.reads.values():
        reads.setdefault(sequence.producers[read.output], []).append(str(read.location))
    calls = {} if graph is None else _delegated(graph)
    rows: list[Row] = []
    for place, group in itertools.groupby(range(start, end), lambda k: _place(nodes[k])):
        row = Row(_short(place), _source(place))
        for k in group:
            node = nodes[k]
            row.boundary |= k in boundaries and k > 0
            if not node.misses:
                _add(row, node, sequence)
                row.calls += [name for name in calls.get(k, ()) if name not in row.calls]
                row.fetches += [f"{node.op}, looked at by {_tail(at)}" for at in reads.get(k, ())]
        if row.ops:
            rows.append(row)
    return rows


def _delegated(graph: GeneratedGraph) -> dict[int, list[str]]:
    """Node -> names of the delegated calls that it belongs to, functions around ops left out."""
    found: dict[int, list[str]] = {}
    for function, nodes in graph.program.delegated_calls():
        if isinstance(function, native.core.OpFunction):
            continue
        original = getattr(function, "__wrapped__", function)
        name = getattr(original, "__qualname__", None) or type(original).__name__
        for node in nodes:
            found.setdefault(node, []).append(name)
    return found


def _add(row: Row, node: Node, sequence: Sequence) -> None:
    name = node.op or "call of a function"
    row.ops[name] += 1
    row.in_place[name] += node.in_place
    row.writes += node.effect in (Effect.ASSIGN, Effect.WRITE)
    row.backward += node.gradient_of is not None
    for source in node.inputs:
        if isinstance(source, Outside):
            external = sequence.trace.externals[source.index]
            if external.fed and not node.in_place:
                row.feeds.append(_describe(external))
    row.in_place = +row.in_place


def _describe(external: OutputInfo | object) -> str:
    kinds = {
        Kind.TENSOR: "tensor",
        Kind.SMALL: "small tensor",
        Kind.NUMBER: "number",
        Kind.SELECT: "one of several tensors",
    }
    return f"{kinds.get(external.kind, 'tensor')} {tensor_text(external)}"


def tensor_text(info: OutputInfo | object) -> str:
    """Dtype and shape, like `float32[32,?]`."""
    dtype = tf.dtypes.as_dtype(info.dtype).name
    if info.shape is None:
        return f"{dtype}[...]"
    return f"{dtype}[{','.join('?' if size is None else str(size) for size in info.shape)}]"


def _place(node: Node) -> tuple[str, int, str] | None:
    return node.location.frames[0] if node.location.frames else None


def _short(place: tuple[str, int, str] | None) -> str:
    if place is None:
        return "<no line of yours>"
    file, line, function = place
    return f"{os.path.basename(file)}:{line} in {function}"


def _tail(location: str) -> str:
    return location.rpartition(os.sep)[2]


def _source(place: tuple[str, int, str] | None) -> str:
    return "" if place is None else linecache.getline(place[0], place[1]).strip()
