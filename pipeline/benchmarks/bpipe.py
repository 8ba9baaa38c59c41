"""The contest: the best 1F1B setting against the best BPipe setting under one cap on stash bytes.

1. One process measures what a micro-batch costs in each stage, for several micro-batch sizes, with
   and without recomputation (`profile`).
2. `pipeline.estimation` predicts every setting's samples per second, with ranks that share cores,
   and picks the best ones that stay under the cap.
3. Ranks run the winners by turns in one job. Peak stash bytes come from the ledgers.

Rivals of BPipe are 1F1B with the same recomputation in all stages, as in the paper, and 1F1B with
recomputation in as few stages as the cap allows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline.benchmarks.launch import is_rank, run_ranks

STAGES = 4
PROFILE_ROUNDS = 12


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="tools/bench_bpipe", description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="samples in a step")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4], help="sizes")
    parser.add_argument(
        "--cap",
        type=float,
        help="MB of stashes that a rank may hold; by default two caps: what BPipe needs at the "
        "smallest micro-batch without recomputation, and one under which everything fits",
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns that each setting takes")
    parser.add_argument("--steps", type=int, default=1, help="steps of a turn")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.add_argument("--settings", help=argparse.SUPPRESS)  # for the ranks
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Setting:
    """One way to run.

    Attributes:
        schedule: its name.
        microbatch: samples in a micro-batch.
        recompute: for each stage, whether it recomputes.
    """

    schedule: str
    microbatch: int
    recompute: tuple[bool, ...]

    def __str__(self) -> str:
        stages = [str(stage) for stage, on in enumerate(self.recompute) if on]
        policy = {0: "keep", len(self.recompute): "recompute"}.get(
            len(stages), f"recompute {','.join(stages)}"
        )
        return f"{self.schedule} b={self.microbatch} {policy}"


# --- the estimate --------------------------------------------------------------------------------


def measure_profiles(options: argparse.Namespace) -> dict[tuple[int, bool], Any]:
    """What a micro-batch costs, by its size and policy."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    from pipeline.benchmarks import gpt
    from pipeline.planning.stage_profile import StageProfiler

    profilers = {}
    for microbatch, recompute in itertools.product(options.microbatches, (False, True)):
        x = tf.random.stateless_uniform(
            [microbatch, options.length], [1, 2], 0, options.vocabulary, tf.int32
        )
        layers = gpt.gpt(options.vocabulary, options.length, options.width, options.blocks)
        profilers[microbatch, recompute] = StageProfiler(
            layers, loss(), gpt.cuts(options.blocks, STAGES), x, x, recompute
        )
    for _ in range(PROFILE_ROUNDS):  # by turns, like everything that is compared
        for profiler in profilers.values():
            profiler.run()
    return {key: profiler.profile() for key, profiler in profilers.items()}


def candidates(
    profiles: dict[tuple[int, bool], Any], batch: int, cap: float | None
) -> list[tuple[Setting, Any]]:
    """All settings with their estimates under a cap, the fastest first."""
    from pipeline.estimation import Ranks, estimate

    ranks = Ranks(memory_bytes=cap, cores=min(os.cpu_count() or 1, STAGES))
    found = []
    sizes = sorted({size for size, _ in profiles})
    # Recomputation from the first stage on: the early ones hold the most stashes.
    policies = [tuple(stage < count for stage in range(STAGES)) for count in range(STAGES + 1)]
    for size, policy, schedule in itertools.product(sizes, policies, ("1f1b", "bpipe")):
        if schedule == "bpipe" and any(policy) and not all(policy):
            continue
        kept, again = profiles[size, False], profiles[size, True]

        def mixed(name: str, kept=kept, again=again, policy=policy) -> list[float]:
            return [getattr(again if on else kept, name)[stage] for stage, on in enumerate(policy)]

        profile = replace(
            kept,
            forward=mixed("forward"),
            backward=mixed("backward"),
            stash_bytes=mixed("stash_bytes"),
            recompute="full" if all(policy) else f"{sum(policy)} stages" if any(policy) else "none",
        )
        (candidate,) = estimate([profile], batch, STAGES, ranks, (schedule,)).candidates
        found.append((Setting(schedule, size, policy), candidate))
    return sorted(found, key=lambda pair: -pair[1].samples_per_second)


