"""Starts a program on several ranks and collects what its rank 0 found out.

A launch costs seconds, so one program runs a whole table of cases; see `ranks_runtime.py`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
STARTUP = Path(__file__).resolve().parent / "startup"
RESULTS = "PIPELINE_TEST_RESULTS"


def environment(**more: str) -> dict[str, str]:
    """What a rank gets: one thread, no GPU, few messages."""
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", STARTUP))),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def start(program: Path, ranks: int, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """Starts a program on so many ranks, in a process group of its own."""
    command = [str(Path(sys.executable).parent / "horovodrun"), "-np", str(ranks), "--gloo"]
    return subprocess.Popen(
        [*command, sys.executable, str(program), *arguments],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def launch(
    program: Path, ranks: int, *arguments: str, seconds: float = 250, **more: str
) -> dict[str, object]:
    """Runs a program to its end and returns the results that its rank 0 wrote.

    `more` is set in its environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        process = start(program, ranks, *arguments, **{RESULTS: str(results), **more})
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            printed, _ = process.communicate()
            raise AssertionError(f"{program.name} took over {seconds} s:\n{printed}") from None
        assert process.returncode == 0, f"{program.name} failed:\n{printed[-20000:]}"
        return json.loads(results.read_text())
