"""Runs programs as `python PROGRAM` and as `terra run PROGRAM`, for the tests beside it."""

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TERRA = (sys.executable, "-m", "terra_tf")


@dataclasses.dataclass
class Outcome:
    """What a process has left behind."""

    output: str
    errors: str
    code: int


def write(folder, **files):
    """Writes programs into a folder; `a__b` becomes `a/b.py`. Returns the first one's path."""
    paths = []
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        paths.append(path)
    return paths[0]


def execute(*command, folder, seconds=100, **environment):
    """Runs a command in a folder."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TERRA_")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
    )
    return Outcome(done.stdout, _without_noise(done.stderr), done.returncode)


def python(script, *arguments, folder, **options):
    """`python SCRIPT ARGUMENTS...`."""
    return execute(sys.executable, script, *arguments, folder=folder, **options)


def terra_run(script, *arguments, folder, options=(), **more):
    """`terra run SCRIPT ARGUMENTS...`."""
    return execute(*TERRA, "run", *options, script, *arguments, folder=folder, **more)


def _without_noise(text):
    """Without the lines that TensorFlow's C++ writes before any logging is set up."""
    noise = ("WARNING: All log messages before absl", "I0000 ", "W0000 ", "E0000 ")
    return "\n".join(line for line in text.split("\n") if not line.startswith(noise))
