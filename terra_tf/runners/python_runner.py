"""The PythonRunner: runs the iterations of one step in the mode that fits.

An iteration is traced until its op sequence has been seen often enough, then co-executed; where it
leaves the known sequence it falls back and is traced from there on. `begin` chooses; the iteration
reports back through `learn`, `completed` and `aborted`.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
from collections.abc import Sequence as Tensors
from typing import Any

from terra_tf import native
from terra_tf.configuration import settings
from terra_tf.delegation.library import stand_in_for_libraries
from terra_tf.generation.generated import generate
from terra_tf.report import observers
from terra_tf.report.counters import Counters
from terra_tf.report.history import History, waited
from terra_tf.report.log import topic
from terra_tf.report.reasons import Fallback, FallbackLog
from terra_tf.runners import in_flight
from terra_tf.runners.allowance import Allowance, Doubt
from terra_tf.runners.graph_runner import stop as stop_graph_runner
from terra_tf.runners.iteration import CoExecutedIteration, EagerIteration, TracedIteration
from terra_tf.runners.retreat import Retreat
from terra_tf.tracegraph.graph import Key, TraceGraph
from terra_tf.tracegraph.sequence import Sequence
from terra_tf.tracing.handlers import Loop
from terra_tf.tracing.location import Location
from terra_tf.tracing.trace import Kind, Node, Trace

_fallback_log = topic("fallback")
_graphs_log = topic("graphs")
_retreat_log = topic("retreat")
Iteration = EagerIteration | TracedIteration | CoExecutedIteration
_EAGER = EagerIteration()


class PythonRunner:
    """All that is known of one step, and the choice of how its next iteration runs."""

    def __init__(
        self, name: str, *, max_graphs: int, exact: bool, on_new_trace: str, xla: bool = False
    ):
        """Makes the runner of a step; see `terra_tf.function` for the arguments."""
        self.name = name
        self.loop: Loop | None = None  # where the loop is, if the step is the body of one
        self.tracegraph = TraceGraph(max_graphs, settings.build_after)
        self.counters = Counters()
        self.fallbacks = FallbackLog()
        self.retreat = Retreat()
        self.history = History()
        self.doubt = Doubt()
        self.allowance = Allowance()
        self._current = threading.local()  # .iteration: the one that this thread is in
        self._exact = exact
        self.xla = xla  # asked for
        self._xla = xla
        self._on_new_trace = on_new_trace

    @property
    def exact(self) -> bool:
        """Whether graphs compute with eager's numerics."""
        return self._exact

    @property
    def compiles(self) -> bool:
        """Whether XLA compiles graphs now."""
        return self._xla

    @property
    def raises_on_new_trace(self) -> bool:
        """Whether a fallback has to raise now."""
        return self._on_new_trace == "error"

    def rests(self) -> bool:
        """Whether this iteration runs eagerly without more ado."""
        if not self.retreat.rests():
            return False
        if observers.active:
            observers.notify(self.name, "eager")
        return True

    def begin(self, key: Key, arguments: Tensors[Any]) -> None:
        """Begins an iteration of this thread; `end` or `abort` has to follow in any case.

        Args:
          key: what is known beforehand of how the step was called; picks the sequence to expect.
          arguments: tensors among the step's arguments.

        Raises:
          tf.errors.OpError: an op of an earlier iteration failed in its graph.
        """
        started = self._current.started = time.perf_counter()
        in_flight.settle_finished(settings.lead)
        built = self.counters.build_seconds
        iteration = self._choose(key, arguments)
        built = self.counters.build_seconds - built
        if iteration.mode != "coexecuted":
            in_flight.sync()
        if observers.active:
            observers.notify(self.name, iteration.mode)
        self._current.iteration = iteration
        walk = getattr(iteration, "walk", None)
        self._current.record = self.history.begin(iteration.mode, walk, started + built, built)
        iteration.begin()

    def end(self) -> None:
        """Ends this thread's iteration after the user's code has returned."""
        iteration = self._current.iteration
        iteration.end()
        self._current.iteration = None
        self.history.end(self._current.record)
        seconds = time.perf_counter() - self._current.started
        self.allowance.note(iteration is _EAGER, seconds)

    def abort(self) -> None:
        """Ends this thread's iteration, wherever an exception has come in between."""
        iteration = getattr(self._current, "iteration", None)
        self._current.iteration = None
        if iteration is not None:
            self.history.end(self._current.record, "raised")
        try:
            if iteration is not None:
                iteration.abort()
        finally:
            native.core.leave()

    def _choose(self, key: Key, arguments: Tensors[Any]) -> Iteration:
        if self._stays_eager() or native.core.executes_asynchronously():
            return _EAGER
        sequence = self.tracegraph.expected(key)
        if sequence is None or not self.tracegraph.ready(sequence) or _shared(sequence):
            if self._affords(self.allowance.trace_cost):
                return TracedIteration(self, key, arguments)
            return _EAGER
        if self.tracegraph.outdated(sequence):
            build_cost = self.allowance.build_cost(sequence)
            if self._affords(build_cost, or_rest=sequence.graph is None):
                self._generate(sequence)
        if sequence.graph is None or not self._affords(0.0):
            return _EAGER
        graph = sequence.graph
        return CoExecutedIteration(self, key, arguments, sequence, graph)

    def _stays_eager(self) -> bool:
        before = self.retreat.retreats
        stays = self.retreat.stay_eager()
        if self.retreat.retreats > before:
            _retreat_log.info("%s: stays eager for a while: co-execution did not pay", self.name)
        return stays

    def _affords(self, cost: float, *, or_rest: bool = True) -> bool:
        """Whether the step may spend so many seconds now; else it rests until it may."""
        if not self.doubt.holds:
            return True
        wait = self.allowance.iterations_until(cost)
        if wait and or_rest and self.allowance.measured:
            self.allowance.rested(self.retreat.rest_for(wait))
        return not wait

    def _generate(self, sequence: Sequence) -> None:
        stand_in_for_libraries()
        graph = sequence.graph = generate(sequence, self.name, self._exact, self._xla)
        sequence.builds += 1
        sequence.missed = 0
        self.counters.graphs += 1
        self.counters.build_seconds += graph.seconds
        _graphs_log.info(
            "%s: graph %d, of %d nodes in %d blocks, built in %.2f s",
            self.name,
            self.counters.graphs,
            len(graph.sequence.trace.nodes),
            len(graph.plan.blocks),
            graph.seconds,
        )

    # --- reports of iterations ---

    def completed(self, key: Key, sequence: Sequence, walk: Any) -> None:
        """An iteration ran through as co-executed."""
        self.counters.coexecuted += 1
        self._count_walk(walk)
        self.counters.ops_per_iteration = len(walk.path)
        sequence.completed += 1
        self.tracegraph.use(key, sequence)
        self.retreat.ended(True)

    def learn(
        self,
        key: Key,
        trace: Trace,
        left: Sequence | None = None,
        walked: tuple[int, ...] = (),
    ) -> None:
        """An iteration was traced, from its start or from a fallback on.

        Args:
          key: how it was called.
          trace: what it did.
          left: the sequence along which it was co-executed before it fell back.
          walked: the nodes of that sequence which it had run by then.
        """
        if left is None:
            self.counters.traced += 1
        else:
            self.counters.fallen_back += 1
            if len(walked) < len(trace.nodes):
                self.fallbacks.complete_last(trace.nodes[len(walked)])
        self.counters.ops_per_iteration = len(trace.nodes)
        sequence = self.tracegraph.add(key, trace, left, walked)
        self.doubt.judge(trace, sequence)
        self.retreat.ended(False)

    def aborted(self, code: str | None, sequence: Sequence) -> None:
        """An exception of the user's program ended a co-executed iteration."""
        self.counters.fallen_back += 1
        self.retreat.ended(False)

    def give_up_xla(self) -> None:
        """Has all graphs generated anew without XLA: one with it failed where eager does not."""
        self._xla = False
        for sequence in self.tracegraph.sequences:
            sequence.graph = None

    def note_fallback(self, code: str, expected: Node | None, actual: Location) -> None:
        """A fallback happens now."""
        self.counters.fallback_reasons[code] = self.counters.fallback_reasons.get(code, 0) + 1
        record = getattr(self._current, "record", None)
        if record is not None:  # else another thread has caused it
            record.outcome = "fell back"
        fallback = Fallback(code, expected, actual)
        if not self.fallbacks.add(fallback):
            return
        _fallback_log.info("%s: %s", self.name, fallback)
        if self._on_new_trace == "warn":
            warnings.warn(f"{self.name}: {fallback}", RuntimeWarning, stacklevel=2)

    def _count_walk(self, walk: Any) -> None:
        self.counters.feeds += walk.feeds_sent
        self.counters.fetches += walk.fetches_read
        self.counters.delegated_calls += walk.delegated_calls
        self.counters.python_wait_seconds += walk.python_wait_seconds
        self.counters.graph_wait_seconds += walk.graph_wait_seconds


