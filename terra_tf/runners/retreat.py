"""Retreat: a step stays eager where co-execution does not pay.

Two measurements decide. Where few of the last iterations ran through as co-executed, op sequences
do not repeat. Where co-executed iterations take longer than eager ones (both timed from one start
to the next, so that the program's own reads count), the graph does not help. Either way the step
stays eager for a while and then tries again, each time after twice as many iterations.
"""

from __future__ import annotations

import collections
import statistics
import time

_WINDOW = 24  # iterations from which a judgement is made
_ENOUGH = 0.4  # share of them that has to run through
_SLOWER = 1.05  # of eager's time, from where on co-execution does not pay
_FIRST_REST = 100
_LONGEST_REST = 6400
_EAGER_AT = (3, 16, 17)  # iterations that run eagerly to be timed


class Retreat:
    """Decides for each iteration of a step whether it may leave eager mode."""

    def __init__(self) -> None:
        self._count = -1  # of iterations since the last rest
        self._rest = 0
        self._next_rest = _FIRST_REST
        self._outcomes: collections.deque[bool] = collections.deque(maxlen=_WINDOW)
        self._eager_times: collections.deque[float] = collections.deque(maxlen=8)
        self._graph_times: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._started = 0.0
        self._timing: collections.deque[float] | None = None
        self.retreats = 0

    @property
    def resting(self) -> bool:
        """Whether the step stays eager at present."""
        return self._rest > 0

    def stay_eager(self) -> bool:
        """Called at each iteration's start: whether it should run eagerly."""
        now = time.perf_counter()
        if self._timing is not None:
            self._timing.append(now - self._started)
            self._timing = None
        self._started = now
        if self._rest > 0:
            self._rest -= 1
            self._timing = self._eager_times
            return True
        self._count += 1
        if self._does_not_pay():
            self._retreat()
            return True
        if self._count in _EAGER_AT:
            self._timing = self._eager_times
            return True
        return False

    def ended(self, coexecuted: bool) -> None:
        """Called at the end of an iteration that was traced or co-executed."""
        self._outcomes.append(coexecuted)
        if coexecuted:
            self._timing = self._graph_times

    def _does_not_pay(self) -> bool:
        if len(self._outcomes) < _WINDOW:
            return False
        if sum(self._outcomes) < _ENOUGH * _WINDOW:
            return True
        if len(self._graph_times) < _WINDOW // 2 or not self._eager_times:
            return False
        eager = statistics.median(self._eager_times)
        return statistics.median(self._graph_times) > _SLOWER * eager

    def _retreat(self) -> None:
        self.retreats += 1
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        self._count = _EAGER_AT[-1]  # a second try needs no more eager samples
        self._outcomes.clear()
        self._graph_times.clear()
