"""Plans, predicted and then measured: random small settings on ranks of this machine.

1. One process measures the model and plans; of all settings that fit, the winner and others drawn
   at random are taken.
2. Ranks run them by turns in one job, each several times.
3. The table has both, the rank correlation of their orders, and how good the winner is.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

from pipeline.benchmarks.launch import is_rank, run_ranks


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="tools/bench_plan", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--settings", type=int, default=5, help="random ones, beside the winner")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7, help="turns that each setting takes")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--plan", action="store_true", help=argparse.SUPPRESS)  # for the ranks
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def model(options: argparse.Namespace) -> tuple[Any, Any, Any, tuple[Any, Any]]:
    """A small GPT, its loss, optimizer, and a global batch."""
    import keras
    import tensorflow as tf

    from pipeline.benchmarks import gpt

    tokens = tf.random.stateless_uniform([options.batch, options.length], [1, 2], 0, 256, tf.int32)
    layers = gpt.gpt(256, options.length, options.width, options.blocks)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return layers, loss, keras.optimizers.SGD(0.01), (tokens, tokens)


def make_plan(options: argparse.Namespace) -> Any:
    """The plan, measured here."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    from pipeline.planning import Cluster, plan

    return plan(*model(options)[:3], Cluster.local_ranks(options.ranks), model(options)[3])


def draw(rows: list[dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """The winner, and others at random; of each schedule and shape with the same chance."""
    rng = random.Random(seed)
    others = rows[1:]
    rng.shuffle(others)
    return [rows[0], *others[:count]]


def on_rank(options: argparse.Namespace) -> None:
    """Runs the settings by turns; rank 0 prints the seconds of each turn."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    import pipeline

    pipes = []
    for setting in json.loads(options.run):
        layers, loss, optimizer, (x, y) = model(options)
        pipe = pipeline.Pipeline(layers, loss=loss, optimizer=optimizer, timeout=300.0, **setting)
        replicas = hvd.size() // pipe.schedule.num_stages
        mine = slice(
            options.batch * pipe.replica // replicas, options.batch * (pipe.replica + 1) // replicas
        )
        pipes.append((pipe, x[mine], y[mine]))
    for pipe, x, y in pipes:
        for _ in range(2):
            pipe.train_step(x, y)
    seconds: list[list[float]] = [[] for _ in pipes]
    for _ in range(options.rounds):
        for number, (pipe, x, y) in enumerate(pipes):
            begin = time.perf_counter()
            pipe.train_step(x, y)
            seconds[number].append(time.perf_counter() - begin)
    if hvd.rank() == 0:
        print(json.dumps(seconds), flush=True)
    hvd.allreduce(tf.zeros(1), name="end")


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Spearman's: the correlation of the ranks."""

    def ranks(values: list[float]) -> list[float]:
        order = sorted(values)
        return [order.index(value) + (order.count(value) - 1) / 2 for value in values]

    return statistics.correlation(ranks(one), ranks(other))


def main(arguments: list[str]) -> int:
    """Plans, then measures; or is a rank."""
    options = parse(arguments)
    if is_rank():
        if options.plan:
            print(json.dumps(make_plan(options).as_dict()), flush=True)
        else:
            on_rank(options)
        return 0
    names = ("ranks", "batch", "width", "length", "blocks", "rounds")
    sizes = [f"--{name}={getattr(options, name)}" for name in names]

    def job(ranks: int, *more: str) -> Any:
        lines = run_ranks("pipeline.benchmarks.plans", ranks, [*sizes, *more], quiet=True)
        return json.loads(next(line for line in reversed(lines) if line[:1] in "[{"))

    rows = [row for row in job(1, "--plan")["rows"] if row["status"] == "fits"]
    chosen = draw(rows, options.settings, options.seed)
    if not options.json:
        print(f"{len(rows)} settings fit; predicted before anything ran:", flush=True)
        for row in chosen:
            print(f"  {row['step_seconds'] * 1e3:8.1f} ms  {_name(row['setting'])}", flush=True)
    seconds = job(options.ranks, f"--run={json.dumps([_arguments(r['setting']) for r in chosen])}")
    measured = [statistics.median(of_setting) for of_setting in seconds]
    predicted = [row["step_seconds"] for row in chosen]
    result = {
        "settings": [_name(row["setting"]) for row in chosen],
        "predicted": predicted,
        "measured": measured,
        "rank_correlation": rank_correlation(predicted[1:], measured[1:]),
        "winner_over_best": measured[0] / min(measured),
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return 0
    print(f"{'setting':48}{'predicted ms':>14}{'measured ms':>13}")
    for name, one, other in zip(result["settings"], predicted, measured, strict=True):
        print(f"{name:48}{one * 1e3:>14.1f}{other * 1e3:>13.1f}")
    print(
        f"rank correlation of the random ones {result['rank_correlation']:.2f}; "
        f"the winner takes {result['winner_over_best']:.3f} times the best of all"
    )
    return 0


def _arguments(setting: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_stages": setting["stages"],
        "num_microbatches": setting["microbatches"],
        "schedule": setting["schedule"],
        "num_chunks": setting["chunks"],
        "stash": setting["stash"],
        "partition": setting["cuts"] or "uniform",
    }


def _name(setting: dict[str, Any]) -> str:
    return (
        f"dp {setting['replicas']} x pp {setting['stages']} {setting['schedule']} "
        f"m={setting['microbatches']}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
