"""Proves that no rank of a schedule waits for ever; step 3 of the validator.

The schedule is played through without times, under what transports may do to a sender:

* `RENDEZVOUS`: a send is done only once the receiver has posted its receive, whatever the order.
* `BOUNDED`: one message may be under way from one rank to another, and messages arrive in the order
  in which they were sent: a receive is done only once all messages sent before it were asked for.

In both, a computation starts only when every `SEND` before it is done. That is stricter than the
rules in `schedules.actions`, by which sends wait for nothing, so a schedule that passes runs there,
too. Both at once, in-order messages without any buffer, is tried first; it implies either. Stash
transfers have memory of their own at both ends and go by those rules.

A rank posts what stands before a computation when it comes to that. An action is posted once its
rank has done all computations before it, so every wait is a computation of one rank that needs so
many of another rank's computations to be done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipeline.errors import ScheduleError
from pipeline.schedules.actions import BOUNDARY, COMPUTE, Kind
from pipeline.schedules.faults import Place, fault
from pipeline.schedules.line_index import LineIndex
from pipeline.schedules.schedule import Schedule
from pipeline.schedules.table import KINDS

# Of a rank, in order: (number of the waiting computation, the other rank, how many of its
# computations have to be done).
Waits = list[tuple[int, int, int]]
# The rank times the number of ranks plus the other rank; the numbers of waiting computations; what
# they need.
_Pieces = list[tuple[int, np.ndarray, np.ndarray]]


class Transport(NamedTuple):
    """What a transport does to a sender.

    Attributes:
        name: for people.
        in_order: whether messages between two ranks arrive in the order they were sent.
        buffered: how many messages from one rank to another may be under way.
    """

    name: str
    in_order: bool
    buffered: int


RENDEZVOUS = Transport("rendezvous sends", in_order=False, buffered=0)
BOUNDED = Transport("bounded buffers", in_order=True, buffered=1)
STRICTEST = Transport("rendezvous sends in order", in_order=True, buffered=0)


def check_progress(schedule: Schedule, indexes: Sequence[LineIndex]) -> None:
    """Proves that the schedule runs to its end.

    Args:
        schedule: a schedule whose lines are complete and in order.
        indexes: where the actions of each line are.

    Raises:
        ScheduleError: with an arrow at each computation of the circle of waits.
    """
    channels = _channels(schedule, indexes)
    stashes = list(_stash_waits(schedule))
    if not _circle_of_waits(schedule, _waits(schedule, channels, stashes, STRICTEST)):
        return
    for transport in (RENDEZVOUS, BOUNDED):
        circle = _circle_of_waits(schedule, _waits(schedule, channels, stashes, transport))
        if circle:
            raise _deadlock(schedule, transport, circle)


# (sender, receiver) → positions of sends, of their receives and of the computations that need
# these, sorted by the first.
_Channels = dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]]


def _channels(schedule: Schedule, indexes: Sequence[LineIndex]) -> _Channels:
    place, num_stages = schedule.placement.rank_and_chunk, schedule.num_stages
    parts: dict[tuple[int, int], list[tuple[np.ndarray, ...]]] = {}
    for index in indexes:
        for (kind, chunk, _), sends in index.rows.items():
            if kind not in BOUNDARY:
                continue
            used_by, step = (Kind.FORWARD, 1) if kind is Kind.SEND_FORWARD else (Kind.BACKWARD, -1)
            stage = schedule.virtual_stage(index.rank, chunk) + step
            receiver, receiving_chunk = place(stage, num_stages)
            receives = indexes[receiver].row(BOUNDARY[kind], receiving_chunk, index.rank)
            users = indexes[receiver].row(used_by, receiving_chunk)
            parts.setdefault((index.rank, receiver), []).append((sends, receives, users))
    channels: _Channels = {}
    for ends, found in parts.items():
        sends, receives, users = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(sends)
        channels[ends] = sends[order], receives[order], users[order]
    return channels


def _waits(
    schedule: Schedule,
    channels: _Channels,
    stashes: Sequence[tuple[int, int, int, int]],
    transport: Transport,
) -> list[Waits]:
    """What each computation of each line waits for, under a transport."""
    table = schedule.table
    before = [table.before[table.line(rank)] for rank in range(schedule.num_stages)]
    pieces: _Pieces = []

    def wait(rank: int, computations: np.ndarray, other: int, posted: np.ndarray) -> None:
        """Has computations wait until actions at these positions of the other rank are posted."""
        pieces.append((rank * schedule.num_stages + other, computations, before[other][posted]))

    for (sender, receiver), (sends, receives, users) in channels.items():
        asked = receives
        needing = before[receiver][users]
        if transport.in_order:  # a message arrives only after all that were sent before it
            asked = np.maximum.accumulate(receives)
            late = asked > receives
            if late.any():
                wait(receiver, needing[late], receiver, asked[late])
        wait(receiver, needing, sender, sends)
        # The computation after a send waits for the receive that makes room for it.
        later = len(asked) - transport.buffered
        wait(sender, before[sender][sends[transport.buffered :]], receiver, asked[: max(0, later)])
    for rank, user, peer, posted in stashes:
        wait(rank, before[rank][[user]], peer, np.array([posted]))
    return _in_order(pieces, _num_computations(schedule))


def _num_computations(schedule: Schedule) -> list[int]:
    table = schedule.table
    return [int(table.computes[table.line(rank)].sum()) for rank in range(schedule.num_stages)]


def _in_order(pieces: _Pieces, num_computations: list[int]) -> list[Waits]:
    """The waits of each rank in order, without those that an earlier one implies."""
    num_ranks = len(num_computations)
    if not pieces:
        return [[] for _ in range(num_ranks)]
    lengths = [len(computations) for _, computations, _ in pieces]
    pairs = np.repeat([pair for pair, _, _ in pieces], lengths).astype(np.int64)
    computations = np.concatenate([piece for _, piece, _ in pieces])
    needs = np.concatenate([piece for _, _, piece in pieces])
    # By rank and other rank, then in order; what is needed may not be less than before.
    beyond = max(num_computations) + 1
    order = np.argsort(pairs * beyond + computations, kind="stable")
    pairs, computations, needs = pairs[order], computations[order], needs[order]
    ranks, others = np.divmod(pairs, num_ranks)
    most = np.maximum.accumulate(pairs * beyond + needs)
    new = needs > 0
    new[1:] &= most[1:] > most[:-1]
    new &= computations < np.asarray(num_computations)[ranks]
    new &= (ranks != others) | (needs > computations)
    ranks, rows = ranks[new], np.stack([computations[new], others[new], needs[new]], axis=1)
    order = np.argsort(ranks * beyond + rows[:, 0], kind="stable")
    ends = np.searchsorted(ranks[order], np.arange(num_ranks + 1)).tolist()
    waits = list(map(tuple, rows[order].tolist()))
    return [waits[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]


def _stash_waits(schedule: Schedule) -> Iterator[tuple[int, int, int, int]]:
    """What computations wait for of the stash transfers: rules 4 and 5 of `schedules.actions`.

    Yields:
        The rank and position of the computation, the rank and position that must be posted.
    """
    table = schedule.table
    transfers: dict[tuple[int, int], list[int]] = {}  # (rank, its partner) → their positions
    users: dict[int, dict[int, int]] = {}  # rank → position of a transfer → the one waiting for it
    for rank in np.unique(table.rank[table.moves_stashes]).tolist():
        line = table.line(rank)
        relevant = np.flatnonzero(table.computes[line] | table.moves_stashes[line])
        columns = (column[line][relevant].tolist() for column in (table.kind, table.microbatch))
        rest = (column[line][relevant].tolist() for column in (table.chunk, table.peer))
        users[rank] = of_rank = {}
        loads: dict[tuple[int, int], int] = {}
        # Evictions that no forward has waited for: before the last computation, and after it.
        older: list[int] = []
        newer: list[int] = []
        for position, code, microbatch, chunk, peer in zip(
            relevant.tolist(), *columns, *rest, strict=True
        ):
            kind = KINDS[code]
            if kind in COMPUTE:
                if kind is Kind.FORWARD and older:
                    of_rank.update(dict.fromkeys(older, position))
                    older = []
                elif kind is Kind.BACKWARD and (microbatch, chunk) in loads:
                    of_rank[loads[microbatch, chunk]] = position
                if newer:
                    older += newer
                    newer = []
            else:
                transfers.setdefault((rank, peer), []).append(position)
                if kind is Kind.EVICT:
                    newer.append(position)
                elif kind is Kind.LOAD:
                    loads[microbatch, chunk] = position
    for (rank, peer), ours in transfers.items():
        # Partners list their transfers in the same order.
        for position, posted in zip(ours, transfers[peer, rank], strict=True):
            user = users[rank].get(position)
            if user is not None:
                yield rank, user, peer, posted


def _circle_of_waits(schedule: Schedule, waits: list[Waits]) -> list[Place]:
    """Plays all lines through; returns the computations that wait for each other, if any do."""
    counts = _num_computations(schedule)
    done = [0] * len(waits)  # computations of each rank, up to the one that it is waiting at
    at = [0] * len(waits)  # the wait that it is at
    waiting: list[list[int]] = [[] for _ in waits]  # rank → ranks that wait for it
    runnable = list(range(len(waits)))
    while runnable:
        rank = runnable.pop()
        own, number = waits[rank], at[rank]
        end = len(own)
        # Those of a rank for itself are in the list only if they will never be fulfilled.
        while number < end and done[own[number][1]] >= own[number][2] and own[number][1] != rank:
            number += 1
        at[rank] = number
        reached = own[number][0] if number < end else counts[rank]
        if number < end:
            waiting[own[number][1]].append(rank)
        if reached > done[rank]:
            done[rank] = reached
            runnable += waiting[rank]
            waiting[rank] = []
    blocked = [rank for rank, count in enumerate(counts) if done[rank] < count]
    if not blocked:
        return []
    # Each blocked rank waits for a blocked one, so following the waits leads into a circle.
    route: list[int] = []
    rank = blocked[0]
    while rank not in route:
        route.append(rank)
        rank = waits[rank][at[rank]][1]
    circle = route[route.index(rank) :]
    table = schedule.table
    return [
        Place(rank, int(np.flatnonzero(table.computes[table.line(rank)])[done[rank]]))
        for rank in circle
    ]


def _deadlock(schedule: Schedule, transport: Transport, circle: list[Place]) -> ScheduleError:
    names = [f"rank {rank} at {schedule.actions[rank][position]}" for rank, position in circle]
    text = (
        f"under {transport.name} these wait for each other: {', '.join(names)}; post receives "
        "earlier, or compute in another order"
    )
    return fault(schedule, "deadlock", text, *circle)
