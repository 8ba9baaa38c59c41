"""How many stashes a rank holds at most, moment by moment, as it follows from the schedule's text.

The rules are those of `schedules.actions`: a stash is held from its forward to its backward (to its
weight gradient in a schedule that splits backward); one on its way counts at both ends; transfers
between two partners run one at a time, in order; a transfer is known to be complete only once a
computation of this rank has waited for it or for a later one. So the counts hold however slow the
transfers are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.schedules.actions import Kind
from pipeline.schedules.schedule import Schedule
from pipeline.schedules.table import CODES, NO_PEER

_FORWARD, _BACKWARD, _WEIGHT = (CODES[k] for k in (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT))
_EVICT, _LOAD, _ACCEPT = (CODES[k] for k in (Kind.EVICT, Kind.LOAD, Kind.ACCEPT))


def held_over_time(
    schedule: Schedule, rank: int, sizes: Sequence[float] | None = None
) -> Iterator[tuple[int, float]]:
    """What `rank` holds at most, at each computation and stash transfer of its line.

    Args:
        schedule: a schedule whose order is right (see `schedules.validation`).
        rank: the rank.
        sizes: for each rank the bytes of one of its stashes; by default each counts 1.

    Yields:
        The position in the line, and what is held there: stashes or bytes.
    """
    return _Ledger(schedule, rank, sizes or [1] * schedule.num_stages).run()


def most_held(schedule: Schedule, rank: int, sizes: Sequence[float] | None = None) -> float:
    """The most that `rank` ever holds; see `held_over_time`."""
    table = schedule.table
    line = table.line(rank)
    if table.moves_stashes[line].any():
        return max((amount for _, amount in held_over_time(schedule, rank, sizes)), default=0)
    # Without transfers it is a running sum.
    kinds = table.kind[line]
    made = np.cumsum(kinds == _FORWARD)
    used = np.cumsum(kinds == (_WEIGHT if schedule.splits_backward else _BACKWARD))
    # At its last use a stash is still there.
    held = made - np.concatenate([[0], used[:-1]]) if len(made) else made
    return int(held.max(initial=0)) * (1 if sizes is None else sizes[rank])


class _Queue:
    """The transfers with one partner that are not known to be complete, in order."""

    def __init__(self) -> None:
        # (what it takes up while it runs, what it has changed once it is complete)
        self.waiting: deque[tuple[float, float]] = deque()
        self.posted = 0
        self.total: float = 0
        self.peak: float = 0

    def post(self, running: float, change: float) -> int:
        """Appends a transfer and returns its number."""
        self.peak = max(self.peak, self.total + running)
        self.waiting.append((running, change))
        self.total += change
        self.posted += 1
        return self.posted - 1

    def complete(self, number: int) -> float:
        """Takes all transfers up to `number` as complete; returns what they have changed."""
        changed: float = 0
        while self.posted - len(self.waiting) <= number:
            changed += self.waiting.popleft()[1]
        self.peak = self.total = 0
        for running, change in self.waiting:
            self.peak = max(self.peak, self.total + running)
            self.total += change
        return changed


class _Ledger:
    def __init__(self, schedule: Schedule, rank: int, sizes: Sequence[float]) -> None:
        self.table = schedule.table
        self.last_use = _WEIGHT if schedule.splits_backward else _BACKWARD
        self.rank = rank
        self.sizes = sizes
        self.held: float = 0
        self.in_flight: float = 0  # the most that transfers in the queues take up besides
        self.queues: dict[int, _Queue] = {}
        # Evictions since the last forward that waited, as (computation before it, peer, number).
        self.evictions: deque[tuple[int, int, int]] = deque()
        self.loads: dict[tuple[int, int], tuple[int, int]] = {}

    def run(self) -> Iterator[tuple[int, float]]:
        table, line = self.table, self.table.line(self.rank)
        relevant = np.flatnonzero(table.computes[line] | table.moves_stashes[line])
        columns = table.columns[:, line][:, relevant].tolist()
        computations = 0
        own_size = self.sizes[self.rank]
        for position, *action in zip(relevant.tolist(), *columns, strict=True):
            kind, microbatch, chunk, peer = action
            if peer == NO_PEER:
                if kind == _FORWARD:
                    if self.evictions:
                        self._wait_for_evictions(computations)
                    self.held += own_size
                elif self.loads and kind == _BACKWARD:
                    self._wait_for_load(microbatch, chunk)
                computations += 1
            else:
                self._post(kind, microbatch, chunk, peer, computations)
            yield position, self.held + self.in_flight
            if kind == self.last_use:
                self.held -= own_size

    def _post(self, kind: int, microbatch: int, chunk: int, peer: int, computations: int) -> None:
        size = self.sizes[self.rank if kind in (_EVICT, _LOAD) else peer]
        arriving = kind in (_LOAD, _ACCEPT)
        queue = self.queues.setdefault(peer, _Queue())
        self.in_flight -= queue.peak
        number = queue.post(size if arriving else 0, size if arriving else -size)
        self.in_flight += queue.peak
        if kind == _EVICT:
            self.evictions.append((computations, peer, number))
        elif kind == _LOAD:
            self.loads[microbatch, chunk] = (peer, number)

    def _wait_for_evictions(self, computations: int) -> None:
        """A forward waits for the evictions before the preceding computation."""
        while self.evictions and self.evictions[0][0] < computations:
            _, peer, number = self.evictions.popleft()
            self._complete(peer, number)

    def _wait_for_load(self, microbatch: int, chunk: int) -> None:
        """A backward waits for its stash, if that is on its way back."""
        load = self.loads.pop((microbatch, chunk), None)
        if load is not None:
            self._complete(*load)

    def _complete(self, peer: int, number: int) -> None:
        queue = self.queues[peer]
        self.in_flight -= queue.peak
        self.held += queue.complete(number)
        self.in_flight += queue.peak
