"""The TraceGraph of one step.

It is a bounded set of Sequences, each the merged traces of one way through the step. `add` merges a
new trace into the sequence that is most like it, or keeps it as a new one where none is;
`expected` says which sequence an iteration will probably follow, by what was passed to the step and
by what came last.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from terra_tf.configuration import settings
from terra_tf.tracegraph.identity import identify
from terra_tf.tracegraph.sequence import Sequence
from terra_tf.tracing.trace import Trace

_MOST_KEYS = 1000
_SIMILAR = 0.3  # share of its nodes that a trace has to have in common with a sequence
_MOST_NODES = 4  # times the nodes of a trace that a sequence may have
_SPARE_NODES = 2000  # and these
_MADE_AGAIN = 2  # iterations that made as many variables, before it counts as a habit
_MOST_TRACES = 8  # before a graph is generated although each trace was new
_PATIENT_FROM = 2  # builds after which new ones come ever later

Key = tuple[Hashable, ...]  # from fine to coarse; see runners/signature.py


class TraceGraph:
    """Sequences of one step, most recently used last."""

    def __init__(self, max_graphs: int, build_after: int):
        """Makes an empty TraceGraph.

        Args:
          max_graphs: how many sequences may hold a generated graph.
          build_after: how many traces a sequence needs before a graph is generated.
        """
        self._max_graphs = max_graphs
        self._build_after = build_after
        self._sequences: list[Sequence] = []
        self._by_key: dict[Hashable, Sequence] = {}
        self.traces = 0
        self._in_use: tuple[Any, ...] = ()  # the latest sequence, and what it was like

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All sequences, most recently used last."""
        return tuple(self._sequences)

    @property
    def nodes(self) -> int:
        """Nodes of all sequences together."""
        return sum(len(sequence.trace.nodes) for sequence in self._sequences)

    @property
    def branches(self) -> int:
        """Branch regions of all sequences together."""
        return sum(sequence.branches for sequence in self._sequences)

    @property
    def loops(self) -> int:
        """Loops of varying length of all sequences together."""
        return sum(sequence.loops for sequence in self._sequences)

    def add(
        self,
        key: Key,
        trace: Trace,
        left: Sequence | None = None,
        walked: tuple[int, ...] = (),
    ) -> Sequence:
        """Merges a trace of an iteration that was called with `key`.

        Args:
          key: how the iteration was called.
          trace: what it did.
          left: the sequence along which it was co-executed before it fell back.
          walked: ids of that sequence's nodes that its first nodes are.
        """
        self.traces += 1
        identify(trace)
        here = left in self._sequences and self._may_join(left, trace.variables_made)
        sequence = left if here else self._most_similar(key, trace)
        if sequence is None or len(sequence.trace.nodes) > self._most_nodes(trace):
            sequence = Sequence.of(trace)
            self._sequences.append(sequence)
        else:
            sequence.merge(trace, walked if sequence is left else ())
        self.use(key, sequence)
        return sequence

    def _may_join(self, sequence: Sequence, made: int) -> bool:
        """Whether an iteration that made so many variables may share nodes with a sequence.

        Mostly variables are made once, in the first iteration, where all that is done with them
        runs in place; other iterations should not. What makes variables ever again is a branch.
        """
        known = sum(s.seen for s in self._sequences if made in s.variables_made)
        return made in sequence.variables_made or known >= _MADE_AGAIN

    def _most_similar(self, key: Key, trace: Trace) -> Sequence | None:
        likely = self.expected(key)
        made = trace.variables_made
        alike = [s for s in self._sequences if made in s.variables_made]
        if not alike:
            return None
        # Of equally similar ones the expected one, then the latest.
        ranked = [(s.similarity(trace), s is likely, k) for k, s in enumerate(alike)]
        similarity, _, best = max(ranked)
        return alike[best] if similarity >= _SIMILAR else None

    def _most_nodes(self, trace: Trace) -> int:
        return _MOST_NODES * len(trace.nodes) + _SPARE_NODES

    def expected(self, key: Key) -> Sequence | None:
        """The sequence to expect for an iteration that is called with `key`."""
        for part in key:
            sequence = self._by_key.get(part)
            if sequence is not None:
                return sequence
        return None

    def use(self, key: Key, sequence: Sequence) -> None:
        """Notes that an iteration with `key` went along `sequence`."""
        changed = (sequence, sequence.graph, sequence.version) != self._in_use
        self._in_use = (sequence, sequence.graph, sequence.version)
        if self._sequences[-1] is not sequence:
            self._sequences.remove(sequence)
            self._sequences.append(sequence)
        for part in key:
            if self._by_key.get(part) is not sequence:
                self._by_key.pop(part, None)  # so that it counts as new
                self._by_key[part] = sequence
        while len(self._by_key) > _MOST_KEYS:
            del self._by_key[next(iter(self._by_key))]
        if changed:  # else all is as it was after the iteration before
            self._evict()

    def ready(self, sequence: Sequence) -> bool:
        """Whether an iteration that is expected to follow a sequence can be co-executed."""
        if sequence.graph is not None:
            return True
        if sequence.seen < self._build_after:
            return False
        return not sequence.branched or sequence.seen >= _MOST_TRACES

    def outdated(self, sequence: Sequence) -> bool:
        """Whether a new graph should be generated for a sequence.

        A graph from an earlier state serves all paths that it knows. The more often it was
        generated anew, the more traces have to show something new before it is again.
        """
        if sequence.graph is None:
            return True
        return sequence.missed >= 2 ** max(0, sequence.builds - _PATIENT_FROM)

    def _evict(self) -> None:
        # Sequences without a graph are cheap but not free: they may be a few times as many.
        self._drop_oldest(lambda s: s.graph is not None, self._max_graphs)
        self._drop_oldest(lambda _: 1, 4 * self._max_graphs)
        self._drop_oldest(lambda s: len(s.trace.nodes), settings.max_nodes)
        self._drop_oldest(lambda s: s.graph.seconds if s.graph else 0, settings.max_build_seconds)

    def _drop_oldest(self, weight: Callable[[Sequence], float], limit: float) -> None:
        """Drops sequences with a weight, least recently used first, until the rest is in a limit.

        The one in use stays, whatever it weighs.
        """
        total = sum(map(weight, self._sequences))
        for sequence in self._sequences[:-1]:
            if total <= limit:
                return
            if weight(sequence):
                total -= weight(sequence)
                self._sequences.remove(sequence)
                self._by_key = {k: s for k, s in self._by_key.items() if s is not sequence}

    def __str__(self) -> str:
        lines = [f"TraceGraph of {self.traces} traces, {len(self._sequences)} op sequences"]
        lines += [f"  {sequence}" for sequence in self._sequences]
        return "\n".join(lines)
