"""Checks of the lines' order and of what pairs up between them; steps 1 and 2 of the validator.

From the placement it is known which messages every line must have. Once each line has been found
complete, every send therefore has exactly one receive of the same tag.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.errors import ScheduleError
from pipeline.schedules.actions import BOUNDARY, COUNTERPART, Action, Kind
from pipeline.schedules.faults import Place, fault
from pipeline.schedules.line_index import MISSING, LineIndex, Row
from pipeline.schedules.schedule import Schedule
from pipeline.schedules.table import CODES, KINDS

_NONE = np.zeros(0, np.int64)
# The code of an action of communication → that of its counterpart.
_COUNTERPARTS = np.array(
    [CODES[COUNTERPART[kind]] if kind in COUNTERPART else -1 for kind in KINDS]
)
_BOUNDARY_KINDS = frozenset(BOUNDARY) | frozenset(BOUNDARY.values())


class LineCheck:
    """Checks one rank's line by itself.

    Args:
        schedule: the schedule.
        index: where the actions of the line are.
    """

    def __init__(self, schedule: Schedule, index: LineIndex) -> None:
        self.schedule = schedule
        self.index = index
        self.expected = set()  # keys of the boundary messages that the line must have

    @property
    def line(self) -> Sequence[Action]:
        """The actions."""
        return self.schedule.actions[self.index.rank]

    def run(self) -> None:
        """Raises ScheduleError at the first fault."""
        for chunk in range(self.schedule.num_chunks):
            self._check_computations(chunk)
        for chunk in range(self.schedule.num_chunks):
            self._check_dependencies(chunk, Kind.FORWARD, -1)
            self._check_dependencies(chunk, Kind.BACKWARD, 1)
        for key, row in self.index.rows.items():
            if key[0] in _BOUNDARY_KINDS and key not in self.expected:
                position = int(row[row != MISSING][0])
                raise self._fault(
                    "unexpected-message",
                    "by the placement of the model's parts, nothing passes here between these two "
                    "ranks in this direction",
                    position,
                )
        self._check_stashes()

    def _fault(self, code: str, text: str, position: int) -> ScheduleError:
        return fault(self.schedule, code, text, Place(self.index.rank, position))

    def _check_computations(self, chunk: int) -> None:
        """Every micro-batch has its forward, then its backward, then its weight gradient."""
        forwards = self.index.row(Kind.FORWARD, chunk)
        backwards = self.index.row(Kind.BACKWARD, chunk)
        microbatch = _first((forwards < 0) | (forwards >= backwards))
        if microbatch is not None:
            forward, backward = int(forwards[microbatch]), int(backwards[microbatch])
            name = str(Action(Kind.FORWARD, microbatch, chunk))
            if forward == MISSING:
                position = self._first_without_forward(microbatch, backward)
                raise self._fault("missing-forward", f"the line has no {name}", position)
            if backward == MISSING:
                raise self._fault("missing-backward", f"{name} has no backward", forward)
            raise self._fault("backward-first", f"the backward is before {name}", backward)
        if not self.schedule.splits_backward:
            return
        weights = self.index.row(Kind.WEIGHT, chunk)
        microbatch = _first(weights < backwards)
        if microbatch is not None:
            name = str(Action(Kind.BACKWARD, microbatch, chunk))
            weight = int(weights[microbatch])
            if weight == MISSING:
                raise self._fault(
                    "missing-weight",
                    f"{name} has no weight gradient, though others have; add its W",
                    int(backwards[microbatch]),
                )
            raise self._fault("weight-first", f"the weight gradient is before {name}", weight)

    def _first_without_forward(self, microbatch: int, backward: int) -> int:
        """The place to show: the backward, else whatever names a micro-batch that late."""
        if backward != MISSING:
            return backward
        return next(
            (at for at, action in enumerate(self.line) if action.microbatch >= microbatch),
            len(self.line) - 1,
        )

    def _check_dependencies(self, chunk: int, kind: Kind, step: int) -> None:
        """Each computation has what it needs before it, and hands on what it made after it.

        Args:
            chunk: the model chunk.
            kind: forward or backward.
            step: which virtual stage it needs something from: the one before or the one after.
        """
        forward = kind is Kind.FORWARD
        computed = self.index.row(kind, chunk)
        source, source_chunk = self._neighbour(chunk, step)
        if source == self.index.rank:
            earlier = self.index.row(kind, source_chunk)
            self._check_order("not-computed", earlier, computed, Action(kind, 0, source_chunk))
        elif source is not None:
            receive = Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD
            self.expected.add((receive, chunk, source))
            received = self.index.row(receive, chunk, source)
            example = Action(receive, 0, chunk, source)
            self._check_order("not-received", received, computed, example)
        target, _ = self._neighbour(chunk, -step)
        if target is not None and target != self.index.rank:
            send = Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD
            self.expected.add((send, chunk, target))
            sent = self.index.row(send, chunk, target)
            self._check_sent(computed, sent, Action(send, 0, chunk, target))

    def _neighbour(self, chunk: int, step: int) -> tuple[int | None, int]:
        """The rank and chunk of the virtual stage before (-1) or after (1); None at the ends."""
        schedule = self.schedule
        stage = schedule.virtual_stage(self.index.rank, chunk) + step
        if not 0 <= stage < schedule.num_virtual_stages:
            return None, 0
        return schedule.placement.rank_and_chunk(stage, schedule.num_stages)

    def _check_order(self, code: str, needed: Row, users: Row, example: Action) -> None:
        """What is needed comes first; `example` is what it is called for micro-batch 0."""
        microbatch = _first((needed < 0) | (needed >= users))
        if microbatch is not None:
            user = int(users[microbatch])
            name = example._replace(microbatch=microbatch)
            raise self._fault(code, f"{self.line[user]} needs {name} before it", user)

    def _check_sent(self, computed: Row, sent: Row, example: Action) -> None:
        microbatch = _first(computed >= sent)
        if microbatch is not None:
            made, send = int(computed[microbatch]), int(sent[microbatch])
            name = example._replace(microbatch=microbatch)
            if send == MISSING:
                raise self._fault("not-sent", f"what {self.line[made]} makes needs {name}", made)
            raise self._fault("sent-too-early", f"{name} is before {self.line[made]}", send)

    def _check_stashes(self) -> None:
        """Evicted stashes come back before their backward, accepted ones are returned."""
        for kind, chunk, peer in self.index.rows:
            if kind in (Kind.EVICT, Kind.LOAD):
                self._check_evicted(chunk, peer)
            elif kind in (Kind.ACCEPT, Kind.RETURN):
                self._check_accepted(chunk, peer)

    def _check_evicted(self, chunk: int, peer: int | None) -> None:
        forwards = self.index.row(Kind.FORWARD, chunk)
        backwards = self.index.row(Kind.BACKWARD, chunk)
        evictions = self.index.row(Kind.EVICT, chunk, peer)
        loads = self.index.row(Kind.LOAD, chunk, peer)
        moved = (evictions != MISSING) | (loads != MISSING)
        in_order = (forwards < evictions) & (evictions < loads) & (loads < backwards)
        wrong = _first(moved & ~in_order)
        if wrong is not None:
            forward, evict, load, backward = (
                int(row[wrong]) for row in (forwards, evictions, loads, backwards)
            )
            if evict == MISSING:
                raise self._fault("load-without-evict", "this stash is not away", load)
            if evict < forward:
                raise self._fault("evict-before-forward", "there is no such stash yet", evict)
            if evict > backward:
                raise self._fault("evict-after-backward", "this stash is used up", evict)
            if load == MISSING:
                text = f"{self.line[evict]} took its stash away and no LOAD brought it back"
                raise self._fault("missing-load", text, backward)
            if load < evict:
                raise self._fault("load-before-evict", "this stash is not away yet", load)
            text = f"{self.line[load]} comes after it"
            raise self._fault("load-after-backward", text, backward)
        self._check_one_peer(chunk, peer, evictions)

    def _check_one_peer(self, chunk: int, peer: int | None, evictions: Row) -> None:
        """No stash that goes to this peer goes to another one, too."""
        for (kind, other_chunk, other_peer), others in self.index.rows.items():
            if kind is not Kind.EVICT or other_chunk != chunk or other_peer == peer:
                continue
            twice = _first((evictions != MISSING) & (others != MISSING))
            if twice is not None:
                position = int(max(evictions[twice], others[twice]))
                raise self._fault("evicted-twice", "this stash is evicted twice", position)

    def _check_accepted(self, chunk: int, peer: int | None) -> None:
        accepted = self.index.row(Kind.ACCEPT, chunk, peer)
        returned = self.index.row(Kind.RETURN, chunk, peer)
        there = (accepted != MISSING) | (returned != MISSING)
        wrong = _first(there & ((accepted < 0) | (accepted >= returned)))
        if wrong is not None:
            accept, give_back = int(accepted[wrong]), int(returned[wrong])
            if give_back == MISSING:
                raise self._fault("missing-return", "this stash is never returned", accept)
            raise self._fault("return-without-accept", "this stash is not here yet", give_back)


def _first(wrong: np.ndarray) -> int | None:
    """The first micro-batch where something is wrong."""
    at = int(wrong.argmax()) if len(wrong) else 0
    return at if len(wrong) and wrong[at] else None


def check_chunks(schedule: Schedule) -> None:
    """Checks that the ranks' model chunks count from 0 without gaps.

    Raises:
        ScheduleError: at an action of a chunk above a gap.
    """
    table = schedule.table
    there = np.unique(table.chunk)
    gap = _first(there != np.arange(len(there)))
    if gap is not None:
        at = int(np.flatnonzero(table.chunk == there[gap])[0])
        place = Place(int(table.rank[at]), table.position(at))
        text = f"no action is of model chunk {gap}; chunks count from 0 without gaps"
        raise fault(schedule, "odd-chunk", text, place)


def check_microbatches(schedule: Schedule) -> None:
    """Checks that the lines are about the same micro-batches; points at those that are not.

    Raises:
        ScheduleError: at a micro-batch that most lines do not have, or that leaves a gap below it.
    """
    table = schedule.table
    forwards = np.flatnonzero(table.kind == CODES[Kind.FORWARD])
    if not len(forwards):
        raise fault(schedule, "empty", "no line has a forward", Place(0, 0))
    ranks, microbatches = table.rank[forwards], table.microbatch[forwards]
    # More cannot be there without a gap.
    size = min(schedule.num_microbatches, len(forwards) + 1)
    small = microbatches < size
    having = np.zeros((schedule.num_stages, size), bool)
    having[ranks[small], microbatches[small]] = True
    lines = having.sum(axis=0)
    odd = _first(2 * lines <= schedule.num_stages)
    if odd is None:
        return  # a line without some of them will be found by its own check
    if lines[odd]:
        text, shown = f"most lines have no forward of micro-batch {odd}", odd
    else:
        text, shown = f"no line has a forward of micro-batch {odd}", int(microbatches.max())
    at = int(forwards[microbatches == shown][0])
    place = Place(int(table.rank[at]), table.position(at))
    raise fault(
        schedule,
        "odd-microbatch",
        f"{schedule.actions[place.rank][place.position]} is there, but {text}; micro-batches "
        "count from 0 without gaps, and pass all stages",
        place,
    )


def check_pairs(schedule: Schedule) -> None:
    """Checks that partners list the same stash transfers in the same order.

    Raises:
        ScheduleError: at the first transfer that the partner does not have, or has elsewhere.
    """
    table = schedule.table
    moves = np.flatnonzero(table.moves_stashes)
    if not len(moves):
        return
    pairs = table.rank[moves].astype(np.int64) * schedule.num_stages + table.peer[moves]
    order = np.argsort(pairs, kind="stable")
    pairs, begins = np.unique(pairs[order], return_index=True)
    # (rank, its partner) → the numbers of their transfers.
    parts = np.split(moves[order], begins[1:])
    transfers = {
        divmod(pair, schedule.num_stages): numbers
        for pair, numbers in zip(pairs.tolist(), parts, strict=True)
    }
    for (rank, peer), ours in transfers.items():
        theirs = transfers.get((peer, rank), _NONE)
        kinds, *names = table.columns[:3, ours]
        if len(ours) == len(theirs) and np.array_equal(
            [_COUNTERPARTS[kinds], *names], table.columns[:3, theirs]
        ):
            continue
        positions = [(of - table.starts[at]).tolist() for at, of in ((rank, ours), (peer, theirs))]
        wanted = [_counterpart(schedule.actions[rank][at], rank) for at in positions[0]]
        found = [schedule.actions[peer][at] for at in positions[1]]
        raise _unpaired(schedule, (rank, positions[0], wanted), (peer, positions[1], found))


def _counterpart(action: Action, rank: int) -> Action:
    return action._replace(kind=COUNTERPART[action.kind], peer=rank)


def _unpaired(
    schedule: Schedule,
    here: tuple[int, list[int], list[Action]],
    there: tuple[int, list[int], list[Action]],
) -> ScheduleError:
    rank, ours, wanted = here
    peer, theirs, found = there
    # A transfer that one of them lacks is the better explanation than the order of the others.
    for position, action in zip(ours, wanted, strict=True):
        if action not in found:
            text = f"the line of rank {peer} has no {action}"
            return fault(schedule, "unpaired", text, Place(rank, position))
    for position, action in zip(theirs, found, strict=True):
        if action not in wanted:
            text = f"the line of rank {rank} has no {_counterpart(action, peer)}"
            return fault(schedule, "unpaired", text, Place(peer, position))
    at = next(at for at, action in enumerate(wanted) if action != found[at])
    text = (
        f"rank {rank} has {schedule.actions[rank][ours[at]]} here, rank {peer} has {found[at]}; "
        "partners must list their stash transfers in the same order"
    )
    return fault(schedule, "stash-order", text, Place(rank, ours[at]), Place(peer, theirs[at]))
