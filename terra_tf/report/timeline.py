"""Writes what both runners did, as a Chrome trace: chrome://tracing or ui.perfetto.dev show it.

Each step has two rows. The PythonRunner's has its iterations by mode, and in them the times when
Python waited for the graph. The GraphRunner's has the runs of its graph, and in them the times when
the graph waited for Python: for feeds, decisions and gates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terra_tf.report.history import Record

_MICROSECONDS = 1e6


def spans(record: Record) -> Iterator[tuple[str, str, float, float]]:
    """(runner, what, begin, end) of all that is known of an iteration; times in seconds."""
    if record.built:
        yield "PythonRunner", "generates a graph", record.begin - record.built, record.begin
    if record.end:
        what = record.mode if record.outcome == "ended" else f"{record.mode}, {record.outcome}"
        yield "PythonRunner", what, record.begin, record.end
    if record.graph is None:
        return
    for begin, end in record.graph.python_waits:
        yield "PythonRunner", "waits for the graph", begin, end
    if record.graph.started and record.graph.finished:
        yield "GraphRunner", "graph", record.graph.started, record.graph.finished
    for begin, end in record.graph.graph_waits:
        yield "GraphRunner", "waits for Python", begin, end


def chrome_trace(steps: Iterable[tuple[str, Iterable[Record]]]) -> dict[str, Any]:
    """The trace of some steps.

    Args:
      steps: name and records of each.

    Returns:
      An object in the Trace Event Format (JSON), times in microseconds.
    """
    events: list[dict[str, Any]] = []
    for process, (name, records) in enumerate(steps, 1):
        rows = {"PythonRunner": 1, "GraphRunner": 2}
        events.append(_label("process_name", process, 0, f"step {name}"))
        events += [_label("thread_name", process, row, runner) for runner, row in rows.items()]
        for number, record in enumerate(records):
            for runner, what, begin, end in spans(record):
                events.append(
                    {
                        "name": what,
                        "cat": runner,
                        "ph": "X",
                        "pid": process,
                        "tid": rows[runner],
                        "ts": begin * _MICROSECONDS,
                        "dur": max(0.0, end - begin) * _MICROSECONDS,
                        "args": {"iteration": number, "thread": record.thread},
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _label(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}


def write_chrome_trace(path: str, steps: Iterable[tuple[str, Iterable[Record]]]) -> None:
    """Writes the trace of some steps to a file; see `chrome_trace`."""
    text = json.dumps(chrome_trace(steps))
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
