"""The third pass: BPipe's evictions and loads (Kim et al., BPipe, ICML 2023).

Stage x is paired with stage p-1-x. The one of a pair that holds more stashes than the limit, the
evictor, sends some to its partner, the acceptor, and loads each back before its backward.

Which stashes: seen from the evictor, a stash that leaves as soon as it is made and comes back as
late as can be hidden may be away during an interval of its line. At every moment, as many must be
away as the line holds beyond the limit. Sweeping over the line and taking, whenever one more has to
be away, the one that is needed last, gives the fewest evictions (Belady's rule): about every other
stash of stage 0 moves, and none of the stages that stay below the limit.

When: an eviction is posted one computation before the stash has to be away, and a load one before
its backward, so that either hides behind a computation. The acceptor posts its side just before the
last of its computations that the evictor's next one depends on. So the evictor never waits for the
partner's computation, whatever the computations cost: with free transfers the timeline is exactly
that of the schedule without eviction.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from pipeline.schedules.actions import Kind
from pipeline.schedules.placement import Placement
from pipeline.schedules.table import CODES, NO_PEER, Columns, Table

_FORWARD, _BACKWARD = CODES[Kind.FORWARD], CODES[Kind.BACKWARD]
_SENDS = [CODES[Kind.SEND_FORWARD], CODES[Kind.SEND_BACKWARD]]


class Transfer(NamedTuple):
    """A stash transfer of an evictor: posted after the computation at `position` of its line."""

    position: int
    is_load: bool
    microbatch: int
    chunk: int


def balanced_limit(num_stages: int, num_chunks: int = 1) -> int:
    """The number of stashes that no stage of a balanced 1F1B ever exceeds.

    1F1B holds min(m, p-x) stashes at stage x, so a pair holds p+1. Half of that, and one more for
    the stash on its way, is ⌈(p+2)/2⌉. Interleaved over v chunks, rank x holds 2(p-1-x)+(v-1)p+1
    and a pair 2vp, so the limit is vp+1.
    """
    if num_chunks == 1:
        return (num_stages + 3) // 2
    return num_chunks * num_stages + 1


def add_eviction(table: Table, placement: Placement, limit: int) -> Table:
    """Returns the lines with the stash transfers that keep every rank within `limit` stashes.

    Args:
        table: compute actions and boundary messages.
        placement: which virtual stages the ranks' chunks hold.
        limit: the number of stashes that no rank may exceed, those on their way included.
    """
    num_stages = len(table.starts) - 1
    lines = [table.columns[:, table.line(rank)] for rank in range(num_stages)]
    orders = [line[:, table.computes[table.line(rank)]] for rank, line in enumerate(lines)]
    # For each rank: the transfers and the position of the computation after which each is posted;
    # -1 is before the first.
    posted: list[list[tuple[int, tuple[int, int, int, int]]]] = [[] for _ in lines]
    for evictor, order in enumerate(orders):
        if _most_held(order) <= limit:
            continue
        acceptor = num_stages - 1 - evictor
        known = _latest_known(order, evictor, orders[acceptor], acceptor, placement)
        for position, is_load, microbatch, chunk in plan_transfers(order, limit):
            kinds = (Kind.LOAD, Kind.RETURN) if is_load else (Kind.EVICT, Kind.ACCEPT)
            ours, theirs = (CODES[kind] for kind in kinds)
            posted[evictor].append((position, (ours, microbatch, chunk, acceptor)))
            # In time for the computation that the transfer hides behind, and not much earlier.
            at = max(known[position], known[position + 1] - 1)
            posted[acceptor].append((at, (theirs, microbatch, chunk, evictor)))
    return Table.of_lines(
        [_merged(line, extra) if extra else line for line, extra in zip(lines, posted, strict=True)]
    )


def _most_held(order: Columns) -> int:
    """The stashes that a rank which computes in this order holds at most."""
    change = (order[0] == _FORWARD).astype(int) - (order[0] == _BACKWARD)
    return int(np.cumsum(change).max(initial=0))


def plan_transfers(order: Columns, limit: int) -> list[Transfer]:
    """The transfers that keep a rank which computes in this `order` within `limit` stashes.

    They are sorted by where they are posted. Where the limit cannot be kept, the plan comes as
    close as it can; the validator then says so.
    """
    computations = list(zip(*order[:3].tolist(), strict=True))
    backward_at = {
        (microbatch, chunk): position
        for position, (kind, microbatch, chunk) in enumerate(computations)
        if kind == _BACKWARD
    }
    transfers = []
    held = 0
    # A heap of the stashes that could be away by now (their eviction has had a computation to hide
    # behind), as (-position of backward, position of forward); `fresh` is ready one position later.
    ready: list[tuple[int, int]] = []
    fresh: tuple[int, int] | None = None
    returns: dict[int, int] = {}  # position → how many of those away are no longer from there on
    away = 0
    for position, (kind, microbatch, chunk) in enumerate(computations):
        away -= returns.get(position, 0)
        held += kind == _FORWARD
        while held - away > limit and ready:
            backward, forward = heapq.heappop(ready)
            backward = -backward
            # Loaded back while the computation before its backward runs.
            if backward - 1 <= position:
                break
            _, *stash = computations[forward]
            transfers.append(Transfer(position - 2, False, *stash))
            transfers.append(Transfer(backward - 2, True, *stash))
            returns[backward - 1] = returns.get(backward - 1, 0) + 1
            away += 1
        held -= kind == _BACKWARD
        if fresh:
            heapq.heappush(ready, fresh)
            fresh = None
        if kind == _FORWARD:
            fresh = (-backward_at[microbatch, chunk], position)
    # After the same computation, a load goes first: so the partner gets room before it needs it.
    return sorted(transfers, key=lambda transfer: (transfer.position, not transfer.is_load))


def _latest_known(
    evictor_order: Columns,
    evictor: int,
    acceptor_order: Columns,
    acceptor: int,
    placement: Placement,
) -> list[int]:
    """For each position of the evictor: the acceptor's last one that surely came before, or -1.

    Forwards depend on the same micro-batch's forwards in earlier virtual stages, backwards on its
    backwards in later ones.
    """
    num_stages = evictor + acceptor + 1
    kinds, microbatches, chunks, _ = evictor_order
    num_chunks = 1 + int(chunks.max())
    stages = sorted(
        (placement.virtual_stage(acceptor, chunk, num_stages), chunk) for chunk in range(num_chunks)
    )
    # Where the acceptor's computations are, by kind, chunk and micro-batch.
    shape = max(_FORWARD, _BACKWARD) + 1, num_chunks, 1 + int(microbatches.max())
    positions = np.full(shape, -1)
    kind, microbatch, chunk, _ = acceptor_order
    positions[kind, chunk, microbatch] = np.arange(len(kind))
    known = np.full(len(kinds), -1)
    for chunk in range(num_chunks):
        stage = placement.virtual_stage(evictor, chunk, num_stages)
        earlier = [(_FORWARD, of) for other, of in stages if other < stage]
        later = [(_BACKWARD, of) for other, of in stages if other > stage]
        # Of the acceptor's computations of a micro-batch, the last one before the evictor's.
        before = earlier[-1] if earlier else None
        self_made = _FORWARD, stages[-1][1]
        for code, source in (_FORWARD, before), (_BACKWARD, later[0] if later else self_made):
            if source is not None:
                of_kind = (kinds == code) & (chunks == chunk)
                known[of_kind] = positions[source][microbatches[of_kind]]
    return np.maximum.accumulate(known).tolist()


def _merged(line: Columns, posted: list[tuple[int, tuple[int, int, int, int]]]) -> Columns:
    """The line with each computation's transfers after it and its send, before the receives."""
    computations = np.flatnonzero(line[3] == NO_PEER)
    after, transfers = zip(*posted, strict=True)
    # The first action after the computation that is no send.
    free = np.append(np.flatnonzero(~np.isin(line[0], _SENDS)), line.shape[1])
    begins = np.append(computations, -1)[list(after)]  # -1 is the last of these
    return np.insert(
        line, free[np.searchsorted(free, begins, "right")], np.array(transfers).T, axis=1
    )
