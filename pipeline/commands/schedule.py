"""The subcommand `terra-pipeline schedule`: prints a schedule."""

from __future__ import annotations

import argparse
import re

from pipeline.commands.common import (
    add_json_argument,
    add_schedule_arguments,
    print_json,
    read_schedule,
)
from pipeline.schedules.mapping import pair_adjacent

NAME = "schedule"
HELP = "print a schedule: as text, over time, with a mapping of stages to nodes"

DESCRIPTION = """\
Prints a schedule in its text form, one line a rank, which `validate` and `simulate` read back.
"""

EPILOG = """\
examples:
  terra-pipeline schedule bpipe 4 8
  terra-pipeline schedule v-half 4 8 --grid
  terra-pipeline schedule bpipe 8 16 --map 2x4     partners on the same of two nodes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand to its parser."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    add_schedule_arguments(parser)
    parser.add_argument("--grid", action="store_true", help="show it over time instead")
    parser.add_argument(
        "--width", type=int, default=120, help="characters in a row of the grid (default: 120)"
    )
    parser.add_argument(
        "--map",
        type=_nodes_and_slots,
        metavar="NODESxSLOTS",
        help="also show which process should run which stage on so many nodes",
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the schedule; returns 0."""
    schedule = read_schedule(arguments)
    mapping = pair_adjacent(schedule.num_stages, *arguments.map) if arguments.map else None
    if arguments.json:
        lines = str(schedule).splitlines()
        shown = {
            "schedule": schedule.name,
            "stages": schedule.num_stages,
            "microbatches": schedule.num_microbatches,
            "chunks": schedule.num_chunks,
            "placement": schedule.placement.value,
            "lines": [line.partition(":")[2].split() for line in lines],
        }
        if mapping is not None:
            shown["rank_of_stage"] = mapping.ranks[0]
            shown["node_of_rank"] = mapping.nodes
        print_json(shown)
        return 0
    print(schedule.grid(arguments.width) if arguments.grid else schedule)
    if mapping is not None:
        print(mapping)
    return 0


def _nodes_and_slots(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2x4, nodes times slots of each")
    return int(match[1]), int(match[2])
