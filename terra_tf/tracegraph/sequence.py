"""A Sequence: the merged traces of one way through a step, in one line of nodes.

Each trace is a path: it runs through the nodes in ascending order and skips some. Where any trace
has entered or left the line there is a *cut*; between two cuts lies a *block*, which every trace
ran whole or skipped whole. A branch is a few blocks of which an iteration takes some; a loop whose
length varies is a chain of blocks, one a turn, of which an iteration takes the first few.

An argument that traces got from different places is a *select*: an external of its own that takes
whatever the program passes there.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from terra_tf.tracegraph.identity import identify
from terra_tf.tracegraph.merging import Merger, flat_inputs
from terra_tf.tracing.trace import External, Items, Kind, Node, Output, Outside, Read, Trace

if TYPE_CHECKING:
    from terra_tf.generation.generated import GeneratedGraph

_ids = itertools.count()
_SEVERAL = 2  # nodes of a family that have to show something
_GOOD_PART = 0.03  # and share of them, to take it for all


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Nodes `start` to `end` (exclusive), which an iteration runs all or none of."""

    start: int
    end: int
    optional: bool


@dataclasses.dataclass(eq=False)
class Sequence:
    """Merged traces.

    Attributes:
      trace: the merged nodes, outputs and externals.
      ids: per node, a number that stays the same when nodes are added.
      seen: how many traces were merged.
      reads: what was looked at, by output and position.
      kept: union of what was still reachable, by position.
      dynamic: outputs whose shape differed between traces.
      cuts: positions before which a block begins.
      producers: per output, the position of the node that makes it.
      variables_made: how many variables an iteration that went this way has made.
      branched: whether the latest trace went a new way.
      novelty: share of its nodes that came from a place from which none had come before.
      version: how many traces showed anything new.
      graph: the graph that was generated last, from an earlier state of the sequence.
      missed: traces since then that it could not serve.
      builds: graphs generated for this sequence so far.
      completed: iterations that ran through as co-executed.
    """

    trace: Trace
    ids: list[int] = dataclasses.field(default_factory=list)
    seen: int = 1
    reads: dict[tuple[int, int], Read] = dataclasses.field(default_factory=dict)
    kept: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    dynamic: set[int] = dataclasses.field(default_factory=set)
    cuts: set[int] = dataclasses.field(default_factory=set)
    producers: list[int] = dataclasses.field(default_factory=list)
    variables_made: set[int] = dataclasses.field(default_factory=set)
    branched: bool = False
    novelty: float = 1.0
    version: int = 0
    graph: GeneratedGraph | None = None
    missed: int = 0
    builds: int = 0
    completed: int = 0
    _counted: tuple[int, tuple[int, int]] | None = None  # at what version, branches and loops

    @classmethod
    def of(cls, trace: Trace) -> Sequence:
        """A sequence that has seen one trace."""
        identify(trace)
        sequence = cls(trace, ids=[next(_ids) for _ in trace.nodes])
        sequence.variables_made = {trace.variables_made}
        sequence.reads = {(r.output, r.position): r for r in trace.reads.values()}
        sequence.kept = dict(trace.kept)
        sequence.producers = [k for k, n in enumerate(trace.nodes) for _ in range(n.num_outputs)]
        return sequence

    def snapshot(self) -> Sequence:
        """A copy that later traces do not change: what a graph is generated from."""
        trace = Trace(
            nodes=[dataclasses.replace(node) for node in self.trace.nodes],
            outputs=list(self.trace.outputs),
            externals=[dataclasses.replace(external) for external in self.trace.externals],
        )
        return dataclasses.replace(
            self,
            trace=trace,
            ids=list(self.ids),
            reads=dict(self.reads),
            kept=dict(self.kept),
            dynamic=set(self.dynamic),
            cuts=set(self.cuts),
            producers=list(self.producers),
            graph=None,
        )

    def similarity(self, trace: Trace) -> float:
        """The share of a trace's nodes, which have identities, that look like known ones."""
        if not trace.nodes:
            return float(not self.trace.nodes)
        known = {node.identity.context for node in self.trace.nodes}
        return sum(node.identity.context in known for node in trace.nodes) / len(trace.nodes)

    def merge(self, trace: Trace, walked: tuple[int, ...] = ()) -> None:
        """Adds what one more trace shows.

        Args:
          trace: the trace.
          walked: ids of the nodes that its first nodes are, where a walk has matched them.
        """
        identify(trace)
        self.variables_made.add(trace.variables_made)
        known = {node.identity.family for node in self.trace.nodes}
        novel = sum(node.identity.family not in known for node in trace.nodes)
        self.novelty = novel / max(1, len(trace.nodes))
        merger = Merger(self, trace, walked)
        self.version += merger.run()
        self.branched = merger.branched
        if merger.added:
            ids = iter(self.ids)
            self.ids = [next(_ids) if new else next(ids) for new in merger.added]
        self.missed += self.graph is not None and self.graph.sequence.version != self.version

    def blocks(self) -> list[Block]:
        """The blocks, in order.

        What was seen of some turns of a loop is taken to hold for all: cuts before several nodes of
        a family are cuts before all of them, and if some turns were skipped, any may be.
        """
        nodes = self.trace.nodes
        if not self.cuts:
            return [Block(0, len(nodes), False)]
        cut = self._usual(self.cuts)
        starts = [
            k
            for k, node in enumerate(nodes)
            if k == 0 or k in self.cuts or node.identity.family in cut
        ]
        skipped = [k for k in starts if nodes[k].count < self.seen]
        usually = self._usual(skipped)
        return [
            Block(k, end, nodes[k].count < self.seen or nodes[k].identity.family in usually)
            for k, end in itertools.pairwise([*starts, len(nodes)])
        ]

    def _usual(self, positions: Iterable[int]) -> set[int]:
        """Families of which a good part of the nodes is among those at some positions."""
        families = [node.identity.family for node in self.trace.nodes]
        sizes = collections.Counter(families)
        found = collections.Counter(families[k] for k in positions)
        return {
            family
            for family, count in found.items()
            if count >= _SEVERAL and count >= _GOOD_PART * sizes[family]
        }

    @property
    def branches(self) -> int:
        """How many places there are where iterations go different ways."""
        return self._control_flow()[0]

    @property
    def loops(self) -> int:
        """How many families of optional blocks there are with more than one turn."""
        return self._control_flow()[1]

    def _control_flow(self) -> tuple[int, int]:
        if self._counted is None or self._counted[0] != self.version:
            nodes, blocks = self.trace.nodes, self.blocks()
            runs = itertools.groupby(blocks, key=lambda block: block.optional)
            turns = collections.Counter(
                nodes[b.start].identity.family for b in blocks if b.optional
            )
            branches = sum(optional for optional, _ in runs)
            loops = sum(count > 1 for count in turns.values())
            self._counted = (self.version, (branches, loops))
        return self._counted[1]

    def _usual_selects(self) -> set[tuple[int, int]]:
        """(family, position among the inputs) of what is usually a select."""
        found = []
        for i in range(max((len(node.inputs) for node in self.trace.nodes), default=0)):
            positions = [
                k
                for k, node in enumerate(self.trace.nodes)
                if i < len(node.inputs) and self._is_select(node.inputs[i])
            ]
            found += [(family, i) for family in self._usual(positions)]
        return set(found)

    def _is_select(self, source: Output | Outside) -> bool:
        """Whether an input is whatever the program passes."""
        return (
            isinstance(source, Outside) and self.trace.externals[source.index].kind is Kind.SELECT
        )

    def generalise_selects(self) -> None:
        """Makes an input of a whole family a select where it is one in several of its nodes.

        A loop that was left after some turns can then be left after any.
        """
        selects = self._usual_selects()
        if not selects:
            return
        made: dict[int, Outside] = {}
        for node in self.trace.nodes:
            if node.in_place or node.misses:
                continue
            wanted = {
                i
                for i, source in enumerate(node.inputs)
                if (node.identity.family, i) in selects and isinstance(source, Output)
            }
            if wanted:
                self._make_selects(node, wanted, made)

    def _make_selects(self, node: Node, wanted: set[int], made: dict[int, Outside]) -> None:
        number = itertools.count()

        def convert(arg: object) -> object:
            if isinstance(arg, Items):
                return Items(tuple(convert(item) for item in arg.items))
            if not isinstance(arg, (Output, Outside)):
                return arg
            if next(number) not in wanted:
                return arg
            if arg.index not in made:
                info = self.trace.outputs[arg.index]
                own = frozenset({arg.index})
                self.trace.externals.append(
                    External(Kind.SELECT, info.dtype, info.shape, alternatives=own)
                )
                made[arg.index] = Outside(len(self.trace.externals) - 1)
            return made[arg.index]

        node.args = tuple(convert(arg) for arg in node.args)
        node.inputs = flat_inputs(node.args)

    def selected_outputs(self) -> set[int]:
        """Outputs that selects take, and those of the same families."""
        chosen = {
            output
            for external in self.trace.externals
            if external.kind is Kind.SELECT
            for output in external.alternatives
        }
        places = set()
        for output in chosen:
            node = self.trace.nodes[self.producers[output]]
            places.add((node.identity.family, output - node.first_output))
        return {
            node.first_output + i
            for node in self.trace.nodes
            for i in range(node.num_outputs)
            if (node.identity.family, i) in places
        }

    def __str__(self) -> str:
        state = "no graph" if self.graph is None else "graph"
        blocks = self.blocks()
        optional = sum(block.optional for block in blocks)
        return (
            f"{len(self.trace.nodes)} nodes in {len(blocks)} blocks, {optional} of them optional; "
            f"seen {self.seen} times, {state}"
        )
