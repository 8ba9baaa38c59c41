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

from pipeline.schedules.actions import COMPUTE, Action, Kind
from pipeline.schedules.order import Lines
from pipeline.schedules.placement import Placement


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


def add_eviction(lines: Lines, placement: Placement, limit: int) -> Lines:
    """Returns the lines with the stash transfers that keep every rank within `limit` stashes.

    Args:
        lines: compute actions and boundary messages, for each rank.
        placement: which virtual stages the ranks' chunks hold.
        limit: the number of stashes that no rank may exceed, those on their way included.
    """
    num_stages = len(lines)
    order = [[action for action in line if action.kind in COMPUTE] for line in lines]
    # For each rank: position of a computation → what is posted after it; -1 is before the first.
    posted: list[dict[int, list[Action]]] = [{} for _ in lines]
    for evictor in range(num_stages):
        acceptor = num_stages - 1 - evictor
        transfers = plan_transfers(order[evictor], limit)
        if not transfers:
            continue
        known = _latest_known(order[evictor], evictor, order[acceptor], acceptor, placement)
        for position, is_load, microbatch, chunk in transfers:
            kinds = (Kind.LOAD, Kind.RETURN) if is_load else (Kind.EVICT, Kind.ACCEPT)
            ours = Action(kinds[0], microbatch, chunk, acceptor)
            theirs = Action(kinds[1], microbatch, chunk, evictor)
            posted[evictor].setdefault(position, []).append(ours)
            # In time for the computation that the transfer hides behind, and not much earlier.
            at = max(known[position], known[position + 1] - 1)
            posted[acceptor].setdefault(at, []).append(theirs)
    return [
        _merged(line, extra) if extra else line for line, extra in zip(lines, posted, strict=True)
    ]


def plan_transfers(order: list[Action], limit: int) -> list[Transfer]:
    """The transfers that keep a rank which computes in this `order` within `limit` stashes.

    They are sorted by where they are posted. Where the limit cannot be kept, the plan comes as
    close as it can; the validator then says so.
    """
    backward_at = {
        (action.microbatch, action.chunk): position
        for position, action in enumerate(order)
        if action.kind is Kind.BACKWARD
    }
    transfers = []
    held = 0
    # A heap of the stashes that could be away by now (their eviction has had a computation to hide
    # behind), as (-position of backward, position of forward); `fresh` is ready one position later.
    ready: list[tuple[int, int]] = []
    fresh: tuple[int, int] | None = None
    returns: dict[int, int] = {}  # position → how many of those away are no longer from there on
    away = 0
    for position, action in enumerate(order):
        away -= returns.get(position, 0)
        held += action.kind is Kind.FORWARD
        while held - away > limit and ready:
            backward, forward = heapq.heappop(ready)
            backward = -backward
            # Loaded back while the computation before its backward runs.
            if backward - 1 <= position:
                break
            stash = order[forward]
            transfers.append(Transfer(position - 2, False, stash.microbatch, stash.chunk))
            transfers.append(Transfer(backward - 2, True, stash.microbatch, stash.chunk))
            returns[backward - 1] = returns.get(backward - 1, 0) + 1
            away += 1
        held -= action.kind is Kind.BACKWARD
        if fresh:
            heapq.heappush(ready, fresh)
            fresh = None
        if action.kind is Kind.FORWARD:
            fresh = (-backward_at[action.microbatch, action.chunk], position)
    # After the same computation, a load goes first: so the partner gets room before it needs it.
    return sorted(transfers, key=lambda transfer: (transfer.position, not transfer.is_load))


def _latest_known(
    evictor_order: list[Action],
    evictor: int,
    acceptor_order: list[Action],
    acceptor: int,
    placement: Placement,
) -> list[int]:
    """For each position of the evictor: the acceptor's last one that surely came before, or -1.

    Forwards depend on the same micro-batch's forwards in earlier virtual stages, backwards on its
    backwards in later ones.
    """
    num_stages = evictor + acceptor + 1
    num_chunks = 1 + max(action.chunk for action in acceptor_order)
    stages = sorted(
        (placement.virtual_stage(acceptor, chunk, num_stages), chunk) for chunk in range(num_chunks)
    )
    # For each kind and chunk of the evictor's, which of the acceptor's computations came before.
    needed: dict[tuple[Kind, int], tuple[Kind, int] | None] = {}
    for chunk in range(num_chunks):
        stage = placement.virtual_stage(evictor, chunk, num_stages)
        earlier = [(Kind.FORWARD, of) for other, of in stages if other < stage]
        later = [(Kind.BACKWARD, of) for other, of in stages if other > stage]
        needed[Kind.FORWARD, chunk] = earlier[-1] if earlier else None
        needed[Kind.BACKWARD, chunk] = later[0] if later else (Kind.FORWARD, stages[-1][1])
    position_of = {action[:3]: position for position, action in enumerate(acceptor_order)}
    known = []
    latest = -1
    for kind, microbatch, chunk, _ in evictor_order:
        source = needed[kind, chunk]
        if source is not None:
            position = position_of[source[0], microbatch, source[1]]
            if position > latest:
                latest = position
        known.append(latest)
    return known


def _merged(line: list[Action], posted: dict[int, list[Action]]) -> list[Action]:
    """The line with each computation's transfers after it and its send, before the receives."""
    merged = []
    waiting = posted.get(-1, [])
    position = -1
    for action in line:
        if waiting and action.kind not in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            merged += waiting
            waiting = []
        merged.append(action)
        if action.kind in COMPUTE:
            position += 1
            waiting = posted.get(position, [])
    return merged + waiting
