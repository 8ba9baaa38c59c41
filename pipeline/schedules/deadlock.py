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

from typing import NamedTuple

import numpy as np

from pipeline.errors import ScheduleError
from pipeline.schedules.actions import BOUNDARY, COMPUTE, Kind
from pipeline.schedules.faults import Place, fault
from pipeline.schedules.line_index import Index
from pipeline.schedules.schedule import Schedule
from pipeline.schedules.table import CODES, KINDS, NO_PEER

_SENDS = [CODES[send] for send in BOUNDARY]
# The code of a send → those of its receive and of the computation that needs it.
_RECEIVES, _USERS = (np.full(len(KINDS), -1) for _ in range(2))
_RECEIVES[_SENDS] = [CODES[receive] for receive in BOUNDARY.values()]
_USERS[[CODES[Kind.SEND_FORWARD], CODES[Kind.SEND_BACKWARD]]] = (
    CODES[Kind.FORWARD],
    CODES[Kind.BACKWARD],
)


class Waits(NamedTuple):
    """What one rank waits for, in order.

    Attributes:
        computations: the numbers of the computations that wait.
        others: the ranks that they wait for.
        needs: how many of the other rank's computations have to be done.
    """

    computations: list[int]
    others: list[int]
    needs: list[int]


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


def check_progress(schedule: Schedule, index: Index) -> None:
    """Proves that the schedule runs to its end.

    Args:
        schedule: a schedule whose lines are complete and in order.
        index: where the actions are.

    Raises:
        ScheduleError: with an arrow at each computation of the circle of waits.
    """
    messages = _messages(schedule, index)
    stashes = _stash_waits(schedule)
    if not _circle_of_waits(schedule, _waits(schedule, messages, stashes, STRICTEST)):
        return
    for transport in (RENDEZVOUS, BOUNDED):
        circle = _circle_of_waits(schedule, _waits(schedule, messages, stashes, transport))
        if circle:
            raise _deadlock(schedule, transport, circle)


class _Messages(NamedTuple):
    """All boundary messages, by sender and receiver, each channel's in the order of the sends.

    The actions are named by their numbers in the schedule's table.
    """

    sends: np.ndarray
    receives: np.ndarray
    users: np.ndarray  # the computations that need them
    channel: np.ndarray  # the sender times the number of ranks plus the receiver


def _messages(schedule: Schedule, index: Index) -> _Messages:
    table, num_stages = schedule.table, schedule.num_stages
    sends = np.flatnonzero(np.isin(table.kind, _SENDS))
    channel = table.rank[sends].astype(np.int64) * num_stages + table.peer[sends]
    order = np.argsort(channel, kind="stable")
    sends, channel = sends[order], channel[order]
    kind, microbatch, peer = table.kind[sends], table.microbatch[sends], table.peer[sends]
    sender = table.rank[sends]
    chunk = _receiving_chunks(schedule)[kind, sender, table.chunk[sends]]
    receives = index.positions(peer, _RECEIVES[kind], chunk, sender, microbatch)
    users = index.positions(peer, _USERS[kind], chunk, NO_PEER, microbatch)
    return _Messages(sends, table.starts[peer] + receives, table.starts[peer] + users, channel)


def _receiving_chunks(schedule: Schedule) -> np.ndarray:
    """By kind of a send, rank and chunk: the receiver's chunk."""
    chunks = np.zeros((len(KINDS), schedule.num_stages, schedule.num_chunks), np.int64)
    place = schedule.placement.rank_and_chunk
    for stage in range(schedule.num_virtual_stages - 1):
        at, then = place(stage, schedule.num_stages), place(stage + 1, schedule.num_stages)
        chunks[(CODES[Kind.SEND_FORWARD], *at)] = then[1]
        chunks[(CODES[Kind.SEND_BACKWARD], *then)] = at[1]
    return chunks


def _waits(
    schedule: Schedule, messages: _Messages, stashes: np.ndarray, transport: Transport
) -> list[Waits]:
    """What each computation of each line waits for, under a transport."""
    table = schedule.table
    sends, receives, users, channel = messages
    asked = receives
    pieces = [(users, sends), tuple(stashes.T)]
    if transport.in_order:  # a message arrives only after all that were sent before it
        beyond = len(table.rank)
        asked = np.maximum.accumulate(channel * beyond + receives) - channel * beyond
        late = asked > receives
        pieces.append((users[late], asked[late]))
    # The computation after a send waits for the receive that makes room for it.
    earlier, later = slice(len(sends) - transport.buffered), slice(transport.buffered, None)
    same = channel[earlier] == channel[later]
    pieces.append((sends[later][same], asked[earlier][same]))
    return _in_order(
        schedule, *(np.concatenate([piece[end] for piece in pieces]) for end in (0, 1))
    )


