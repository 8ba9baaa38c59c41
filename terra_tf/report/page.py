"""The web page of `terra explain`: one file, no script, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from terra_tf.report.findings import StepReport
from terra_tf.report.picture import graph_svg, timeline_svg
from terra_tf.report.program import ProgramReport
from terra_tf.report.reasons import REASONS

_OPEN_STEPS = 3  # whose pictures are unfolded

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5d6b7a; --paper: #fbfcfd; --card: #fff;
  --line: #d8dfe6; --good: #1b7f4b; --bad: #b3402a; --box: #e8f0fb; --boxline: #7f9fce;
  --place: #fdeecf; --placeline: #d19a2b; --call: #eadcf8; --callline: #8f62c0; --feed: #2a7ab8;
  --fetch: #b3402a; --wait: #f6d7cf; --graph: #9cc7a8; --trace: #f3cf7a; --eager: #cbd3da; }
@media (prefers-color-scheme: dark) { :root { --ink: #dde5ec; --soft: #93a1af; --paper: #14191f;
  --card: #1b222a; --line: #313c47; --good: #55c488; --bad: #ee8a72; --box: #21324a;
  --boxline: #55779f; --place: #463914; --placeline: #b58a31; --call: #3a2950; --callline: #9a75c9;
  --feed: #69aee0; --fetch: #ee8a72; --wait: #6b342a; --graph: #36664a; --trace: #77601f;
  --eager: #4b5762; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 0 auto; max-width: 1180px; padding: 24px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 0; }
h3 { font-size: 15px; margin: 20px 0 6px; } p { margin: 6px 0; }
.soft, .note { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 16px 20px; margin: 18px 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; } td.number { text-align: right; white-space: nowrap; }
code { font: 13px ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.bar { display: flex; height: 12px; border-radius: 6px; overflow: hidden; margin: 8px 0;
  background: var(--eager); } .bar span { display: block; }
.scroll { overflow-x: auto; } summary { cursor: pointer; margin: 14px 0 6px; font-weight: 600; }
.key span { display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  margin: 0 5px 0 14px; vertical-align: -1px; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg text.source { font: 12.5px ui-monospace, Menlo, Consolas, monospace; fill: var(--ink); }
svg text.taken { fill: var(--good); font-weight: 600; }
svg text.skipped { fill: var(--bad); font-weight: 600; }
.box { fill: var(--box); stroke: var(--boxline); }
.place { fill: var(--place); stroke: var(--placeline); }
.call { fill: var(--call); stroke: var(--callline); }
.edge { stroke: var(--boxline); stroke-width: 1.5; }
.skip { fill: none; stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 5 4; }
.gate { stroke: var(--placeline); stroke-dasharray: 2 4; }
.feed { stroke: var(--feed); fill: var(--feed); }
.fetch { stroke: var(--fetch); fill: var(--fetch); }
.span { stroke: none; } .coexecuted { fill: var(--box); stroke: var(--boxline); }
.graph.span { fill: var(--graph); } .traced { fill: var(--trace); } .eager { fill: var(--eager); }
.fell-back { fill: var(--fetch); } .generates-a-graph { fill: var(--callline); }
.waits-for-the-graph, .waits-for-Python { fill: var(--wait); }
"""

_KEY = """
<p class="key soft"><span class="box" style="background:var(--box)"></span>in the graph
<span style="background:var(--place)"></span>runs in place, eagerly
<span style="background:var(--call)"></span>delegated library call
<span style="background:var(--feed)"></span>feed: from Python into the graph
<span style="background:var(--fetch)"></span>fetch: Python looks at a value.
Point at a box for its ops.</p>
"""
_TIMELINE_KEY = """
<p class="key soft"><span style="background:var(--boxline)"></span>Python in a co-executed iteration
<span style="background:var(--trace)"></span>traced
<span style="background:var(--fetch)"></span>fell back
<span style="background:var(--callline)"></span>generates a graph
<span style="background:var(--graph)"></span>graph runs
<span style="background:var(--wait)"></span>one waits for the other</p>
"""


