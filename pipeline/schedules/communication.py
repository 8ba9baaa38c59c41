"""The second pass: sends and receives of boundary tensors.

Whatever a computation hands to another rank is sent right after it. What a computation needs from
another rank is asked for one computation ahead, so that the transfer can hide behind that one.
"""

from __future__ import annotations

from pipeline.schedules.actions import Action, Kind, action_of
from pipeline.schedules.order import Lines
from pipeline.schedules.placement import Placement

_SEND_FORWARD, _RECV_FORWARD = Kind.SEND_FORWARD, Kind.RECV_FORWARD
_SEND_BACKWARD, _RECV_BACKWARD = Kind.SEND_BACKWARD, Kind.RECV_BACKWARD


def add_communication(order: Lines, placement: Placement, num_chunks: int) -> Lines:
    """Returns the lines of `order` with the sends and receives that they need.

    Args:
        order: compute actions alone, for each rank.
        placement: which virtual stages the ranks' chunks hold.
        num_chunks: the number of model chunks a rank.
    """
    return [
        _with_messages(line, _neighbours(rank, placement, len(order), num_chunks))
        for rank, line in enumerate(order)
    ]


# For each chunk: the ranks of the virtual stages before and after, None where there is no message.
_Neighbours = list[tuple[int | None, int | None]]


def _neighbours(rank: int, placement: Placement, num_stages: int, num_chunks: int) -> _Neighbours:
    neighbours = []
    for chunk in range(num_chunks):
        stage = placement.virtual_stage(rank, chunk, num_stages)
        pair = []
        for other in (stage - 1, stage + 1):
            peer = None
            if 0 <= other < num_stages * num_chunks:
                peer = placement.rank_and_chunk(other, num_stages)[0]
            pair.append(None if peer == rank else peer)
        neighbours.append((pair[0], pair[1]))
    return neighbours


def _with_messages(line: list[Action], neighbours: _Neighbours) -> list[Action]:
    # For each computation: what it needs, and what it hands on.
    receives: list[Action | None] = []
    sends: list[Action | None] = []
    for kind, microbatch, chunk, _ in line:
        before, after = neighbours[chunk]
        if kind is Kind.FORWARD:
            source, target, receive, send = before, after, _RECV_FORWARD, _SEND_FORWARD
        elif kind is Kind.BACKWARD:
            source, target, receive, send = after, before, _RECV_BACKWARD, _SEND_BACKWARD
        else:
            source = target = None
        receives.append(None if source is None else action_of((receive, microbatch, chunk, source)))
        sends.append(None if target is None else action_of((send, microbatch, chunk, target)))
    # Two computations from now: its receive is posted before the next one.
    ahead = [*receives[2:], None, None]
    actions = [receive for receive in receives[:2] if receive is not None]
    for triple in zip(line, sends, ahead, strict=False):
        actions += triple
    return list(filter(None, actions))
