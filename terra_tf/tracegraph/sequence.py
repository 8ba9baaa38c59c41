"""One op sequence, merged from all traces that went this way."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from terra_tf.tracing.trace import Read, Trace, same_structure

if TYPE_CHECKING:
    from terra_tf.generation.generated import GeneratedGraph


@dataclasses.dataclass(eq=False)
class Sequence:
    """Merged traces of one structure.

    Attributes:
      trace: the first trace; its externals carry what later ones showed to vary.
      seen: how many traces went this way.
      reads: union of what was looked at, by output, at the earliest position.
      kept: union of what was still reachable, by position.
      dynamic: outputs whose shape differed between traces.
      producers: per output, the position of the node that makes it.
      graph: the generated graph, or None before the first and after new knowledge.
      builds: graphs generated for this sequence so far.
      completed: iterations that ran through as co-executed.
    """

    trace: Trace
    seen: int = 1
    reads: dict[int, Read] = dataclasses.field(default_factory=dict)
    kept: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    dynamic: set[int] = dataclasses.field(default_factory=set)
    producers: list[int] = dataclasses.field(default_factory=list)
    graph: GeneratedGraph | None = None
    builds: int = 0
    completed: int = 0

    @classmethod
    def of(cls, trace: Trace) -> Sequence:
        """A sequence that has seen one trace."""
        sequence = cls(trace, reads=dict(trace.reads), kept=dict(trace.kept))
        for k, node in enumerate(trace.nodes):
            sequence.producers.extend([k] * node.num_outputs)
        return sequence

    def covers(self, trace: Trace) -> bool:
        """Whether a trace went this way."""
        return same_structure(self.trace, trace)

    def merge(self, trace: Trace) -> None:
        """Adds what one more trace of the same structure shows.

        The graph is dropped when it could not have served this trace.
        """
        self.seen += 1
        if self._merge_externals(trace) | self._merge_reads(trace) | self._merge_outputs(trace):
            self.graph = None

    def _merge_externals(self, trace: Trace) -> bool:
        news = False
        for mine, other in zip(self.trace.externals, trace.externals, strict=True):
            if mine.varies or (not other.varies and mine.content == other.content):
                continue
            mine.varies = news = True
        return news

    def _merge_reads(self, trace: Trace) -> bool:
        news = False
        for output, read in trace.reads.items():
            known = self.reads.get(output)
            if known is None or read.position < known.position:
                self.reads[output] = read
                news = True
        for position, outputs in trace.kept.items():
            known_kept = self.kept.get(position, frozenset())
            if not outputs <= known_kept:
                self.kept[position] = known_kept | outputs
                news = True
        return news

    def _merge_outputs(self, trace: Trace) -> bool:
        news = False
        for output, (mine, other) in enumerate(zip(self.trace.outputs, trace.outputs, strict=True)):
            if mine.shape != other.shape and output not in self.dynamic:
                self.dynamic.add(output)
                news = True
        return news

    def __str__(self) -> str:
        state = "no graph" if self.graph is None else "graph"
        return f"{len(self.trace.nodes)} nodes, seen {self.seen} times, {state}"
