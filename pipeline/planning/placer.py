"""`place`: the best placement of a graph on a cluster that can be found in the time given."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence

from pipeline.errors import InfeasibleError, PlanningError
from pipeline.planning.checks import number
from pipeline.planning.cluster import Cluster
from pipeline.planning.graph import OpGraph
from pipeline.planning.heft import Timetable, heft
from pipeline.planning.instance import Instance
from pipeline.planning.local_search import improve
from pipeline.planning.placement import Placement
from pipeline.planning.replay import lines_of, replay
from pipeline.planning.solver_process import Report, solve

FIRST_SHARE, FIRST_SECONDS = 0.1, 4.0
"""Of the time: for the solver's first attempt."""
ANNEALING_SHARE, ANNEALING_SECONDS = 0.3, 20.0
"""Of the time: for annealing after it."""
CLOSE = 1e-7
"""Relative: a makespan so close to the bound counts as optimal."""


def place(
    graph: OpGraph,
    cluster: Cluster,
    seconds: float = 60.0,
    *,
    progress: bool | Report | None = None,
) -> Placement:
    """Finds the placement with the least makespan, as far as the time allows.

    A list schedule (HEFT) comes first; annealing and CP-SAT improve on it, and CP-SAT proves how
    far from the best it can be at most. Ctrl-C ends the search early and keeps the best so far.
    What is returned has been played through by an independent simulation.

    Args:
        graph: the operations.
        cluster: the devices.
        seconds: for how long to search at most.
        progress: whether to show the search on stderr; None: if that is a terminal. Or a function
            that is called with the seconds so far, the best makespan and the bound.

    Returns:
        The placement, with its bound and gap; never slower than the list schedule.

    Raises:
        InfeasibleError: if an operation fits nowhere, or no placement exists, or (the message says
            so) none was found in the time given.
        PlanningError: if an argument is none.
    """
    if not isinstance(graph, OpGraph):
        raise PlanningError(f"graph must be an OpGraph, not {type(graph).__name__}", "no-graph")
    if not isinstance(cluster, Cluster):
        raise PlanningError(f"cluster must be a Cluster, not {type(cluster).__name__}", "type")
    limit = number(seconds, "place", "seconds", PlanningError, positive=True)
    instance = Instance.of(graph, cluster)
    search = _Search(instance, limit, _reporter(progress))
    try:
        search.run()
    except KeyboardInterrupt:
        search.is_interrupted = True
    found = _best(instance, [search.first, search.best])
    if found is None:
        raise _none_found(search)
    placement = _placement(search, found)
    placement.check()
    return placement


