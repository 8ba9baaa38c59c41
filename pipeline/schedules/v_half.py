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

from pipeline.schedules.actions import Action, Kind
from pipeline.schedules.order import Lines

PERIOD = 6  # F, B and W of two chunks
# Units of time that W is placed for.
DURATION = {Kind.FORWARD: 2, Kind.BACKWARD: 1, Kind.WEIGHT: 1}


def v_half_limit(num_stages: int) -> int:
    """The stashes, each of one chunk, that no rank exceeds: half of 1F1B's 2p, and one stage's."""
    return num_stages + 2


def v_half_order(num_stages: int, num_microbatches: int) -> Lines:
    """For each rank, its F, B and W in order; no rank holds more than `v_half_limit` stashes."""
    ranks = [
        _Rank(rank, queue, v_half_limit(num_stages))
        for rank, queue in enumerate(_passes(num_stages, num_microbatches))
    ]
    done = _Done(2 * num_stages)
    time = 0
    while not all(rank.is_finished for rank in ranks):
        done.advance(time)
        for rank in ranks:
            if rank.busy_until <= time:
                rank.take_next(time, done)
        time += 1
    return [rank.line for rank in ranks]


class _Done:
    """What has been computed so far; micro-batches pass each virtual stage in ascending order."""

    def __init__(self, num_virtual_stages: int) -> None:
        # Kind → virtual stage → number of micro-batches.
        self.number = {
            kind: [0] * num_virtual_stages for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
        }
        self.ending: dict[int, list[tuple[Kind, int]]] = {}  # time → what ends then

    def start(self, kind: Kind, stage: int, end: int) -> None:
        """Notes a computation that ends at the time `end`."""
        self.ending.setdefault(end, []).append((kind, stage))

    def advance(self, time: int) -> None:
        """Counts what ends at `time`."""
        for kind, stage in self.ending.pop(time, ()):
            self.number[kind][stage] += 1

    def has(self, kind: Kind, stage: int, microbatch: int) -> bool:
        """Whether the micro-batch has passed the stage."""
        return self.number[kind][stage] > microbatch


class _Rank:
    """One rank while its line is being made."""

    def __init__(self, rank: int, queue: list[Action], limit: int) -> None:
        self.rank = rank
        self.queue = queue
        self.limit = limit
        self.line: list[Action] = []
        self.next = 0
        self.held = 0
        self.busy_until = 0
        # Weight gradients that can be computed, the oldest first.
        self.weights: deque[Action] = deque()

    @property
    def is_finished(self) -> bool:
        return self.next == len(self.queue) and not self.weights

    def take_next(self, time: int, done: _Done) -> None:
        """Starts the next pass if it can run, else a weight gradient if there is one."""
        action = self.queue[self.next] if self.next < len(self.queue) else None
        if action is not None and self._can_start(action, done):
            self.next += 1
        elif self.weights:
            action = self.weights.popleft()
        else:
            return
        kind, microbatch, chunk, _ = action
        self.line.append(action)
        self.busy_until = time + DURATION[kind]
        done.start(kind, self._stage(chunk, done), self.busy_until)
        if kind is Kind.FORWARD:
            self.held += 1
        elif kind is Kind.BACKWARD:
            self.weights.append(Action(Kind.WEIGHT, microbatch, chunk))
        else:
            self.held -= 1

    def _can_start(self, action: Action, done: _Done) -> bool:
        kind, microbatch, chunk, _ = action
        stage = self._stage(chunk, done)
        if kind is Kind.FORWARD:
            if self.held >= self.limit and self.weights:
                return False  # a weight gradient has to make room first
            return stage == 0 or done.has(Kind.FORWARD, stage - 1, microbatch)
        if stage == len(done.number[kind]) - 1:
            return done.has(Kind.FORWARD, stage, microbatch)
        return done.has(Kind.BACKWARD, stage + 1, microbatch)

    def _stage(self, chunk: int, done: _Done) -> int:
        """The virtual stage of one of the rank's chunks, on the way down or up."""
        return len(done.number[Kind.FORWARD]) - 1 - self.rank if chunk else self.rank


def _passes(num_stages: int, num_microbatches: int) -> Lines:
    """For each rank, its F and B in the order of the repeated building block."""
    last = num_stages - 1
    down = 0
    up = _next_time(2 * last + 1, 1 - last)
    back_down = _next_time(up + last + 1, 3)
    back_up = _next_time(back_down + 2 * last + 1, 4 - last)
    lines = []
    for rank in range(num_stages):
        block = [
            (down + 2 * rank, Kind.FORWARD, 0),
            (up + last - rank, Kind.FORWARD, 1),
            (back_down + 2 * rank, Kind.BACKWARD, 1),
            (back_up + last - rank, Kind.BACKWARD, 0),
        ]
        timed = sorted(
            (start + PERIOD * microbatch, kind, microbatch, chunk)
            for start, kind, chunk in block
            for microbatch in range(num_microbatches)
        )
        lines.append([Action(*what) for _, *what in timed])
    return lines


def _next_time(earliest: int, residue: int) -> int:
    """The first time from `earliest` on that is `residue` modulo the period."""
    return earliest + (residue - earliest) % PERIOD
