"""What a step counts while it runs, and the public snapshot of it."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable


@dataclasses.dataclass
class Counters:
    """Running totals of one step; `Stats` explains the names."""

    traced: int = 0
    coexecuted: int = 0
    fallen_back: int = 0
    graphs: int = 0
    build_seconds: float = 0.0
    ops_per_iteration: int = 0
    delegated_calls: int = 0
    feeds: int = 0
    fetches: int = 0
    python_wait_seconds: float = 0.0
    graph_wait_seconds: float = 0.0
    fallback_reasons: dict[str, int] = dataclasses.field(default_factory=dict)

    def zero(self) -> None:
        """Sets everything back to the start."""
        self.__init__()


@dataclasses.dataclass
class Stats:
    """A snapshot of what a step, or all steps together, have done.

    Attributes:
      traced: iterations that ran eagerly and were recorded from their start.
      coexecuted: iterations that ran through as co-executed.
      fallen_back: iterations that began as co-executed and went on eagerly.
      traces: traces merged into the TraceGraph.
      nodes: nodes of the TraceGraph.
      branches: branch regions of the TraceGraph.
      loops: loops of the TraceGraph.
      graphs: graphs generated since the reset.
      build_seconds: what generating them took.
      ops_per_iteration: op calls of the latest iteration.
      delegated_calls: library calls whose Python body was skipped.
      feeds: values that Python handed to graphs.
      fetches: values that Python got from graphs.
      python_wait_seconds: how long Python waited for the graph.
      graph_wait_seconds: how long graphs waited for Python.
      fallback_reasons: stable reason code -> how often.
    """

    traced: int = 0
    coexecuted: int = 0
    fallen_back: int = 0
    traces: int = 0
    nodes: int = 0
    branches: int = 0
    loops: int = 0
    graphs: int = 0
    build_seconds: float = 0.0
    ops_per_iteration: int = 0
    delegated_calls: int = 0
    feeds: int = 0
    fetches: int = 0
    python_wait_seconds: float = 0.0
    graph_wait_seconds: float = 0.0
    fallback_reasons: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reset: Callable[[], None] = lambda: None

    def reset(self) -> None:
        """Zeroes the counters of the step (or of all steps) that this snapshot was taken of."""
        self._reset()


class Source:
    """Something whose Stats can be taken: a step.

    Attributes:
      counters: its running totals.
      shape: gives (traces, nodes, branches, loops) of its TraceGraph.
    """

    def __init__(self, counters: Counters, shape: Callable[[], tuple[int, int, int, int]]):
        self.counters = counters
        self.shape = shape


_lock = threading.Lock()
_sources: dict[int, Source] = {}
_departed = Counters()  # totals of steps that are gone


def register(owner: object, source: Source) -> None:
    """Counts `source` among all steps; keeps its totals when `owner` is gone."""
    key = id(source)
    _sources[key] = source
    weakref.finalize(owner, _depart, key).atexit = False


def _depart(key: int) -> None:
    with _lock:
        source = _sources.pop(key)
        _add(_departed, source.counters)


def _add(total: Counters | Stats, counters: Counters) -> None:
    for field in dataclasses.fields(Counters):
        value = getattr(counters, field.name)
        if field.name == "fallback_reasons":
            for code, count in value.items():
                total.fallback_reasons[code] = total.fallback_reasons.get(code, 0) + count
        elif field.name == "ops_per_iteration":
            total.ops_per_iteration = value or total.ops_per_iteration
        else:
            setattr(total, field.name, getattr(total, field.name) + value)


def stats_of(sources: Iterable[Source]) -> Stats:
    """The sum over some steps."""
    sources = list(sources)
    stats = Stats()
    for source in sources:
        _add(stats, source.counters)
        traces, nodes, branches, loops = source.shape()
        stats.traces += traces
        stats.nodes += nodes
        stats.branches += branches
        stats.loops += loops

    def reset() -> None:
        for source in sources:
            source.counters.zero()

    stats._reset = reset
    return stats


def all_stats() -> Stats:
    """The sum over all steps of the process, those that are gone included."""
    with _lock:
        stats = stats_of(_sources.values())
        _add(stats, _departed)
    reset_living = stats._reset

    def reset() -> None:
        reset_living()
        _departed.zero()

    stats._reset = reset
    return stats
