"""List schedules: HEFT, which gives the solver its first placement and the user a fair rival.

Heterogeneous Earliest Finish Time (Topcuoglu, Hariri, Wu, IEEE TPDS 2002): operations in order of
their upward rank, the longest way to the end with mean times, each put where it ends first, into a
gap if one is large enough. Here the first operation of a unit decides for all of it, and only
devices that still have memory for it count. Where that greedy choice runs out of memory, units are
packed into the devices first, the largest first, and the list schedule only finds the times.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from pipeline.planning.instance import Instance


@dataclass(frozen=True)
class Timetable:
    """What a placer found: for each operation its device and its start, and when all is done."""

    device: tuple[int, ...]
    start: tuple[float, ...]
    makespan: float


def heft(instance: Instance) -> Timetable | None:
    """The best of HEFT and of everything on one device; None if none of them fits the memory."""
    order = by_upward_rank(instance)
    found = [_list_schedule(instance, order, None)]
    whole = math.fsum(instance.unit_bytes)
    for device in range(instance.num_devices):
        fits = whole <= instance.memory(device)
        if fits and all(device in allowed for allowed in instance.allowed):
            found.append(_list_schedule(instance, order, [device] * len(instance.units)))
    if found[0] is None:
        packed = _pack(instance)
        if packed is not None:
            found.append(_list_schedule(instance, order, packed))
    fitting = [timetable for timetable in found if timetable is not None]
    return min(fitting, key=lambda timetable: timetable.makespan, default=None)


def by_upward_rank(instance: Instance) -> list[int]:
    """The operations, each before all that need it, the longest way to the end first."""
    graph, cluster = instance.graph, instance.cluster
    links = [cluster.link(a, b) for a, b in permutations(range(len(cluster)), 2)]

    def mean_transfer(size: float) -> float:
        # Of two devices drawn at random, one in D is the same.
        if not links:
            return 0.0
        mean = math.fsum(link.seconds(size) for link in links) / len(links)
        return mean * (1 - 1 / len(cluster))

    rank = [0.0] * len(graph)
    for position in reversed(graph.order):
        times = [seconds for seconds in instance.seconds[position] if math.isfinite(seconds)]
        after = max(
            (mean_transfer(size) + rank[target] for target, size in graph.outgoing[position]),
            default=0.0,
        )
        rank[position] = math.fsum(times) / len(times) + after
    place = {position: number for number, position in enumerate(graph.order)}
    # The topological place decides between equals, as after an operation of 0 seconds.
    return sorted(range(len(graph)), key=lambda position: (-rank[position], place[position]))


def _list_schedule(
    instance: Instance, order: Sequence[int], fixed: Sequence[int] | None
) -> Timetable | None:
    """Puts operations one after the other where they end first, or where `fixed` says."""
    graph, cluster = instance.graph, instance.cluster
    of_unit: list[int | None] = [None] * len(instance.units) if fixed is None else list(fixed)
    free = [instance.memory(device) for device in range(instance.num_devices)]
    taken: list[list[tuple[float, float]]] = [[] for _ in range(instance.num_devices)]
    device_of = [0] * len(graph)
    start = [0.0] * len(graph)
    end = [0.0] * len(graph)
    for position in order:
        unit = instance.unit_of[position]
        chosen = of_unit[unit]
        size = instance.unit_bytes[unit]
        if chosen is not None:
            devices = [chosen]
        else:
            devices = [d for d in instance.allowed[unit] if size <= free[d]]
        best: tuple[float, float, int] | None = None
        for device in devices:
            ready = max(
                (
                    end[source] + cluster.transfer_seconds(amount, device_of[source], device)
                    for source, amount in graph.incoming[position]
                ),
                default=0.0,
            )
            seconds = instance.seconds[position][device]
            begin = _earliest(taken[device], ready, seconds)
            if best is None or begin + seconds < best[0]:
                best = (begin + seconds, begin, device)
        if best is None:
            return None
        end[position], start[position], device = best
        if chosen is None:
            of_unit[unit] = device
            free[device] -= size
        device_of[position] = device
        bisect.insort(taken[device], (start[position], end[position]))
    return Timetable(tuple(device_of), tuple(start), max(end, default=0.0))


def _earliest(taken: Sequence[tuple[float, float]], ready: float, seconds: float) -> float:
    """The first time from `ready` on at which a device is free for so long."""
    # What ends before `ready` does not matter; intervals are in order of start and of end.
    first = bisect.bisect_left(taken, ready, key=lambda interval: interval[1])
    begin = ready
    for busy_from, busy_to in taken[first:]:
        if begin + seconds <= busy_from:
            return begin
        begin = max(begin, busy_to)
    return begin


def _pack(instance: Instance) -> list[int] | None:
    """A device for each unit so that memory suffices, the largest first; None if that fails."""
    free = [instance.memory(device) for device in range(instance.num_devices)]
    load = [0.0] * instance.num_devices
    of_unit = [0] * len(instance.units)
    fewest_first = sorted(
        range(len(instance.units)),
        key=lambda unit: (len(instance.allowed[unit]) > 1, -instance.unit_bytes[unit]),
    )
    for unit in fewest_first:
        size = instance.unit_bytes[unit]
        fitting = [d for d in instance.allowed[unit] if size <= free[d]]
        if not fitting:
            return None
        # The tightest fit leaves room for the others; what takes no room goes where less is done.
        device = min(fitting, key=lambda d: (free[d] - size if size else 0.0, load[d]))
        of_unit[unit] = device
        free[device] -= size
        load[device] += math.fsum(instance.seconds[i][device] for i in instance.units[unit])
    return of_unit
