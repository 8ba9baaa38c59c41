"""A job that loses a rank, is launched again and goes on: as if nothing had happened."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(900)]
PROGRAM = Path(__file__).parent / "ranks_restart.py"


def run(case, folder, *options, ranks=4):
    """The finished launch, and by step the losses that it printed, of all attempts."""
    command = [sys.executable, "-m", "pipeline", "run", "-np", str(ranks), *options]
    done = subprocess.run(
        [*command, str(PROGRAM), json.dumps({"who": -1, **case}), str(folder / "run")],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    losses = {}
    for attempt in sorted(folder.glob("run.[0-9]*")):
        for line in attempt.read_text().splitlines():
            step, loss = json.loads(line)
            losses.setdefault(step, set()).add(loss)
    return done, losses


def check(case, folder, begin, ranks=4):
    """`begin`: the steps at which the second attempt may have begun."""
    done, losses = run(case, folder, "--restarts", "2", ranks=ranks)
    assert done.returncode == 0, done.stdout
    assert "restart 1 of 2" in done.stdout and "restart 2" not in done.stdout
    results = json.loads((folder / "run.json").read_text())
    assert results["began"] in begin, done.stdout
    # What was done twice had the same result both times.
    assert set(losses) >= {*range(5), *range(results["began"], 8)}
    for step, found in losses.items():
        assert found == {results["whole_losses"][step]}, (step, losses)
    assert results["weights"] == results["whole_weights"]
    return done.stdout


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_goes_on_from_the_last_checkpoint(ranks, tmp_path):
    options = {"checkpoint": str(tmp_path / "saved"), "save_every": 2}
    case = {"options": options, "who": ranks - 1, "at": "forward", "step": 5}
    check(case, tmp_path, begin=[4], ranks=ranks)


# Where a rank dies in its sixth step, and how many steps the emergency checkpoint may be after.
EMERGENCIES = [
    ("forward", 3, {}, [5]),
    ("forward", 0, {}, [5]),
    ("reduce", 1, {}, [5]),
    ("exchange", 2, {"calls": 1}, [5]),
    ("scatter", 0, {"calls": 1}, [5]),
    ("ended", 0, {}, [5, 6]),
    ("optimizer", 2, {}, [5, 6]),
]


@pytest.mark.full
@pytest.mark.parametrize(("at", "who", "more", "begin"), EMERGENCIES)
def test_goes_on_from_what_the_survivors_wrote(at, who, more, begin, tmp_path):
    options = {"checkpoint": str(tmp_path / "saved"), "emergency": True}
    case = {"options": options, "who": who, "at": at, "step": 5, **more}
    printed = check(case, tmp_path, begin)
    said = {
        int(rank) for rank in re.findall(r"rank (\d): emergency checkpoint after step", printed)
    }
    assert said == {0, 1, 2, 3} - {who}, printed
    left = [path.name for path in (tmp_path / "saved").iterdir()]
    assert all(name == "checkpoint.json" or name.endswith(".npz") for name in left), left


@pytest.mark.full
def test_gives_up_after_so_many_restarts(tmp_path):
    options = {"checkpoint": str(tmp_path / "saved"), "stage_mode": "no such mode"}
    done, _ = run({"options": options}, tmp_path, "--restarts", "1", ranks=2)
    assert done.returncode != 0
    assert "restart 1 of 1" in done.stdout and "no such mode" in done.stdout
