"""Simulated annealing on the assignment: a good start for the exact search, found in seconds.

A step moves a connected piece of the graph that sits on one device to another one, lets a
dispatcher play the assignment through (of the operations that could run, a device takes the one
with the longest way to the end) and keeps the move if it helps, or, now and then, if it costs
little. Pieces, since moving a single operation of a chain only adds two transfers.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Sequence

from pipeline.planning.heft import Timetable
from pipeline.planning.instance import Instance

HOT, COLD = 5e-3, 1e-4
"""The temperature at the beginning and the end, as a share of the makespan."""


def improve(
    instance: Instance,
    first: Timetable,
    seconds: float,
    hear: Callable[[Timetable], None],
    seed: int = 0,
) -> None:
    """Looks for better timetables.

    Args:
        instance: the graph on its cluster.
        first: where to begin.
        seconds: for how long.
        hear: called with each timetable that is better than all before.
        seed: of the random moves.
    """
    begin = time.monotonic()
    search = _Annealing(instance, first, random.Random(seed))
    while search.can_move and (passed := time.monotonic() - begin) < seconds:
        best = search.best
        search.step(HOT * (COLD / HOT) ** (passed / seconds))
        if search.best is not best:
            hear(search.best)


class _Annealing:
    def __init__(self, instance: Instance, first: Timetable, rng: random.Random) -> None:
        self.instance, self.rng = instance, rng
        self.of_unit = [first.device[members[0]] for members in instance.units]
        self.held = [0.0] * instance.num_devices
        for unit, device in enumerate(self.of_unit):
            self.held[device] += instance.unit_bytes[unit]
        self.neighbours = _neighbours(instance)
        self.movable = [u for u, allowed in enumerate(instance.allowed) if len(allowed) > 1]
        self.best = first
        self.current = first.makespan

    @property
    def can_move(self) -> bool:
        return bool(self.movable) and self.current > 0

    def step(self, temperature: float) -> None:
        """Tries one move."""
        instance, rng = self.instance, self.rng
        unit = rng.choice(self.movable)
        source = self.of_unit[unit]
        target = rng.choice([d for d in instance.allowed[unit] if d != source] or [source])
        piece = [u for u in self._piece(unit) if target in instance.allowed[u]]
        size = math.fsum(instance.unit_bytes[u] for u in piece)
        if target == source or self.held[target] + size > instance.memory(target):
            return
        for moved in piece:
            self.of_unit[moved] = target
        found = dispatch(instance, instance.devices_of_ops(self.of_unit))
        worse = (found.makespan - self.current) / self.current
        if worse <= 0 or rng.random() < math.exp(-worse / temperature):
            self.current = found.makespan
            self.held[source] -= size
            self.held[target] += size
            if found.makespan < self.best.makespan:
                self.best = found
            return
        for moved in piece:
            self.of_unit[moved] = source

    def _piece(self, unit: int) -> list[int]:
        """Units connected with this one on the same device, a random number of them."""
        most = max(1, min(len(self.movable) // 4, int(self.rng.expovariate(1 / 6.0)) + 1))
        device, piece, edge = self.of_unit[unit], [unit], [unit]
        seen = {unit}
        while edge and len(piece) < most:
            at = edge.pop(self.rng.randrange(len(edge)) if self.rng.random() < 0.3 else -1)
            for other in self.neighbours[at]:
                if other not in seen and self.of_unit[other] == device and len(piece) < most:
                    seen.add(other)
                    piece.append(other)
                    edge.append(other)
        return piece


def _neighbours(instance: Instance) -> list[list[int]]:
    found: list[set[int]] = [set() for _ in instance.units]
    for position, needed in enumerate(instance.graph.incoming):
        for source, _ in needed:
            one, other = instance.unit_of[source], instance.unit_of[position]
            if one != other:
                found[one].add(other)
                found[other].add(one)
    return [sorted(units) for units in found]


def dispatch(instance: Instance, device_of: Sequence[int]) -> Timetable:
    """The times of an assignment: each device takes the most urgent operation that can run."""
    graph, seconds = instance.graph, instance.seconds
    incoming, outgoing = graph.incoming, graph.outgoing
    links = instance.links
    # The way from each operation's start to the end of the step, transfers included.
    urgency = [0.0] * len(graph)
    for position in reversed(graph.order):
        row = links[device_of[position]]
        longest = 0.0
        for target, size in outgoing[position]:
            bandwidth, latency = row[device_of[target]]
            way = urgency[target] + latency + size / bandwidth
            if way > longest:
                longest = way
        urgency[position] = longest + seconds[position][device_of[position]]

    missing = [len(needed) for needed in incoming]
    waiting: list[list[tuple[float, int]]] = [[] for _ in links]
    busy = [False] * len(links)
    start = [0.0] * len(graph)
    # (time, operation that ends or -1, operation whose tensor arrives or -1)
    events = [(0.0, -1, position) for position in graph.order if not incoming[position]]
    for position in graph.order:
        if not incoming[position]:
            missing[position] = 1
    heapq.heapify(events)
    now = 0.0
    while events:
        now = events[0][0]
        touched = set()
        while events and events[0][0] == now:
            _, ended, arrived = heapq.heappop(events)
            if ended >= 0:
                device = device_of[ended]
                busy[device] = False
                row = links[device]
                for target, size in outgoing[ended]:
                    bandwidth, latency = row[device_of[target]]
                    heapq.heappush(events, (now + latency + size / bandwidth, -1, target))
            else:
                missing[arrived] -= 1
                device = device_of[arrived]
                if not missing[arrived]:
                    heapq.heappush(waiting[device], (-urgency[arrived], arrived))
            touched.add(device)
        for device in touched:
            if not busy[device] and waiting[device]:
                position = heapq.heappop(waiting[device])[1]
                start[position] = now
                busy[device] = True
                heapq.heappush(events, (now + seconds[position][device], position, -1))
    return Timetable(tuple(device_of), tuple(start), now)
