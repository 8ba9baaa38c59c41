"""The pipe by which a child tells `terra bench` of its iterations.

Messages are lines of JSON, one object each, told apart by their only key:

    {"iterations": [[step name, mode, start in ns], ...]}    several iterations, in order
    {"stats": {...}}                                          terra_tf.stats(), once, at the end

The pipe is separate from stdout and stderr, so that the script's output stays what it is.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

# Names the file descriptor of the pipe's writing end in the child's environment.
FD_VARIABLE = "TERRA_BENCH_FD"
# Names the steps that were given by hand, as MODULE:FUNCTION, separated by commas.
STEPS_VARIABLE = "TERRA_BENCH_STEPS"

# Iterations are sent in batches: a write wakes the parent up, which would then compete with the
# script for a core. Ten batches a second look smooth and cost nothing that can be measured.
FLUSH_INTERVAL_NS = 100_000_000


class Sender:
    """The child's end. `iteration_started` is an observer for `terra_tf.report.observers`."""

    def __init__(self, fd: int) -> None:
        """Takes over the file descriptor `fd`, which programs started by this one do not get."""
        os.set_inheritable(fd, False)
        self.iterations = 0
        self._fd = fd
        self._open = True
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, str, int]] = []
        self._next_flush_ns = 0
        # A forked copy of the script is not the script: its iterations are not counted.
        os.register_at_fork(after_in_child=self._forget)

    def iteration_started(self, step_name: str, mode: str) -> None:
        """Notes that an iteration starts now."""
        now = time.perf_counter_ns()
        if not self._open:
            return
        with self._lock:
            self.iterations += 1
            self._waiting.append((step_name, mode, now))
            if now >= self._next_flush_ns:
                self._next_flush_ns = now + FLUSH_INTERVAL_NS
                self._flush()

    def send_stats(self, stats: dict[str, Any]) -> None:
        """Sends the fields of a `Stats`."""
        with self._lock:
            self._write({"stats": stats})

    def close(self) -> None:
        """Sends what still waits and closes the pipe."""
        with self._lock:
            self._flush()
            if self._open:
                self._open = False
                os.close(self._fd)

    def _flush(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._write({"iterations": waiting})

    def _write(self, message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message, default=str).encode() + b"\n")
        try:
            while data and self._open:
                data = data[os.write(self._fd, data) :]
        except BrokenPipeError:
            # Nobody listens any more; that is no reason to disturb the script.
            self._open = False

    def _forget(self) -> None:
        self._open = False
        self._lock = threading.Lock()  # another thread may have held the old one
        os.close(self._fd)


def sender_from_environment() -> Sender | None:
    """Returns the sender that the parent asked for, and removes its trace for the script.

    Returns:
        None when the process was not started by `terra bench`.
    """
    fd = os.environ.pop(FD_VARIABLE, None)
    return None if fd is None else Sender(int(fd))


def decode(line: str) -> dict[str, Any]:
    """Returns the message in a line; an empty one for a line that its sender could not finish."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return {}
