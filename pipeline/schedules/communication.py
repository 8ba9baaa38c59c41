"""The second pass: sends and receives of boundary tensors.

Whatever a computation hands to another rank is sent right after it. What a computation needs from
another rank is asked for one computation ahead, so that the transfer can hide behind that one.
"""

from __future__ import annotations

from pipeline.schedules.actions import Action, Kind
from pipeline.schedules.order import Lines
from pipeline.schedules.placement import Placement


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
    receives: list[Action | None] = []
    sends: list[Action | None] = []
    for kind, microbatch, chunk, _ in line:
        before, after = neighbours[chunk]
        receive = send = None
        if kind is Kind.FORWARD:
            if before is not None:
                receive = Action(Kind.RECV_FORWARD, microbatch, chunk, before)
            if after is not None:
                send = Action(Kind.SEND_FORWARD, microbatch, chunk, after)
        elif kind is Kind.BACKWARD:
            if after is not None:
                receive = Action(Kind.RECV_BACKWARD, microbatch, chunk, after)
            if before is not None:
                send = Action(Kind.SEND_BACKWARD, microbatch, chunk, before)
        receives.append(receive)
        sends.append(send)
    # Two computations from now: its receive is posted before the next one.
    ahead = [*receives[2:], None, None]
    actions = [receive for receive in receives[:2] if receive]
    for compute, send, receive in zip(line, sends, ahead, strict=True):
        actions.append(compute)
        if send:
            actions.append(send)
        if receive:
            actions.append(receive)
    return actions