def _num_computations(schedule: Schedule) -> list[int]:
    table = schedule.table
    return [int(table.computes[table.line(rank)].sum()) for rank in range(schedule.num_stages)]


def _in_order(schedule: Schedule, waiting: np.ndarray, posted: np.ndarray) -> list[Waits]:
    """The waits of each rank in order, without those that an earlier one implies.

    Args:
        schedule: the schedule.
        waiting: actions, by number, of which the computation that follows or is there waits ...
        posted: ... until these are posted.
    """
    table, num_ranks = schedule.table, schedule.num_stages
    num_computations = np.asarray(_num_computations(schedule))
    ranks, others = table.rank[waiting].astype(np.int64), table.rank[posted]
    computations, needs = table.before[waiting], table.before[posted]
    # What can be missing at all: not what is posted at the start, nor what follows in its own line.
    real = (needs > 0) & (computations < num_computations[ranks])
    real &= (ranks != others) | (needs > computations)
    # By rank and other rank, then in order; what is needed may not be less than before.
    beyond = int(num_computations.max(initial=0)) + 1
    keys = ((ranks * num_ranks + others) * beyond + computations)[real]
    needs = needs[real]
    order = np.argsort(keys, kind="stable")
    pairs, computations = np.divmod(keys[order], beyond)
    most = np.maximum.accumulate(pairs * beyond + needs[order])
    new = np.ones(len(most), bool)
    new[1:] = most[1:] > most[:-1]
    pairs, computations = pairs[new], computations[new]
    ranks, others = np.divmod(pairs, num_ranks)
    order = np.argsort(ranks * beyond + computations, kind="stable")
    columns = [
        column[order].tolist() for column in (computations, others, most[new] - pairs * beyond)
    ]
    ends = np.searchsorted(ranks[order], np.arange(num_ranks + 1)).tolist()
    return [
        Waits(*(column[begin:end] for column in columns))
        for begin, end in zip(ends, ends[1:], strict=False)
    ]


def _stash_waits(schedule: Schedule) -> np.ndarray:
    """What computations wait for of the stash transfers: rules 4 and 5 of `schedules.actions`.

    Returns:
        A row for each wait: the computation, the action that must be posted, by number.
    """
    table = schedule.table
    transfers: dict[tuple[int, int], list[int]] = {}  # (rank, its partner) → their numbers
    users: dict[int, dict[int, int]] = {}  # rank → a transfer → the one waiting for it
    for rank in np.unique(table.rank[table.moves_stashes]).tolist():
        line = table.line(rank)
        relevant = np.flatnonzero(table.computes[line] | table.moves_stashes[line]) + line.start
        columns = table.columns[:, relevant].tolist()
        users[rank] = of_rank = {}
        loads: dict[tuple[int, int], int] = {}
        # Evictions that no forward has waited for: before the last computation, and after it.
        older: list[int] = []
        newer: list[int] = []
        for at, code, microbatch, chunk, peer in zip(relevant.tolist(), *columns, strict=True):
            kind = KINDS[code]
            if kind in COMPUTE:
                if kind is Kind.FORWARD and older:
                    of_rank.update(dict.fromkeys(older, at))
                    older = []
                elif kind is Kind.BACKWARD and (microbatch, chunk) in loads:
                    of_rank[loads[microbatch, chunk]] = at
                if newer:
                    older += newer
                    newer = []
            else:
                transfers.setdefault((rank, peer), []).append(at)
                if kind is Kind.EVICT:
                    newer.append(at)
                elif kind is Kind.LOAD:
                    loads[microbatch, chunk] = at
    waits = []
    for (rank, peer), ours in transfers.items():
        # Partners list their transfers in the same order.
        for at, posted in zip(ours, transfers[peer, rank], strict=True):
            user = users[rank].get(at)
            if user is not None:
                waits.append((user, posted))
    return np.array(waits, np.int64).reshape(-1, 2)


def _circle_of_waits(schedule: Schedule, waits: list[Waits]) -> list[Place]:
    """Plays all lines through; returns the computations that wait for each other, if any do."""
    counts = _num_computations(schedule)
    done = [0] * len(waits)  # computations of each rank, up to the one that it is waiting at
    at = [0] * len(waits)  # the wait that it is at
    waiting: list[list[int]] = [[] for _ in waits]  # rank → ranks that wait for it
    runnable = list(range(len(waits)))
    while runnable:
        rank = runnable.pop()
        computations, others, needs = waits[rank]
        number, end = at[rank], len(needs)
        # Those of a rank for itself are in the list only if they will never be fulfilled.
        while number < end and done[others[number]] >= needs[number] and others[number] != rank:
            number += 1
        at[rank] = number
        reached = computations[number] if number < end else counts[rank]
        if number < end:
            waiting[others[number]].append(rank)
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
        rank = waits[rank].others[at[rank]]
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
