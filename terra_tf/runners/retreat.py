"""Retreat: a step stays eager where co-execution does not pay.

Two things are watched. Where none or few of the last iterations ran through as co-executed, op
sequences do not repeat. And now and then a *probe* runs a few iterations eagerly and a few
co-executed, timed from one start to the next so that the program's own reads count; where the graph
is slower, a longer probe has to confirm it, since machines are noisy. Either way the step then
rests: it stays eager at next to no cost, and tries again after twice as many iterations each time.
"""

from __future__ import annotations

import collections
import statistics
import time

_WINDOW = 24  # iterations from which the share of co-executed ones is judged
_ENOUGH = 0.4  # that share
_HOPELESS = 20  # iterations after which a first one should have run through
_HOPELESS_AGAIN = 4  # the same after a rest
_FIRST_PROBE = 16  # co-executed iterations before the first probe
_PROBES_APART = 400  # before the second one; doubles each time
_SLOWER = 1.05  # of eager's time, from where on co-execution does not pay
_FIRST_REST = 100
_LONGEST_REST = 6400

# (eager, timed) for each iteration of a probe. The first of each kind pays for the change of mode.
_PROBE = [(True, False)] + 3 * [(True, True)] + [(False, False)] + 6 * [(False, True)]


class Retreat:
    """Decides for each iteration of a step whether it may leave eager mode."""

    def __init__(self) -> None:
        self.retreats = 0
        self._rest = 0
        self._next_rest = _FIRST_REST
        self._outcomes: collections.deque[bool] = collections.deque(maxlen=_WINDOW)
        self._hopeless = _HOPELESS
        self._coexecuted = 0  # since the last probe
        self._probe_after = _FIRST_PROBE
        self._next_gap = _PROBES_APART
        self._plan: collections.deque[tuple[bool, bool]] = collections.deque()
        self._confirming = False
        self._probing = False
        self._times: dict[bool, list[float]] = {True: [], False: []}  # eager? -> seconds
        self._timing: list[float] | None = None  # where the iteration in progress is noted
        self._started = 0.0

    @property
    def resting(self) -> bool:
        """Whether the step stays eager at present."""
        return self._rest > 0

    def rests(self) -> bool:
        """Called first at each iteration's start: whether it runs eagerly without more ado."""
        if self._rest == 0:
            return False
        self._rest -= 1
        return True

    def stay_eager(self) -> bool:
        """Called at the start of each iteration that does not rest: whether it should be eager."""
        self._note_time()
        if self._sequences_do_not_repeat() or self._graph_is_slower():
            self._begin_rest()
            return True
        if not self._plan and self._coexecuted >= self._probe_after:
            self._begin_probe(1)
        if not self._plan:
            return False
        eager, timed = self._plan.popleft()
        self._timing = self._times[eager] if timed else None
        return eager

    def ended(self, coexecuted: bool) -> None:
        """Called at the end of an iteration that was traced or co-executed."""
        self._outcomes.append(coexecuted)
        self._coexecuted += coexecuted

    def rest_for(self, iterations: int) -> int:
        """Begins a rest of about so many iterations; returns how many these are."""
        self._rest = min(iterations, _LONGEST_REST)
        self._timing = None
        return self._rest

    def _note_time(self) -> None:
        now = time.perf_counter()
        if self._timing is not None:
            self._timing.append(now - self._started)
            self._timing = None
        self._started = now

    def _sequences_do_not_repeat(self) -> bool:
        if len(self._outcomes) >= self._hopeless and not any(self._outcomes):
            return True
        return len(self._outcomes) == _WINDOW and sum(self._outcomes) < _ENOUGH * _WINDOW

    def _begin_probe(self, length: int) -> None:
        self._plan.extend(length * _PROBE)
        self._probing = True
        self._times = {True: [], False: []}

    def _graph_is_slower(self) -> bool:
        if self._plan or not self._probing:
            return False
        self._probing = False
        self._coexecuted = 0
        eager, graph = (statistics.median(self._times[kind]) for kind in (True, False))
        if graph <= _SLOWER * eager:
            self._confirming = False
            self._probe_after, self._next_gap = self._next_gap, 2 * self._next_gap
            return False
        if self._confirming:
            return True
        self._confirming = True
        self._begin_probe(2)
        return False

    def _begin_rest(self) -> None:
        self.retreats += 1
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        self._hopeless = _HOPELESS_AGAIN
        self._outcomes.clear()
        self._plan.clear()
        self._probing = self._confirming = False
        self._coexecuted = 0
        self._probe_after = 2
