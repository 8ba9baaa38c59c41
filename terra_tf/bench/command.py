"""The subcommand `terra bench`: its arguments and its course."""

from __future__ import annotations

import argparse
import os
import re

from terra_tf.bench import process, verdict
from terra_tf.dropin.command import add_step_argument

NAME = "bench"
HELP = "compare a script in plain eager TensorFlow with the same script under Terra"

DESCRIPTION = """\
Runs SCRIPT in two processes, first in plain eager TensorFlow (TERRA_DISABLE=1), then under Terra,
and compares what it prints and how long its steps take. The script is run unchanged: its steps are
those that it names by terra.function or terra.iterate, or else what `terra run` finds.

Every number that both runs print to stdout must be exactly the same, in the same order. A step's
time is the time from one start to the next start of the same step; shown is the median over the
second half of the run, when graphs are built and caches are warm.
"""

EPILOG = """\
examples:
  terra bench train.py --epochs 3              what follows SCRIPT goes to the script
  terra bench --ignore 'took .* s' train.py    do not compare the printed times
  terra bench --repeat 3 train.py              eager, Terra, eager, Terra, eager, Terra

exit code:
  0  the printed numbers agree       1  they do not
  2  mistake on the command line     3  the script failed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `terra bench` to its parser."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.usage = (
        "terra bench [-h] [--repeat N] [--ignore REGEX] [--show-output] [--step MODULE:FUNCTION] "
        "SCRIPT [ARG ...]"
    )
    parser.add_argument(
        "--repeat",
        type=_positive,
        default=1,
        metavar="N",
        help="run both N times in turn, against noise from the machine (default: 1)",
    )
    parser.add_argument(
        "--ignore",
        type=_pattern,
        action="append",
        default=[],
        metavar="REGEX",
        help="cut what matches out of every printed line before comparing; may be given again",
    )
    parser.add_argument(
        "--show-output", action="store_true", help="show what the script prints while it runs"
    )
    add_step_argument(parser)
    parser.add_argument("script", type=_script, metavar="SCRIPT", help="the Python script to run")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARG", help="arguments of the script"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs `terra bench` and returns its exit code."""
    # Here, because loading rich would make `terra --help` slower.
    from terra_tf.bench import display

    console = display.make_console()
    runs: dict[str, list[process.ScriptRun]] = {process.EAGER: [], process.TERRA: []}
    with display.RunDisplay(console, arguments.show_output) as screen:
        total = None
        for turn in range(1, arguments.repeat + 1):
            for mode, finished in runs.items():
                label = mode if arguments.repeat == 1 else f"{mode} {turn}"
                screen.start(label, total)
                result = process.run_script(
                    mode, arguments.script, arguments.arguments, screen.update, arguments.step
                )
                finished.append(result)
                total = _expected(result)
                if result.exit_code != 0:
                    break
            if result.exit_code != 0:
                break
    if result.exit_code != 0:
        display.show_failure(console, result)
        return verdict.SCRIPT_FAILED
    eager, terra = runs[process.EAGER], runs[process.TERRA]
    outcome = verdict.judge(eager, terra, arguments.ignore)
    display.show_verdict(console, outcome, eager[-1], terra[-1], arguments.ignore)
    return outcome.exit_code


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def _script(text: str) -> str:
    if not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return text


def _expected(result: process.ScriptRun) -> int | None:
    """How many iterations the next run may have: not the turns of loops that may be no steps."""
    return result.iterations - result.turns or None
