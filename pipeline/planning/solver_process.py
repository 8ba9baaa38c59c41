"""The solver in a process of its own.

OR-Tools and TensorFlow both export what they share (absl, protobuf, Eigen), in different versions:
in one process, a search crashes. And a process of its own leaves Ctrl-C to this one, which asks the
solver to stop and takes the best so far. The process is started at the first search and serves all
later ones; it ends when its standard input does, with this process.

Messages are pickles: a `Task` or "stop" to the solver, `(makespan, bound)`, a `Solution` or an
exception from it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.errors import PlanningError
from pipeline.planning.heft import Timetable
from pipeline.planning.instance import Instance
from pipeline.planning.solver import Search, Solution

Report = Callable[[float, float | None, float], None]
"""Called with the seconds so far, the best makespan or None, and the bound."""
_STOP = "stop"
# Not `-m`: the classes of messages would then be those of a module called __main__.
_PROGRAM = "from pipeline.planning.solver_process import main; main()"


@dataclass(frozen=True)
class Task:
    """What is to be solved, from which start, for how many seconds."""

    instance: Instance
    hint: Timetable | None
    seconds: float


def solve(
    instance: Instance, hint: Timetable | None, seconds: float, report: Report | None = None
) -> tuple[Solution, bool]:
    """Searches for the best placement.

    Args:
        instance: the graph on its cluster.
        hint: a placement to begin with.
        seconds: for how long.
        report: hears of progress.

    Returns:
        What was found, and whether Ctrl-C ended the search.

    Raises:
        ImportError: if OR-Tools is not installed.
        PlanningError: if the solver's process died.
    """
    begin = time.monotonic()
    with _lock:
        solver = _Solver.running()
        interrupted = False
        solver.send(Task(instance, hint, seconds))
        while True:
            try:
                message = solver.receive(0.2)
                if isinstance(message, Solution):
                    return message, interrupted
                if isinstance(message, BaseException):
                    raise message
                if message is not None and report is not None:
                    report(time.monotonic() - begin, *message)
            except KeyboardInterrupt:
                if interrupted:  # once more: whoever presses it does not want to wait
                    solver.end()
                    raise
                interrupted = True
                solver.send(_STOP)


class _Solver:
    """The solver's process, seen from this one."""

    _running: _Solver | None = None

    def __init__(self) -> None:
        package = str(Path(__file__).resolve().parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C in the terminal is for this process
        )
        self.messages: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._read, name="solver messages", daemon=True).start()

    @classmethod
    def running(cls) -> _Solver:
        """The process that serves this one; after a fork, a new one."""
        own = cls._running
        if own is None or own.process.poll() is not None or own.owner != os.getpid():
            own = cls._running = cls()
            own.owner = os.getpid()
        return own

    owner = 0

    def send(self, message: Any) -> None:
        assert self.process.stdin is not None
        try:
            pickle.dump(message, self.process.stdin)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `receive` tells

    def receive(self, seconds: float) -> Any:
        """The next message, or None if there is none for so long."""
        try:
            return self.messages.get(timeout=seconds)
        except queue.Empty:
            return None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while True:
            try:
                self.messages.put(pickle.load(self.process.stdout))
            except (EOFError, pickle.UnpicklingError, OSError):
                break
        code = self.process.wait()
        self.messages.put(
            PlanningError(f"the solver's process ended with exit code {code}", "solver-died")
        )


_lock = threading.Lock()


@atexit.register
def _end() -> None:
    own = _Solver._running
    if own is not None and own.owner == os.getpid() and own.process.poll() is None:
        own.end()


# --- inside the solver's process -----------------------------------------------------------------


def serve(incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Solves what comes in, one task after the other, until the input ends."""
    tasks: queue.Queue[Task] = queue.Queue()
    state: dict[str, Search | None] = {"search": None}
    stop = threading.Event()

    def read() -> None:
        while True:
            try:
                message = pickle.load(incoming)
            except EOFError:
                os._exit(0)  # whoever asked is gone
            if message == _STOP:
                stop.set()
                if state["search"] is not None:
                    state["search"].stop()
            else:
                stop.clear()
                tasks.put(message)

    writing = threading.Lock()

    def write(message: Any) -> None:
        with writing:
            pickle.dump(message, outgoing)
            outgoing.flush()

    threading.Thread(target=read, daemon=True).start()
    while True:
        task = tasks.get()
        try:
            search = Search(
                task.instance, task.hint, task.seconds, lambda best, bound: write((best, bound))
            )
            state["search"] = search
            if stop.is_set():
                search.stop()
            found: Any = search.run()
        except Exception as error:
            found = error
        state["search"] = None
        write(found)


def main() -> None:
    """Serves the process that started this one."""
    # Messages have standard output for themselves; whatever the solver prints goes to stderr.
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, messages)