def _shared(sequence: Sequence) -> bool:
    """Whether another thread uses a variable of the sequence while the step runs.

    It would have to see each write of the step where eager makes it, so such steps stay eager.
    """
    if not native.core.any_shared():
        return False
    externals = sequence.trace.externals
    return any(x.kind is Kind.RESOURCE and native.core.is_shared(x.tensor) for x in externals)


_initialised = False
_owner = 0  # the process that has initialised


def initialise() -> None:
    """Readies the native core; before the first iteration of the process."""
    global _initialised, _owner
    if not _initialised:
        native.initialise(in_flight.recover)
        if native.core is None:
            return
        native.core.tell_waits(waited)
        atexit.register(_shut_down)
        # A child inherits whatever locks a running graph holds, so none may run just then.
        os.register_at_fork(before=in_flight.end_all, after_in_child=_in_forked_child)
        _initialised, _owner = True, os.getpid()


def _shut_down() -> None:
    """Lets what is on its way finish, so that no graph runs into the interpreter's end."""
    if os.getpid() != _owner:  # a forked child has no graphs of its own
        return
    in_flight.shut_down()
    stop_graph_runner()


def _in_forked_child() -> None:
    """A forked child has none of its parent's threads: it stays eager."""
    settings.disabled = True
    native.core.forget_all()
    in_flight.forget_all()
