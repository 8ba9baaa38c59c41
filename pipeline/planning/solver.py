"""The exact placer: DLPlacer's integer program as a model of OR-Tools' CP-SAT.

After Pal et al. (arXiv 1907.13257): each unit on one device, a consumer after its producer plus the
transfer if they sit apart, no two operations of a device at once, memory per device, the least
makespan. What they write with big-M rows are intervals here: an optional one for each operation and
device, and `NoOverlap` for each device. The search starts from a list schedule and can be stopped
at any time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from pipeline.planning.heft import Timetable
from pipeline.planning.instance import Instance
from pipeline.planning.ticks import Ticks

FEWEST_WORKERS = 8
"""CP-SAT's portfolio: with fewer workers it leaves out whole strategies, cores or not."""
_MEMORY_TICKS = 10**12


@dataclass(frozen=True)
class Solution:
    """What the search has found.

    Attributes:
        timetable: the best placement, or None if none was found.
        bound: seconds that no placement is below.
        is_proven: whether there is none better, or none at all.
    """

    timetable: Timetable | None
    bound: float
    is_proven: bool


class _Model:
    """The variables and constraints."""

    def __init__(self, instance: Instance, hint: Timetable | None) -> None:
        from ortools.sat.python import cp_model

        self.instance = instance
        self.cp_model = cp_model
        self.model = cp_model.CpModel()
        links = [
            [instance.cluster.link(a, b).seconds(size) for a, b in self._pairs()]
            for size in {edge.bytes for edge in instance.graph.edges}
        ]
        times = [t for row in (*instance.seconds, *links) for t in row]
        longest = self._horizon()
        best = longest if hint is None else min(longest, hint.makespan)
        self.ticks = Ticks.for_times(times, best)
        self.horizon = self.ticks.count(best) if hint is None else self._in_ticks(hint)[1]
        self._place_units()
        self._run_operations()
        self._transfer()
        self._bound_makespan()
        if hint is not None:
            self._hint(hint)

    def _pairs(self) -> list[tuple[int, int]]:
        return list(permutations(range(self.instance.num_devices), 2))

    def _horizon(self) -> float:
        """Seconds in which everything is done for certain."""
        instance = self.instance
        total = math.fsum(max(t for t in times if math.isfinite(t)) for times in instance.seconds)
        cluster = instance.cluster
        for edge in instance.graph.edges:
            slowest = [cluster.link(a, b).seconds(edge.bytes) for a, b in self._pairs()]
            total += max(slowest, default=0.0)
        return total

    def _place_units(self) -> None:
        """A literal for each unit and device; memory; equal devices in a fixed order."""
        instance, model = self.instance, self.model
        self.on: list[list[Any]] = []
        for unit, allowed in enumerate(instance.allowed):
            row: list[Any] = [0] * instance.num_devices
            if len(allowed) == 1:
                row[allowed[0]] = 1
            elif len(allowed) == 2:
                first = model.new_bool_var(f"u{unit}")
                row[allowed[0]], row[allowed[1]] = first, ~first
            else:
                for device in allowed:
                    row[device] = model.new_bool_var(f"u{unit}d{device}")
                model.add_exactly_one(row[device] for device in allowed)
            self.on.append(row)
        for device in range(instance.num_devices):
            limit = instance.memory(device)
            if math.fsum(instance.unit_bytes) > limit:
                unit = max(1.0, limit / _MEMORY_TICKS)
                sizes = [math.ceil(size / unit) for size in instance.unit_bytes]
                model.add(
                    sum(size * row[device] for size, row in zip(sizes, self.on, strict=True))
                    <= math.floor(limit / unit)
                )

    def _run_operations(self) -> None:
        """The times of each operation, and that a device runs one at a time."""
        instance, model, ticks = self.instance, self.model, self.ticks
        self.start, self.end = [], []
        lines: list[list[Any]] = [[] for _ in range(instance.num_devices)]
        for position in range(len(instance.graph)):
            row = self.on[instance.unit_of[position]]
            allowed = instance.allowed[instance.unit_of[position]]
            lengths = {d: ticks.count(instance.seconds[position][d]) for d in allowed}
            start = model.new_int_var(0, self.horizon, f"s{position}")
            if len(set(lengths.values())) == 1:
                end = start + next(iter(lengths.values()))
            else:
                end = start + sum(length * row[d] for d, length in lengths.items())
            self.start.append(start)
            self.end.append(end)
            for device, length in lengths.items():
                interval = model.new_optional_fixed_size_interval_var(
                    start, length, row[device], f"o{position}d{device}"
                )
                lines[device].append(interval)
        for line in lines:
            model.add_no_overlap(line)

    def _transfer(self) -> None:
        """A consumer starts after its producer, plus the transfer if they sit apart."""
        instance, model = self.instance, self.model
        self.apart: dict[tuple[int, int], Any] = {}
        longest: dict[tuple[int, int], float] = {}
        for position, needed in enumerate(instance.graph.incoming):
            for source, size in needed:
                pair = (source, position)
                longest[pair] = max(longest.get(pair, 0.0), size)
        for (source, target), size in longest.items():
            units = instance.unit_of[source], instance.unit_of[target]
            model.add(self.start[target] >= self.end[source])
            if units[0] == units[1] or instance.num_devices == 1:
                continue
            if instance.cluster.has_equal_links:
                delay = self.ticks.count(instance.cluster.link(0, 1).seconds(size))
                if delay:
                    apart = self._apart(*units)
                    model.add(self.start[target] >= self.end[source] + delay * apart)
                continue
            for a, b in self._pairs():
                delay = self.ticks.count(instance.cluster.link(a, b).seconds(size))
                both = [self.on[units[0]][a], self.on[units[1]][b]]
                if delay and not any(isinstance(one, int) and one == 0 for one in both):
                    literals = [one for one in both if not isinstance(one, int)]
                    rule = model.add(self.start[target] >= self.end[source] + delay)
                    if literals:
                        rule.only_enforce_if(literals)

    def _apart(self, one: int, other: int) -> Any:
        """Whether two units sit on different devices."""
        key = (min(one, other), max(one, other))
        if key not in self.apart:
            apart = self.model.new_bool_var(f"apart{key}")
            for a, b in zip(self.on[one], self.on[other], strict=True):
                self.model.add(apart >= a - b)
                self.model.add(apart >= b - a)
            self.apart[key] = apart
        return self.apart[key]

    def _bound_makespan(self) -> None:
        instance, model = self.instance, self.model
        self.makespan = model.new_int_var(0, self.horizon, "makespan")
        for position, end in enumerate(self.end):
            if not instance.graph.outgoing[position]:
                model.add(self.makespan >= end)
        for device in range(instance.num_devices):
            load = 0
            for position in range(len(instance.graph)):
                on = self.on[instance.unit_of[position]][device]
                if not (isinstance(on, int) and on == 0):
                    load += self.ticks.count(instance.seconds[position][device]) * on
            model.add(self.makespan >= load)
        model.minimize(self.makespan)

    def _hint(self, hint: Timetable) -> None:
        starts, makespan = self._in_ticks(hint)
        for start, value in zip(self.start, starts, strict=True):
            self.model.add_hint(start, value)
        for unit, row in enumerate(self.on):
            held = hint.device[self.instance.units[unit][0]]
            for device, literal in enumerate(row):
                if not isinstance(literal, int) and literal.index >= 0:
                    self.model.add_hint(literal, device == held)
        of_unit = [hint.device[members[0]] for members in self.instance.units]
        for (one, other), apart in self.apart.items():
            self.model.add_hint(apart, of_unit[one] != of_unit[other])
        self.model.add_hint(self.makespan, makespan)

    def _in_ticks(self, hint: Timetable) -> tuple[list[int], int]:
        """The starts and the makespan in whole ticks, in the same order: a hint has to fit."""
        instance, ticks = self.instance, self.ticks
        place = {position: number for number, position in enumerate(instance.graph.order)}

        def seconds(position: int) -> float:
            return instance.seconds[position][hint.device[position]]

        order = sorted(place, key=lambda p: (hint.start[p], seconds(p) > 0, place[p]))
        end = [0] * len(order)
        starts = [0] * len(order)
        free = [0] * instance.num_devices
        for position in order:
            device = hint.device[position]
            arrivals = [free[device]]
            for source, size in instance.graph.incoming[position]:
                delay = instance.cluster.transfer_seconds(size, hint.device[source], device)
                arrivals.append(end[source] + ticks.count(delay))
            starts[position] = max(arrivals)
            end[position] = free[device] = starts[position] + ticks.count(seconds(position))
        return starts, max(end, default=0)

    def read(self, value: Callable[[Any], int]) -> Timetable:
        """The timetable in a solution."""
        device_of = []
        for unit in self.instance.unit_of:
            row = self.on[unit]
            device_of.append(next(d for d, on in enumerate(row) if value(on)))
        start = [value(start) * self.ticks.seconds for start in self.start]
        return Timetable(tuple(device_of), tuple(start), value(self.makespan) * self.ticks.seconds)


