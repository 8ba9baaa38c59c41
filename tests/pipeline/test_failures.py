"""A rank in trouble: every other rank raises and says what happened, and nothing stays."""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from launch import start

pytestmark = pytest.mark.horovod
PROGRAM = Path(__file__).parent / "ranks_failure.py"


def run(trouble, who, seconds=100):
    """The exit code, what each rank raised, and how many seconds after the trouble began."""
    process = start(PROGRAM, 4, trouble, str(who))
    lines = []
    for line in process.stdout:
        lines.append(line)
        stopped = re.search(r"rank \d stops: (\d+)", line)
        if stopped:
            stopped_process = int(stopped[1])
    try:
        process.wait(seconds)
    finally:
        if trouble == "stop":
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped_process, signal.SIGKILL)
    printed = "".join(lines)
    began = max(map(float, re.findall(r"begins at ([\d.]+)", printed)))
    raised = {
        int(rank): (float(at) - began, text)
        for rank, at, text in re.findall(r"rank (\d) raised at ([\d.]+): (.*)", printed)
    }
    assert "went on" not in printed
    return process.returncode, raised, printed


def nothing_stays(before):
    left = subprocess.run(["pgrep", "-f", str(PROGRAM)], capture_output=True, text=True).stdout
    assert left == ""
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize(
    ("trouble", "who", "message"),
    [
        ("raise", 2, "rank 2 failed in train_step: ArithmeticError: this rank has a bug"),
        pytest.param("kill", 1, "rank 1 was lost", marks=pytest.mark.full),
        pytest.param("kill", 3, "rank 3 was lost", marks=pytest.mark.full),
        pytest.param("stop", 1, "nothing came within 8 s", marks=pytest.mark.full),
        pytest.param("shape", 0, "rank 0 failed in train_step", marks=pytest.mark.full),
        pytest.param("interrupt", 2, "KeyboardInterrupt", marks=pytest.mark.full),
    ],
)
def test_every_survivor_raises_what_happened(trouble, who, message):
    before = set(os.listdir("/dev/shm"))
    code, raised, printed = run(trouble, who)
    assert code != 0
    survivors = {0, 1, 2, 3} - ({who} if trouble in ("kill", "stop") else set())
    assert set(raised) == survivors, printed
    for rank in survivors - {who}:
        seconds, text = raised[rank]
        assert text.startswith(("CommunicationError", "CommunicationTimeout")), text
        assert message in text
        assert re.search(r"stage \d, before [FBW]\d|the number of samples|end of the step", text)
        assert seconds < (20 if trouble == "stop" else 5), raised
    nothing_stays(before)
