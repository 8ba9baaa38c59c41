"""All that the user of `terra bench` sees: progress while the script runs, then the outcome.

On a terminal there is a bar for each run; in a pipe or a file the same facts are plain lines.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from terra_tf.bench import printed
from terra_tf.bench.process import ScriptRun
from terra_tf.bench.timing import format_seconds
from terra_tf.bench.verdict import StepSpeed, Verdict, describe_agreement, failure_summary

STDERR_LINES_SHOWN = 20
REASONS_SHOWN = 3
LAST_LINES_SHOWN = 2

# Drawing competes with the script for the processor, so it is done rarely.
_BAR_INTERVAL_SECONDS = 0.25
_LINE_INTERVAL_SECONDS = 5.0
_PLAIN_WIDTH = 120


def make_console() -> Console:
    """Returns the console for the output; one for a pipe prints what its encoding can print."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False, width=int(os.environ.get("COLUMNS", _PLAIN_WIDTH)))


class RunDisplay:
    """Shows runs as they go on; a context manager, since it owns the terminal meanwhile."""

    def __init__(self, console: Console, show_output: bool = False) -> None:
        self._console = console
        self._show_output = show_output
        self._lines_shown = 0
        self._last_drawn = 0.0
        self._label = ""
        self._total: int | None = None
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}", markup=False),
            TextColumn("{task.fields[seconds]:.1f} s"),
            TextColumn(
                "{task.fields[line]}",
                markup=False,
                style="dim",
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=console,
            auto_refresh=False,
            expand=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> RunDisplay:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def start(self, label: str, total: int | None) -> None:
        """Begins a run.

        Args:
            label: what to call it.
            total: how many iterations are to be expected; None when nobody knows.
        """
        self._label = label
        self._total = total or None
        self._lines_shown = 0
        self._last_drawn = time.monotonic()
        self._task = self._bars.add_task(
            label, total=self._total, count="starting", seconds=0.0, line=""
        )
        self._bars.refresh()
        if not self._console.is_terminal:
            self._print(f"{label}: started")

    def update(self, run: ScriptRun) -> None:
        """Shows how far a run is; does nothing most of the time."""
        if self._show_output:
            for line in run.lines[self._lines_shown :]:
                self._print(f"{self._label} | {line}")
            self._lines_shown = len(run.lines)
        ended = run.exit_code is not None
        interval = _BAR_INTERVAL_SECONDS if self._console.is_terminal else _LINE_INTERVAL_SECONDS
        if not ended and time.monotonic() - self._last_drawn < interval:
            return
        self._last_drawn = time.monotonic()
        count = count_text(run.iterations, self._total)
        line = next((line for line in reversed(run.lines) if line.strip()), "")
        if not self._console.is_terminal:
            state = "ended" if ended else "running"
            latest = f": {line}" if line else ""
            self._print(f"{self._label}: {state}, {count}, {run.wall_seconds:.1f} s{latest}")
            return
        self._bars.update(
            self._task,
            completed=run.iterations,
            # An ended run's bar is full, however many iterations it had.
            total=max(run.iterations, 1) if ended else self._total,
            count=count,
            seconds=run.wall_seconds,
            line=line,
        )
        if ended and run.iterations == 0:
            self._bars.update(self._task, completed=1)
        self._bars.refresh()

    def _print(self, line: str) -> None:
        # Text, because a script's output may look like markup.
        self._console.print(Text(line), soft_wrap=True)


def count_text(iterations: int, total: int | None) -> str:
    """Returns how far a run is: `12 iterations`, or with a known total `12/48 25%`."""
    if total is None:
        return f"{iterations} iteration{'' if iterations == 1 else 's'}"
    return f"{iterations}/{total} {iterations / total:.0%}"


def show_failure(console: Console, run: ScriptRun) -> None:
    """Shows the end of a failed run's stderr and the summary."""
    tail = list(run.stderr)[-STDERR_LINES_SHOWN:]
    console.print(Text(f"\nThe last lines that the script printed to stderr ({run.mode} run):"))
    for line in tail or ["(none)"]:
        console.print(Text(f"  {line}"), soft_wrap=True)
    _show_summary(console, failure_summary(run), good=False)


def show_verdict(
    console: Console,
    verdict: Verdict,
    eager: ScriptRun,
    terra: ScriptRun,
    ignore: Sequence[re.Pattern[str]] = (),
) -> None:
    """Shows the outcome.

    Args:
        console: where to.
        verdict: the outcome.
        eager: the eager run whose last lines are shown.
        terra: the Terra run whose last lines are shown.
        ignore: patterns of output that is not compared.
    """
    console.print()
    console.print(_side_by_side(verdict, eager, terra, ignore))
    console.print()
    _show_facts(console, verdict)
    for difference in verdict.agreement.differences:
        console.print("differs:", style="red")
        for name, line in (("eager", difference.eager), ("Terra", difference.terra)):
            text = "(no more numbers)" if line is None else line
            console.print(Text(f"  {name}: {text}"), soft_wrap=True)
    for remark in verdict.remarks:
        console.print(Text(f"note: {remark}", style="yellow"), soft_wrap=not console.is_terminal)
    _show_summary(console, verdict.summary(), good=verdict.agreement.complete)


def _side_by_side(
    verdict: Verdict, eager: ScriptRun, terra: ScriptRun, ignore: Sequence[re.Pattern[str]]
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("eager", overflow="fold")
    table.add_column("Terra", overflow="fold")
    table.add_column("ratio", justify="right")
    label = "last numbers printed"
    for left, right in last_lines(eager.lines, terra.lines, ignore):
        table.add_row(label, Text(left), Text(right))
        label = ""
    for step in verdict.steps:
        table.add_row(Text(f"{step.name}, median step"), *_speed_cells(step))
    table.add_row(
        "whole run",
        format_seconds(verdict.eager_wall_seconds),
        format_seconds(verdict.terra_wall_seconds),
        f"{verdict.eager_wall_seconds / verdict.terra_wall_seconds:.2f}",
    )
    return table


def last_lines(
    eager_lines: Sequence[str], terra_lines: Sequence[str], ignore: Sequence[re.Pattern[str]]
) -> list[tuple[str, str]]:
    """Returns the last lines with numbers of both runs, side by side.

    When none of them speaks of a loss, the last line that does comes first.
    """
    columns = []
    for lines in (eager_lines, terra_lines):
        shown = printed.last_lines_with_numbers(lines, LAST_LINES_SHOWN, ignore)
        losses = [line for line in lines if "loss" in line.lower()]
        if not any("loss" in line.lower() for line in shown):
            shown = printed.last_lines_with_numbers(losses, 1, ignore) + shown
        columns.append(shown)
    rows = max(len(column) for column in columns)
    left, right = ([""] * (rows - len(column)) + column for column in columns)
    return list(zip(left, right, strict=True))


def _speed_cells(step: StepSpeed) -> tuple[str, str, str]:
    def cell(seconds: float | None, iterations: int) -> str:
        time_text = "no time" if seconds is None else format_seconds(seconds)
        return f"{time_text} ({count_text(iterations, None)})"

    return (
        cell(step.eager_seconds, step.eager_iterations),
        cell(step.terra_seconds, step.terra_iterations),
        "" if step.ratio is None else f"{step.ratio:.2f}",
    )


def _show_facts(console: Console, verdict: Verdict) -> None:
    agreement = verdict.agreement
    text = describe_agreement(agreement)
    if agreement.total:
        text += f"; largest difference {agreement.largest_difference:.3g}"
    console.print(f"agreement: {text}")
    if verdict.coexecuted_share is not None:
        console.print(
            f"co-executed: {verdict.coexecuted} of {verdict.iterations} iterations "
            f"({verdict.coexecuted_share:.1%})"
        )
        reasons = list(verdict.fallback_reasons.items())
        shown = ", ".join(f"{code} ({count})" for code, count in reasons[:REASONS_SHOWN])
        more = len(reasons) - REASONS_SHOWN
        console.print(
            Text(f"fallbacks: {shown or 'none'}" + (f", {more} more reasons" if more > 0 else ""))
        )
    if verdict.steps:
        console.print(
            "step time: from a step's start to its next start, the median of the run's second "
            "half; ratio: eager / Terra",
            style="dim",
            soft_wrap=not console.is_terminal,
        )


def _show_summary(console: Console, summary: str, good: bool) -> None:
    console.print()
    console.print(Text(summary, style="bold green" if good else "bold red"), soft_wrap=True)