class Search:
    """A run of the solver; `stop` may be called from another thread.

    Args:
        instance: the graph on its cluster.
        hint: a placement to begin with.
        seconds: for how long to search.
        hear: called with the best makespan so far, or None, and the bound, both in seconds.
    """

    def __init__(
        self,
        instance: Instance,
        hint: Timetable | None,
        seconds: float,
        hear: Callable[[float | None, float], None],
    ) -> None:
        self.model, self.hear = _Model(instance, hint), hear
        self.solver = self.model.cp_model.CpSolver()
        self.solver.parameters.max_time_in_seconds = seconds
        self.solver.parameters.num_workers = max(FEWEST_WORKERS, os.cpu_count() or 1)
        self.solver.parameters.catch_sigint_signal = False
        self.best: int | None = None
        self.bound = 0.0
        self.is_stopped = False

    def run(self) -> Solution:
        """Searches until the time is up, all is proven or `stop` was called."""
        self.solver.best_bound_callback = self._on_bound
        if self.is_stopped:
            return Solution(None, 0.0, False)
        self.status = self.solver.solve(self.model.model, _callback(self.model, self._on_solution))
        return self._solution()

    def stop(self) -> None:
        """Ends the search; `run` returns with the best so far."""
        self.is_stopped = True
        self.solver.stop_search()

    def _on_solution(self, makespan: int) -> None:
        self.best = makespan
        self._tell()

    def _on_bound(self, bound: float) -> None:
        self.bound = bound
        self._tell()

    def _tell(self) -> None:
        unit = self.model.ticks.seconds
        self.hear(None if self.best is None else self.best * unit, self.bound * unit)

    def _solution(self) -> Solution:
        codes, solver = self.model.cp_model, self.solver
        proven = self.status in (codes.OPTIMAL, codes.INFEASIBLE)
        timetable = None
        if self.status in (codes.OPTIMAL, codes.FEASIBLE):
            timetable = self.model.read(solver.value)
        unit = self.model.ticks.seconds
        bound = max(0.0, solver.best_objective_bound) * unit if timetable or not proven else 0.0
        if not self.model.ticks.is_exact:
            # Each of the times along a path may have been rounded up by half a tick.
            steps = 2 * len(self.model.instance.graph)
            bound = max(0.0, bound - steps * unit / 2)
        return Solution(timetable, bound, proven)


def _callback(model: _Model, hear: Callable[[int], None]) -> Any:
    class Callback(model.cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            hear(int(self.objective_value))

    return Callback()
