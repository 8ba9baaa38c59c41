"""`terra bench`: numbers and their comparison, step times, and whole runs in real processes."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter

import pytest

from terra_tf.bench import printed, process, timing, verdict

pytestmark = pytest.mark.timeout(60)

# ---------------------------------------------------------------- numbers in a script's output


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", []),
        ("no number here", []),
        ("loss 0.25", ["0.25"]),
        ("loss=-1.5e-03, lr:+2", ["-1.5e-03", "+2"]),
        ("step 3/10 [.5, 7.]", ["3", "10", ".5", "7."]),
        ("3-4 5 - 6", ["3", "4", "5", "6"]),
        ("12ms 50%", ["12", "50"]),
        ("conv2d layer_3 v1", []),
        ("version 2.21.0", ["2.21"]),
        ("loss nan -inf Infinity", ["nan", "-inf", "infinity"]),
        ("info nano inform", []),
        ("True false Falsehood", ["true", "false"]),
        ("<object at 0x7f3A09> 0X1f 5", ["5"]),
        ("\x1b[32m0.5\x1b[0m", ["0.5"]),
        ("tf.Tensor([1. 2.5], shape=(2,), dtype=float32)", ["1.", "2.5", "2"]),
    ],
)
def test_numbers_in_a_line(line, expected):
    assert [number.text for number in printed.numbers_in([line])] == expected


def test_numbers_know_their_line():
    assert [number.line for number in printed.numbers_in(["1 2", "none", "3"])] == [0, 0, 2]


def test_ignored_parts_hold_no_numbers():
    ignore = [re.compile(r"took \S+ s"), re.compile("^seed.*")]
    numbers = printed.numbers_in(["seed 5", "loss 1 took 2.5 s", "loss 3"], ignore)
    assert [number.text for number in numbers] == ["1", "3"]


@pytest.mark.parametrize(
    ("left", "right", "agree"),
    [
        ("0.5", "0.50", True),
        ("1e-2", "0.01", True),
        ("3", "3.0", True),
        ("0.0", "-0.0", False),
        ("nan", "nan", True),
        ("nan", "1", False),
        ("inf", "-inf", False),
        ("True", "True", True),
        ("True", "False", False),
        ("True", "1", False),
        ("9007199254740993", "9007199254740992", False),  # equal as 64-bit floats
        ("0.1000000000000000055", "0.1", False),
        ("1e99999999999999999999", "2e99999999999999999999", False),
    ],
)
def test_numbers_agree_only_if_they_are_exactly_equal(left, right, agree):
    agreement = printed.compare([left], [right])
    assert agreement.complete is agree
    assert agreement.agreeing == int(agree)


def test_agreement_counts_positions_and_finds_the_largest_difference():
    agreement = printed.compare(
        ["a 1 2", "b 3", "c 4", "d 5", "e 6"], ["a 1 2.5", "b 3", "c 4.25", "d 6", "e 6.5"]
    )
    assert (agreement.eager_count, agreement.terra_count) == (6, 6)
    assert agreement.agreeing == 2
    assert agreement.largest_difference == 1.0
    # Only the first three lines that differ are shown.
    assert agreement.differences == (
        printed.Difference("a 1 2", "a 1 2.5"),
        printed.Difference("c 4", "c 4.25"),
        printed.Difference("d 5", "d 6"),
    )


def test_a_missing_number_is_a_disagreement():
    agreement = printed.compare(["x 1", "y 2"], ["x 1"])
    assert not agreement.complete
    assert (agreement.agreeing, agreement.total) == (1, 2)
    assert agreement.largest_difference == 0
    assert agreement.differences == (printed.Difference("y 2", None),)
    assert printed.compare(["x 1"], ["x 1", "y 2"]).differences == (
        printed.Difference(None, "y 2"),
    )


def test_a_difference_that_is_no_number_is_infinite():
    assert printed.compare(["nan"], ["1"]).largest_difference == math.inf
    assert printed.compare(["inf"], ["-inf"]).largest_difference == math.inf


def test_other_words_around_equal_numbers_are_found():
    same = printed.compare(["<f at 0x1>  took 3 s"], ["<f at 0x22> took 3 s"])
    assert same.complete
    assert same.words is None
    other = printed.compare(["stopped at 3"], ["went on at 3"])
    assert other.complete
    assert other.words == printed.Difference("stopped at 3", "went on at 3")


def test_last_lines_with_numbers():
    lines = ["loss 1", "loss 2", "bye", "accuracy 3", ""]
    assert printed.last_lines_with_numbers(lines, 2) == ["loss 2", "accuracy 3"]


# ---------------------------------------------------------------- times and verdicts


def test_step_time_is_the_median_of_the_second_half():
    # Times between starts, in ms: 900 800 700 | 10 20 90
    starts = [0, 900, 1700, 2400, 2410, 2430, 2520]
    run = timing.StepTimes([start * 1_000_000 for start in starts])
    assert timing.median_step_seconds([run]) == pytest.approx(0.020)


def test_step_time_pools_all_runs():
    runs = [timing.StepTimes([0, 10**6]), timing.StepTimes([0, 3 * 10**6])]
    assert timing.median_step_seconds(runs) == pytest.approx(0.002)


def test_a_step_that_started_once_has_no_time():
    assert timing.median_step_seconds([timing.StepTimes([5])]) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.34, "12.3 s"), (1.5, "1.50 s"), (0.0123, "12.3 ms"), (0.25, "250 ms"), (7e-5, "70 us")],
)
def test_format_seconds(seconds, text):
    assert timing.format_seconds(seconds) == text


def finished_run(mode, lines=(), starts=(), phase="eager", stats=None):
    return process.ScriptRun(
        mode,
        lines=list(lines),
        steps={"train": timing.StepTimes(list(starts))} if starts else {},
        phases=Counter({phase: len(starts)} if starts else {}),
        stats=stats,
        wall_seconds=2.0,
        exit_code=0,
    )


def test_verdict_of_a_good_comparison():
    stats = {"coexecuted": 3, "fallback_reasons": {"new-op": 1}}
    eager = finished_run("eager", ["loss 1"], [0, 10**7, 2 * 10**7, 3 * 10**7])
    terra = finished_run("Terra", ["loss 1"], [0, 10**6, 2 * 10**6, 3 * 10**6], "traced", stats)
    outcome = verdict.judge([eager], [terra])
    assert outcome.exit_code == 0
    assert outcome.steps[0].ratio == pytest.approx(10)
    assert outcome.coexecuted_share == 0.75
    assert outcome.fallback_reasons == {"new-op": 1}
    assert outcome.remarks == ()
    assert outcome.summary() == (
        "terra bench: OK: 1 of 1 printed numbers agree; "
        "train 10.0 ms eager, 1.00 ms Terra, ratio 10.00; 75.0% of iterations co-executed"
    )


def test_one_disagreeing_pair_of_several_decides():
    eager = [finished_run("eager", ["1"]), finished_run("eager", ["1"])]
    terra = [finished_run("Terra", ["1"]), finished_run("Terra", ["2"])]
    outcome = verdict.judge(eager, terra)
    assert outcome.exit_code == verdict.DISAGREED
    assert verdict.NOT_REPEATABLE not in outcome.remarks


def test_remarks_on_runs_that_prove_little():
    once = verdict.judge(
        [finished_run("eager", ["1"], [0])], [finished_run("Terra", ["1"], [0], "traced")]
    )
    assert once.remarks == (
        verdict.TOO_FEW_ITERATIONS,
        verdict.NO_STATISTICS,
        verdict.NOTHING_COEXECUTED,
    )
    fewer = verdict.judge(
        [finished_run("eager", [], [0, 1, 2])],
        [finished_run("Terra", [], [0, 1], "coexecuted", {"coexecuted": 2})],
    )
    assert fewer.remarks == (
        "The eager run had 3 iterations, the Terra run 2.",
        verdict.NO_NUMBERS,
    )


# ---------------------------------------------------------------- streams


def test_lines_are_cut_at_any_end_and_across_portions():
    lines = []
    reader = process.LineReader(lines.append)
    for portion in (b"one\ntw", b"o\r\nbar 1\rbar 2\r", b"\xff caf\xc3", b"\xa9"):
        reader.feed(portion)
    assert lines == ["one", "two", "bar 1", "bar 2"]
    reader.finish()
    reader.finish()
    assert lines[4:] == ["\ufffd caf\u00e9"]


def run_once(folder, source, mode=process.EAGER, *arguments):
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    return process.run_script(mode, str(script), arguments)


def test_iterations_arrive_with_their_step_mode_and_time(tmp_path):
    # The script is left through os._exit, so nothing is sent at its end: what arrives was sent
    # while it ran. The last iteration comes late enough to send the others along.
    run = run_once(
        tmp_path,
        """
        import os, time
        from terra_tf.report import observers

        for turn in range(20):
            observers.notify("train", "traced" if turn < 5 else "coexecuted")
            time.sleep(0.01)
            if turn % 10 == 9:
                observers.notify("evaluate", "eager")
        time.sleep(0.2)
        observers.notify("late", "eager")
        os._exit(0)
        """,
    )
    assert run.exit_code == 0
    run.forget_loops({"train"})  # in an eager run, the script's own loop tells of its turns, too
    counts = {name: step.iterations for name, step in run.steps.items()}
    assert counts == {"train": 20, "evaluate": 2, "late": 1}
    assert run.phases == {"traced": 5, "coexecuted": 15, "eager": 3}
    assert run.iterations == 23
    assert run.stats is None
    assert timing.median_step_seconds([run.steps["train"]]) >= 0.01
    assert run.wall_seconds >= 0.4


def test_iterations_of_a_forked_copy_are_not_the_scripts(tmp_path):
    run = run_once(
        tmp_path,
        """
        import os, time
        from terra_tf.report import observers

        observers.notify("train", "eager")
        copy = os.fork()
        time.sleep(0.2)
        observers.notify("train", "eager")
        if copy:
            os.waitpid(copy, 0)
        os._exit(0)
        """,
    )
    assert run.exit_code == 0
    assert run.iterations == 2


def test_a_program_that_the_script_leaves_behind_is_not_waited_for(tmp_path):
    started = time.monotonic()
    run = run_once(
        tmp_path,
        """
        import subprocess
        left = subprocess.Popen(["sleep", "20"])
        print("pid", left.pid)
        """,
    )
    os.kill(int(run.lines[0].split()[1]), signal.SIGKILL)
    assert run.exit_code == 0
    assert time.monotonic() - started < 15


def test_much_output_on_both_streams_does_not_block(tmp_path):
    run = run_once(
        tmp_path,
        """
        import sys
        for turn in range(20_000):
            print("out", turn)
            print("error", turn, file=sys.stderr)
        """,
    )
    assert run.lines == [f"out {turn}" for turn in range(20_000)]
    assert len(run.stderr) == process.STDERR_LINES_KEPT
    assert run.stderr[-1] == "error 19999"


def test_the_script_runs_as_main(tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    run = run_once(
        tmp_path,
        """
        import atexit, json, pickle, sys
        from neighbour import VALUE

        class Point: pass

        def at_exit():
            print(json.dumps([__name__, sys.modules["__main__"].VALUE]))

        atexit.register(at_exit)
        if __name__ == "__main__":
            copy = pickle.loads(pickle.dumps(Point()))
            print(json.dumps([type(copy) is Point, __file__, sys.argv, VALUE]))
        """,
        process.EAGER,
        "--rate",
        "0.1",
        "two words",
    )
    script = str(tmp_path / "script.py")
    assert list(run.stderr) == []
    assert json.loads(run.lines[0]) == [True, script, [script, "--rate", "0.1", "two words"], 7]
    assert json.loads(run.lines[1]) == ["__main__", 7]


def test_the_modes_differ_by_one_variable_only(tmp_path, monkeypatch):
    monkeypatch.setenv("TERRA_DISABLE", "1")  # of the caller: must not reach the Terra run
    source = "import json, os\nprint(json.dumps(dict(os.environ)))\n"
    eager, terra = (
        json.loads(run_once(tmp_path, source, mode).lines[0])
        for mode in (process.EAGER, process.TERRA)
    )
    assert eager.pop("TERRA_DISABLE") == "1"
    assert eager == terra
    assert "TERRA_BENCH_FD" not in eager


@pytest.mark.parametrize(
    ("source", "exit_code", "stderr"),
    [
        (
            "def f():\n    raise ValueError('no')\nf()\n",
            1,
            [
                "Traceback (most recent call last):",
                '  File "{script}", line 3, in <module>',
                "    f()",
                '  File "{script}", line 2, in f',
                "    raise ValueError('no')",
                "ValueError: no",
            ],
        ),
        ("import sys\nsys.exit('enough')\n", 1, ["enough"]),
        ("import sys\nsys.exit(4)\n", 4, []),
        ("import sys\nsys.exit()\n", 0, []),
        ("import sys\nsys.exit(0)\n", 0, []),
        ("import os\nos.kill(os.getpid(), 9)\n", -9, []),
    ],
)
def test_the_script_ends_as_it_would_alone(tmp_path, source, exit_code, stderr):
    script = tmp_path / "script.py"
    run = run_once(tmp_path, source)
    assert run.exit_code == exit_code
    # Python 3.11 and later mark the spot in a line of its own.
    shown = [line for line in run.stderr if set(line) - set(" ^~")]
    assert shown == [line.format(script=script) for line in stderr]


# ---------------------------------------------------------------- the command


def bench(folder, source, *arguments, options=()):
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    return subprocess.run(
        [sys.executable, "-m", "terra_tf", "bench", *options, "script.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def summary(result):
    return result.stdout.splitlines()[-1]


def test_a_script_with_several_steps_that_agrees(tmp_path):
    result = bench(
        tmp_path,
        """
        import tensorflow as tf
        import terra_tf as terra

        weight = tf.Variable([1.0, 2.0])

        @terra.function
        def train_step(x):
            weight.assign_sub(0.1 * x * weight)
            return tf.reduce_sum(weight)

        @terra.function
        def evaluate(x):
            return tf.reduce_max(weight * x)

        x = tf.constant([0.5, 0.25])
        for turn in range(1, 41):
            loss = train_step(x)
            if turn % 10 == 0:
                print("loss", float(loss), "best", float(evaluate(x)))
        for y in terra.iterate([x] * 6):
            weight.assign_add(y)
        print("end", weight.numpy())
        """,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    # Ten numbers: four lines of two, and the two weights.
    assert "agreement: 10 of 10 printed numbers agree; largest difference 0" in result.stdout
    assert re.search(
        r"^train_step, median step .*\(40 iterations\).*\(40 iter", result.stdout, re.M
    )
    assert re.search(r"^evaluate, median step .*\(4 iterations\).*\(4 iter", result.stdout, re.M)
    assert re.search(r"^co-executed: \d+ of 50 iterations", result.stdout, re.M)
    assert re.search(r"^fallbacks: ", result.stdout, re.M)
    assert "/50 " in result.stdout  # the Terra run knows how many iterations to expect
    assert re.fullmatch(
        r"terra bench: OK: 10 of 10 printed numbers agree; "
        r"train_step \(first of 3 steps\) \S+ \S+ eager, \S+ \S+ Terra, ratio \d+\.\d\d; "
        r"\d+\.\d% of iterations co-executed",
        summary(result),
    )


def test_a_script_that_disagrees(tmp_path):
    result = bench(
        tmp_path,
        """
        import os
        print("loss", 0.75)
        print("loss", 0.5 if os.environ.get("TERRA_DISABLE") else 0.53125)
        """,
    )
    assert result.returncode == 1
    assert "largest difference 0.0312" in result.stdout
    assert "  eager: loss 0.5\n  Terra: loss 0.53125\n" in result.stdout
    assert "--repeat 2" in result.stdout
    assert summary(result).startswith("terra bench: DIFFERENT: only 1 of 2 printed numbers agree")


def test_ignored_numbers_may_differ(tmp_path):
    source = """
        import os
        print("loss 1, took", os.getpid(), "s")
        """
    assert bench(tmp_path, source).returncode == 1
    result = bench(tmp_path, source, options=["--ignore", r"took \d+ s"])
    assert result.returncode == 0
    assert "1 of 1 printed numbers agree" in summary(result)


def test_repeating_tells_a_script_that_does_not_repeat_itself(tmp_path):
    result = bench(tmp_path, "import os\nprint(os.getpid())\n", options=["--repeat", "2"])
    assert result.returncode == 1
    started = [line for line in result.stdout.splitlines() if line.endswith(": started")]
    assert started == [
        "eager 1: started",
        "Terra 1: started",
        "eager 2: started",
        "Terra 2: started",
    ]
    assert verdict.NOT_REPEATABLE in result.stdout


def test_a_script_that_fails_under_terra_only(tmp_path):
    result = bench(
        tmp_path,
        """
        import os
        print("loss 1")
        if "TERRA_DISABLE" not in os.environ:
            raise RuntimeError("only [red] here")
        """,
    )
    assert result.returncode == verdict.SCRIPT_FAILED
    assert "RuntimeError: only [red] here" in result.stdout
    assert summary(result) == ("terra bench: FAILED: the script failed under Terra (exit code 1)")


def test_a_script_that_fails_in_eager_mode_is_not_run_again(tmp_path):
    result = bench(tmp_path, "print('loss 1')\nraise RuntimeError('at once')\n")
    assert result.returncode == verdict.SCRIPT_FAILED
    assert "RuntimeError: at once" in result.stdout
    assert "Terra: started" not in result.stdout
    assert summary(result) == (
        "terra bench: FAILED: the script failed in plain eager mode (exit code 1)"
    )


def test_a_script_that_does_not_use_terra_is_told_so(tmp_path):
    result = bench(tmp_path, "print('loss 1')\n")
    assert result.returncode == 0
    assert verdict.NO_ITERATIONS in result.stdout
    assert summary(result) == "terra bench: OK: 1 of 1 printed numbers agree; no step times"


def test_arguments_reach_the_script_in_both_modes(tmp_path):
    result = bench(
        tmp_path,
        "import sys\nprint(sys.argv, len(sys.argv))\n",
        "--repeat",
        "9",
        "-v",
        options=["--show-output"],
    )
    assert result.returncode == 0
    for mode in ("eager", "Terra"):
        assert f"{mode} | ['script.py', '--repeat', '9', '-v'] 4\n" in result.stdout


def test_the_interrupt_key_ends_the_script_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nprint('pid', os.getpid())\nopen('ready', 'w').close()\ntime.sleep(50)\n"
    )
    command = subprocess.Popen(
        [sys.executable, "-m", "terra_tf", "bench", "--show-output", "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)  # for the line with the process id to arrive
        command.send_signal(signal.SIGINT)
        stdout, stderr = command.communicate(timeout=20)
    finally:
        command.kill()
    assert command.returncode == 130
    assert stderr == "terra: interrupted\n"
    script_pid = int(re.search(r"pid (\d+)", stdout)[1])
    with pytest.raises(ProcessLookupError):
        os.kill(script_pid, 0)
