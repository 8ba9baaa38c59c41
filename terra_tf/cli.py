"""The command line: `terra`, which is the same as `python -m terra_tf`.

Every subcommand is a module with `NAME`, `HELP`, `add_arguments(parser)` and
`run(arguments) -> exit code`; a new one is written into `SUBCOMMANDS`. Nothing here, nor in the
modules at import, loads TensorFlow: `terra --help` answers at once, and a script under `terra`
can still set the environment that TensorFlow reads when it loads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from terra_tf.bench import command as bench_command
from terra_tf.dropin import command as run_command
from terra_tf.dropin import explain_command

SUBCOMMANDS = (run_command, explain_command, bench_command)

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended

DESCRIPTION = """\
Terra runs imperative TensorFlow 2 programs with the speed of a graph: your Python runs as it is,
its TensorFlow ops are executed by a graph at the same time, and the results are those of eager.
"""

EPILOG = """\
environment:
  TERRA_DISABLE=1   plain eager TensorFlow: terra.function and terra.iterate do nothing

`terra COMMAND --help` tells more about a command.
"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="terra",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in SUBCOMMANDS:
        subparser = commands.add_parser(
            command.NAME,
            help=command.HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments without the program's name; those of this process by default.

    Returns:
        The exit code: 0 for success, 2 for a mistake on the command line, 130 after Ctrl-C;
        the others are the subcommand's own.
    """
    arguments = build_parser().parse_args(argv)
    if arguments.run is not bench_command.run:  # it ends as the script does
        return arguments.run(arguments)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("terra: interrupted", file=sys.stderr)
        return INTERRUPTED
