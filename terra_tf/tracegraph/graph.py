"""The TraceGraph of one step.

At present it is a bounded set of straight op sequences. `add` merges a new trace into the sequence
that covers it, or keeps it as a new one; `expected` says which sequence an iteration will probably
follow, by what was passed to the step and by what came last.
"""

from __future__ import annotations

from collections.abc import Hashable

from terra_tf.tracegraph.sequence import Sequence
from terra_tf.tracing.trace import Trace

_MOST_KEYS = 1000

Key = tuple[Hashable, Hashable]  # see runners/signature.py


class TraceGraph:
    """Sequences of one step, most recently used last."""

    def __init__(self, max_graphs: int, build_after: int):
        """Makes an empty TraceGraph.

        Args:
          max_graphs: how many sequences may hold a generated graph.
          build_after: how many agreeing traces a sequence needs before a graph is generated.
        """
        self._max_graphs = max_graphs
        self._build_after = build_after
        self._sequences: list[Sequence] = []
        self._by_key: dict[Hashable, Sequence] = {}
        self.traces = 0

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All sequences, most recently used last."""
        return tuple(self._sequences)

    @property
    def nodes(self) -> int:
        """Nodes of all sequences together."""
        return sum(len(sequence.trace.nodes) for sequence in self._sequences)

    def add(self, key: Key, trace: Trace) -> Sequence:
        """Merges a trace of an iteration that was called with `key`."""
        self.traces += 1
        for sequence in reversed(self._sequences):
            if sequence.covers(trace):
                sequence.merge(trace)
                break
        else:
            sequence = Sequence.of(trace)
            self._sequences.append(sequence)
        self.use(key, sequence)
        return sequence

    def expected(self, key: Key) -> Sequence | None:
        """The sequence to expect for an iteration that is called with `key`."""
        whole, shapes = key
        return self._by_key.get(whole) or self._by_key.get(shapes)

    def use(self, key: Key, sequence: Sequence) -> None:
        """Notes that an iteration with `key` went along `sequence`."""
        if self._sequences[-1] is not sequence:
            self._sequences.remove(sequence)
            self._sequences.append(sequence)
        for part in key:
            if self._by_key.get(part) is not sequence:
                self._by_key.pop(part, None)  # so that it counts as new
                self._by_key[part] = sequence
        while len(self._by_key) > _MOST_KEYS:
            del self._by_key[next(iter(self._by_key))]
        self._evict()

    def ready(self, sequence: Sequence) -> bool:
        """Whether enough is known of a sequence to generate a graph from it."""
        return sequence.seen >= self._build_after

    def _evict(self) -> None:
        # Sequences without a graph are cheap but not free: they may be a few times as many.
        built = [sequence for sequence in self._sequences if sequence.graph is not None]
        surplus = built[: max(0, len(built) - self._max_graphs)]
        surplus += self._sequences[: max(0, len(self._sequences) - 4 * self._max_graphs)]
        for sequence in surplus:
            if sequence in self._sequences and sequence is not self._sequences[-1]:
                self._sequences.remove(sequence)
        if surplus:
            self._by_key = {k: s for k, s in self._by_key.items() if s in self._sequences}

    def __str__(self) -> str:
        lines = [f"TraceGraph of {self.traces} traces, {len(self._sequences)} op sequences"]
        lines += [f"  {sequence}" for sequence in self._sequences]
        return "\n".join(lines)
