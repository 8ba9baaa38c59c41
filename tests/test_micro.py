"""The micro benchmark: a short run of two programs, its table, and what counts as agreement."""

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 30


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the benchmark as `tools/bench` does, in the environment of the tests."""
    return subprocess.run(
        [sys.executable, "-m", "examples.micro", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=200,
        capture_output=True,
        text=True,
    )


def table_of(text: str) -> list[dict[str, str]]:
    """Reads the rows of a Markdown table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    headings, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(headings, row, strict=True)) for row in rows]


@pytest.mark.timeout(240)
def test_quick_run_of_two_programs_agrees_with_eager(tmp_path):
    output = tmp_path / "table.md"
    run = bench("--quick", "--programs", "raw-mlp,keras-mlp", "--output", str(output))
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert output.read_text() == run.stdout
    rows = table_of(run.stdout)
    assert [row["program"] for row in rows] == ["raw TF MLP, SGD", "Keras MLP, Adam"]
    for row in rows:
        losses = WARM_UP + 3 * 10
        assert row["Terra equals eager"].startswith(f"bit-equal: {losses} losses, ")
        assert float(row["tf.function differs by"]) < 1e-3
        eager, terra, graph = (
            float(row[f"{mode}, ms"]) for mode in ("eager", "Terra", "tf.function")
        )
        assert min(eager, terra, graph) > 0
        assert float(row["eager / Terra"]) == pytest.approx(eager / terra, rel=0.02, abs=0.01)
        assert float(row["tf.function / Terra"]) == pytest.approx(graph / terra, rel=0.02, abs=0.01)
        assert 0 <= float(row["co-executed"].removesuffix("%")) <= 100


@pytest.mark.timeout(240)
def test_a_run_in_which_nothing_co_executes_is_no_proof():
    arguments = ["--programs", "raw-mlp", "--rounds", "1", "--steps", "5", "--read-every", "4"]
    run = bench(*arguments, TERRA_DISABLE="1")
    assert run.returncode == 1, f"{run.stdout}\n{run.stderr}"
    (row,) = table_of(run.stdout)
    assert row["co-executed"] == "0.0%"
    assert "co-executed nothing" in row["Terra equals eager"]
    assert "raw TF MLP, SGD" in run.stderr.splitlines()[-1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--programs", "raw-mlp,nothing"], "no program nothing; there are: raw-mlp, keras-mlp"),
        (["--rounds", "0"], "--rounds"),
        (["--read-every", "x"], "--read-every"),
        (["--output", "no/such/folder/table.md"], "no/such/folder/table.md"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    run = bench(*arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr


@pytest.fixture
def micro(monkeypatch):
    """Imports modules of the benchmark, which is not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"examples.micro.{name}")


LOSSES = np.array([2.0, 1.5, 1.25])
STATE = [np.array([1.0, -0.0], np.float32), np.array(3, np.int32)]


def verdict(micro, tolerance: float, **changes):
    """Compares eager results with the same results, a few of them changed, as those of Terra."""
    measure, programs = micro("measure"), micro("programs")
    eager = measure.Result(1.0, LOSSES, STATE, coexecuted=1)
    results = {
        measure.EAGER: eager,
        measure.TERRA: dataclasses.replace(eager, **changes),
        measure.TF_FUNCTION: dataclasses.replace(eager, losses=LOSSES * 1.01),
    }
    program = dataclasses.replace(programs.PROGRAMS[0], tolerance=tolerance)
    return micro("agreement").compare(program, results)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("tolerance", "changes", "good"),
    [
        (0.0, {}, True),
        (0.0, {"losses": LOSSES * (1 + 1e-7)}, False),
        (0.0, {"losses": np.array([2.0, 1.5, np.nan])}, False),
        (0.0, {"state": [np.array([1.0, 0.0], np.float32), STATE[1]]}, False),
        (0.0, {"state": [STATE[0], np.array(3, np.int64)]}, False),
        (0.0, {"state": STATE[:1]}, False),
        (0.0, {"coexecuted": 0}, False),
        (1e-4, {"losses": LOSSES * (1 + 1e-5)}, True),
        (1e-4, {"losses": LOSSES * (1 + 1e-3)}, False),
        (1e-4, {"losses": np.array([2.0, 1.5, np.nan])}, False),
    ],
)
def test_agreement(micro, tolerance, changes, good):
    agreement = verdict(micro, tolerance, **changes)
    assert agreement.good is good
    assert agreement.text.startswith("**NO") is not good
    assert agreement.tf_function == pytest.approx(0.01)
