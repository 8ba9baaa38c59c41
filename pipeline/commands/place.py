"""The subcommand `terra-pipeline place`: which operation should run on which device."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from pipeline.commands.common import add_json_argument, positive, print_json
from pipeline.planning import Cluster, ClusterError

NAME = "place"
HELP = "place the operations of a graph on devices, as fast as can be found and proven"

DESCRIPTION = """\
Reads a graph of operations (JSON, also the form of the dnn-partitioning data set) and searches the
placement with the least makespan: a list schedule first, then annealing and OR-Tools' CP-SAT. Tells
the makespan, a bound that nothing is faster than, and the gap between both. Ctrl-C ends the search
and prints the best so far.
"""

EPILOG = """\
examples:
  terra-pipeline place inception.json --devices 2 --bandwidth 50e9 --seconds 60
  terra-pipeline place step.json --devices 4 --memory 16e9 --bandwidth 10e9 --plot step.png
  terra-pipeline place step.json --devices 2 --json

exit code:
  0  placed        2  the graph, a number or the memory does not allow a placement
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand to its parser."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.add_argument("graph", metavar="GRAPH", help="a JSON file with nodes and edges")
    parser.add_argument(
        "--devices", type=positive, required=True, metavar="N", help="number of devices"
    )
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=math.inf,
        metavar="BYTES_PER_SECOND",
        help="of the link from device to device (default: without limit)",
    )
    parser.add_argument(
        "--latency", type=float, default=0.0, metavar="S", help="of a transfer (default: 0)"
    )
    parser.add_argument(
        "--memory", type=float, metavar="BYTES", help="of a device (default: without limit)"
    )
    parser.add_argument(
        "--speeds",
        type=_speeds,
        metavar="X,...",
        help="for each device, how many times faster than the measured one it is",
    )
    parser.add_argument(
        "--kind", choices=("gpu", "cpu"), default="gpu", help="of the devices (default: gpu)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="to search at most (default: 60)"
    )
    parser.add_argument(
        "--fuse", type=positive, metavar="N", help="fuse the graph to about so many nodes first"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the devices over time, PNG")
    parser.add_argument("--quiet", action="store_true", help="do not show the search on stderr")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Places the graph; returns 0."""
    from pipeline.planning.graph_json import load
    from pipeline.planning.placer import place

    cluster = _cluster(arguments)
    graph = load(arguments.graph)
    if arguments.fuse:
        graph = graph.fuse(arguments.fuse)
    placement = place(graph, cluster, arguments.seconds, progress=not arguments.quiet)
    if arguments.json:
        print_json(placement.as_dict())
    else:
        print(placement)
    if arguments.plot:
        placement.plot(arguments.plot)
    return 0


def _cluster(arguments: argparse.Namespace) -> Cluster:
    cluster = Cluster.uniform(
        arguments.devices,
        memory=arguments.memory,
        bandwidth=arguments.bandwidth,
        latency=arguments.latency,
        kind=arguments.kind,
    )
    if arguments.speeds is None:
        return cluster
    if len(arguments.speeds) != arguments.devices:
        raise ClusterError(
            f"--speeds has {len(arguments.speeds)} numbers for {arguments.devices} devices",
            "speeds",
            "--speeds",
        )
    devices = [
        replace(device, speed=speed)
        for device, speed in zip(cluster.devices, arguments.speeds, strict=True)
    ]
    return replace(cluster, devices=tuple(devices))


def _speeds(text: str) -> list[float]:
    try:
        return [float(item) for item in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas") from None
