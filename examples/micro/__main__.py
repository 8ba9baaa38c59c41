"""The command line: `python -m examples.micro`, which `tools/bench` calls.

The table goes to standard output and progress to standard error. The exit code is 0 if Terra's
results equal eager's in every program, 1 if not, 2 for a mistake on the command line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

ROUNDS = 8
QUICK_ROUNDS, QUICK_STEPS = 3, 10
INTERRUPTED = 130


def positive(text: str) -> int:
    """Reads a positive whole number."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "positive number"  # argparse shows it


def output_file(text: str) -> Path:
    """Reads the name of a file that can be written; better now than after the run."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text}: not a file in an existing folder")
    return path


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/bench",
        description="Times small training programs eagerly, under Terra and under tf.function.",
    )
    parser.add_argument(
        "--programs", help='names with commas between (default: all; "?" lists them)'
    )
    parser.add_argument("--rounds", type=positive, help=f"blocks of a mode (default: {ROUNDS})")
    parser.add_argument("--steps", type=positive, help="steps of a block (default: by program)")
    parser.add_argument(
        "--read-every", type=positive, default=1, metavar="N", help="read the loss every N steps"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"a look only: {QUICK_ROUNDS} rounds of {QUICK_STEPS} steps",
    )
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also write it there")
    arguments = parser.parse_args(argv)
    # Not earlier: TensorFlow takes seconds to load, and --help should not.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from . import programs

    known = {program.name: program for program in programs.PROGRAMS}
    names = list(known) if arguments.programs is None else arguments.programs.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no program {', '.join(unknown)}; there are: {', '.join(known)}")
    arguments.programs = [known[name] for name in dict.fromkeys(names)]
    if arguments.quick:
        arguments.rounds = arguments.rounds or QUICK_ROUNDS
        arguments.steps = arguments.steps or QUICK_STEPS
    arguments.rounds = arguments.rounds or ROUNDS
    return arguments


class Display:
    """Progress on standard error: a bar a program on a terminal, else a line a program."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}", style="dim"),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def start(self, title: str, blocks: int) -> None:
        """Begins a program that has so many blocks."""
        self._task = self._bars.add_task(title, total=blocks, completed=-1, now="building")
        if not self._console.is_terminal:
            self._console.print(Text(f"{title}: started"))

    def block(self, now: str) -> None:
        """A block is about to begin."""
        self._bars.update(self._task, advance=1, now=now)

    def end(self, title: str, outcome: str) -> None:
        """Ends a program."""
        self._bars.update(self._task, advance=1, now=outcome)
        if not self._console.is_terminal:
            self._console.print(Text(f"{title}: {outcome}"))


def run(arguments: argparse.Namespace) -> int:
    """Runs the programs, prints the table, returns the exit code."""
    from . import agreement, measure, table

    rows = []
    with Display() as display:
        for program in arguments.programs:
            display.start(program.title, measure.blocks(arguments.rounds))
            results = measure.measure(
                program,
                arguments.rounds,
                arguments.steps or program.steps,
                arguments.read_every,
                display.block,
            )
            row = table.Row(program, results, agreement.compare(program, results))
            rows.append(row)
            display.end(program.title, outcome(measure, row.results))
    text = table.markdown(rows, conditions(arguments))
    print(text, end="")
    if arguments.output:
        arguments.output.write_text(text)
    different = [row.program.title for row in rows if not row.agreement.good]
    if different:
        print(f"bench: not shown to equal eager: {', '.join(different)}", file=sys.stderr)
    return 1 if different else 0


def outcome(measure: ModuleType, results: dict) -> str:
    """Says in a few words how fast Terra was."""
    eager, terra = (results[mode].step_seconds for mode in (measure.EAGER, measure.TERRA))
    return f"{1000 * eager:.3g} ms eager, {1000 * terra:.3g} ms Terra"


def conditions(arguments: argparse.Namespace) -> str:
    """Says how the programs were run."""
    steps = arguments.steps or ", ".join(str(program.steps) for program in arguments.programs)
    every = arguments.read_every
    reads = "step" if every == 1 else f"{every} steps"
    return f"{arguments.rounds} rounds of {steps} steps a mode; the loss was read every {reads}."


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(parse(argv))
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
