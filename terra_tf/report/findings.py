"""What there is to say about a step: the facts that the text, the terminal and the page show.

A `StepReport` is taken from a PythonRunner at one moment and holds no part of it. Everything that a
person reads in more than one place is worded here.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from terra_tf import tensorflow_internals
from terra_tf.report.counters import Stats
from terra_tf.report.drawing import Drawing, draw
from terra_tf.report.history import Line, Record
from terra_tf.report.reasons import REASONS, Fallback

if TYPE_CHECKING:
    from terra_tf.runners.python_runner import PythonRunner
    from terra_tf.tracegraph.sequence import Sequence

_MILLISECONDS = 1e3
_WORTH_A_HINT = 0.02  # of an iteration's time
_FREQUENT = 0.05  # share of iterations that fall back, from which on it is worth a hint
_MOST_OF_A_KIND = 3


@dataclasses.dataclass
class ReadReport:
    """A line of the program that looks at values.

    Attributes:
      place: "file:line in function".
      inside: whether it is in the step, not in what comes after it.
      waits: how often Python had to wait there.
      per_iteration: milliseconds of waiting per co-executed iteration.
      in_place: whether it is an op in place that takes them, not the program.
    """

    place: str
    inside: bool
    waits: int
    per_iteration: float
    in_place: bool = False


@dataclasses.dataclass
class StepReport:
    """All about one step.

    Attributes:
      name: the step's.
      phase: what it does at present.
      stats: its counters.
      fallbacks: by place, most frequent first.
      reads: lines that look at values, most costly first.
      in_place: op type -> calls per iteration that run in place, of the latest graph.
      numerics: what `numerics="fast"` and `xla=True` did with the newest graph.
      hints: what could make it faster, most useful first.
      records: latest iterations.
      drawings: the TraceGraph, most recently used sequence first.
      milliseconds: mean time of a co-executed iteration, in Python; None if there was none.
    """

    name: str
    phase: str
    stats: Stats
    fallbacks: list[Fallback]
    reads: list[ReadReport]
    in_place: dict[str, int]
    numerics: list[str]
    hints: list[str]
    records: list[Record]
    drawings: list[Drawing]
    milliseconds: float | None

    @property
    def iterations(self) -> int:
        """How many there were."""
        return self.stats.traced + self.stats.coexecuted + self.stats.fallen_back

    @property
    def share(self) -> float:
        """The share of iterations that ran through as co-executed."""
        return self.stats.coexecuted / max(1, self.iterations)


def report_of(runner: PythonRunner, stats: Stats) -> StepReport:
    """Takes the report of a step.

    Args:
      runner: the step's.
      stats: its counters.
    """
    sequences = runner.tracegraph.sequences[::-1]
    spent = runner.history.seconds.get("coexecuted")
    begun = stats.coexecuted + stats.fallen_back
    report = StepReport(
        name=runner.name,
        phase=_phase(runner),
        stats=stats,
        fallbacks=sorted(runner.fallbacks.places, key=lambda fallback: -fallback.count),
        reads=_reads(runner, max(1, begun)),
        in_place=_in_place(sequences),
        numerics=_numerics(runner),
        hints=[],
        records=list(runner.history.records),
        drawings=[draw(sequence, number) for number, sequence in enumerate(sequences, 1)],
        milliseconds=_MILLISECONDS * spent / begun if spent and begun else None,
    )
    report.hints = hints(report)
    return report


def _phase(runner: PythonRunner) -> str:
    if runner.retreat.resting:
        return "resting in eager mode, because co-execution did not pay"
    sequences = runner.tracegraph.sequences
    if not sequences:
        return "not run yet"
    if sequences[-1].graph is not None:
        return "co-executing"
    return "tracing"


def _reads(runner: PythonRunner, iterations: int) -> list[ReadReport]:
    found = {}
    in_place = _places_of_ops_in_place(runner)
    for wait in runner.history.waits.values():
        file, line, function = wait.line
        place = f"{file}:{line} in {function}" if line else file
        each = _MILLISECONDS * wait.seconds / iterations
        takes = wait.inside and wait.line in in_place
        found[place, wait.inside] = ReadReport(place, wait.inside, wait.count, each, takes)
    # Those that have not made Python wait yet.
    for sequence in runner.tracegraph.sequences:
        graph = sequence.graph
        for read in graph.sequence.reads.values() if graph is not None else ():
            if read.output in graph.slots.fetches:  # shapes are known without the graph
                place = str(read.location)
                found.setdefault((place, True), ReadReport(place, True, 0, 0.0))
    return sorted(found.values(), key=lambda read: -read.per_iteration)


def _places_of_ops_in_place(runner: PythonRunner) -> set[Line]:
    graphs = [s.graph for s in runner.tracegraph.sequences if s.graph is not None]
    return {
        node.location.frames[0]
        for graph in graphs
        for node in graph.sequence.trace.nodes
        if node.in_place and node.inputs and node.location.frames
    }


def _in_place(sequences: tuple[Sequence, ...]) -> dict[str, int]:
    counts: dict[str, int] = {}
    graph = next((s.graph for s in sequences if s.graph is not None), None)
    for node in graph.sequence.trace.nodes if graph is not None else ():
        if node.in_place and not node.misses:
            name = node.op or "call of a function"
            counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _numerics(runner: PythonRunner) -> list[str]:
    sequences = runner.tracegraph.sequences
    graph = sequences[-1].graph if sequences else None
    if graph is None:
        return []
    lines = []
    if not runner.exact:
        before = len(graph.concrete.graph.get_operations())
        after = tensorflow_internals.rewritten_ops(graph.concrete, graph.config)
        fused = collections.Counter(op for op in after if op.startswith("_"))
        shown = ", ".join(f"{op} ({count})" for op, count in fused.most_common()) or "none"
        lines.append(
            f'numerics="fast": Grappler makes {len(after)} ops of {before}, fused kernels: {shown}'
        )
    if graph.compilation is not None:
        lines.append(f"xla=True: {graph.compilation}")
    elif runner.xla and not runner.compiles:
        lines.append("xla=True: given up, because a compiled graph failed where eager does not")
    return lines


# --- hints ---------------------------------------------------------------------------------------


def hints(report: StepReport) -> list[str]:
    """What could make a step faster, in words, most useful first."""
    found: list[str] = []
    worth = _WORTH_A_HINT * (report.milliseconds or 0.0)
    for read in report.reads[:_MOST_OF_A_KIND]:
        if read.per_iteration > max(worth, 0.01):
            saves = f"saves about {read.per_iteration:.2g} ms per step"
            if read.in_place:
                found.append(
                    f"an op that runs in place at {read.place} waits for its inputs: "
                    f"{read.per_iteration:.2g} ms per step"
                )
            elif read.inside:
                found.append(f"move the read at {read.place} out of the step: {saves}")
            else:
                found.append(f"read less often at {read.place} (every tenth step?): {saves}")
    for fallback in report.fallbacks[:_MOST_OF_A_KIND]:
        if fallback.count > max(2, _FREQUENT * report.iterations):
            found.append(
                f"{fallback.count} iterations left the graph at {fallback.location} "
                f"({fallback.code}): {REASONS[fallback.code][1]}"
            )
    functions = report.in_place.get("call of a function", 0)
    if functions:
        found.append(
            f"{functions} calls of functions (tf.function, a dataset's, a model's predict) run in "
            "place, each between two parts of the graph: without @tf.function inside the step they "
            "become parts of the graph"
        )
    for op in ("EagerPyFunc", "PyFunc", "PyFuncStateless"):
        if op in report.in_place:
            found.append(
                f"{report.in_place[op]} calls of tf.py_function or tf.numpy_function run in place: "
                "call the Python function directly, the step runs as Python anyway"
            )
    if "resting" in report.phase:
        found.append(
            "it stays eager at present and tries again after a while: its op sequences hardly "
            "repeat, or its steps are too small for a graph to pay"
        )
    if 0 < report.iterations <= 4 and not report.stats.coexecuted:
        found.append(
            "it ran only a few times: the first iterations are traced, then a graph is made"
        )
    return found
