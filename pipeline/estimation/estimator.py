"""The estimate: does BPipe pay, for stages of known cost and ranks of known memory?

Candidate settings are all profiles (a micro-batch size and a recomputation, with what they cost)
under all schedules asked for. Each is simulated, its memory taken from the validator, and the best
that fits is found twice: among the schedules that move stashes and among those that do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.schedules import GENERATORS, Schedule
from pipeline.simulation import Costs, simulate
from pipeline.simulation.costs import PerPair, PerStage, per_rank

# Steps of more micro-batches than this times p are extrapolated: their middle only repeats.
SIMULATED_ROUNDS = 4


@dataclass(frozen=True)
class Profile:
    """What one micro-batch costs in a stage, measured or computed, for one setting of the stage.

    Attributes:
        microbatch: samples in a micro-batch.
        forward: seconds of the forward of one stage, one number or one for each.
        backward: seconds of the whole backward, recomputation included.
        stash_bytes: bytes of a stash of a stage.
        recompute: what is recomputed, for people: `none`, `selective` or `full`.
        weight: the part of `backward` that computes weight gradients; half of it if not known.
        boundary_bytes: bytes of a boundary tensor.
    """

    microbatch: int
    forward: PerStage
    backward: PerStage
    stash_bytes: PerStage
    recompute: str = "none"
    weight: PerStage | None = None
    boundary_bytes: PerStage = 0


@dataclass(frozen=True)
class Ranks:
    """What the ranks have.

    Attributes:
        memory_bytes: bytes that a rank can use, one number or one for each; None: without limit.
        static_bytes: bytes that do not depend on the schedule: weights, gradients, optimizer
            slots; one number or one for each stage.
        bandwidth: see `pipeline.Costs`.
        latency: see `pipeline.Costs`.
        cores: see `pipeline.Costs`.
    """

    memory_bytes: PerStage | None = None
    static_bytes: PerStage = 0
    bandwidth: PerPair | None = None
    latency: PerPair = 0.0
    cores: int | Sequence[int] | None = None


@dataclass(frozen=True)
class Candidate:
    """One setting and what is to be expected of it.

    Attributes:
        schedule: the schedule's name.
        microbatch: samples in a micro-batch.
        recompute: what is recomputed.
        step_seconds: the time of a step.
        samples_per_second: of one replica.
        bubble: the share of time in which ranks do not compute.
        peak_bytes: for each stage, the most bytes it uses, static ones included.
        fits: whether every stage has that much memory.
    """

    schedule: str
    microbatch: int
    recompute: str
    step_seconds: float
    samples_per_second: float
    bubble: float
    peak_bytes: tuple[float, ...]
    fits: bool

    @property
    def moves_stashes(self) -> bool:
        """Whether it is BPipe."""
        return self.schedule == "bpipe"

    def __str__(self) -> str:
        return f"{self.schedule}, micro-batch {self.microbatch}, recompute {self.recompute}"


@dataclass(frozen=True)
class Estimate:
    """Whether BPipe pays.

    Attributes:
        candidates: all settings, the fastest first.
        without: the best one that fits without BPipe, or None if none fits.
        with_bpipe: the best one that fits with BPipe, or None.
        worth: the least gain that counts as paying.
    """

    candidates: tuple[Candidate, ...]
    worth: float
    without: Candidate | None = field(default=None)
    with_bpipe: Candidate | None = field(default=None)

    @property
    def gain(self) -> float:
        """How many times faster the best BPipe setting is; inf if nothing else fits, else nan."""
        if self.with_bpipe is None:
            return math.nan
        if self.without is None:
            return math.inf
        return self.with_bpipe.samples_per_second / self.without.samples_per_second

    @property
    def pays(self) -> bool:
        """Whether BPipe is faster by more than `worth`, or the only one that fits."""
        return self.gain > self.worth

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        best = {"without_bpipe": self.without, "with_bpipe": self.with_bpipe}
        return {
            "pays": self.pays,
            "gain": self.gain if math.isfinite(self.gain) else None,
            **{name: None if one is None else asdict(one) for name, one in best.items()},
            "candidates": [asdict(candidate) for candidate in self.candidates],
        }

    def __str__(self) -> str:
        lines = [
            f"{'schedule':<12}{'micro-batch':>12}{'recompute':>11}{'samples/s':>11}{'bubble':>8}"
            f"{'fullest stage':>15}  fits"
        ]
        for one in self.candidates:
            lines.append(
                f"{one.schedule:<12}{one.microbatch:>12}{one.recompute:>11}"
                f"{one.samples_per_second:>11.4g}{one.bubble:>8.1%}"
                f"{max(one.peak_bytes) / 1e9:>12.4g} GB  {'yes' if one.fits else 'no'}"
            )
        lines.append(f"best without BPipe: {self.without or 'nothing fits'}")
        lines.append(f"best with BPipe:    {self.with_bpipe or 'nothing fits'}")
        lines.append(self.verdict())
        return "\n".join(lines)

    def verdict(self) -> str:
        """One sentence."""
        if self.with_bpipe is None:
            return "BPipe does not pay: none of its settings fits"
        if self.without is None:
            return "BPipe pays: nothing else fits"
        if self.pays:
            return f"BPipe pays: {self.gain:.2f} times the samples per second"
        return f"BPipe does not pay: {self.gain:.2f} times the samples per second"


def estimate(
    profiles: Iterable[Profile],
    batch: int,
    num_stages: int,
    ranks: Ranks | None = None,
    schedules: Sequence[str] = ("1f1b", "bpipe"),
    worth: float = 1.02,
) -> Estimate:
    """Estimates whether BPipe pays.

    Args:
        profiles: the settings of a stage to choose from, with their costs.
        batch: samples of one replica in a step.
        num_stages: the number of stages p.
        ranks: memory and links; by default memory without limit and links that cost nothing.
        schedules: names of the schedules to choose from; those with two chunks cut each stage of a
            profile into two equal ones.
        worth: the least gain that counts as paying; by default 2%, which transfers easily cost.

    Returns:
        All candidates and the best ones with and without BPipe.

    Raises:
        ValueError: if a schedule is unknown, there is no profile, or a number does not fit.
    """
    ranks = ranks or Ranks()
    unknown = [name for name in schedules if name not in GENERATORS]
    if unknown:
        raise ValueError(f"no schedule {unknown[0]!r}; there are {', '.join(GENERATORS)}")
    if batch < 1 or num_stages < 1:
        raise ValueError(
            f"there must be at least 1 sample and 1 stage, not {batch} and {num_stages}"
        )
    candidates = [
        _candidate(name, profile, batch, num_stages, ranks)
        for profile in profiles
        for name in schedules
    ]
    if not candidates:
        raise ValueError("there is nothing to choose from; pass at least one profile and schedule")
    candidates.sort(key=lambda one: one.samples_per_second, reverse=True)
    fitting = [one for one in candidates if one.fits]
    return Estimate(
        tuple(candidates),
        worth,
        next((one for one in fitting if not one.moves_stashes), None),
        next((one for one in fitting if one.moves_stashes), None),
    )


def _candidate(name: str, profile: Profile, batch: int, num_stages: int, ranks: Ranks) -> Candidate:
    if profile.microbatch < 1:
        raise ValueError(f"a micro-batch must have at least 1 sample, not {profile.microbatch}")
    num_microbatches = math.ceil(batch / profile.microbatch)
    make = GENERATORS[name]
    simulated = num_microbatches
    if num_microbatches > (SIMULATED_ROUNDS + 1) * num_stages:
        simulated = SIMULATED_ROUNDS * num_stages + num_microbatches % num_stages
    schedule = make(num_stages, simulated)
    costs = _costs(profile, schedule, ranks)
    result = simulate(schedule, costs)
    seconds = result.step_time
    work = (1 - result.bubble) * seconds * num_microbatches / simulated
    if simulated < num_microbatches:
        longer = simulate(make(num_stages, simulated + num_stages), costs)
        rounds = (num_microbatches - simulated) / num_stages
        seconds += rounds * (longer.step_time - result.step_time)
    memory = [math.inf] * num_stages
    if ranks.memory_bytes is not None:
        memory = per_rank("memory_bytes", ranks.memory_bytes, num_stages)
    static = per_rank("static_bytes", ranks.static_bytes, num_stages)
    stashes = schedule.validate(stash_bytes=per_rank("stash_bytes", costs.stash_bytes, num_stages))
    peak = tuple(map(sum, zip(static, stashes.peak_bytes or (), strict=True)))
    return Candidate(
        name,
        profile.microbatch,
        profile.recompute,
        seconds,
        batch / seconds if seconds else math.inf,
        1 - work / seconds if seconds else 0.0,
        peak,
        all(used <= limit for used, limit in zip(peak, memory, strict=True)),
    )


def _costs(profile: Profile, schedule: Schedule, ranks: Ranks) -> Costs:
    """The profile's costs as those of the schedule's chunks."""
    num_stages = schedule.num_stages
    chunks = schedule.num_chunks
    stages: dict[str, list[float]] = {
        name: [value / chunks for value in per_rank(name, getattr(profile, name), num_stages)]
        for name in ("forward", "backward", "stash_bytes")
    }
    weight = [seconds / 2 for seconds in stages["backward"]]
    if profile.weight is not None:
        weight = [value / chunks for value in per_rank("weight", profile.weight, num_stages)]
    backward = [
        max(0.0, whole - part) for whole, part in zip(stages["backward"], weight, strict=True)
    ]
    return Costs(
        forward=stages["forward"],
        backward=backward,
        weight=weight,
        stash_bytes=stages["stash_bytes"],
        boundary_bytes=per_rank("boundary_bytes", profile.boundary_bytes, num_stages),
        bandwidth=ranks.bandwidth,
        latency=ranks.latency,
        cores=ranks.cores,
    )