def contest(found: list[tuple[Setting, Any]]) -> dict[str, tuple[Setting, Any]]:
    """The best setting of each kind that fits."""
    kinds = {
        "BPipe": lambda s: s.schedule == "bpipe",
        "1F1B, all stages alike": lambda s: s.schedule == "1f1b" and len(set(s.recompute)) == 1,
        "1F1B, chosen per stage": lambda s: s.schedule == "1f1b",
    }
    return {
        kind: next((pair for pair in found if belongs(pair[0]) and pair[1].fits), (None, None))
        for kind, belongs in kinds.items()
    }


# --- the run -------------------------------------------------------------------------------------


def loss() -> Any:
    """Cross-entropy of the next token."""
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def on_rank(options: argparse.Namespace) -> None:
    """Runs the settings by turns; rank 0 prints JSON, one row a setting."""
    import horovod.tensorflow as hvd
    import keras
    import numpy as np
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    import pipeline
    from pipeline.benchmarks import gpt

    hvd.init()
    settings = [Setting(s, b, tuple(r)) for s, b, r in json.loads(options.settings)]
    random = np.random.default_rng(0)
    x = random.integers(0, options.vocabulary, (options.batch, options.length))
    pipes = []
    for setting in settings:
        keras.utils.set_random_seed(1)
        pipes.append(
            pipeline.Pipeline(
                gpt.gpt(options.vocabulary, options.length, options.width, options.blocks),
                loss=loss(),
                optimizer=keras.optimizers.SGD(0.01),
                num_stages=STAGES,
                num_microbatches=options.batch // setting.microbatch,
                schedule=setting.schedule,
                stash=["recompute" if on else "keep" for on in setting.recompute],
                partition=gpt.cuts(options.blocks, STAGES),
                timeout=300.0,
            )
        )
        pipes[-1].train_step(x, x)
    seconds: list[list[float]] = [[] for _ in pipes]
    cpu: list[list[float]] = [[] for _ in pipes]
    for _ in range(options.rounds):
        for number, pipe in enumerate(pipes):
            begin, used = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                pipe.train_step(x, x)
            seconds[number].append((time.perf_counter() - begin) / options.steps)
            cpu[number].append((time.process_time() - used) / options.steps)
    rows = []
    for number, pipe in enumerate(pipes):
        report = pipe.report()
        all_cpu = hvd.allreduce(
            tf.constant(float(np.median(cpu[number])), tf.float64), op=hvd.Sum, name=f"cpu{number}"
        )
        rows.append(
            {
                "best_samples_per_second": options.batch / min(seconds[number]),
                "median_samples_per_second": options.batch / float(np.median(seconds[number])),
                "rounds": [options.batch / s for s in seconds[number]],
                "cpu_seconds": float(all_cpu),
                "peak_bytes": max((r.peak_stash_bytes for r in report.rows), default=0),
            }
        )
    if hvd.rank() == 0:
        print(json.dumps(rows), flush=True)
    hvd.allreduce(tf.zeros(1), name="end")


def measure(options: argparse.Namespace, settings: list[Setting]) -> list[dict[str, Any]]:
    """Runs the settings in one job; returns its rows."""
    chosen = [[s.schedule, s.microbatch, list(s.recompute)] for s in settings]
    return run_job(options, STAGES, f"--settings={json.dumps(chosen)}")


def profiles_of(options: argparse.Namespace) -> dict[tuple[int, bool], Any]:
    """What a micro-batch costs, by its size and policy; measured in a process of its own."""
    from pipeline.estimation import Profile

    rows = run_job(options, 1, "--profile")
    return {(row["microbatch"], row["recompute"] == "full"): Profile(**row) for row in rows}


def run_job(options: argparse.Namespace, ranks: int, what: str) -> Any:
    """Runs this module on ranks; returns the JSON that it prints."""
    names = ("width", "length", "blocks", "vocabulary", "batch", "rounds", "steps")
    arguments = [f"--{name}={getattr(options, name)}" for name in names]
    sizes = ["--microbatches", *map(str, options.microbatches)]
    lines = run_ranks("pipeline.benchmarks.bpipe", ranks, [*arguments, *sizes, what], quiet=True)
    return json.loads(next(line for line in reversed(lines) if line.startswith("[{")))


