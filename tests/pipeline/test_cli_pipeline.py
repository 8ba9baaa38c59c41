"""The command line: what each subcommand prints, its JSON, its exit codes."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pipeline import schedules
from pipeline.cli import SUBCOMMANDS, main
from pipeline.commands.run import run_with_restarts
from pipeline.schedules import Schedule

pytestmark = pytest.mark.timeout(60)


def run(capsys, *arguments):
    """Runs the command line here; returns the exit code and what it printed."""
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_help_names_every_command_and_loads_no_tensorflow():
    code = (
        "import sys\n"
        "from pipeline.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "finally:\n"
        "    print(sorted({'tensorflow', 'keras'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    for command in SUBCOMMANDS:
        assert f"    {command.NAME} " in done.stdout


def test_module_is_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "schedule", "gpipe", "-p", "1", "-m", "2"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (0, "0: F0 F1 B0 B1\n")


@pytest.mark.parametrize("name", schedules.GENERATORS)
def test_schedule_prints_what_parse_reads(capsys, name):
    for size in (("-p", 4, "-m", 6), (4, 6)):
        code, out, _ = run(capsys, "schedule", name, *size)
        assert code == 0
        assert Schedule.parse(out) == schedules.GENERATORS[name](4, 6)


def test_schedule_over_time_on_nodes_and_as_json(capsys):
    _, out, _ = run(capsys, "schedule", "bpipe", "-p", 4, "-m", 8, "--grid", "--map", "2x2")
    assert "step 33" in out
    assert "2 of 2 pairs on one node" in out
    _, out, _ = run(capsys, "schedule", "interleaved", "-p", 2, "-m", 4, "-v", 3, "--json")
    shown = json.loads(out)
    assert (shown["stages"], shown["microbatches"], shown["chunks"]) == (2, 4, 3)
    text = "\n".join(f"{rank}: {' '.join(line)}" for rank, line in enumerate(shown["lines"]))
    assert Schedule.parse(text) == schedules.interleaved(2, 4, 3)
    _, out, _ = run(capsys, "schedule", "bpipe", "-p", 4, "-m", 8, "--map", "2x2", "--json")
    assert json.loads(out)["rank_of_stage"] == [0, 2, 3, 1]


def test_validate_proves_a_named_schedule(capsys):
    code, out, _ = run(capsys, "validate", "bpipe", "-p", 8, "-m", 16, "--stash-bytes", 1000)
    assert code == 0
    assert "no deadlock" in out
    assert "5,000 bytes" in out
    code, out, _ = run(capsys, "validate", "1f1b", "-p", 4, "-m", 8, "--json")
    assert (code, json.loads(out)["peak_counts"]) == (0, [4, 3, 2, 1])


def test_validate_shows_the_fault_of_a_file(capsys, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(str(schedules.bpipe(4, 6)).replace("LOAD1<3 ", ""))
    code, out, err = run(capsys, "validate", path)
    assert (code, out) == (1, "")
    assert "'mine' refused, missing-load" in err
    assert "B1 <--" in err
    code, out, _ = run(capsys, "validate", path, "--json")
    shown = json.loads(out)
    assert (code, shown["valid"], shown["code"]) == (1, False, "missing-load")
    path.write_text("0: F0 nonsense")
    assert run(capsys, "validate", path)[0] == 1


def test_validate_checks_the_limit(capsys):
    code, _, err = run(capsys, "validate", "1f1b", "-p", 4, "-m", 8, "--limit", 3)
    assert code == 1
    assert "its limit is 3" in err


def test_validate_reads_from_stdin(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("0: F0 B0"))
    assert run(capsys, "validate", "-")[0] == 0


def test_simulate_several_schedules(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture, trace = tmp_path / "steps.png", tmp_path / "step.json"
    arguments = ("simulate", "1f1b", "bpipe", "-p", 4, "-m", 8, "--evict", 0.5)
    code, out, _ = run(capsys, *arguments, "--plot", picture, "--trace", trace)
    assert code == 0
    assert "1f1b, p=4, m=8: step 33 s" in out and "bpipe, p=4, m=8: step 33 s" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]
    _, out, _ = run(capsys, *arguments, "--json")
    assert [one["schedule"] for one in json.loads(out)] == ["1f1b", "bpipe"]


def test_simulate_takes_a_cost_for_each_rank(capsys):
    costs = ("--forward", "1,1,1,2", "--backward", "2,2,2,4", "--cores", "0,1,2,3")
    _, out, _ = run(capsys, "simulate", "1f1b", "-p", 4, "-m", 8, *costs, "--json")
    assert json.loads(out)["step_time"] == pytest.approx(8 * 6 + 3 * 3)
    _, out, _ = run(capsys, "simulate", "1f1b", "-p", 4, "-m", 8, "--cores", 1, "--json")
    assert json.loads(out)["step_time"] == pytest.approx(4 * 8 * 3)


TIMES = (
    *("estimate", "-p", 8, "--batch", 128, "--times", "1=1.0,2=1.5"),
    *("--stash-bytes", "1=1e9,2=2e9", "--static-bytes", 2e9),
)


def test_estimate_from_measured_times(capsys):
    code, out, _ = run(capsys, *TIMES, "--memory", 12e9)
    assert code == 0
    assert "BPipe pays: 1.27 times" in out
    _, out, _ = run(capsys, *TIMES, "--memory", 20e9, "--json")
    assert json.loads(out)["pays"] is False


def test_estimate_of_a_model(capsys):
    cluster = ("--devices", 32, "--tensor-parallel", 4, "--batch", 128)
    efficiency = ("--efficiency", "1=0.359,2=0.508", "--recompute", "selective")
    _, out, _ = run(capsys, "estimate", "--model", "gpt3-96b", *cluster, *efficiency)
    assert "BPipe pays: 1.35 times" in out
    _, out, _ = run(
        capsys, "estimate", "--model", "gpt3-96b", *cluster, *efficiency, "--memory", 160e9
    )
    assert "BPipe does not pay: 1.00 times" in out


def test_estimate_from_a_file(capsys, tmp_path):
    path = tmp_path / "profiles.json"
    profile = {"microbatch": 1, "forward": 1.0, "backward": 2.0, "stash_bytes": 10}
    path.write_text(json.dumps({"profiles": [profile], "ranks": {"memory_bytes": 30}}))
    _, out, _ = run(capsys, "estimate", "--profiles", path, "-p", 4, "--batch", 8)
    assert "BPipe pays: nothing else fits" in out
    path.write_text("{}")
    code, _, err = run(capsys, "estimate", "--profiles", path, "-p", 4, "--batch", 8)
    assert code == 2
    assert "does not hold profiles" in err


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Catches what would be launched: a list of commands, and a folder with a horovodrun."""
    commands = []
    launcher = tmp_path / "horovodrun"
    launcher.write_text("#!/bin/sh\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(os, "execv", lambda program, command: commands.append(command))
    return commands, launcher


def test_run_becomes_horovodrun(launched, tmp_path, capsys):
    commands, launcher = launched
    script = tmp_path / "train.py"
    script.write_text("")
    run(capsys, "run", "-np", 4, script, "--steps", 100, "-v")
    run(capsys, "run", "-np", 8, "-H", "one:4,two:4", "--option=--mpi", script)
    python = str(tmp_path / "python")
    assert commands == [
        [str(launcher), "-np", "4", "--gloo", python, str(script), "--steps", "100", "-v"],
        [str(launcher), "-np", "8", "-H", "one:4,two:4", "--mpi", python, str(script)],
    ]


def test_run_says_what_is_missing(launched, tmp_path, capsys, monkeypatch):
    _, launcher = launched
    code, _, err = run(capsys, "run", "-np", 4, "no_such_script.py")
    assert (code, err) == (2, "terra-pipeline: there is no file 'no_such_script.py'\n")
    launcher.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run(capsys, "run", "-np", 4, __file__)
    assert code == 2
    assert "tools/setup --horovod installs Horovod" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: COMMAND"),
        (("fly",), "invalid choice: 'fly'"),
        (("schedule",), "required: SCHEDULE"),
        (("schedule", "bpipe", "-p", "0", "-m", "4"), "'0' is not a whole number above 0"),
        (("schedule", "bpipe", "-p", "4", "-m", "4", "--map", "2by2"), "is not like 2x4"),
        (("simulate", "1f1b", "--forward", "x"), "neither a number nor several"),
        (("simulate", "1f1b", "4", "8", "--cores", "1.5"), "'1.5' is not a whole number"),
        (("simulate", "1f1b", "4", "8", "--cores", "inf"), "'inf' is not a whole number"),
        (("estimate", "--batch", "4"), "one of the arguments --times --model --profiles"),
        (("estimate", "--batch", "4", "--times", "1"), "is not like 1=0.5,2=0.8"),
        (("estimate", "--batch", "4", "--times", "1=1", "--schedules", "x"), "'x' is unknown"),
        (("run", "train.py"), "required: -np"),
    ],
)
def test_mistakes_on_the_command_line_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("schedule", "bpipe"), "needs its number of stages, -p"),
        (("schedule", "1f1b", "bpipe", "4", "8"), "takes one schedule"),
        (("schedule", "4", "8"), "name a schedule and its size"),
        (("schedule", "bpipe", "4", "8", "1", "1"), "name a schedule and its size"),
        (("schedule", "no_such_file"), "is neither a file nor one of gpipe"),
        (("schedule", "bpipe", "-p", "4", "-m", "4", "--map", "1x2"), "need 4 processes"),
        (("simulate", "1f1b", "-p", "4", "-m", "4", "--forward", "1,2"), "forward has 2 numbers"),
        (("simulate", "1f1b", "4", "8", "--evict", "1,2"), "evict must be one number"),
        (("estimate", "--batch", "4", "--times", "1=1"), "the number of stages is missing"),
        (("estimate", "--batch", "4", "--model", "gpt3-96b"), "needs --devices and --efficiency"),
    ],
)
def test_mistakes_of_meaning_are_explained(capsys, arguments, message):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.startswith("terra-pipeline: ")
    assert message in err


