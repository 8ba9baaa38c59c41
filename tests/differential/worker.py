"""Runs rows in a process of its own, so that a crash or a hang costs one row and not the whole run.

`Worker` is the parent's side: it starts a process on demand, sends it one row at a time, and starts
a new one after a crash or a timeout. `serve` is the child's side. Both speak JSON, a line each way,
over two pipes that no program can print into. A child is `python -m PACKAGE --serve ...`, where the
package, of this project's tests, says how a row is checked.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import harness

# What a process needs at most to import TensorFlow and all programs.
START_SECONDS = 120.0
EXIT_SECONDS = 20.0
SHOWN_LINES = 60


class Worker:
    """A process that runs rows with one Keras generation."""

    def __init__(self, keras: str, package: str = __package__, *, reuse: bool = False) -> None:
        """Starts nothing yet.

        Args:
            keras: "3" or "2".
            package: Whose `__main__` calls `serve`.
            reuse: Goes on with a process after a row in which it found problems.
        """
        self._keras = keras
        self._package = package
        self._reuse = reuse
        self._process: subprocess.Popen | None = None

    def run(self, row: str, timeout: float, **options: Any) -> harness.Verdict:
        """Runs a row.

        Args:
            row: Its name, or what else the package knows it by.
            timeout: Seconds until the process is killed, its start not included.
            **options: Those of the package's check: `candidate`, `read`, `iterations` here.

        Returns:
            The verdict; a crash or a timeout is a problem in it.
        """
        if self._process is None:
            self._start()
        try:
            self._requests.write(json.dumps({"row": row, **options}) + "\n")
            self._requests.flush()
            verdict = harness.Verdict(**self._receive(timeout))
            if verdict.problems and not self._reuse:
                # Whatever the row left behind must not spoil the next one.
                self._stop()
            return verdict
        except (_WorkerDied, BrokenPipeError) as died:
            problem = f"the process {died or 'died'}:\n{self._stop()}"
            return harness.Verdict(row, [problem], None, 0.0, 0.0)

    def close(self) -> str | None:
        """Ends the process as a script ends.

        Returns:
            What went wrong while the interpreter shut down, or None.
        """
        if self._process is None:
            return None
        self._requests.close()
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._tell_stacks()
            return f"the process did not end within {EXIT_SECONDS:.0f} s:\n{self._stop()}"
        printed = self._stop()
        return f"the process ended with exit code {code}:\n{printed}" if code else None

    def _start(self) -> None:
        root = Path(__file__).resolve().parents[__package__.count(".") + 1]
        paths = [str(root), *filter(None, sys.path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
        environment["TF_USE_LEGACY_KERAS"] = "1" if self._keras == "2" else "0"
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        requests, requests_end = os.pipe()
        replies_end, replies = os.pipe()
        self._requests, self._replies = os.fdopen(requests_end, "w"), os.fdopen(replies_end)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by _stop)
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._package, "--serve", str(requests), str(replies)],
            pass_fds=(requests, replies),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
        )
        os.close(requests)
        os.close(replies)
        self._receive(START_SECONDS)

    def _receive(self, timeout: float) -> dict[str, Any]:
        readable, _, _ = select.select([self._replies], [], [], timeout)
        if not readable:
            self._tell_stacks()
            raise _WorkerDied(f"gave no answer within {timeout:.0f} s")
        line = self._replies.readline()
        if not line:
            raise _WorkerDied(f"died with exit code {self._process.wait(EXIT_SECONDS)}")
        return json.loads(line)

    def _tell_stacks(self) -> None:
        """Lets the process print where its threads stand, before its end."""
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)

    def _stop(self) -> str:
        """Kills the process and returns the end of what it printed."""
        self._process.kill()
        self._process.wait()
        self._process = None
        self._replies.close()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._log.seek(0)
        with self._log as log:
            return "".join(log.readlines()[-SHOWN_LINES:])


class _WorkerDied(Exception):
    """The child's process gives no more answers; says why."""


def serve(requests: int, replies: int, check: Callable[..., harness.Verdict]) -> None:
    """Runs the rows that a parent asks for, until it closes the pipe.

    Args:
        requests: The descriptor to read from.
        replies: The descriptor to write to.
        check: Called with what `Worker.run` was given, but for the timeout.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with open(requests) as questions, open(replies, "w", buffering=1) as answers:
        answers.write(json.dumps("ready") + "\n")
        for question in questions:
            options = json.loads(question)
            verdict = check(options.pop("row"), **options)
            answers.write(json.dumps(dataclasses.asdict(verdict)) + "\n")
