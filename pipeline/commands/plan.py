"""The subcommand `terra-pipeline plan`: which parallelism to launch."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeline.commands.common import add_json_argument, positive, print_json
from pipeline.planning import Cluster, LayerCosts, Link, Plan, PlanningError
from pipeline.planning.checks import read_json

NAME = "plan"
HELP = "plan replicas, stages, schedule, micro-batches and recomputation for a model"

DESCRIPTION = """\
Measures a model and searches how to train it on so many devices: data-parallel replicas, pipeline
stages, schedules with and without BPipe, micro-batches, and what is recomputed so that it fits.
Prints the settings, what ran out of memory, why the winner wins, and the line that launches it.

MODEL is either FILE.py:FUNCTION, a function without arguments that returns
(layers, loss, optimizer, (x, y)) with one global batch; or a JSON file with costs of layers: lists
forward and backward (seconds per sample), stash_bytes, output_bytes (per sample), weight_bytes, and
numbers copies, update_seconds, fixed_seconds.
"""

EPILOG = """\
examples:
  terra-pipeline plan model.py:setup --devices 4 --cores 2
  terra-pipeline plan model.py:setup --devices 8 --memory 16e9 --bandwidth 50e9 --save plan.json
  terra-pipeline plan layers.json --batch 64 --devices 8 --memory 16e9 --json

In the script: pipe = pipeline.Pipeline.from_plan("plan.json", layers, loss=..., optimizer=...)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand to its parser."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.add_argument("model", metavar="MODEL", help="FILE.py:FUNCTION or a JSON file")
    parser.add_argument(
        "--devices", type=positive, required=True, metavar="N", help="devices, one a rank"
    )
    parser.add_argument("--memory", type=float, metavar="BYTES", help="of a device")
    parser.add_argument(
        "--bandwidth", type=float, default=5e9, metavar="B/S", help="of links (default: 5e9)"
    )
    parser.add_argument(
        "--latency", type=float, default=1e-4, metavar="S", help="of links (default: 1e-4)"
    )
    parser.add_argument(
        "--per-node", type=positive, metavar="N", help="devices in a node (default: all)"
    )
    parser.add_argument(
        "--node-bandwidth", type=float, metavar="B/S", help="of links between nodes"
    )
    parser.add_argument(
        "--reduction", type=float, metavar="B/S", help="of all-reduces (default: the slowest link)"
    )
    parser.add_argument(
        "--cores", type=positive, metavar="N", help="processor cores that all ranks share"
    )
    parser.add_argument(
        "--batch", type=positive, metavar="B", help="samples in a step, with a JSON file"
    )
    parser.add_argument("--rows", type=positive, default=25, help="of the table (default: 25)")
    parser.add_argument("--save", metavar="FILE", help="write the plan as JSON, for from_plan")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plans; returns 0."""
    cluster = _cluster(arguments)
    if arguments.model.endswith(".json"):
        found = _of_costs(arguments, cluster)
    else:
        found = _of_model(arguments, cluster)
    if arguments.save:
        found.save(arguments.save)
    if arguments.json:
        print_json(found.as_dict())
    else:
        print(f"{found.table(arguments.rows)}\n\n{found.explain()}")
    return 0


def _cluster(arguments: argparse.Namespace) -> Cluster:
    from dataclasses import replace

    remote = None
    if arguments.node_bandwidth is not None:
        remote = Link(arguments.node_bandwidth, arguments.latency)
    cluster = Cluster.uniform(
        arguments.devices,
        arguments.memory,
        arguments.bandwidth,
        arguments.latency,
        arguments.per_node,
        remote,
        cores=arguments.cores,
    )
    if arguments.reduction is None:
        return cluster
    return replace(cluster, reduction=Link(arguments.reduction, arguments.latency))


def _of_costs(arguments: argparse.Namespace, cluster: Cluster) -> Plan:
    from pipeline.planning.planner import search

    path = arguments.model
    data = read_json(path, PlanningError)
    known = {field.name for field in fields(LayerCosts)}
    if not isinstance(data, dict):
        raise PlanningError(f"{path} must hold an object", "no-object", path)
    for name in sorted(set(data) - known):
        raise PlanningError(f"layer costs have no field {name!r}", "unknown-field", name)
    for name in ("forward", "backward", "stash_bytes", "output_bytes", "weight_bytes"):
        if not isinstance(data.get(name), list):
            raise PlanningError(f"field {name!r}: must be a list", "missing-field", name)
    if arguments.batch is None:
        raise PlanningError("a JSON file needs --batch, the samples in a step", "batch", "--batch")
    return search(LayerCosts(**data), cluster, [arguments.batch])


def _of_model(arguments: argparse.Namespace, cluster: Cluster) -> Plan:
    setup = _function(arguments.model)
    import tensorflow as tf

    # As the ranks will have it.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    from pipeline.planning.planner import plan

    made = setup()
    if not isinstance(made, tuple) or len(made) != 4:
        raise PlanningError(
            f"{arguments.model} must return (layers, loss, optimizer, (x, y))", "setup"
        )
    layers, loss, optimizer, batch = made

    def show(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return plan(layers, loss, optimizer, cluster, batch, progress=show)


def _function(text: str) -> Callable[[], Any]:
    """The function that FILE.py:FUNCTION names."""
    file, colon, name = text.rpartition(":")
    if not colon or not Path(file).is_file():
        raise PlanningError(
            f"{text!r} is neither FILE.py:FUNCTION with a file that is there, nor a JSON file",
            "no-file",
            text,
        )
    spec = importlib.util.spec_from_file_location("planned_model", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(file).resolve().parent))
    sys.modules["planned_model"] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise PlanningError(f"{file} has no function {name!r}", "no-function", text)
    return found
