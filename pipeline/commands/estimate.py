"""The subcommand `terra-pipeline estimate`: does BPipe pay?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pipeline import estimation
from pipeline.commands.common import add_json_argument, positive, print_json
from pipeline.estimation.transformer import RECOMPUTATIONS
from pipeline.schedules import GENERATORS

NAME = "estimate"
HELP = "estimate whether BPipe pays for a model, its hardware and its memory"

DESCRIPTION = """\
Compares all settings (micro-batch size, recomputation, schedule) by simulation, and tells the best
one that fits into memory with and without BPipe. The costs of a stage come from one of:

  --times      measured seconds of forward and backward of the slowest stage, for each micro-batch
               size, with --stash-bytes, --static-bytes and --memory for what fits
  --model      a transformer by name, with the share of the device's peak FLOPs that a stage of it
               reaches while it computes, --efficiency
  --profiles   a JSON file: {"profiles": [...], "ranks": {...}} with the fields of
               pipeline.estimation.Profile and Ranks
"""

EPILOG = """\
examples:
  terra-pipeline estimate -p 8 --batch 128 --times 1=1.0,2=1.5 --stash-bytes 1=1e9,2=2e9 \\
      --static-bytes 2e9 --memory 12e9
  terra-pipeline estimate --model gpt3-96b --devices 32 --tensor-parallel 4 --batch 128 \\
      --efficiency 1=0.359,2=0.508 --recompute selective
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand to its parser."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--times", type=_by_size, metavar="B=S,...", help="seconds by micro-batch")
    source.add_argument("--model", choices=sorted(estimation.MODELS), help="a transformer by name")
    source.add_argument("--profiles", metavar="FILE", help="a JSON file with measured profiles")
    parser.add_argument("-p", "--stages", type=positive, metavar="P", help="number of stages")
    parser.add_argument(
        "--batch", type=positive, required=True, metavar="B", help="samples of a replica in a step"
    )
    parser.add_argument(
        "--schedules",
        type=_names,
        default=["1f1b", "bpipe"],
        metavar="NAME,...",
        help="schedules to choose from (default: 1f1b,bpipe)",
    )
    parser.add_argument(
        "--memory", type=float, metavar="BYTES", help="memory of a rank (a device with --model)"
    )
    times = parser.add_argument_group("with --times")
    times.add_argument(
        "--stash-bytes", type=_by_size, metavar="B=BYTES,...", help="stash by micro-batch size"
    )
    times.add_argument(
        "--static-bytes", type=float, default=0.0, metavar="BYTES", help="weights, optimizer"
    )
    times.add_argument("--bandwidth", type=float, metavar="B/S", help="bytes per second")
    times.add_argument("--cores", type=positive, metavar="N", help="cores that all ranks share")
    model = parser.add_argument_group("with --model")
    model.add_argument("--devices", type=positive, metavar="N", help="devices of a replica, p·t")
    model.add_argument("--tensor-parallel", type=positive, default=1, metavar="T")
    model.add_argument("--peak-flops", type=float, default=312e12, metavar="FLOP/S")
    model.add_argument(
        "--efficiency", type=_by_size, metavar="B=SHARE,...", help="of a stage, by micro-batch size"
    )
    model.add_argument(
        "--recompute",
        type=_names,
        default=list(RECOMPUTATIONS),
        metavar="KIND,...",
        help=f"what to choose from (default: {','.join(RECOMPUTATIONS)})",
    )
    model.add_argument("--flash", action="store_true", help="flash attention is used")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the estimate; returns 0."""
    make = _of_model if arguments.model else _of_times if arguments.times else _of_file
    profiles, ranks, stages = make(arguments)
    if stages is None:
        raise ValueError("the number of stages is missing; pass -p")
    result = estimation.estimate(
        profiles, arguments.batch, stages, ranks, schedules=arguments.schedules
    )
    if arguments.json:
        print_json(result.as_dict())
    else:
        print(result)
    return 0


Inputs = tuple[list[estimation.Profile], estimation.Ranks, int | None]


def _of_times(arguments: argparse.Namespace) -> Inputs:
    stashes = arguments.stash_bytes or dict.fromkeys(arguments.times, 0.0)
    missing = sorted(set(arguments.times) - set(stashes))
    if missing:
        raise ValueError(f"--stash-bytes has no entry for micro-batches of {missing[0]}")
    profiles = [
        estimation.Profile(size, seconds / 3, seconds * 2 / 3, stashes[size])
        for size, seconds in arguments.times.items()
    ]
    ranks = estimation.Ranks(
        memory_bytes=arguments.memory,
        static_bytes=arguments.static_bytes,
        bandwidth=arguments.bandwidth,
        cores=arguments.cores,
    )
    return profiles, ranks, arguments.stages


def _of_model(arguments: argparse.Namespace) -> Inputs:
    if arguments.devices is None or arguments.efficiency is None:
        raise ValueError("--model needs --devices and --efficiency")
    if arguments.devices % arguments.tensor_parallel:
        raise ValueError("--devices must be a multiple of --tensor-parallel")
    cluster = estimation.Cluster(arguments.devices, arguments.tensor_parallel, arguments.peak_flops)
    if arguments.memory is not None:
        cluster = estimation.Cluster(
            arguments.devices, arguments.tensor_parallel, arguments.peak_flops, arguments.memory
        )
    if arguments.stages not in (None, cluster.num_stages):
        raise ValueError(f"-p {arguments.stages} is not devices by tensor-parallel")
    model = estimation.MODELS[arguments.model]
    profiles = estimation.transformer_profiles(
        model, cluster, arguments.efficiency, arguments.recompute, arguments.flash
    )
    return profiles, estimation.transformer_ranks(model, cluster), cluster.num_stages


def _of_file(arguments: argparse.Namespace) -> Inputs:
    path = Path(arguments.profiles)
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        profiles = [estimation.Profile(**profile) for profile in content["profiles"]]
        ranks = estimation.Ranks(**content.get("ranks", {}))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} does not hold profiles as --help describes them: {error}"
        ) from None
    return profiles, ranks, arguments.stages


def _by_size(text: str) -> dict[int, float]:
    """Reads '1=0.5,2=0.8': numbers by micro-batch size."""
    try:
        pairs = [item.split("=") for item in text.split(",")]
        return {int(size): float(value) for size, value in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not like 1=0.5,2=0.8, a number for each micro-batch size"
        ) from None


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in GENERATORS and name not in RECOMPUTATIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown")
    return names
