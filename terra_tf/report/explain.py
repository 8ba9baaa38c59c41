"""Says in a page of text what a step did and why."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from terra_tf import tensorflow_internals
from terra_tf.report.counters import Stats
from terra_tf.report.reasons import REASONS

if TYPE_CHECKING:
    from terra_tf.runners.python_runner import PythonRunner

_MOST = 12  # lines of one kind


def explain_runner(runner: PythonRunner, stats: Stats) -> str:
    """The page for one step."""
    lines = [f"terra_tf step {runner.name!r}: {_phase(runner)}"]
    total = stats.traced + stats.coexecuted + stats.fallen_back
    if total:
        share = 100 * stats.coexecuted / total
        lines.append(
            f"  iterations: {stats.coexecuted} co-executed ({share:.0f}%), {stats.traced} traced, "
            f"{stats.fallen_back} fallen back"
        )
    lines.append(
        f"  TraceGraph: {stats.traces} traces, {len(runner.tracegraph.sequences)} op sequences, "
        f"{stats.nodes} nodes, {stats.branches} branches, {stats.loops} loops; "
        f"{stats.graphs} graphs built in {stats.build_seconds:.2f} s"
    )
    lines.append(
        f"  Python waited {stats.python_wait_seconds:.3f} s for graphs; "
        f"graphs waited {stats.graph_wait_seconds:.3f} s for Python"
    )
    lines += _numerics(runner)
    lines += _fallbacks(runner)
    lines += _reads(runner)
    return "\n".join(lines)


def explain_without_native(name: str, problem: str | None) -> str:
    """The page for a step that cannot co-execute at all."""
    return f"terra_tf step {name!r}: plain eager, because {problem or 'TERRA_DISABLE is set'}"


def _phase(runner: PythonRunner) -> str:
    if runner.retreat.resting:
        return "resting in eager mode, because co-execution did not pay"
    sequences = runner.tracegraph.sequences
    if not sequences:
        return "not run yet"
    if sequences[-1].graph is not None:
        return "co-executing"
    return "tracing"


def _numerics(runner: PythonRunner) -> list[str]:
    """What `numerics="fast"` and `xla=True` did with the newest graph."""
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
            f'  numerics="fast": Grappler makes {len(after)} ops of {before}, '
            f"fused kernels: {shown}"
        )
    if graph.compilation is not None:
        lines.append(f"  xla=True: {graph.compilation}")
    elif runner.xla and not runner.compiles:
        lines.append("  xla=True: given up, because a compiled graph failed where eager does not")
    return lines


def _fallbacks(runner: PythonRunner) -> list[str]:
    places = sorted(runner.fallbacks.places, key=lambda fallback: -fallback.count)
    if not places:
        return ["  fallbacks: none"]
    lines = ["  fallbacks:"]
    for fallback in places[:_MOST]:
        lines.append(f"    {fallback.count} x {fallback}")
        lines.append(f"        hint: {REASONS[fallback.code][1]}")
    if len(places) > _MOST:
        lines.append(f"    and {len(places) - _MOST} more places")
    return lines


def _reads(runner: PythonRunner) -> list[str]:
    sequences = runner.tracegraph.sequences
    graph = sequences[-1].graph if sequences else None
    if graph is None:
        return ["  reads inside the step: not known yet"]
    reads = sorted(graph.sequence.reads.values(), key=lambda read: read.position)
    # Shapes are known without the graph.
    reads = [read for read in reads if read.output in graph.slots.fetches]
    if not reads:
        return ["  reads inside the step: none"]
    lines = ["  reads inside the step (each waits for the graph):"]
    trace = graph.sequence.trace
    for read in reads[:_MOST]:
        lines.append(f"    {trace.producer(read.output).op} looked at by {read.location}")
    if len(reads) > _MOST:
        lines.append(f"    and {len(reads) - _MOST} more")
    return lines
