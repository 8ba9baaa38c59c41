"""The schedules by name, each made by passes: order → communication → eviction → check.

To add one, write its order (`schedules.order`), then a function of a few lines here, and enter it
into `GENERATORS`.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeline.schedules import order as orders
from pipeline.schedules.communication import add_communication
from pipeline.schedules.eviction import add_eviction, balanced_limit
from pipeline.schedules.order import Lines
from pipeline.schedules.placement import Placement
from pipeline.schedules.schedule import Schedule
from pipeline.schedules.table import Table
from pipeline.schedules.v_half import v_half_limit, v_half_order


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards; every stage holds m stashes."""
    _check(num_stages, num_microbatches)
    return build("gpipe", orders.gpipe_order(num_stages, num_microbatches))


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B: the same bubble as GPipe's; stage x holds min(m, p-x) stashes."""
    _check(num_stages, num_microbatches)
    return build("1f1b", orders.one_f_one_b_order(num_stages, num_microbatches))


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Interleaved 1F1B with v chunks a rank: about 1/v of the bubble, more stashes and messages."""
    _check(num_stages, num_microbatches, num_chunks)
    if num_chunks == 1:
        order = orders.one_f_one_b_order(num_stages, num_microbatches)
    else:
        order = orders.interleaved_order(num_stages, num_microbatches, num_chunks)
    return build("interleaved", order, num_chunks=num_chunks)


def bpipe(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """BPipe: 1F1B, no stage above c = ⌈(p+2)/2⌉ stashes, by moving some to a partner and back.

    With more than one chunk, the same for interleaved 1F1B; there c = vp + 1.
    """
    _check(num_stages, num_microbatches, num_chunks)
    if num_chunks == 1:
        order = orders.one_f_one_b_order(num_stages, num_microbatches)
    else:
        order = orders.interleaved_order(num_stages, num_microbatches, num_chunks)
    evict_above = balanced_limit(num_stages, num_chunks)
    return build("bpipe", order, num_chunks=num_chunks, evict_above=evict_above)


def v_half(num_stages: int, num_microbatches: int) -> Schedule:
    """V-Half: two chunks a rank, half of 1F1B's memory on all and half its bubble, nothing moved.

    No rank holds more than p+2 stashes of a chunk each. Backward is split into `B` and `W`.
    """
    _check(num_stages, num_microbatches)
    order = v_half_order(num_stages, num_microbatches)
    limit = v_half_limit(num_stages)
    return build("v-half", order, Placement.ZIGZAG, num_chunks=2, limit=limit)


def build(
    name: str,
    order: Lines,
    placement: Placement = Placement.LOOP,
    num_chunks: int = 1,
    evict_above: int | None = None,
    limit: int | None = None,
) -> Schedule:
    """Makes a schedule from an order of computation: adds communication, then eviction, checks.

    Args:
        name: what the schedule is called.
        order: for each rank, its compute actions in order.
        placement: which virtual stages the ranks' chunks hold.
        num_chunks: the number of model chunks a rank.
        evict_above: the number of stashes above which a rank evicts some; None: none evicts.
        limit: the number of stashes that is checked to be never exceeded; `evict_above` by default.

    Raises:
        ScheduleError: if the schedule cannot be run or holds more than the limit.
    """
    table = add_communication(Table.of_lines(order), placement, num_chunks)
    if evict_above is not None:
        table = add_eviction(table, placement, evict_above)
    schedule = Schedule.of_table(table, name, placement)
    schedule.validate(evict_above if limit is None else limit)
    return schedule


# What a user calls the schedule → the function that makes it.
GENERATORS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "bpipe": bpipe,
    "v-half": v_half,
}


def _check(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> None:
    for what, number in (
        ("the number of stages", num_stages),
        ("the number of micro-batches", num_microbatches),
        ("the number of model chunks", num_chunks),
    ):
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise TypeError(f"{what} must be an int, not {number!r}")
        if number < 1:
            raise ValueError(f"{what} must be at least 1, not {number}")