def test_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m pipeline schedule bpipe -p 32 -m 128 | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0: F0 SEND", "")


FAILS = """
import os, signal, sys
with open(sys.argv[1], "a") as file:
    file.write(os.environ["PIPELINE_ATTEMPT"])

if os.environ["PIPELINE_ATTEMPT"] < sys.argv[2]:
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[3] == "kill" else sys.exit(5)
"""


@pytest.mark.parametrize(
    ("fails", "how", "restarts", "code", "launches"),
    [
        (1, "kill", 3, 0, "01"),
        (2, "exit", 2, 0, "012"),
        (9, "exit", 2, 5, "012"),
        (9, "kill", 1, 137, "01"),
    ],
)
def test_a_failed_job_is_launched_again(fails, how, restarts, code, launches, tmp_path, capfd):
    log = tmp_path / "log"
    command = [sys.executable, "-c", FAILS, str(log), str(fails), how]
    assert run_with_restarts(command, restarts) == code
    assert log.read_text() == launches
    assert f"restart {len(launches) - 1} of {restarts}" in capfd.readouterr().err


def test_an_interrupted_job_is_not_launched_again(tmp_path):
    log = tmp_path / "log"
    program = (
        "import sys, time; from pipeline.commands.run import run_with_restarts; "
        f"sys.exit(run_with_restarts([sys.executable, '-c', {SLEEPS!r}, {str(log)!r}], 3))"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    end = time.monotonic() + 30
    while not log.exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 7
    assert log.read_text() == "1"


SLEEPS = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
open(sys.argv[1], "a").write("1")
time.sleep(30)
"""
