"""Pictures for the page of `terra explain`, as SVG: a TraceGraph, and the timeline of both runners.

Both are plain strings without any script, so that the page can be kept, mailed and searched.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from terra_tf.report.drawing import Drawing, DrawnBlock, Row
from terra_tf.report.history import Record
from terra_tf.report.timeline import spans

_MOST_ROWS = 400
_MOST_ITERATIONS = 24  # in a timeline
_ROW, _GAP, _WIDTH = 40, 10, 1120
_LEFT, _SHIFT, _BOX = 230, 60, 560  # where boxes begin, how far optional ones are shifted, width
_BRANCH = _LEFT - 24  # the line that goes past an optional block


def graph_svg(drawing: Drawing) -> str:
    """The picture of a TraceGraph: rows from top to bottom, what may be skipped to the right."""
    parts: list[str] = []
    y, shown, hidden = 28, 0, 0
    parts.append(_text(_LEFT, 16, "the program comes in here", "note"))
    for block in drawing.blocks:
        rows = block.rows[: max(0, _MOST_ROWS - shown)]
        hidden += len(block.rows) - len(rows)
        shown += len(rows)
        if rows:
            y = _block(parts, block, rows, y)
    if hidden:
        parts.append(_text(_LEFT, y + 14, f"and {hidden} more lines of the program", "note"))
        y += 24
    parts.append(_text(_LEFT, y + 14, "and leaves the iteration here", "note"))
    label = escape(drawing.title)
    return (
        f'<svg class="graph" role="img" aria-label="{label}" width="{_WIDTH}" height="{y + 28}" '
        f'viewBox="0 0 {_WIDTH} {y + 28}">{"".join(parts)}</svg>'
    )


def _block(parts: list[str], block: DrawnBlock, rows: list[Row], y: int) -> int:
    x = _LEFT + (_SHIFT if block.optional else 0)
    top = y
    if block.optional:
        y += 18
        parts.append(_text(x, top + 12, f"taken {block.taken} times", "taken"))
        parts.append(_text(x + 120, top + 12, f"skipped {block.skipped} times", "skipped"))
    for row in rows:
        if row.boundary:
            parts.append(
                f'<line class="gate" x1="20" x2="{_WIDTH - 20}" y1="{y + 3}" y2="{y + 3}"/>'
            )
            parts.append(_text(24, y - 1, "gate", "note"))
            y += 8
        _row(parts, row, x, y)
        y += _ROW + _GAP
    if block.optional:
        parts.append(
            f'<path class="skip" d="M{_LEFT + 10} {top - 6} C{_BRANCH} {top + 4} {_BRANCH} '
            f"{top + 10} {_BRANCH} {top + 20} V{y - 20} C{_BRANCH} {y - 8} {_BRANCH} {y - 4} "
            f'{_LEFT + 10} {y + 2}"/>'
        )
        parts.append(f'<line class="edge" x1="{x}" x2="{_LEFT + 10}" y1="{y - 10}" y2="{y + 2}"/>')
        y += 6
    return y


def _row(parts: list[str], row: Row, x: int, y: int) -> None:
    count = sum(row.ops.values())
    in_place = sum(row.in_place.values())
    kind = "call" if row.calls else "place" if in_place == count else "box"
    listing = ", ".join(f"{n} x {op}" if n > 1 else op for op, n in row.ops.items())
    notes = [f"{count} op{'' if count == 1 else 's'}"]
    notes += [f"{row.backward} of gradients"] if row.backward else []
    notes += [f"{row.writes} write variables"] if row.writes else []
    notes += [f"{in_place} in place"] if in_place else []
    notes += [f"delegated: {', '.join(row.calls)}"] if row.calls else []
    width = _BOX - (x - _LEFT)
    below = _cut(f"{row.place}: {', '.join(notes)}", width // 7 + 4)
    parts.append(
        f"<g><title>{escape(row.place)}\n{escape(row.source)}\n{escape(listing)}</title>"
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{_ROW}" rx="5"/>'
        f"{_text(x + 10, y + 16, _cut(row.source or row.place, width // 8 + 8), 'source')}"
        f"{_text(x + 10, y + 32, below, 'note')}"
        f'<line class="edge" x1="{x + 14}" x2="{x + 14}" y1="{y + _ROW}" '
        f'y2="{y + _ROW + _GAP}"/></g>'
    )
    if row.feeds:
        _arrow(parts, 16, x, y + 20, _count(row.feeds, "feed"), "\n".join(row.feeds), "feed")
    if row.fetches:
        end = _LEFT + _BOX
        text = _count(row.fetches, "fetch")
        _arrow(parts, end, _WIDTH - 16, y + 20, text, "\n".join(row.fetches), "fetch")


def _count(things: list[str], name: str) -> str:
    if len(things) == 1:
        return f"{name}: {things[0]}"
    return f"{len(things)} {name}{'es' if name.endswith('ch') else 's'}"


def _arrow(parts: list[str], x1: int, x2: int, y: int, text: str, title: str, kind: str) -> None:
    parts.append(
        f'<g><title>{escape(title)}</title><line class="{kind}" x1="{x1}" x2="{x2 - 7}" y1="{y}" '
        f'y2="{y}"/><path class="{kind} head" d="M{x2 - 8} {y - 4} L{x2} {y} L{x2 - 8} {y + 4} z"/>'
        f"{_text(x1 + 6, y - 6, _cut(text, (x2 - x1) // 7), 'note')}</g>"
    )


def _text(x: int, y: int, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(1, most - 1)] + "…"


def timeline_svg(records: Iterable[Record]) -> str:
    """The picture of the latest iterations: a lane for each runner, waits cut out of them."""
    latest = [record for record in records if record.end][-_MOST_ITERATIONS:]
    found = [(number, span) for number, record in enumerate(latest) for span in spans(record)]
    if not found:
        return "<p>No iteration has ended yet.</p>"
    first = min(span[2] for _, span in found)
    length = max(max(span[3] for _, span in found) - first, 1e-9)
    scale = (_WIDTH - 150) / length
    lanes = {"PythonRunner": 34, "GraphRunner": 84}
    parts = [_text(8, top + 20, runner, "source") for runner, top in lanes.items()]
    # What is inside of something else comes after it and lies over it.
    for number, (runner, what, begin, end) in sorted(found, key=lambda item: item[1][2]):
        x, width = 140 + (begin - first) * scale, max((end - begin) * scale, 0.6)
        kind = what.partition(",")[0].replace(" ", "-")
        kind = "fell-back" if "fell back" in what else kind
        y, height = lanes[runner], 30
        if what.startswith("waits"):
            y, height = y + 6, 18
        title = f"{runner}: {what}, iteration {number}, {1e3 * (end - begin):.3f} ms"
        parts.append(
            f'<rect class="span {kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}">'
            f"<title>{escape(title)}</title></rect>"
        )
    for tick in range(6):
        x = 140 + tick * (_WIDTH - 150) / 5
        parts.append(_text(int(x), 20, f"{1e3 * length * tick / 5:.1f} ms", "note", "middle"))
    return (
        f'<svg class="timeline" role="img" aria-label="timeline of both runners" width="{_WIDTH}" '
        f'height="126" viewBox="0 0 {_WIDTH} 126">{"".join(parts)}</svg>'
    )
