"""The subcommand `terra-pipeline hybrid`: replicas alone, or replicas of split models?"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pipeline.commands.common import add_json_argument, positive, print_json

NAME = "hybrid"
HELP = "tell from which number of devices on splitting the model beats more replicas"

DESCRIPTION = """\
Reads a model of training time (JSON: batch, E(B), scaling efficiency, speed-ups of M-way model
parallelism) and tells the speed-up of data parallelism and of hybrids, where they cross, and the
best strategy for a number of devices.
"""

EPILOG = """\
the file:
  {"batch": 64, "step_seconds": 0.3, "samples": 1281167,
   "epochs": {"64": 40, "2048": 42, "16384": 90},      or {"floor": 40, "slope": 0.003}
   "efficiency": {"1": 1, "256": 0.9},                 or {"gradient_bytes": 1e8, "bandwidth": 1e10}
   "model_speedup": {"2": 1.32, "4": 1.9}}

examples:
  terra-pipeline hybrid inception.json --devices 256
  terra-pipeline hybrid inception.json --devices 256 --plot inception.png --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand to its parser."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.add_argument("model", metavar="MODEL", help="a JSON file")
    parser.add_argument(
        "--devices", type=positive, required=True, metavar="N", help="devices that there are"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the curves, PNG")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the curves; returns 0."""
    from pipeline.planning.hybrid import HybridModel

    model = HybridModel.load(arguments.model)
    counts = sorted({2**i for i in range(arguments.devices.bit_length())} | {arguments.devices})
    counts = [count for count in counts if count <= arguments.devices]
    best = model.best(arguments.devices)
    crossovers = {ways: model.crossover(ways, arguments.devices) for ways in model.ways[1:]}
    if arguments.json:
        print_json(
            {
                "speedup": model.curves(counts),
                "crossover": crossovers,
                "best": asdict(best),
            }
        )
    else:
        print(model.table(counts))
        for ways, devices in crossovers.items():
            where = "nowhere that is known" if devices is None else f"from {devices} devices on"
            print(f"{ways}-way model parallel workers win {where}")
        seconds = "" if best.seconds is None else f", {best.seconds:.6g} s to the target"
        print(f"best on at most {arguments.devices} devices: {best}{seconds}")
    if arguments.plot:
        model.plot(arguments.plot, counts)
    return 0