class _Search:
    """The phases of the search, and the best that they have found so far.

    Small graphs are proven in the first seconds; for large ones the solver needs a better start
    than the list schedule, which annealing finds in less time than the solver would.
    """

    def __init__(self, instance: Instance, limit: float, report: Report | None) -> None:
        self.instance, self.limit, self.report = instance, limit, report
        self.began = time.monotonic()
        self.first: Timetable | None = None
        self.best: Timetable | None = None
        self.bound = 0.0
        self.is_proven = self.is_interrupted = False

    @property
    def passed(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> None:
        """Searches until the time is up or nothing better can be found."""
        self.bound = simple_bound(self.instance)
        self.first = self.best = heft(self.instance)
        if self.first is not None and self.first.makespan <= self.bound * (1 + CLOSE):
            self.is_proven = True
            return
        self._solve(min(self.limit * FIRST_SHARE, FIRST_SECONDS) if self.best else self.limit)
        if self.is_done:
            return
        annealing = min(self.limit * ANNEALING_SHARE, ANNEALING_SECONDS)
        improve(self.instance, self.best, annealing, self._hear)
        self._solve(self.limit - self.passed)

    @property
    def is_done(self) -> bool:
        return (
            self.is_proven or self.is_interrupted or self.best is None or self.passed >= self.limit
        )

    def _hear(self, timetable: Timetable) -> None:
        self.best = timetable
        if self.report is not None:
            self.report(self.passed, timetable.makespan, self.bound)

    def _solve(self, seconds: float) -> None:
        shift = self.passed

        def report(seconds: float, makespan: float | None, bound: float) -> None:
            if self.report is not None:
                best = self.best.makespan if self.best else math.inf
                shown = min(best, math.inf if makespan is None else makespan)
                shown_bound = max(self.bound, bound)
                self.report(shift + seconds, shown if math.isfinite(shown) else None, shown_bound)

        solution, interrupted = solve(self.instance, self.best, max(0.01, seconds), report)
        self.is_interrupted = interrupted and not solution.is_proven
        self.bound = max(self.bound, solution.bound)
        self.is_proven = solution.is_proven
        found = solution.timetable
        if found is not None and (self.best is None or found.makespan < self.best.makespan):
            self.best = found


def simple_bound(instance: Instance) -> float:
    """Seconds that no placement is below: the longest chain, the work over all devices."""
    graph = instance.graph
    path = [0.0] * len(graph)
    for position in graph.order:
        before = max((path[source] for source, _ in graph.incoming[position]), default=0.0)
        path[position] = before + min(instance.seconds[position])
    # What an operation takes on the device that is best at it, spread evenly.
    work = math.fsum(min(times) for times in instance.seconds) / instance.num_devices
    speeds = {device.speed for device in instance.cluster.devices}
    if len(speeds) > 1 and not any(node.seconds_on for node in graph.nodes):
        total = math.fsum(device.speed for device in instance.cluster.devices)
        work = max(work, graph.total_seconds / total)
    return max(max(path, default=0.0), work)


def _best(
    instance: Instance, candidates: Sequence[Timetable | None]
) -> tuple[dict[str, int], dict[str, float], float] | None:
    """The fastest of the candidates once played through: devices, starts, makespan."""
    best = None
    names = [node.name for node in instance.graph.nodes]
    for candidate in candidates:
        if candidate is None:
            continue
        device_of = dict(zip(names, candidate.device, strict=True))
        start = dict(zip(names, candidate.start, strict=True))
        lines = lines_of(instance.graph, instance.cluster, device_of, start)
        times = replay(instance.graph, instance.cluster, lines)
        makespan = max((end for _, end in times.values()), default=0.0)
        if best is None or makespan < best[2]:
            best = (device_of, {name: times[name][0] for name in names}, makespan)
    return best


def _placement(search: _Search, found: tuple[dict[str, int], dict[str, float], float]) -> Placement:
    device_of, start, makespan = found
    bound = min(makespan, search.bound)
    is_optimal = search.is_proven or makespan - bound <= CLOSE * makespan
    if is_optimal:
        bound = makespan  # what is left is rounding
    return Placement(
        search.instance.graph,
        search.instance.cluster,
        device_of,
        start,
        makespan,
        bound,
        makespan if search.first is None else search.first.makespan,
        search.instance.serial_seconds(),
        "optimal" if is_optimal else "interrupted" if search.is_interrupted else "feasible",
        search.passed,
    )


def _none_found(search: _Search) -> InfeasibleError:
    if search.is_proven:
        return InfeasibleError(
            "no placement exists: each node and group fits somewhere, but not all of them at once; "
            "give the devices more memory or loosen the groups",
            "infeasible",
            "the whole graph",
        )
    return InfeasibleError(
        f"no placement was found in {search.passed:.1f} s, nor was it proven that there is none; "
        "allow more seconds or give the devices more memory",
        "not-found",
        "the whole graph",
    )


def _reporter(progress: bool | Report | None) -> Report | None:
    if callable(progress):
        return progress
    if progress or (progress is None and sys.stderr.isatty()):
        return _Printer()
    return None


class _Printer:
    """Prints the search on stderr, at most twice a second."""

    def __init__(self) -> None:
        self.last = -math.inf

    def __call__(self, seconds: float, makespan: float | None, bound: float) -> None:
        if seconds < self.last + 0.5:
            return
        self.last = seconds
        if makespan is None:
            text = f"{seconds:6.1f} s  no placement yet, bound {bound:.6g} s"
        else:
            gap = (makespan - bound) / makespan if makespan else 0.0
            text = (
                f"{seconds:6.1f} s  makespan {makespan:.6g} s, bound {bound:.6g} s, gap {gap:.2%}"
            )
        print(text, file=sys.stderr, flush=True)
