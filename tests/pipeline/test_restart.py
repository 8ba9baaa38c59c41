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


def run(case, folder, name, *options):
    results = folder / name
    case = {"who": -1, **case}
    command = [sys.executable, "-m", "pipeline", "run", "-np", "4", *options]
    done = subprocess.run(
        [*command, str(PROGRAM), json.dumps(case), str(results)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    losses = {}
    for attempt in sorted(folder.glob(f"{name}.[0-9]*")):
        for line in attempt.read_text().splitlines():
            step, loss = json.loads(line)
            losses.setdefault(step, []).append(loss)
    return done, losses


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    done, losses = run({"options": {}}, folder, "whole")
    assert done.returncode == 0, done.stdout
    assert sorted(losses) == list(range(8))
    return losses, (folder / "whole.weights").read_text()


def check(case, folder, uninterrupted, begin):
    losses, weights = uninterrupted
    done, found = run(case, folder, "again", "--restarts", "2")
    assert done.returncode == 0, done.stdout
    assert "restart 1 of 2" in done.stdout and "restart 2" not in done.stdout
    began = (folder / "again.begin").read_text()
    assert began in begin, done.stdout
    for step in range(8):
        # A step may have been done twice, with the same result.
        assert set(found.get(step, losses[step])) == set(losses[step]), (step, found, losses)
    assert set(found) >= {*range(5), *range(int(began), 8)}
    assert (folder / "again.weights").read_text() == weights
    return done.stdout


def test_goes_on_from_the_last_checkpoint(tmp_path, uninterrupted):
    options = {"checkpoint": str(tmp_path / "saved"), "save_every": 2}
    case = {"options": options, "who": 3, "at": "forward", "step": 5}
    check(case, tmp_path, uninterrupted, begin=["4"])


# Where a rank dies in its sixth step, and how many steps the emergency checkpoint may be after.
EMERGENCIES = [
    ("forward", 3, {}, ["5"]),
    ("forward", 0, {}, ["5"]),
    ("reduce", 1, {}, ["5"]),
    ("exchange", 2, {"calls": 1}, ["5"]),
    ("scatter", 0, {"calls": 1}, ["5"]),
    ("ended", 0, {}, ["5", "6"]),
    ("optimizer", 2, {}, ["5", "6"]),
]


@pytest.mark.full
@pytest.mark.parametrize(("at", "who", "more", "begin"), EMERGENCIES)
def test_goes_on_from_what_the_survivors_wrote(at, who, more, begin, tmp_path, uninterrupted):
    options = {"checkpoint": str(tmp_path / "saved"), "emergency": True}
    case = {"options": options, "who": who, "at": at, "step": 5, **more}
    printed = check(case, tmp_path, uninterrupted, begin)
    said = {
        int(rank) for rank in re.findall(r"rank (\d): emergency checkpoint after step", printed)
    }
    assert said == {0, 1, 2, 3} - {who}, printed
    left = [path.name for path in (tmp_path / "saved").iterdir()]
    assert all(name == "checkpoint.json" or name.endswith(".npz") for name in left), left


@pytest.mark.full
def test_gives_up_after_so_many_restarts(tmp_path):
    options = {"checkpoint": str(tmp_path / "saved"), "stage_mode": "no such mode"}
    done, _ = run({"options": options}, tmp_path, "bad", "--restarts", "1")
    assert done.returncode != 0
    assert "restart 1 of 1" in done.stdout and "no such mode" in done.stdout
