"""The simulator: plays a schedule through in time, event by event.

Each rank goes through its line as `schedules.actions` says: communication is posted and left to
itself, computations run one after the other and wait for what they need. A transfer starts when
both ends have posted it and the link in its direction is free; the stash transfers of two partners
run one at a time. Transfers run beside computation.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import count
from typing import Any

from pipeline.schedules import Action, Kind, Schedule, Tag
from pipeline.schedules.actions import BOUNDARY, COMPUTE, SENDS, STASH_TRANSFERS
from pipeline.simulation.costs import Costs, ScheduleCosts
from pipeline.simulation.result import Computation, Simulation, Transfer


def simulate(schedule: Schedule, costs: Costs | Mapping[str, Any] | None = None) -> Simulation:
    """Plays a schedule through and tells how long it takes and what each stage holds.

    Args:
        schedule: the schedule; it is validated first.
        costs: what its actions take, see `Costs`; by default a forward takes 1 s, a backward 2 s,
            and transfers nothing.

    Returns:
        Step time, bubble, memory and the timeline.

    Raises:
        ScheduleError: if the schedule cannot be run.
        ValueError: if the costs do not fit the schedule.
        TypeError: if it is no schedule, or a cost is no number.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be a schedules.Schedule, not {type(schedule).__name__}")
    schedule.validate()
    costs = Costs() if costs is None else Costs.of(costs)
    return _Simulator(schedule, ScheduleCosts(schedule, costs)).run()


class _Transfer:
    """A transfer on its way: since when each end has posted it, and who waits for its end."""

    __slots__ = ("action", "end", "link", "pair", "posted", "seconds", "start", "tag")

    def __init__(self, tag: Tag) -> None:
        self.tag = tag
        self.action: Action | None = None  # the sender's
        self.link = (0, 0)  # from rank, to rank
        self.pair: tuple[int, int] | None = None  # of partners, for a stash
        self.posted: list[float] = []
        self.seconds = 0.0
        self.start = self.end = -1.0

    @property
    def is_done(self) -> bool:
        return self.end >= 0


