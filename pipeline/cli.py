"""The command line: `terra-pipeline`, which is the same as `python -m pipeline`.

Every subcommand is a module of `pipeline.commands` with `NAME`, `HELP`, `add_arguments(parser)` and
`run(arguments) -> exit code`; a new one is written into `SUBCOMMANDS`. None of them loads
TensorFlow, but for `plan` where it measures a model.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pipeline.commands import estimate, hybrid, place, plan, run, schedule, simulate, validate

SUBCOMMANDS = (schedule, validate, simulate, estimate, plan, place, hybrid, run)

FAILED, MISTAKE, INTERRUPTED = 1, 2, 130

DESCRIPTION = """\
Pipeline-parallel training with memory balanced by BPipe: look at schedules, prove them, price them,
estimate whether BPipe pays, plan which parallelism to use and where operations run, and launch a
training script.
"""

EPILOG = """\
examples:
  terra-pipeline schedule bpipe 4 8 --grid
  terra-pipeline simulate 1f1b bpipe 8 16 --evict 0.1 --plot steps.png
  terra-pipeline run -np 4 train.py

`terra-pipeline COMMAND --help` tells more about a command.
"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="terra-pipeline",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in SUBCOMMANDS:
        subparser = commands.add_parser(
            command.NAME, help=command.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments without the program's name; those of this process by default.

    Returns:
        The exit code: 0 for success, 1 for a refused schedule, 2 for another mistake, 130 after
        Ctrl-C; `run` ends with that of the launcher.
    """
    arguments = build_parser().parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("terra-pipeline: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"terra-pipeline: {error}", file=sys.stderr)
        return MISTAKE
