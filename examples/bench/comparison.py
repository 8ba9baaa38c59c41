"""What changed since an earlier run.

Times of two runs may come from a machine in two moods, so what is compared is mostly relative to
eager mode in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator

from .modes import EAGER
from .results import ModeResult, ProgramResult, Results
from .table import seconds_of_a_graph

NOTICEABLE = 0.05  # of a number, from where on its change is told


def compare(earlier: Results, now: Results) -> str:
    """Says what changed, a line a change."""
    before = {program.name: program for program in earlier.programs}
    lines = []
    for program in now.programs:
        known = before.pop(program.name, None)
        changes = ["is new"] if known is None else list(_changes(known, program, now.read_every))
        lines += [f"{program.title}: {change}" for change in changes]
    lines += [f"{program.title}: was not run" for program in before.values()]
    return "\n".join(lines) if lines else "nothing changed noticeably"


def _changes(before: ProgramResult, now: ProgramResult, variants: list[str]) -> Iterator[str]:
    for mode, result in now.modes.items():
        if mode not in before.modes:
            yield f"{mode} is new"
            continue
        if mode != EAGER:
            for every in variants:
                reads = "" if every == "1" else f", read every {every}"
                speeds = before.speed(mode, every), now.speed(mode, every)
                yield from _ratio(f"speed of {mode} over eager{reads}", *speeds)
        yield from _mode_changes(mode, before.modes[mode], result)


def _mode_changes(mode: str, before: ModeResult, now: ModeResult) -> Iterator[str]:
    if before.good != now.good or before.failed != now.failed:
        yield f"{mode}: {before.verdict} -> {now.verdict}"
    if before.coexecuted is not None and now.coexecuted is not None:
        if abs(before.coexecuted - now.coexecuted) > 0.01:
            yield f"{mode}: co-executed {before.coexecuted:.1%} -> {now.coexecuted:.1%}"
        if before.first_coexecuted != now.first_coexecuted:
            yield (
                f"{mode}: first co-executed iteration {before.first_coexecuted} -> "
                f"{now.first_coexecuted}"
            )
    graph_seconds = seconds_of_a_graph(before), seconds_of_a_graph(now)
    yield from _ratio(f"{mode}: seconds for a graph", *graph_seconds)
    yield from _ratio(f"{mode}: peak MB", before.peak_mb, now.peak_mb)


def _ratio(name: str, before: float | None, now: float | None) -> Iterator[str]:
    if before and now and abs(now / before - 1.0) > NOTICEABLE:
        yield f"{name} {before:.3g} -> {now:.3g} ({now / before - 1.0:+.0%})"