def html_page(program: ProgramReport) -> str:
    """The page of a program, as a complete HTML document."""
    body = [
        f"<h1>{escape(program.title)}</h1>",
        f'<p class="soft">{escape(program.summary)}</p>',
        _shares(program.shares),
        _hints(program),
        _loops(program),
        *(_step(step, number < _OPEN_STEPS) for number, step in enumerate(program.steps)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(program.title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _shares(shares: Sequence[tuple[str, float, str]]) -> str:
    bar = "".join(
        f'<span style="width:{100 * share:.2f}%;background:var(--{color})" '
        f'title="{escape(what)}"></span>'
        for what, share, color in shares
    )
    key = "".join(
        f'<span style="background:var(--{color})"></span>{escape(what)} {share:.0%}'
        for what, share, color in shares
    )
    return f'<div class="bar">{bar}</div><p class="key soft">{key}</p>' if shares else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _hints(program: ProgramReport) -> str:
    found = [(step.name, hint) for step in program.steps for hint in step.hints]
    if not found:
        return ""
    rows = [(escape(hint), _code(name)) for name, hint in found]
    return f"<section><h2>What could make it faster</h2>{_table(('hint', 'step'), rows)}</section>"


def _loops(program: ProgramReport) -> str:
    if not program.loops:
        return ""
    rows = [
        (_code(f"{loop.place}"), _code(loop.head), escape(loop.role), escape(loop.reason))
        for loop in program.loops
    ]
    heads = ("loop", "", "its turns are", "because")
    return f"<section><h2>How iterations were found</h2>{_table(heads, rows)}</section>"


def _step(step: StepReport, unfolded: bool) -> str:
    stats = step.stats
    kind = "good" if step.phase == "co-executing" else "bad"
    facts = [
        ("iterations", f"{stats.coexecuted} co-executed ({step.share:.0%}), {stats.traced} traced, "
         f"{stats.fallen_back} fallen back"),
        ("TraceGraph", f"{stats.traces} traces, {len(step.drawings)} op sequences, {stats.nodes} "
         f"nodes, {stats.branches} branches, {stats.loops} loops"),
        ("graphs", f"{stats.graphs} built in {stats.build_seconds:.2f} s"),
        ("per run", f"{stats.ops_per_iteration} ops in the latest iteration; in all "
         f"{stats.feeds} feeds, {stats.fetches} fetches, {stats.delegated_calls} delegated calls"),
        ("waits", f"Python {stats.python_wait_seconds:.3f} s for graphs, graphs "
         f"{stats.graph_wait_seconds:.3f} s for Python"),
    ]  # fmt: skip
    if step.in_place:
        listed = ", ".join(f"{count} x {op}" for op, count in step.in_place.items())
        facts.append(("in place", listed))
    facts += [("numerics", text) for text in step.numerics]
    rows = [(f"<b>{name}</b>", escape(text)) for name, text in facts]
    drawings = [
        f"<details{' open' if unfolded and number == 0 else ''}><summary>TraceGraph, "
        f"{escape(drawing.title)}</summary>{_KEY}<div class='scroll'>{graph_svg(drawing)}</div>"
        "</details>"
        for number, drawing in enumerate(step.drawings)
    ]
    timeline = f"<div class='scroll'>{timeline_svg(step.records)}</div>"
    return (
        f"<section><h2>{_code(step.name)} <span class='{kind}'>{escape(step.phase)}</span></h2>"
        f"{_table(('', ''), rows)}{_fallbacks(step)}{_reads(step)}"
        f"<h3>Timeline of both runners, latest iterations</h3>{_TIMELINE_KEY}{timeline}"
        f"{''.join(drawings)}</section>"
    )


def _fallbacks(step: StepReport) -> str:
    if not step.fallbacks:
        return '<h3>Fallbacks</h3><p class="good">none</p>'
    rows = [
        (
            str(fallback.count),
            _code(fallback.code),
            escape(REASONS[fallback.code][0]),
            _code(fallback.expected_text),
            _code(fallback.actual_text),
            escape(REASONS[fallback.code][1]),
        )
        for fallback in step.fallbacks
    ]
    heads = ("", "code", "what happened", "expected", "came", "hint")
    return f"<h3>Fallbacks</h3>{_table(heads, rows)}"


def _reads(step: StepReport) -> str:
    if not step.reads:
        return '<h3>Reads of values</h3><p class="good">none</p>'
    rows = [
        (
            _code(read.place),
            "in the step" if read.inside else "after it",
            str(read.waits),
            f"{read.per_iteration:.3g} ms",
        )
        for read in step.reads
    ]
    heads = ("line", "where", "waits", "per iteration")
    return f"<h3>Reads of values</h3>{_table(heads, rows)}"
