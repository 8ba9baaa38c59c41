"""The subcommand `terra-pipeline run`: launches a script on all ranks by horovodrun."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from pipeline.commands.common import positive, whole

NAME = "run"
HELP = "launch a training script on all ranks (by horovodrun)"

DESCRIPTION = """\
Runs SCRIPT in so many processes with this Python, by horovodrun, which ends with a non-zero exit
code if one of them fails. What follows SCRIPT goes to the script.

With --restarts, a job that fails, because a rank was lost for example, is launched again. The
script goes on from its last checkpoint if its pipeline is made with checkpoint=PATH and
save_every=STEPS, and its loop begins at pipe.steps. PIPELINE_ATTEMPT counts the launches, from 0.
"""

EPILOG = """\
examples:
  terra-pipeline run -np 4 train.py --steps 100
  terra-pipeline run -np 4 --restarts 3 train.py
  terra-pipeline run -np 8 -H one:4,two:4 --option=--network-interfaces=eth0 train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand to its parser."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.add_argument(
        "-np", dest="processes", type=positive, required=True, metavar="N", help="number of ranks"
    )
    parser.add_argument("-H", dest="hosts", metavar="HOSTS", help="like one:4,two:4; default: here")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option for horovodrun, as --option=--verbose; may be given again",
    )
    parser.add_argument(
        "--restarts",
        type=whole,
        default=0,
        metavar="N",
        help="launch a job that fails again, up to N times (default: 0)",
    )
    parser.add_argument("script", metavar="SCRIPT", help="the Python script to run")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARG", help="arguments of the script"
    )


def run(arguments: argparse.Namespace) -> int:
    """Becomes horovodrun, or with restarts watches over it; returns its exit code."""
    command = launch_command(arguments)
    sys.stdout.flush()
    if arguments.restarts:
        return run_with_restarts(command, arguments.restarts)
    # In place of this process, so that signals and the exit code are the launcher's own.
    os.execv(command[0], command)


def run_with_restarts(command: list[str], restarts: int) -> int:
    """Runs a command until it succeeds, is interrupted, or has failed once more than `restarts`.

    Returns:
        The exit code of the last time.
    """
    attempt, interrupts = 0, []
    while True:
        process = subprocess.Popen(command, env=os.environ | {"PIPELINE_ATTEMPT": str(attempt)})

        def pass_on(
            number: int, frame: FrameType | None, process: subprocess.Popen[bytes] = process
        ) -> None:
            interrupts.append(number)
            process.send_signal(number)

        before = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if code == 0 or interrupts or attempt == restarts:
            # Of a signal, as a shell has it.
            return 128 - code if code < 0 else code
        attempt += 1
        print(
            f"terra-pipeline: the job ended with exit code {code}; restart {attempt} of {restarts}",
            file=sys.stderr,
            flush=True,
        )


def launch_command(arguments: argparse.Namespace) -> list[str]:
    """The command that launches the script.

    Raises:
        ValueError: if there is no such script.
        OSError: if Horovod is not installed.
    """
    if not Path(arguments.script).is_file():
        raise ValueError(f"there is no file {arguments.script!r}")
    # That of this environment first: another one's would start another Python's Horovod.
    beside = Path(sys.executable).parent / "horovodrun"
    launcher = str(beside) if beside.is_file() else shutil.which("horovodrun")
    if launcher is None:
        raise OSError("horovodrun is missing; tools/setup --horovod installs Horovod")
    hosts = ["-H", arguments.hosts] if arguments.hosts else []
    options = [*hosts, *arguments.option]
    if not {"--gloo", "--mpi"} & set(options):
        options.append("--gloo")
    script = [sys.executable, arguments.script, *arguments.arguments]
    return [launcher, "-np", str(arguments.processes), *options, *script]
