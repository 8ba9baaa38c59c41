"""The timeline as a Chrome trace, which chrome://tracing and Perfetto show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from pipeline.schedules.actions import BOUNDARY, STASH
from pipeline.simulation.result import Simulation

MICROSECONDS = 1e6
# Each rank is a process of the trace; its threads, by number.
COMPUTE_THREAD = 0
THREADS = {COMPUTE_THREAD: "compute", 1: "boundary tensors", 2: "stashes"}


def write_chrome_trace(result: Simulation, path: str | PathLike[str]) -> None:
    """Writes a simulated step as a Chrome trace.

    Args:
        result: the simulation.
        path: the JSON file to write.
    """
    trace = {"traceEvents": list(trace_events(result)), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(trace))


def trace_events(result: Simulation) -> Iterator[dict[str, Any]]:
    """The events: computations, transfers at both ends, and what each rank holds."""
    for rank in range(result.schedule.num_stages):
        yield _metadata("process_name", rank, 0, f"rank {rank}")
        for thread, name in THREADS.items():
            yield _metadata("thread_name", rank, thread, name)
    for action, rank, start, end in result.computations:
        yield _span(str(action), "compute", rank, COMPUTE_THREAD, start, end)
    for action, source, target, start, end in result.transfers:
        thread = 1 if action.kind in BOUNDARY else 2
        name = str(action)
        yield _span(name, action.kind.value, source, thread, start, end)
        other = (BOUNDARY | STASH)[action.kind].value
        yield _span(f"{other} of {name}", other, target, thread, start, end)
    for rank, held in enumerate(result.memory):
        for time, count, size in held:
            yield {
                "name": "stashes",
                "ph": "C",
                "pid": rank,
                "ts": time * MICROSECONDS,
                "args": {"count": count, "bytes": size},
            }


def _metadata(name: str, rank: int, thread: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": {"name": value}}


def _span(
    name: str, category: str, rank: int, thread: int, start: float, end: float
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "ts": start * MICROSECONDS,
        "dur": (end - start) * MICROSECONDS,
    }
