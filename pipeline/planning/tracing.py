"""What TensorFlow's own profiler saw: when each operation of a call ran, and how long."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from pipeline import tensorflow_internals

_MARK = "planning_call"
_PICOSECONDS = 1e-12


@dataclass
class CallTrace:
    """The operations of one call: name → start and end in seconds; several runs in turn."""

    events: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def span(self, names: set[str]) -> float:
        """Seconds from the start of the first of these operations to the end of the last."""
        found = [event for name in names for event in self.events.get(name, ())]
        if not found:
            return 0.0
        return max(end for _, end in found) - min(start for start, _ in found)

    def seconds(self, name: str) -> float:
        """What an operation took, all of its runs in the call."""
        return sum(end - start for start, end in self.events.get(name, ()))


class Tracer:
    """Records calls: `with Tracer() as tracer: with tracer.call(): step(x)`, then `traces()`."""

    def __init__(self) -> None:
        self._calls = 0
        self._traces: list[CallTrace] = []

    def __enter__(self) -> Tracer:
        self._folder = tempfile.TemporaryDirectory(prefix="planning-")
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=2, python_tracer_level=0, device_tracer_level=1
        )
        tf.profiler.experimental.start(self._folder.name, options=options)
        return self

    def __exit__(self, *failure: Any) -> None:
        tf.profiler.experimental.stop(save=failure[0] is None)
        try:
            if failure[0] is None:
                self._read()
        finally:
            self._folder.cleanup()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around one call."""
        number = self._calls
        self._calls += 1
        with tf.profiler.experimental.Trace(f"{_MARK}{number}"):
            yield
        time.sleep(0.001)  # so that what ends late still lies before the next call

    def traces(self) -> list[CallTrace]:
        """One for each call, in order."""
        return self._traces

    def _read(self) -> None:
        marks: dict[int, tuple[float, float]] = {}
        events: list[tuple[str, float, float]] = []
        for path in Path(self._folder.name).rglob("*.xplane.pb"):
            space = tensorflow_internals.read_trace(str(path))
            for plane in space.planes:
                for line in plane.lines:
                    base = line.timestamp_ns * 1e-9
                    for event in line.events:
                        name = plane.event_metadata[event.metadata_id].name
                        start = base + event.offset_ps * _PICOSECONDS
                        end = start + event.duration_ps * _PICOSECONDS
                        if name.startswith(_MARK):
                            marks[int(name[len(_MARK) :].split("#")[0])] = (start, end)
                        elif ":" in name:
                            events.append((name.rpartition(":")[0], start, end))
        self._traces = [CallTrace() for _ in range(self._calls)]
        order = sorted((begin, end, number) for number, (begin, end) in marks.items())
        for name, start, end in events:
            for begin, stop, number in order:
                if begin <= start <= stop:
                    self._traces[number].events.setdefault(name, []).append((start, end))
                    break
