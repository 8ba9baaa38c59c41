"""`tools/bench`: a short run, its report and files, what counts as agreement, what has changed."""

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
PNG = b"\x89PNG\r\n"


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the benchmark as `tools/bench` does, in the environment of the tests."""
    return subprocess.run(
        [sys.executable, "-m", "examples.bench", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=200,
        capture_output=True,
        text=True,
    )


def tables_of(text: str) -> list[list[dict[str, str]]]:
    """Reads the Markdown tables of a text, each a list of rows."""
    tables = []
    for part in text.split("\n\n"):
        if part.startswith("|"):
            cells = [[c.strip() for c in line.strip("|").split("|")] for line in part.splitlines()]
            headings, _, *rows = cells
            tables.append([dict(zip(headings, row, strict=True)) for row in rows])
    return tables


@pytest.fixture
def part(monkeypatch):
    """Imports modules of the benchmark, which is not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"examples.bench.{name}")


@pytest.mark.timeout(240)
def test_quick_run_of_two_programs(tmp_path, part):
    output = tmp_path / "report.md"
    arguments = ["--programs", "raw-mlp,keras-mlp", "--read-every", "1", "--output", str(output)]
    run = bench("--quick", *arguments)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert output.read_text() == run.stdout
    assert output.with_suffix(".png").read_bytes().startswith(PNG)
    times, learning, verdicts = tables_of(run.stdout)
    assert [row["program"] for row in times] == ["raw TF MLP, SGD", "Keras MLP, Adam"]
    for row in times:
        eager, terra, graph = (
            float(row[f"{mode}, ms"]) for mode in ("eager", "Terra", "tf.function")
        )
        assert min(eager, terra, graph) > 0
        assert float(row["eager / Terra"]) == pytest.approx(eager / terra, rel=0.02, abs=0.01)
        assert float(row["tf.function / Terra"]) == pytest.approx(graph / terra, rel=0.02, abs=0.01)
    for row in learning:
        assert 2 <= int(row["first"]) <= 10
        assert 0 <= float(row["co-executed"].removesuffix("%")) <= 100
    for row in verdicts:
        losses = 40 + 3 * 10
        assert row["Terra"].startswith(f"bit-equal: {losses} losses, ")
        assert row["tf.function"].startswith("first 12 losses within ")
    kept = part("results").Results.load(output.with_suffix(".json"))
    assert part("table").markdown(kept) == run.stdout


@pytest.mark.timeout(240)
def test_a_run_in_which_nothing_co_executes_is_no_proof(tmp_path):
    output = str(tmp_path / "report.md")
    arguments = ["--programs", "raw-mlp", "--modes", "terra", "--verdicts", "--output", output]
    run = bench(*arguments, TERRA_DISABLE="1")
    assert run.returncode == 1, f"{run.stdout}\n{run.stderr}"
    ((row,),) = tables_of(run.stdout)
    assert row["Terra"] == "**co-executed nothing**"
    assert "raw TF MLP, SGD" in run.stderr.splitlines()[-1]


