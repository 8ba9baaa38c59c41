"""The subcommand `terra-pipeline validate`: proves a schedule or shows its fault."""

from __future__ import annotations

import argparse
import sys

from pipeline.commands.common import (
    add_json_argument,
    add_schedule_arguments,
    positive,
    print_json,
    read_schedule,
)
from pipeline.errors import ScheduleError

NAME = "validate"
HELP = "prove that a schedule can be run, or show where it cannot"

DESCRIPTION = """\
Proves a schedule's order, the pairing of its sends and receives, that it cannot deadlock, and how
many stashes each rank holds at most. A refused schedule is shown with an arrow, <--, at the fault.
"""

EPILOG = """\
examples:
  terra-pipeline validate bpipe 8 16
  terra-pipeline validate mine.txt --limit 5

exit code:
  0  proven        1  refused        2  mistake on the command line
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand to its parser."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    add_schedule_arguments(parser)
    parser.add_argument(
        "--limit", type=positive, metavar="N", help="refuse it if a rank may hold more stashes"
    )
    parser.add_argument(
        "--stash-bytes", type=positive, metavar="BYTES", help="size of a stash, to show bytes too"
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Validates the schedule; returns 0, or 1 if it is refused."""
    try:
        schedule = read_schedule(arguments)
        report = schedule.validate(arguments.limit, arguments.stash_bytes)
    except ScheduleError as error:
        if arguments.json:
            fault = {"code": error.code, "rank": error.rank, "position": error.position}
            print_json({"valid": False, **fault, "message": str(error)})
        else:
            print(error, file=sys.stderr)
        return 1
    if arguments.json:
        shown = {"valid": True, "schedule": schedule.name, "peak_counts": report.peak_counts}
        print_json({**shown, "peak_bytes": report.peak_bytes})
    else:
        print(report)
    return 0
