"""One run of the script in a child process, and all that came out of it.

The parent reads three streams at once: stdout, stderr and the pipe of `channel`. It returns when
the child has ended, even if a program that the child left behind still holds a stream open.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from terra_tf.bench import channel
from terra_tf.bench.timing import StepTimes
from terra_tf.report import observers

EAGER = "eager"
TERRA = "Terra"
LOOP = "loop at "  # how the names of steps begin that are loops

STDERR_LINES_KEPT = 1000
_TICK_SECONDS = 0.25  # how often a silent child's progress is reported
_GRACE_SECONDS = 5.0  # between asking a child to end and killing it


@dataclass
class ScriptRun:
    """What one run of the script did, as far as it has come.

    Attributes:
        mode: `EAGER` or `TERRA`.
        lines: what it printed to stdout.
        stderr: the last lines that it printed to stderr.
        steps: step name -> starts of its iterations.
        phases: "eager", "traced" or "coexecuted" -> how many iterations started so.
        turns: how many of the eager ones were turns of loops that may be no iterations.
        stats: the fields of `terra_tf.stats()` at the end; None when they did not arrive.
        wall_seconds: from the start of the process to its end, or to now.
        exit_code: None while it runs; negative for a signal, as in `subprocess`.
    """

    mode: str
    lines: list[str] = field(default_factory=list)
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=STDERR_LINES_KEPT))
    steps: dict[str, StepTimes] = field(default_factory=dict)
    phases: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    stats: dict[str, Any] | None = None
    wall_seconds: float = 0.0
    exit_code: int | None = None

    def forget_loops(self, known: Iterable[str]) -> None:
        """Drops the loops of an eager run that the other run has not found to be iterations."""
        for name in [name for name in self.steps if name.startswith(LOOP) and name not in known]:
            self.phases["eager"] -= self.steps.pop(name).iterations

    @property
    def iterations(self) -> int:
        """How many iterations started, of all steps together."""
        return self.phases.total()

    def describe_exit(self) -> str:
        """Says in words how the process ended."""
        if self.exit_code is not None and self.exit_code < 0:
            return f"ended by {signal.Signals(-self.exit_code).name}"
        return f"exit code {self.exit_code}"

    def receive(self, message: dict[str, Any]) -> None:
        """Takes in a message of the child."""
        for step_name, phase, start in message.get("iterations", ()):
            self.steps.setdefault(step_name, StepTimes()).starts.append(start)
            self.turns += phase == observers.TURN
            self.phases["eager" if phase == observers.TURN else phase] += 1
        self.stats = message.get("stats", self.stats)


class LineReader:
    """Cuts a stream of bytes into lines; a carriage return ends a line too, as progress bars do."""

    _END = re.compile(rb"\r\n|\n|\r")

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Takes in some bytes and passes on the lines that they complete."""
        *complete, self._rest = self._END.split(self._rest + data)
        for line in complete:
            self._on_line(line.decode("utf-8", "replace"))

    def finish(self) -> None:
        """Passes on the last line if nothing ended it."""
        if self._rest:
            self._on_line(self._rest.decode("utf-8", "replace"))
            self._rest = b""


def run_script(
    mode: str,
    script: str,
    arguments: Sequence[str],
    on_progress: Callable[[ScriptRun], None] = lambda run: None,
    steps: Sequence[tuple[str, str]] = (),
) -> ScriptRun:
    """Runs the script once and waits for its end.

    Args:
        mode: `EAGER` or `TERRA`.
        script: the path of the script.
        arguments: the script's own arguments.
        on_progress: called from time to time while the script runs, and once when it has ended.
        steps: (module, function) of steps that were named by hand.

    Returns:
        The finished run, failed or not.
    """
    run = ScriptRun(mode)
    read_end, write_end = os.pipe()
    started = time.perf_counter()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "terra_tf.bench.child", script, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(write_end,),
            env=child_environment(mode, write_end, steps),
        )
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    try:
        with process.stdout as stdout, process.stderr as stderr:
            readers = {
                stdout.fileno(): LineReader(run.lines.append),
                stderr.fileno(): LineReader(run.stderr.append),
                read_end: LineReader(lambda line: run.receive(channel.decode(line))),
            }
            for _ in _read_until_exit(process, readers):
                run.wall_seconds = time.perf_counter() - started
                on_progress(run)
        run.exit_code = process.wait()
        run.wall_seconds = time.perf_counter() - started
        on_progress(run)
    finally:
        os.close(read_end)
        _end(process)
    return run


def child_environment(mode: str, fd: int, steps: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Returns the environment of a child that sends its messages to `fd`."""
    environment = dict(os.environ)
    environment[channel.FD_VARIABLE] = str(fd)
    environment[channel.STEPS_VARIABLE] = ",".join(map(":".join, steps))
    # Sets of strings would otherwise be walked in another order in each process.
    environment.setdefault("PYTHONHASHSEED", "0")
    # Our caller may have it set, but then eager would be compared with eager.
    environment.pop("TERRA_DISABLE", None)
    if mode == EAGER:
        environment["TERRA_DISABLE"] = "1"
    return environment


def _read_until_exit(process: subprocess.Popen[bytes], readers: dict[int, LineReader]):
    """Feeds the readers until the process has ended; yields after each portion and each tick."""
    with selectors.DefaultSelector() as selector:
        for fd in readers:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            # Asked before reading: all that an ended process wrote is in the streams by now.
            ended = process.poll() is not None
            ready = selector.select(0 if ended else _TICK_SECONDS)
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if data:
                    readers[key.fd].feed(data)
                else:
                    selector.unregister(key.fd)
            if ended and not ready:
                break
            yield
    for reader in readers.values():
        reader.finish()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Makes sure that the process has ended, also when we leave because of Ctrl-C."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