class _Simulator:
    def __init__(self, schedule: Schedule, costs: ScheduleCosts) -> None:
        self.schedule = schedule
        self.costs = costs
        num_stages = schedule.num_stages
        self.now = 0.0
        self.events: list[tuple[float, int, Any]] = []
        self.numbers = count()
        # Of each rank: where it is in its line, since when it has been there.
        self.next = [0] * num_stages
        self.idle_since = [0.0] * num_stages
        self.transfers: dict[Tag, _Transfer] = {}
        # What a computation has to wait for: of each rank, by action.
        self.needs: list[dict[tuple[Kind, int, int], list[_Transfer]]] = [
            defaultdict(list) for _ in range(num_stages)
        ]
        # Evictions that no forward has waited for: before the last computation, and after it.
        self.older: list[list[_Transfer]] = [[] for _ in range(num_stages)]
        self.newer: list[list[_Transfer]] = [[] for _ in range(num_stages)]
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.pair_queues = self._queues_of_partners()
        self.group, self.free_cores = costs.core_of_ranks()
        self.core_queues: list[deque[int]] = [deque() for _ in self.free_cores]
        self.computations: list[Computation] = []
        self.exposed = [0.0] * num_stages

    def run(self) -> Simulation:
        for rank in range(self.schedule.num_stages):
            self._advance(rank)
        while self.events:
            self.now, _, (handle, argument) = heapq.heappop(self.events)
            handle(argument)
        transfers = [
            Transfer(transfer.action, *transfer.link, transfer.start, transfer.end)
            for transfer in self.transfers.values()
            if transfer.action is not None
        ]
        return Simulation(self.schedule, self.costs, self.computations, transfers, self.exposed)

    def _at(self, time: float, handle: Any, argument: Any) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), (handle, argument)))

    def _queues_of_partners(self) -> dict[tuple[int, int], deque[Tag]]:
        """For each pair of partners, their stash transfers in order."""
        queues: dict[tuple[int, int], deque[Tag]] = defaultdict(deque)
        for rank, line in enumerate(self.schedule.actions):
            for action in line:
                if action.kind in STASH_TRANSFERS and rank < action.peer:
                    queues[rank, action.peer].append(self.schedule.tag(rank, action))
        return queues

    def _advance(self, rank: int) -> None:
        """Posts what comes next in the rank's line, up to its next computation, and tries that."""
        line = self.schedule.actions[rank]
        while self.next[rank] < len(line) and line[self.next[rank]].kind not in COMPUTE:
            self._post(rank, line[self.next[rank]])
            self.next[rank] += 1
        self._try_to_compute(rank)

    # --- transfers ---

    def _post(self, rank: int, action: Action) -> None:
        tag = self.schedule.tag(rank, action)
        transfer = self.transfers.get(tag)
        if transfer is None:
            transfer = self.transfers[tag] = _Transfer(tag)
        kind, microbatch, chunk, peer = action
        if kind in SENDS:
            transfer.action = action
            transfer.link = (rank, peer)
            if kind in BOUNDARY:
                transfer.seconds = self.costs.boundary_seconds(rank, peer, tag.virtual_stage)
            else:
                transfer.seconds = self.costs.stash_seconds(rank, peer, tag.virtual_stage)
        if kind is Kind.RECV_FORWARD:
            self.needs[rank][Kind.FORWARD, microbatch, chunk].append(transfer)
        elif kind in (Kind.RECV_BACKWARD, Kind.LOAD):
            self.needs[rank][Kind.BACKWARD, microbatch, chunk].append(transfer)
        elif kind is Kind.EVICT:
            self.newer[rank].append(transfer)
        transfer.posted.append(self.now)
        if kind in STASH_TRANSFERS:
            transfer.pair = (min(rank, peer), max(rank, peer))
            self._start_next_of_pair(transfer.pair)
        elif len(transfer.posted) == 2:
            self._start(transfer)

    def _start_next_of_pair(self, pair: tuple[int, int]) -> None:
        queue = self.pair_queues[pair]
        transfer = self.transfers.get(queue[0]) if queue else None
        if transfer is not None and len(transfer.posted) == 2 and transfer.start < 0:
            self._start(transfer)

    def _start(self, transfer: _Transfer) -> None:
        transfer.start = max(self.now, self.link_free[transfer.link])
        end = transfer.start + transfer.seconds
        self.link_free[transfer.link] = end
        self._at(end, self._end_transfer, transfer)

    def _end_transfer(self, transfer: _Transfer) -> None:
        transfer.end = self.now
        if transfer.pair is not None:
            self.pair_queues[transfer.pair].popleft()
            self._start_next_of_pair(transfer.pair)
        for rank in transfer.link:
            self._try_to_compute(rank)

    # --- computations ---

    def _try_to_compute(self, rank: int) -> None:
        """Asks for a core if the rank's next computation has all that it needs."""
        line, position = self.schedule.actions[rank], self.next[rank]
        if position >= len(line) or self.idle_since[rank] < 0:  # at its end, or computing
            return
        kind, microbatch, chunk, _ = line[position]
        needs = self.needs[rank].get((kind, microbatch, chunk), [])
        if kind is Kind.FORWARD:
            needs = needs + self.older[rank]
        if not all(transfer.is_done for transfer in needs):
            return
        # The part of the wait in which only transfers were missing.
        without_transfers = max(
            [self.idle_since[rank], *(max(transfer.posted) for transfer in needs)]
        )
        self.exposed[rank] += self.now - without_transfers
        self.idle_since[rank] = -1.0
        if kind is Kind.FORWARD:
            self.older[rank] = []
        self.older[rank] += self.newer[rank]
        self.newer[rank] = []
        self.core_queues[self.group[rank]].append(rank)
        self._use_cores(self.group[rank])

    def _use_cores(self, group: int) -> None:
        queue = self.core_queues[group]
        while queue and self.free_cores[group]:
            self.free_cores[group] -= 1
            rank = queue.popleft()
            action = self.schedule.actions[rank][self.next[rank]]
            stage = self.schedule.virtual_stage(rank, action.chunk)
            end = self.now + self.costs.seconds[action.kind][stage]
            self.computations.append(Computation(action, rank, self.now, end))
            self._at(end, self._end_computation, rank)

    def _end_computation(self, rank: int) -> None:
        self.free_cores[self.group[rank]] += 1
        self.next[rank] += 1
        self.idle_since[rank] = self.now
        self._advance(rank)
        self._use_cores(self.group[rank])
