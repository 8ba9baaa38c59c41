"""The last pass: proves that a schedule can be run, or says where it cannot.

`validate` checks, in this order:

1. each line by itself: every computation once and in order, what it needs received before it, what
   it made sent after it, stashes evicted, loaded, accepted and returned in order;
2. lines against each other: each send has one receive of the same tag, and partners list their
   stash transfers in the same order;
3. that no rank waits for ever (`schedules.deadlock`);
4. that no rank ever holds more than the limit (`schedules.stashes`).

The first fault found is raised. All of it takes time in proportion to the number of actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.schedules.checks import LineCheck, check_chunks, check_microbatches, check_pairs
from pipeline.schedules.deadlock import check_progress
from pipeline.schedules.faults import Place, fault
from pipeline.schedules.line_index import Index
from pipeline.schedules.schedule import Schedule
from pipeline.schedules.stashes import held_over_time, most_held

# For one rank: (position in its line, what it holds at most there).
History = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class ValidationReport:
    """What has been proven of a schedule.

    Attributes:
        schedule: the schedule.
        peak_counts: for each rank, the most stashes it ever holds, those on their way included; a
            rank with several model chunks has one for each micro-batch and chunk.
        peak_bytes: the same in bytes, or None if the size of a stash was not given.
        stash_bytes: the size of each rank's stashes, or None.
    """

    schedule: Schedule = field(repr=False)
    peak_counts: tuple[int, ...]
    peak_bytes: tuple[float, ...] | None = None
    stash_bytes: Sequence[float] | None = None

    @property
    def counts(self) -> tuple[History, ...]:
        """For each rank, the stashes it holds at most at each computation and stash transfer."""
        return _history(self.schedule, None)

    @property
    def bytes(self) -> tuple[History, ...] | None:
        """The same in bytes, or None."""
        return None if self.stash_bytes is None else _history(self.schedule, self.stash_bytes)

    def __str__(self) -> str:
        lines = ["valid: order, pairing, no deadlock", "rank  most stashes"]
        for rank, count in enumerate(self.peak_counts):
            size = "" if self.peak_bytes is None else f"  {self.peak_bytes[rank]:,} bytes"
            lines.append(f"{rank:>4}  {count:>12}{size}")
        return "\n".join(lines)


def validate(
    schedule: Schedule,
    limit: int | Sequence[int] | None = None,
    stash_bytes: float | Sequence[float] | None = None,
    byte_limit: float | Sequence[float] | None = None,
) -> ValidationReport:
    """Proves that a schedule can be run, within limits of memory if they are given.

    Args:
        schedule: the schedule.
        limit: the number of stashes that no rank may exceed, for all ranks or for each.
        stash_bytes: the size of a stash (of one micro-batch and chunk), for all ranks or for each.
        byte_limit: the bytes of stashes that no rank may exceed, for all ranks or for each.

    Returns:
        What each rank holds at most.

    Raises:
        ScheduleError: if the schedule cannot be run; it shows the lines and the fault.
        ValueError: if a limit has not one number for each rank, or bytes are limited but not given.
        TypeError: if one is no number.
    """
    if byte_limit is not None and stash_bytes is None:
        raise ValueError("a limit in bytes needs the size of a stash; pass stash_bytes too")
    sizes = None if stash_bytes is None else _for_each_rank(schedule, stash_bytes, "stash_bytes")
    peak_counts = schedule.proven_peaks
    if limit is not None:
        limits = _for_each_rank(schedule, limit, "limit")
        _check_limit(schedule, peak_counts, limits, None, "stashes")
    if sizes is None:
        return ValidationReport(schedule, peak_counts)
    peak_bytes = _peaks(schedule, sizes)
    if byte_limit is not None:
        limits = _for_each_rank(schedule, byte_limit, "byte_limit")
        _check_limit(schedule, peak_bytes, limits, sizes, "bytes of stashes")
    return ValidationReport(schedule, peak_counts, peak_bytes, sizes)


def prove(schedule: Schedule) -> tuple[int, ...]:
    """Proves a schedule without limits; returns the most stashes that each rank holds.

    `Schedule.proven_peaks` keeps the outcome, so that a schedule is proven once.
    """
    check_chunks(schedule)
    check_microbatches(schedule)
    index = Index(schedule)
    for line in index.lines:
        LineCheck(schedule, line).run()
    check_pairs(schedule)
    check_progress(schedule, index)
    return tuple(map(int, _peaks(schedule, None)))


def _for_each_rank(
    schedule: Schedule, value: float | Sequence[float], name: str
) -> Sequence[float]:
    several = hasattr(value, "__len__") and not isinstance(value, str | bytes)
    values = list(value) if several else [value] * schedule.num_stages
    if len(values) != schedule.num_stages:
        raise ValueError(
            f"{name} has {len(values)} numbers for {schedule.num_stages} ranks; give one for "
            "each rank, or one number for all"
        )
    for one in values:
        if not hasattr(one, "__float__"):
            raise TypeError(f"{name} must be a number or one for each rank, not {one!r}")
        if not one >= 0:
            raise ValueError(f"{name} must be a number that is not negative, not {one!r}")
    return values


def _peaks(schedule: Schedule, sizes: Sequence[float] | None) -> tuple[float, ...]:
    return tuple(most_held(schedule, rank, sizes) for rank in range(schedule.num_stages))


def _history(schedule: Schedule, sizes: Sequence[float] | None) -> tuple[History, ...]:
    return tuple(
        tuple(held_over_time(schedule, rank, sizes)) for rank in range(schedule.num_stages)
    )


def _check_limit(
    schedule: Schedule,
    peaks: Sequence[float],
    limits: Sequence[float],
    sizes: Sequence[float] | None,
    what: str,
) -> None:
    for rank, (peak, limit) in enumerate(zip(peaks, limits, strict=True)):
        if peak <= limit:
            continue
        position, amount = next(
            (position, amount)
            for position, amount in held_over_time(schedule, rank, sizes)
            if amount > limit
        )
        text = (
            f"rank {rank} may hold {amount:g} {what} here, its limit is {limit:g}; "
            "evict earlier, load later, or raise the limit"
        )
        raise fault(schedule, "over-limit", text, Place(rank, position))