def main(arguments: list[str]) -> int:
    """Predicts, then measures; or is a rank."""
    options = parse(arguments)
    if is_rank():
        if options.profile:
            print(json.dumps([asdict(p) for p in measure_profiles(options).values()]), flush=True)
        else:
            on_rank(options)
        return 0
    profiles = profiles_of(options)
    caps = [options.cap * 1e6] if options.cap else default_caps(profiles, options.batch)
    contests = [(cap, contest(candidates(profiles, options.batch, cap))) for cap in caps]
    settings = sorted(
        {setting for _, found in contests for setting, _ in found.values() if setting}, key=str
    )
    if not options.json:
        for cap, found in contests:
            print(prediction(cap, found), flush=True)
    measured = dict(zip(settings, measure(options, settings), strict=True))
    if options.json:
        print(json.dumps([as_dict(cap, found, measured) for cap, found in contests], indent=1))
    else:
        for cap, found in contests:
            print(table(cap, found, measured), flush=True)
    return 0


def default_caps(profiles: dict[tuple[int, bool], Any], batch: int) -> list[float]:
    """A cap that BPipe just keeps at the smallest micro-batch, and one that all settings keep."""
    everything = candidates(profiles, batch, None)
    smallest = min(size for size, _ in profiles)
    needs = {setting: max(candidate.peak_bytes) for setting, candidate in everything}
    tight = needs[Setting("bpipe", smallest, (False,) * STAGES)]
    return [1.01 * tight, 1.01 * max(needs.values())]


def gains(found: dict[str, tuple[Setting, Any]], rates: Any) -> dict[str, float]:
    """How many times faster BPipe is than each rival.

    Args:
        found: of `contest`.
        rates: gives a setting's samples per second, one for each round; the median counts of the
            rounds' ratios, since what else the machine does changes between rounds.
    """
    own, _ = found["BPipe"]
    return {
        kind: statistics.median(
            mine / theirs for mine, theirs in zip(rates(own), rates(setting), strict=True)
        )
        for kind, (setting, _) in found.items()
        if kind != "BPipe" and setting is not None and own is not None
    }


def prediction(cap: float, found: dict[str, tuple[Setting, Any]]) -> str:
    """What the estimate says beforehand."""
    rates = {setting: [c.samples_per_second] for setting, c in found.values() if setting}
    lines = [f"Predicted under a cap of {cap / 1e6:.2f} MB of stashes a rank:"]
    for kind, gain in gains(found, rates.__getitem__).items():
        verdict = "pays" if gain > 1.02 else "does not pay"
        lines.append(f"  BPipe {verdict} against {kind}: {gain:.2f} times the samples per second")
    return "\n".join(lines)


def table(
    cap: float, found: dict[str, tuple[Setting, Any]], measured: dict[Setting, dict[str, Any]]
) -> str:
    """Predicted and measured side by side."""
    lines = [
        "",
        f"Cap {cap / 1e6:.2f} MB",
        f"{'':24}{'setting':32}{'predicted/s':>12}{'measured/s':>12}{'CPU s/step':>12}"
        f"{'peak MB':>9}",
    ]
    for kind, (setting, candidate) in found.items():
        if setting is None:
            lines.append(f"{kind:24}nothing fits")
            continue
        row = measured[setting]
        lines.append(
            f"{kind:24}{setting!s:32}{candidate.samples_per_second:>12.1f}"
            f"{row['median_samples_per_second']:>12.1f}{row['cpu_seconds']:>12.3f}"
            f"{row['peak_bytes'] / 1e6:>9.2f}"
        )
    rates = {setting: [c.samples_per_second] for setting, c in found.values() if setting}
    predicted = gains(found, rates.__getitem__)
    for kind, gain in gains(found, lambda s: measured[s]["rounds"]).items():
        own, _ = found["BPipe"]
        work = measured[found[kind][0]]["cpu_seconds"] / measured[own]["cpu_seconds"]
        lines.append(
            f"BPipe against {kind}: predicted {predicted[kind]:.2f}, measured {gain:.2f}; "
            f"bound by the work that recomputation adds: {work:.2f}"
        )
    return "\n".join(lines)


def as_dict(
    cap: float, found: dict[str, tuple[Setting, Any]], measured: dict[Setting, dict[str, Any]]
) -> dict[str, Any]:
    """For JSON."""
    return {
        "cap_bytes": cap,
        "settings": {
            kind: {"setting": str(s), "predicted": c.samples_per_second, **measured[s]}
            for kind, (s, c) in found.items()
            if s is not None
        },
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
