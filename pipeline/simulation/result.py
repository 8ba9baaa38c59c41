"""Simulation: what playing a schedule through has shown."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from os import PathLike
from typing import Any, NamedTuple

from pipeline.schedules import Action, Kind, Schedule
from pipeline.schedules.actions import STASH
from pipeline.simulation.costs import ScheduleCosts


class Computation(NamedTuple):
    """A computation in time: the action, its rank, its start and end in seconds."""

    action: Action
    rank: int
    start: float
    end: float


class Transfer(NamedTuple):
    """A transfer in time: the sender's action, from and to which rank, start and end in seconds."""

    action: Action
    source: int
    target: int
    start: float
    end: float


class Memory(NamedTuple):
    """What a rank holds from a time on: stashes, one for each micro-batch and chunk, and bytes."""

    time: float
    count: int
    bytes: float


class Simulation:
    """The course of one step.

    Attributes:
        schedule: the schedule that was played through.
        computations: all computations, in order of their start.
        transfers: all transfers.
        step_time: seconds from the start of the first action to the end of the last computation.
        bubble: the share of all ranks' time in which they do not compute.
        bubble_per_stage: the same for each rank.
        memory: for each rank, what it holds over time; a stash on its way counts at both ends.
        peak_count: for each rank, the most stashes that it holds.
        peak_bytes: for each rank, the most bytes of stashes that it holds.
        exposed_transfer: seconds, summed over ranks, in which a rank waits for transfers alone.
        exposed_per_stage: the same for each rank.
        transfer_seconds: seconds that transfers take, summed.
        stash_traffic: the number of stash transfers.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: ScheduleCosts,
        computations: list[Computation],
        transfers: list[Transfer],
        exposed: list[float],
    ) -> None:
        self.schedule = schedule
        self.computations = computations
        self.transfers = transfers
        self.exposed_per_stage = exposed
        self.exposed_transfer = sum(exposed)
        self.step_time = max((computation.end for computation in computations), default=0.0)
        busy = [0.0] * schedule.num_stages
        for computation in computations:
            busy[computation.rank] += computation.end - computation.start
        self.bubble_per_stage = [
            1.0 - seconds / self.step_time if self.step_time else 0.0 for seconds in busy
        ]
        self.bubble = sum(self.bubble_per_stage) / schedule.num_stages
        self._stash_bytes = costs.stash_bytes

    @cached_property
    def memory(self) -> list[list[Memory]]:
        """For each rank, what it holds over time."""
        schedule = self.schedule
        last_use = Kind.WEIGHT if schedule.splits_backward else Kind.BACKWARD
        changes: list[list[tuple[float, int, float]]] = [[] for _ in schedule.actions]
        for action, rank, start, end in self.computations:
            size = self._stash_bytes[schedule.virtual_stage(rank, action.chunk)]
            if action.kind is Kind.FORWARD:
                changes[rank].append((start, 1, size))
            elif action.kind is last_use:
                changes[rank].append((end, -1, -size))
        for action, source, target, start, end in self.transfers:
            if action.kind in STASH:
                owner = source if action.kind is Kind.EVICT else target
                size = self._stash_bytes[schedule.virtual_stage(owner, action.chunk)]
                changes[target].append((start, 1, size))
                changes[source].append((end, -1, -size))
        return [_running_total(sorted(of_rank)) for of_rank in changes]

    @cached_property
    def peak_count(self) -> list[int]:
        """For each rank, the most stashes that it holds."""
        return [max((held.count for held in of_rank), default=0) for of_rank in self.memory]

    @cached_property
    def peak_bytes(self) -> list[float]:
        """For each rank, the most bytes of stashes that it holds."""
        return [max((held.bytes for held in of_rank), default=0) for of_rank in self.memory]

    @property
    def transfer_seconds(self) -> float:
        """Seconds that transfers take, summed."""
        return sum(transfer.end - transfer.start for transfer in self.transfers)

    @property
    def stash_traffic(self) -> int:
        """The number of stash transfers."""
        return sum(transfer.action.kind in STASH for transfer in self.transfers)

    def as_dict(self) -> dict[str, Any]:
        """The figures without the timeline, for JSON."""
        return {
            "schedule": self.schedule.name,
            "stages": self.schedule.num_stages,
            "microbatches": self.schedule.num_microbatches,
            "chunks": self.schedule.num_chunks,
            "step_time": self.step_time,
            "bubble": self.bubble,
            "bubble_per_stage": self.bubble_per_stage,
            "peak_count": self.peak_count,
            "peak_bytes": self.peak_bytes,
            "exposed_transfer": self.exposed_transfer,
            "exposed_per_stage": self.exposed_per_stage,
            "transfer_seconds": self.transfer_seconds,
            "stash_traffic": self.stash_traffic,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.schedule.name}, p={self.schedule.num_stages}, "
            f"m={self.schedule.num_microbatches}: step {self.step_time:.6g} s, "
            f"bubble {self.bubble:.1%}, exposed transfer {self.exposed_transfer:.6g} s, "
            f"{self.stash_traffic} stash transfers",
            "stage  bubble  peak stashes  peak bytes  exposed s",
        ]
        for rank, bubble in enumerate(self.bubble_per_stage):
            lines.append(
                f"{rank:>5}  {bubble:>6.1%}  {self.peak_count[rank]:>12}  "
                f"{self.peak_bytes[rank]:>10,.0f}  {self.exposed_per_stage[rank]:>9.6g}"
            )
        return "\n".join(lines)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws the timeline and the memory of each stage into a PNG file.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        from pipeline.simulation.plot import plot

        plot([self], path)

    def chrome_trace(self, path: str | PathLike[str]) -> None:
        """Writes the timeline as a Chrome trace (JSON), for chrome://tracing or Perfetto."""
        from pipeline.simulation.chrome_trace import write_chrome_trace

        write_chrome_trace(self, path)


def _running_total(changes: Sequence[tuple[float, int, float]]) -> list[Memory]:
    """What is held after each change. At the same time, what is given up goes first."""
    counts = accumulate(change[1] for change in changes)
    sizes = accumulate(change[2] for change in changes)
    times = (change[0] for change in changes)
    return [Memory(*held) for held in zip(times, counts, sizes, strict=True)]
