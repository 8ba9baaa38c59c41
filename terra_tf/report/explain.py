"""Says in a page of text what steps did and why.

The text is lines of (text, style) pieces, so that the same page is plain in a string and coloured
on a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from terra_tf.report.findings import StepReport
from terra_tf.report.reasons import REASONS

_MOST = 12  # lines of one kind

Piece = tuple[str, str]  # text, and the name of a style of `rich`
Line = list[Piece]


def page(report: StepReport) -> str:
    """The plain page of one step."""
    return text_of(lines_of(report))


def explain_without_native(name: str, problem: str | None) -> str:
    """The page for a step that cannot co-execute at all."""
    return f"terra_tf step {name!r}: plain eager, because {problem or 'TERRA_DISABLE is set'}"


def lines_of(report: StepReport) -> Iterator[Line]:
    """The page of one step, line by line."""
    stats = report.stats
    good = "bold green" if report.phase == "co-executing" else "bold yellow"
    yield [
        ("terra_tf step ", ""),
        (f"{report.name!r}", "bold cyan"),
        (": ", ""),
        (report.phase, good),
    ]
    if report.iterations:
        yield [
            ("  iterations: ", "bold"),
            (f"{stats.coexecuted} co-executed ({report.share:.0%})", _style_of(report.share)),
            (f", {stats.traced} traced, {stats.fallen_back} fallen back", ""),
        ]
    yield [
        ("  TraceGraph: ", "bold"),
        (
            f"{stats.traces} traces, {len(report.drawings)} op sequences, {stats.nodes} nodes, "
            f"{stats.branches} branches, {stats.loops} loops; {stats.graphs} graphs built in "
            f"{stats.build_seconds:.2f} s",
            "",
        ),
    ]
    yield [
        ("  per iteration: ", "bold"),
        (
            f"{stats.ops_per_iteration} ops; {_each(stats.feeds, report)} feeds, "
            f"{_each(stats.fetches, report)} fetches, {_each(stats.delegated_calls, report)} "
            "delegated calls",
            "",
        ),
    ]
    yield [
        ("  waits: ", "bold"),
        (
            f"Python waited {stats.python_wait_seconds:.3f} s for graphs; "
            f"graphs waited {stats.graph_wait_seconds:.3f} s for Python",
            "",
        ),
    ]
    for text in report.numerics:
        yield [("  ", ""), (text, "")]
    yield from _fallbacks(report)
    yield from _reads(report)
    yield from _in_place(report)
    yield from _hints(report)


def _style_of(share: float) -> str:
    return "green" if share >= 0.8 else "yellow" if share >= 0.4 else "red"


def _each(total: int, report: StepReport) -> str:
    return f"{total / max(1, report.stats.coexecuted + report.stats.fallen_back):.3g}"


def _fallbacks(report: StepReport) -> Iterator[Line]:
    if not report.fallbacks:
        yield [("  fallbacks: ", "bold"), ("none", "green")]
        return
    yield [("  fallbacks:", "bold")]
    for fallback in report.fallbacks[:_MOST]:
        yield [(f"    {fallback.count} x ", "yellow"), (f"{fallback}", "")]
        yield [(f"        hint: {REASONS[fallback.code][1]}", "dim")]
    yield from _more(len(report.fallbacks), "places")


def _reads(report: StepReport) -> Iterator[Line]:
    if not report.stats.graphs and not report.reads:
        yield [("  reads inside the step: ", "bold"), ("not known yet", "")]
        return
    inside = [read for read in report.reads if read.inside]
    after = [read for read in report.reads if not read.inside]
    if not inside:
        yield [("  reads inside the step: ", "bold"), ("none", "green")]
    else:
        yield [("  reads inside the step (each waits for the graph):", "bold")]
    for read in inside[:_MOST]:
        yield [(f"    {read.place}", ""), (f"  {_cost(read.waits, read.per_iteration)}", "yellow")]
    yield from _more(len(inside), "lines")
    if after:
        yield [("  reads of its values after the step:", "bold")]
    for read in after[:_MOST]:
        yield [(f"    {read.place}", ""), (f"  {_cost(read.waits, read.per_iteration)}", "yellow")]
    yield from _more(len(after), "lines")


def _cost(waits: int, per_iteration: float) -> str:
    if not waits:
        return "never had to wait"
    return f"waited {waits} times, {per_iteration:.3g} ms per iteration"


def _in_place(report: StepReport) -> Iterator[Line]:
    if report.in_place:
        found = list(report.in_place.items())
        text = ", ".join(f"{count} x {op}" for op, count in found[:_MOST])
        text += f" and {len(found) - _MOST} more op types" if len(found) > _MOST else ""
        yield [("  ops that run in place: ", "bold"), (text, "")]


def _hints(report: StepReport) -> Iterator[Line]:
    if report.hints:
        yield [("  hints:", "bold")]
    for hint in report.hints:
        yield [("    * ", "magenta"), (hint, "")]


def _more(count: int, what: str) -> Iterator[Line]:
    if count > _MOST:
        yield [(f"    and {count - _MOST} more {what}", "dim")]


def text_of(lines: Iterable[Line]) -> str:
    """Lines as plain text."""
    return "\n".join("".join(text for text, _ in line) for line in lines)
