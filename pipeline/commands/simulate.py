"""The subcommand `terra-pipeline simulate`: what schedules take in time and memory."""

from __future__ import annotations

import argparse

from pipeline.commands.common import (
    add_json_argument,
    add_schedule_arguments,
    numbers,
    print_json,
    read_schedules,
    whole_numbers,
)
from pipeline.simulation import Costs, simulate

NAME = "simulate"
HELP = "tell a schedule's step time, bubble, memory and exposed transfers"

DESCRIPTION = """\
Plays one or more schedules through with the costs given and tells what each takes. Costs are one
number, or one for each rank or virtual stage, with commas.
"""

EPILOG = """\
examples:
  terra-pipeline simulate 1f1b bpipe 8 16 --evict 0.1 --plot steps.png
  terra-pipeline simulate v-half 4 16 --forward 1 --backward 1 --weight 1
  terra-pipeline simulate 1f1b 4 8 --forward 1,1,1,2 --backward 2,2,2,4 --trace step.json
"""

# Option → its metavar and help; each is a field of Costs.
COSTS = {
    "forward": ("S", "seconds of a forward, per micro-batch and chunk (default: 1)"),
    "backward": ("S", "of a backward; of the input gradient alone where it is split (2)"),
    "weight": ("S", "of a weight gradient; a schedule that does not split adds it (0)"),
    "recompute": ("S", "of recomputing a stash before its backward (0)"),
    "transfer": ("S", "of a boundary tensor from rank to rank"),
    "evict": ("S", "of a stash to the partner or back"),
    "boundary_bytes": ("BYTES", "size of a boundary tensor"),
    "stash_bytes": ("BYTES", "size of a stash"),
    "bandwidth": ("B/S", "bytes per second from rank to rank"),
    "latency": ("S", "seconds until the first byte arrives (0)"),
    "cores": ("N", "ranks take turns on so many cores; or the core of each rank"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand to its parser."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    add_schedule_arguments(parser, several=True)
    costs = parser.add_argument_group("costs")
    for name, (metavar, text) in COSTS.items():
        option = f"--{name.replace('_', '-')}"
        read = whole_numbers if name == "cores" else numbers
        costs.add_argument(option, dest=name, type=read, metavar=metavar, help=text)
    parser.add_argument("--plot", metavar="FILE", help="draw the steps into a PNG file")
    parser.add_argument(
        "--trace", metavar="FILE", help="write the (last) step as a Chrome trace, JSON"
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Simulates the schedules; returns 0."""
    given = {name: getattr(arguments, name) for name in COSTS}
    given = {name: value for name, value in given.items() if value is not None}
    costs = Costs.of(given)
    results = [simulate(schedule, costs) for schedule in read_schedules(arguments)]
    if arguments.json:
        shown = [result.as_dict() for result in results]
        print_json(shown[0] if len(shown) == 1 else shown)
    else:
        print("\n\n".join(map(str, results)))
    if arguments.plot:
        from pipeline.simulation.plot import plot

        plot(results, arguments.plot)
    if arguments.trace:
        results[-1].chrome_trace(arguments.trace)
    return 0