@pytest.mark.full
def test_all_programs_are_bit_equal_without_onednn(tmp_path):
    output = tmp_path / "report.md"
    run = subprocess.run(
        [sys.executable, "-m", "examples.bench", "--no-onednn", "--modes", "terra"]
        + ["--rounds", "1", "--read-every", "1", "--output", str(output)],
        cwd=ROOT,
        timeout=1700,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    *_, verdicts = tables_of(run.stdout)
    assert len(verdicts) == 15
    assert all(row["Terra"].startswith("bit-equal: ") for row in verdicts)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_verdicts_on_tf_function_are_those_of_the_readme(tmp_path):
    output = tmp_path / "report.md"
    run = bench("--verdicts", "--programs", "sdpoint,faster-rcnn,gpt2", "--output", str(output))
    ((sdpoint, faster_rcnn, gpt2),) = tables_of(run.stdout)
    assert sdpoint["tf.function"].startswith("**silently wrong: losses differ")
    assert faster_rcnn["tf.function"].startswith("**fails: ")
    assert gpt2["tf.function"].startswith("first 12 losses within")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--programs", "raw-mlp,nothing"], "no program nothing; there are: dropblock, "),
        (["--modes", "eager,fastest"], "no mode fastest; there are: eager, terra"),
        (["--rounds", "0"], "--rounds"),
        (["--read-every", "1,x"], "--read-every"),
        (["--output", "no/such/folder/table.md"], "no/such/folder/table.md"),
        (["--compare", "no/such/file.json"], "no/such/file.json"),
        (["--compare", "setup.cfg"], "setup.cfg holds no results of this benchmark"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    run = bench(*arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr


# ---------------------------------------------------------------- agreement

LOSSES = np.array([2.0, 1.5, 1.25])
STATE = [np.array([1.0, -0.0], np.float32), np.array(3, np.int32)]
PRINTED = ["step 1", "step 2"]


def judge(part, mode, tolerance=0.0, coexecuted=3, failed=None, **changes):
    """Compares eager's run with the same, a few things changed, as that of another mode."""
    measure, results = part("measure"), part("results")
    eager = measure.Run(results.ModeResult(), LOSSES, STATE, PRINTED)
    result = results.ModeResult(first_coexecuted=coexecuted, failed=failed)
    other = dataclasses.replace(eager, result=result, **changes)
    program = dataclasses.replace(part("programs").PROGRAMS[0], tolerance=tolerance)
    part("agreement").judge(program, {"eager": eager, mode: other})
    return result


@pytest.mark.parametrize(
    ("tolerance", "changes", "good"),
    [
        (0.0, {}, True),
        (0.0, {"losses": LOSSES * (1 + 1e-7)}, False),
        (0.0, {"losses": np.array([2.0, 1.5, np.nan])}, False),
        (0.0, {"state": [np.array([1.0, 0.0], np.float32), STATE[1]]}, False),
        (0.0, {"state": [STATE[0], np.array(3, np.int64)]}, False),
        (0.0, {"state": STATE[:1]}, False),
        (0.0, {"printed": PRINTED[:1]}, False),
        (0.0, {"printed": ["step 1", "step 3"]}, False),
        (0.0, {"coexecuted": None}, False),
        (0.0, {"failed": "ValueError: no"}, False),
        (1e-4, {"losses": LOSSES * (1 + 1e-5)}, True),
        (1e-4, {"losses": LOSSES * (1 + 1e-5), "printed": PRINTED[:1]}, False),
        (1e-4, {"losses": LOSSES * (1 + 1e-3)}, False),
        (1e-4, {"losses": np.array([2.0, 1.5, np.nan])}, False),
    ],
)
def test_terra_has_to_compute_what_eager_does(part, monkeypatch, tolerance, changes, good):
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    result = judge(part, "Terra", tolerance, **changes)
    assert result.good is good
    assert result.verdict


def test_without_onednn_there_is_no_tolerance(part, monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    assert not judge(part, "Terra", 1e-4, losses=LOSSES * (1 + 1e-5)).good


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"losses": LOSSES * 1.001}, "first 12 losses within 1.0e-03"),
        (
            {"losses": LOSSES * [1.0, 1.1, 1.1]},
            "silently wrong: losses differ by up to 10% in 12 steps, from step 2 on",
        ),
        ({"printed": PRINTED[:1]}, "silently wrong: prints 1 lines, eager 2"),
        ({"failed": "TypeError: no"}, "fails: TypeError: no"),
    ],
)
def test_verdicts_on_tf_function(part, changes, verdict):
    result = judge(part, "tf.function", coexecuted=None, **changes)
    assert result.verdict == verdict
    assert result.good is verdict.startswith("first")


# ---------------------------------------------------------------- the report


def results_of(part, **terra):
    """A run of two programs of the paper, of which `tf.function` fails on the second."""
    results = part("results")

    def program(name, group, terra_ms, failed):
        modes = {
            "eager": results.ModeResult(ms={"1": 40.0}),
            "Terra": results.ModeResult(ms={"1": terra_ms}, coexecuted=1.0, graphs=1, **terra),
            "tf.function": results.ModeResult(
                ms={} if failed else {"1": 5.0}, failed=failed, good=not failed, graphs=1
            ),
        }
        return results.ProgramResult(name, name.upper(), group, modes)

    programs = [program("one", "paper", 10.0, None), program("two", "paper", 20.0, "TypeError: x")]
    return results.Results("On a table.", ["1"], programs)


def test_summary_counts_only_what_ran(part):
    text = part("table").summary(results_of(part))
    assert text.splitlines() == [
        "* Terra over eager, 2 programs of the paper, the loss read every step: geometric mean "
        "2.83, from 2.00 to 4.00, 1 of them at least 3.",
        "* Terra over tf.function, 1 programs that it runs rightly, the loss read every step: "
        "geometric mean 0.50, from 0.50 to 0.50.",
    ]


def test_report_shows_a_failed_mode_as_such(part):
    times, *_ = tables_of(part("table").markdown(results_of(part)))
    assert times[1]["tf.function, ms"] == "-"
    assert times[1]["tf.function / Terra"] == "-"
    assert times[1]["eager / Terra"] == "2.00"


def test_results_survive_their_file(part, tmp_path):
    results = results_of(part, fallbacks={"new-op": 2}, peak_mb=100.0, training_mb=7.5)
    results.save(tmp_path / "r.json")
    assert part("results").Results.load(tmp_path / "r.json") == results


def test_comparison_tells_what_changed(part):
    earlier, now = results_of(part), results_of(part)
    compare = part("comparison").compare
    assert compare(earlier, now) == "nothing changed noticeably"
    terra = now.programs[0].modes["Terra"]
    terra.ms["1"], terra.coexecuted = 5.0, 0.5
    terra.good, terra.verdict = False, "differs"
    earlier.programs[0].modes["Terra"].verdict = "bit-equal"
    now.programs[1].name = "three"
    assert compare(earlier, now).splitlines() == [
        "ONE: speed of Terra over eager 4 -> 8 (+100%)",
        "ONE: Terra: bit-equal -> differs",
        "ONE: Terra: co-executed 100.0% -> 50.0%",
        "TWO: is new",
        "TWO: was not run",
    ]
