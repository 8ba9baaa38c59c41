"""The order of V-Half (Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024).

Two model chunks a rank, placed as a V: down the ranks and up again. So the rank that holds the
first stage, whose stashes live longest, also holds the last, whose stashes live shortest, and all
ranks hold the same. Backward is split: input gradients (B) go first, weight gradients (W) fill
holes.

The paper builds such schedules from a building block, the times of one micro-batch's passes, which
repeats every six units (two F, two B, two W a rank). If neighbours' passes are 2 (F of chunk 0),
1 (F of chunk 1), 2 (B of chunk 1) and 1 (B of chunk 0) units apart, a stash lives so long that a
rank holds half of what 1F1B's first stage does. Modulo six, rank i then has its four passes at

    F of chunk 0: 2i     F of chunk 1: 1 - i     B of chunk 1: 2i + 3     B of chunk 0: 4 - i

which are different for every i. This gives the order of F and B. W fills the holes, also those at
the two ends of a step; where they are comes from playing the order through. What is best for equal
times of F, B and W is brittle: where they differ, ranks may wait in every round. Played through
with forwards twice as long, the bubble stays below 1F1B's for most ratios, and is still about half
of it for equal times.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from pipeline.schedules.actions import Kind
from pipeline.schedules.order import Lines
from pipeline.schedules.table import CODES, NO_PEER

PERIOD = 6  # F, B and W of two chunks
# Units of time of a forward that W is placed for; B and W take one.
FORWARD_TIME = 2

_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
_CODES = np.array([CODES[kind] for kind in _KINDS])
_F, _B, _W = range(len(_KINDS))
# A pass: its kind (a number of the above), micro-batch and chunk.
_Pass = tuple[int, int, int]


def v_half_limit(num_stages: int) -> int:
    """The stashes, each of one chunk, that no rank exceeds: half of 1F1B's 2p, and one stage's."""
    return num_stages + 2


def v_half_order(num_stages: int, num_microbatches: int) -> Lines:
    """For each rank, its F, B and W in order; no rank holds more than `v_half_limit` stashes."""
    ranks = [
        _Rank(rank, num_stages, queue)
        for rank, queue in enumerate(_passes(num_stages, num_microbatches))
    ]
    # Micro-batches that have passed each virtual stage, in ascending order, forward and backward.
    passed = [0] * (2 * num_stages), [0] * (2 * num_stages)
    # Time → what ends then, as lists of `passed` and stages.
    ending: dict[int, list[tuple[list[int], int]]] = {}
    time, working = 0, ranks
    while working:
        for of_kind, stage in ending.pop(time, ()):
            of_kind[stage] += 1
        finished = False
        for rank in working:
            if rank.busy_until <= time:
                ended = rank.take_next(time, *passed)
                if ended is not None:
                    ending.setdefault(rank.busy_until, []).append(ended)
                finished |= rank.is_finished
        if finished:
            working = [rank for rank in working if not rank.is_finished]
        time += 1
    lines = []
    for rank in ranks:
        kinds, microbatches, chunks = np.array(rank.line, np.int32).T
        peers = np.full_like(kinds, NO_PEER)
        lines.append(np.stack([_CODES[kinds], microbatches, chunks, peers]))
    return lines


class _Rank:
    """One rank while its line is being made."""

    def __init__(self, rank: int, num_stages: int, queue: list[_Pass]) -> None:
        self.queue = queue
        self.stages = rank, 2 * num_stages - 1 - rank  # on the way down and up
        self.last_stage = 2 * num_stages - 1
        self.limit = v_half_limit(num_stages)
        self.line: list[_Pass] = []
        self.next = 0
        self.held = 0
        self.busy_until = 0
        # Weight gradients that can be computed, the oldest first.
        self.weights: deque[_Pass] = deque()

    @property
    def is_finished(self) -> bool:
        return self.next == len(self.queue) and not self.weights

    def take_next(
        self, time: int, forwards: list[int], backwards: list[int]
    ) -> tuple[list[int], int] | None:
        """Starts the next pass if it can run, else a weight gradient if there is one.

        Args:
            time: of the start.
            forwards: the micro-batches whose forward has passed each virtual stage.
            backwards: the same for backwards.

        Returns:
            Where to count the pass when it has ended, if others wait for it.
        """
        if self.next < len(self.queue):
            what = self.queue[self.next]
            kind, microbatch, chunk = what
            stage = self.stages[chunk]
            if kind == _F:
                # Without room, a weight gradient has to make some first.
                has_room = self.held < self.limit or not self.weights
                if has_room and (stage == 0 or forwards[stage - 1] > microbatch):
                    self._start(what, time + FORWARD_TIME)
                    self.held += 1
                    return forwards, stage
            else:
                if stage == self.last_stage:
                    can_start = forwards[stage] > microbatch
                else:
                    can_start = backwards[stage + 1] > microbatch
                if can_start:
                    self._start(what, time + 1)
                    self.weights.append((_W, microbatch, chunk))
                    return backwards, stage
        if self.weights:
            self.line.append(self.weights.popleft())
            self.busy_until = time + 1
            self.held -= 1
        return None

    def _start(self, what: _Pass, end: int) -> None:
        self.next += 1
        self.line.append(what)
        self.busy_until = end


def _passes(num_stages: int, num_microbatches: int) -> list[list[_Pass]]:
    """For each rank, its F and B in the order of the repeated building block."""
    last = num_stages - 1
    down = 0
    up = _next_time(2 * last + 1, 1 - last)
    back_down = _next_time(up + last + 1, 3)
    back_up = _next_time(back_down + 2 * last + 1, 4 - last)
    lines = []
    for rank in range(num_stages):
        block = [
            (down + 2 * rank, _F, 0),
            (up + last - rank, _F, 1),
            (back_down + 2 * rank, _B, 1),
            (back_up + last - rank, _B, 0),
        ]
        timed = sorted(
            (start + PERIOD * microbatch, kind, microbatch, chunk)
            for start, kind, chunk in block
            for microbatch in range(num_microbatches)
        )
        lines.append([what for _, *what in timed])
    return lines


def _next_time(earliest: int, residue: int) -> int:
    """The first time from `earliest` on that is `residue` modulo the period."""
    return earliest + (residue - earliest) % PERIOD
