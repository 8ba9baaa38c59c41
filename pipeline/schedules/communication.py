"""The second pass: sends and receives of boundary tensors.

Whatever a computation hands to another rank is sent right after it. What a computation needs from
another rank is asked for one computation ahead, so that the transfer can hide behind that one.
"""

from __future__ import annotations

import numpy as np

from pipeline.schedules.actions import BOUNDARY, Kind
from pipeline.schedules.placement import Placement
from pipeline.schedules.table import CODES, KINDS, NO_PEER, Table

_NOTHING = -1
_SEND_OF = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD}
# The code of a computation → that of what it sends and receives.
_SENT = np.array([CODES[_SEND_OF[kind]] if kind in _SEND_OF else _NOTHING for kind in KINDS])
_RECEIVED = np.array(
    [CODES[BOUNDARY[_SEND_OF[kind]]] if kind in _SEND_OF else _NOTHING for kind in KINDS]
)


def add_communication(order: Table, placement: Placement, num_chunks: int) -> Table:
    """Returns the lines of `order` with the sends and receives that they need.

    Args:
        order: compute actions alone.
        placement: which virtual stages the ranks' chunks hold.
        num_chunks: the number of model chunks a rank.
    """
    num_stages = len(order.starts) - 1
    sources, targets = _peers(placement, num_stages, num_chunks)
    source, target = (of[order.rank, order.chunk, order.kind] for of in (sources, targets))
    # A line is laid out in slots, of which some stay empty: the receives of its first two
    # computations; then for each computation itself, its send, the receive of the next but one.
    slot = 3 * np.arange(len(order.rank)) + 2 * order.rank + 2
    columns = np.full((4, 3 * len(order.rank) + 2 * num_stages), _NOTHING, np.int32)
    columns[:, slot] = order.columns
    _place(columns, slot + 1, _SENT, order, target)
    _place(columns, slot - 4 + 2 * (order.before == 0), _RECEIVED, order, source)
    used = columns[0] != _NOTHING
    ends = np.concatenate([[0], np.cumsum(used)])
    starts = ends[3 * order.starts + 2 * np.arange(num_stages + 1)]
    return Table(columns[:, used], starts)


def _place(
    columns: np.ndarray, slots: np.ndarray, kinds: np.ndarray, order: Table, peers: np.ndarray
) -> None:
    """Puts the message of each computation that has a peer into its slot."""
    has = peers != NO_PEER
    messages = kinds[order.kind], order.microbatch, order.chunk, peers
    columns[:, slots[has]] = [row[has] for row in messages]


def _peers(placement: Placement, num_stages: int, num_chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """By rank, chunk and kind of a computation: whom it needs something from, who needs it."""
    shape = num_stages, num_chunks, len(KINDS)
    sources, targets = np.full(shape, NO_PEER), np.full(shape, NO_PEER)
    forward, backward = CODES[Kind.FORWARD], CODES[Kind.BACKWARD]
    for stage in range(num_stages * num_chunks - 1):
        rank, chunk = placement.rank_and_chunk(stage, num_stages)
        following, following_chunk = placement.rank_and_chunk(stage + 1, num_stages)
        if rank != following:
            targets[rank, chunk, forward] = sources[rank, chunk, backward] = following
            sources[following, following_chunk, forward] = rank
            targets[following, following_chunk, backward] = rank
    return sources, targets
