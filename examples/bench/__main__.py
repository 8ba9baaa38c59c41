"""The command line: `python -m examples.bench`, which `tools/bench` calls.

The report goes to standard output and, with a chart and all numbers as JSON, into files; progress
goes to standard error. The exit code is 0 if Terra's results equal eager's in every program, 1 if
not, 2 for a mistake on the command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from . import modes, programs
from .display import Display
from .results import ProgramResult, Results

ROUNDS = 5
QUICK_ROUNDS, QUICK_STEPS = 3, 10
READ_EVERY = (1, 10)
VERDICT_STEPS = 20
INTERRUPTED = 130
OUTPUT = Path("build/bench.md")


def positive(text: str) -> int:
    """Reads a positive whole number."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "positive number"  # argparse shows it


def positives(text: str) -> tuple[int, ...]:
    """Reads positive whole numbers with commas between."""
    return tuple(dict.fromkeys(positive(part) for part in text.split(",")))


positives.__name__ = "list of positive numbers"


def output_file(text: str) -> Path:
    """Reads the name of a file that can be written; better now than after the run."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text}: not a file in an existing folder")
    return path


def earlier_results(text: str) -> Results:
    """Reads the JSON file of an earlier run."""
    try:
        return Results.load(Path(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/bench",
        description="Times training programs eagerly, under Terra and under tf.function, and "
        "checks that they compute the same.",
    )
    add = parser.add_argument
    add("--programs", help="names with commas between, or paper, or micro (default: all)")
    add("--modes", help=f"of {', '.join(modes.NAMES)}; (default: all but xla)")
    add("--rounds", type=positive, help=f"blocks of a mode and variant (default: {ROUNDS})")
    add("--steps", type=positive, help="steps of a block (default: by program)")
    add(
        "--read-every",
        type=positives,
        default=READ_EVERY,
        metavar="N,...",
        help="variants: read the loss every N steps (default: 1,10)",
    )
    add("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of {QUICK_STEPS} steps")
    add(
        "--verdicts",
        action="store_true",
        help="time nothing: only say whether each mode (default: tf.function) computes as eager",
    )
    add("--memory", action="store_true", help="also measure memory, each mode in its own process")
    add(
        "--no-onednn",
        action="store_true",
        help="with TF_ENABLE_ONEDNN_OPTS=0: convolutions have to be bit-equal, too",
    )
    add(
        "--output",
        type=output_file,
        metavar="FILE.md",
        help=f"where the report goes, with .png and .json beside it (default: {OUTPUT})",
    )
    add("--compare", type=earlier_results, metavar="EARLIER.json", help="tell what changed since")
    add("--results", type=earlier_results, metavar="FILE.json", help="run nothing: show these")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; ends the process if there is a mistake in it."""
    reader = parser()
    arguments = reader.parse_args(argv)
    try:
        arguments.programs = programs.choose(arguments.programs)
        if arguments.verdicts and arguments.modes is None:
            arguments.modes = "tf.function"
        arguments.modes = modes.choose(arguments.modes)
    except ValueError as error:
        reader.error(str(error))
    if arguments.quick:
        arguments.rounds = arguments.rounds or QUICK_ROUNDS
        arguments.steps = arguments.steps or QUICK_STEPS
    arguments.rounds = 0 if arguments.verdicts else arguments.rounds or ROUNDS
    if arguments.output is None:
        OUTPUT.parent.mkdir(exist_ok=True)
        arguments.output = OUTPUT
    return arguments


def run(arguments: argparse.Namespace) -> Results:
    """Runs the programs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if arguments.no_onednn:
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    # Not earlier: TensorFlow takes seconds to load, and --help should not.
    from .measure import blocks

    found = []
    with Display() as display:
        for program in arguments.programs:
            count = blocks(arguments.modes, arguments.rounds, arguments.read_every)
            display.start(program.title, count)
            result = run_program(program, arguments, display)
            found.append(result)
            display.end(program.title, outcome(result))
            gc.collect()
    read_every = [] if arguments.verdicts else [str(every) for every in arguments.read_every]
    return Results(conditions(arguments), read_every, found)


def run_program(
    program: programs.Program, arguments: argparse.Namespace, display: Display
) -> ProgramResult:
    """Runs one program in all modes, and again for memory if that is asked for."""
    from .agreement import judge
    from .isolated import peak_of
    from .measure import measure

    if arguments.verdicts:
        program = dataclasses.replace(program, warm_up=min(program.warm_up, VERDICT_STEPS))
    runs = measure(
        program,
        arguments.modes,
        arguments.rounds,
        arguments.steps or program.steps,
        arguments.read_every,
        display.block,
    )
    judge(program, runs)
    results = {mode: run.result for mode, run in runs.items()}
    for mode, result in results.items():
        if arguments.memory and result.failed is None:
            result.peak_mb, result.training_mb = peak_of(program, mode)
    return ProgramResult(program.name, program.title, program.group, results)


def outcome(program: ProgramResult) -> str:
    """Says in a few words how fast each mode was."""
    parts = []
    for mode, result in program.modes.items():
        if result.ms and result.failed is None:
            parts.append(f"{next(iter(result.ms.values())):.3g} ms {mode}")
        elif mode != modes.EAGER:
            parts.append(f"{mode} {result.verdict}")
    return ", ".join(parts)


def conditions(arguments: argparse.Namespace) -> str:
    """Says how the programs were run."""
    import keras
    import tensorflow as tf

    onednn = "off" if os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0" else "on"
    text = (
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, "
        f"Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores, "
        f"oneDNN {onednn}. "
    )
    if arguments.verdicts:
        return text
    steps = arguments.steps or "10 to 60"
    return text + (
        f"{arguments.rounds} rounds of {steps} steps a mode, after the warm-up; the modes trained "
        "by turns in one process; times are medians over the rounds, of a step. A ratio above 1 "
        "means that Terra is faster. "
        "`first` is the first co-executed iteration; `s a graph` and `s a trace` are seconds of "
        "Terra for a graph, and of tf.function for a trace. Memory is the peak of a process with "
        "this mode alone, and in brackets what training added to the built model."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    arguments = parse(argv)
    try:
        results = arguments.results or run(arguments)
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return INTERRUPTED
    from . import chart, comparison, table

    text = table.verdicts(results) + "\n" if arguments.verdicts else table.markdown(results)
    print(text, end="")
    if not arguments.results:
        arguments.output.write_text(text)
        results.save(arguments.output.with_suffix(".json"))
    if results.read_every:
        chart.save(results, arguments.output.with_suffix(".png"))
    if arguments.compare:
        print(f"\nSince the earlier run:\n\n{comparison.compare(arguments.compare, results)}")
    different = [
        program.title
        for program in results.programs
        if not all(r.good for mode, r in program.modes.items() if mode != modes.TF_FUNCTION)
    ]
    if different:
        print(f"bench: not shown to equal eager: {', '.join(different)}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
