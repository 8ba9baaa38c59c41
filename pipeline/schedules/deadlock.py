"""Proves that no rank of a schedule waits for ever; step 3 of the validator.

The schedule is played through without times, under what transports may do to a sender:

* `RENDEZVOUS`: a send is done only once the receiver has posted its receive, whatever the order.
* `BOUNDED`: one message may be under way from one rank to another, and messages arrive in the order
  in which they were sent: a receive is done only once all messages sent before it were asked for.

In both, a computation starts only when every `SEND` before it is done. That is stricter than the
rules in `schedules.actions`, by which sends wait for nothing, so a schedule that passes runs there,
too. Both at once, in-order messages without any buffer, is tried first; it implies either. Stash
transfers have memory of their own at both ends and go by those rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from pipeline.errors import ScheduleError
from pipeline.schedules.actions import BOUNDARY, COMPUTE, STASH_TRANSFERS, Kind
from pipeline.schedules.faults import Place, fault
from pipeline.schedules.line_index import LineIndex
from pipeline.schedules.schedule import Schedule

# For each computation of a line, by its position: what must have been posted before it can start,
# as (rank, position).
Waits = dict[int, list[tuple[int, int]]]


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
    messages = list(_messages(schedule, indexes))
    if not _circle_of_waits(_waits(schedule, messages, STRICTEST)):
        return
    for transport in (RENDEZVOUS, BOUNDED):
        circle = _circle_of_waits(_waits(schedule, messages, transport))
        if circle:
            raise _deadlock(schedule, transport, circle)


# A boundary message: sender, position of the send, receiver, positions of the receive and of the
# computation that needs it. A plain tuple, for there are many.
_Message = tuple[int, int, int, int, int]


def _messages(schedule: Schedule, indexes: Sequence[LineIndex]) -> Iterator[_Message]:
    place, num_stages = schedule.placement.rank_and_chunk, schedule.num_stages
    for index in indexes:
        for (kind, chunk, _), sends in index.rows.items():
            if kind not in BOUNDARY:
                continue
            used_by, step = (Kind.FORWARD, 1) if kind is Kind.SEND_FORWARD else (Kind.BACKWARD, -1)
            stage = schedule.virtual_stage(index.rank, chunk) + step
            receiver, receiving_chunk = place(stage, num_stages)
            receives = indexes[receiver].row(BOUNDARY[kind], receiving_chunk, index.rank)
            users = indexes[receiver].row(used_by, receiving_chunk)
            for send, receive, user in zip(sends, receives, users, strict=True):
                yield index.rank, send, receiver, receive, user


def _waits(schedule: Schedule, messages: list[_Message], transport: Transport) -> list[Waits]:
    """What each computation of each line waits for, under a transport."""
    waits: list[Waits] = []
    following: list[list[int]] = []  # rank → position → the computation from there on
    for line in schedule.actions:
        computations = [at for at, action in enumerate(line) if action.kind in COMPUTE]
        waits.append({position: [] for position in computations})
        following.append(_following(len(line), computations))

    channels: dict[tuple[int, int], list[_Message]] = {}
    for message in messages:
        channels.setdefault((message[0], message[2]), []).append(message)
    for (sender, receiver), channel in channels.items():
        channel.sort()
        asked = [receive for _, _, _, receive, _ in channel]
        if transport.in_order:  # a message arrives only after all that were sent before it
            asked = list(accumulate(asked, max))
        for number, (_, send, _, receive, user) in enumerate(channel):
            waits[receiver][user].append((sender, send))
            if asked[number] > receive:
                waits[receiver][user].append((receiver, asked[number]))
            if number >= transport.buffered:
                computation = following[sender][send]
                if computation in waits[sender]:
                    freed_by = asked[number - transport.buffered]
                    waits[sender][computation].append((receiver, freed_by))
    for rank, user, peer, posted in _stash_waits(schedule):
        waits[rank][user].append((peer, posted))
    return waits


def _following(length: int, computations: list[int]) -> list[int]:
    """For each position, the first computation from there on; `length` if there is none."""
    following = []
    for computation in computations:
        following += [computation] * (computation + 1 - len(following))
    return following + [length] * (length - len(following))


def _stash_waits(schedule: Schedule) -> Iterator[tuple[int, int, int, int]]:
    """What computations wait for of the stash transfers: rules 4 and 5 of `schedules.actions`.

    Yields:
        The rank and position of the computation, the rank and position that must be posted.
    """
    if not schedule.evicts:
        return
    transfers: dict[tuple[int, int], list[int]] = {}  # (rank, its partner) → their positions
    users: list[dict[int, int]] = []  # rank → position of a transfer → the computation waiting
    for rank, line in enumerate(schedule.actions):
        users.append({})
        loads: dict[tuple[int, int], int] = {}
        # Evictions that no forward has waited for: before the last computation, and after it.
        older: list[int] = []
        newer: list[int] = []
        for position, (kind, microbatch, chunk, peer) in enumerate(line):
            if kind in COMPUTE:
                if kind is Kind.FORWARD:
                    users[rank].update(dict.fromkeys(older, position))
                    older = []
                elif kind is Kind.BACKWARD and (microbatch, chunk) in loads:
                    users[rank][loads[microbatch, chunk]] = position
                older += newer
                newer = []
            elif kind in STASH_TRANSFERS and peer is not None:
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


def _circle_of_waits(waits: list[Waits]) -> list[Place]:
    """Plays all lines through; returns the computations that wait for each other, if any do."""
    computations = [list(line) for line in waits]
    done = [0] * len(waits)
    # Up to where each rank has posted its actions: to the computation that it is waiting at.
    end = max((line[-1] for line in computations if line), default=0) + 1_000_000
    posted = [line[0] if line else end for line in computations]
    waiting: list[list[int]] = [[] for _ in waits]  # rank → ranks that wait for it
    runnable = list(range(len(waits)))
    while runnable:
        rank = runnable.pop()
        line, needs = computations[rank], waits[rank]
        before = done[rank]
        while done[rank] < len(line):
            for peer, position in needs[line[done[rank]]]:
                if posted[peer] <= position:
                    waiting[peer].append(rank)
                    break
            else:
                done[rank] += 1
                posted[rank] = line[done[rank]] if done[rank] < len(line) else end
                continue
            break
        if done[rank] > before:
            runnable += waiting[rank]
            waiting[rank] = []
    blocked = [rank for rank, line in enumerate(computations) if done[rank] < len(line)]
    if not blocked:
        return []
    # Each blocked rank waits for a blocked one, so following the waits leads into a circle.
    route: list[int] = []
    rank = blocked[0]
    while rank not in route:
        route.append(rank)
        needs_now = waits[rank][posted[rank]]
        rank = next(peer for peer, position in needs_now if posted[peer] <= position)
    return [Place(rank, posted[rank]) for rank in route[route.index(rank) :]]


def _deadlock(schedule: Schedule, transport: Transport, circle: list[Place]) -> ScheduleError:
    names = [f"rank {rank} at {schedule.actions[rank][position]}" for rank, position in circle]
    text = (
        f"under {transport.name} these wait for each other: {', '.join(names)}; post receives "
        "earlier, or compute in another order"
    )
    return fault(schedule, "deadlock", text, *circle)
