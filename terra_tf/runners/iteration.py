"""The three ways in which one iteration runs: eager, traced, co-executed.

Each is begun before the user's code and then either ends with it or aborts with an exception.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable
from collections.abc import Sequence as Tensors
from typing import TYPE_CHECKING, Any

from terra_tf import native, tensorflow_internals
from terra_tf.errors import NewTraceError
from terra_tf.generation.generated import GeneratedGraph
from terra_tf.report.log import topic
from terra_tf.runners import in_flight
from terra_tf.runners.fallback import Replay
from terra_tf.runners.graph_runner import graph_runner
from terra_tf.runners.prefix import Prefix
from terra_tf.tracegraph.sequence import Sequence
from terra_tf.tracing.location import user_location
from terra_tf.tracing.recorder import Recorder
from terra_tf.tracing.trace import Node, Read, Trace

if TYPE_CHECKING:
    from terra_tf.runners.python_runner import PythonRunner


_log = topic("errors")


class EagerIteration:
    """Runs untouched."""

    mode = "eager"

    def begin(self) -> None:
        """Enters the mode; called right before the user's code."""
        native.core.enter_plain()

    def end(self) -> None:
        """Called after the user's code has returned."""
        native.core.leave()

    def abort(self) -> None:
        """Called when the user's code has raised."""
        native.core.leave()


class TracedIteration:
    """Runs eagerly and is recorded."""

    mode = "traced"

    def __init__(self, runner: PythonRunner, key: Hashable, arguments: Tensors[Any]):
        self._runner = runner
        self._key = key
        self._recorder = Recorder(arguments, loop=runner.loop)

    def begin(self) -> None:
        """Enters the mode; called right before the user's code."""
        self._recorder.start()

    def end(self) -> None:
        """Called after the user's code has returned."""
        trace = self._recorder.finish()
        native.core.leave()
        self._runner.learn(self._key, trace)

    def abort(self) -> None:
        """Called when the user's code has raised."""
        self._recorder.abandon()
        native.core.leave()


class CoExecutedIteration:
    """Runs as a skeleton while the GraphRunner computes; falls back to a traced one."""

    mode = "coexecuted"

    def __init__(
        self,
        runner: PythonRunner,
        key: Hashable,
        arguments: Tensors[Any],
        sequence: Sequence,
        graph: GeneratedGraph,
    ):
        self._runner = runner
        self._key = key
        self._arguments = arguments
        self._sequence = sequence
        self._graph = graph
        self._recorder: Recorder | None = None
        self._fell_back: str | None = None
        self._walked: tuple[int, ...] = ()
        self._since = tensorflow_internals.next_id()
        self.thread = threading.get_ident()
        self.walk = native.core.Walk(graph.program, self._on_fallback)
        self._replay = Replay(self.walk, graph)

    def begin(self) -> None:
        """Enters the mode; called right before the user's code."""
        native.core.enter_walk(self.walk)  # first: a walk that was entered is never left open
        self.walk.launch(graph_runner())

    def end(self) -> None:
        """Called after the user's code has returned."""
        try:
            as_recorded = self._fell_back is None and self.walk.end()
            trace = None if as_recorded else self._finish_recording()
        finally:
            native.core.leave()
        if as_recorded:
            self._arguments = ()
            in_flight.add(self)
            self._runner.completed(self._key, self._sequence, self.walk)
            return
        if self.walk.interrupted:
            in_flight.add(self)
        if trace is None:
            self._runner.aborted(self._fell_back, self._sequence)
        else:
            self._runner.learn(self._key, trace, self._sequence, self._walked)

    def _finish_recording(self) -> Trace | None:
        recorder, self._recorder = self._recorder, None
        return recorder.finish() if recorder is not None else None

    def abort(self) -> None:
        """Called when the user's code has raised."""
        if self.walk.closed:  # the exception came after the end
            in_flight.add(self)
            return
        try:
            if self.walk.interrupted:
                in_flight.add(self)
            elif self._fell_back is None and isinstance(sys.exc_info()[1], KeyboardInterrupt):
                self._note_fallback("exception")
                self._leave_for_later()
            elif self._fell_back is None:
                self.walk.fallback("exception")
        finally:
            if self._recorder is not None:
                self._recorder.abandon()
                self._recorder = None
            native.core.leave()
            self._runner.aborted(self._fell_back, self._sequence)

    def recover(self) -> None:
        """Replays what the graph has not made; after a Ctrl-C, called again, goes on."""
        failed = self.walk.failed
        try:
            self._replay.run()
        except Exception as error:
            in_flight.note_error(self.walk.id, error)
            _log.info("%s: replayed eagerly, raises %s", self._runner.name, type(error).__name__)
            self.walk.close()
            raise
        self.walk.close()
        if failed and self._graph.compilation is not None:  # and yet there is no error in eager
            self._runner.give_up_xla()

    def _leave_for_later(self) -> None:
        """Puts the replay off until somebody looks: Ctrl-C must not wait for it."""
        if not self.walk.launched:  # it came before the graph was there, and so before any op
            self.walk.leave_to_plain()
            self.walk.close()
            return
        self.walk.interrupt()
        in_flight.add(self)

    # --- fallback ---

    def _on_fallback(self, code: str, output: int) -> None:
        """Called by the native half at the op, read or end that no trace covers."""
        if self.walk.interrupted:
            in_flight.recover(-1)
            return
        alive = frozenset(self.walk.alive())
        expected = self._note_fallback(code)
        self.walk.leave_to_plain()
        try:
            self.recover()
        except KeyboardInterrupt:
            self._leave_for_later()
            raise
        if code not in ("exception", "other-thread"):
            self._record_on(code, output, alive)
            if self._runner.raises_on_new_trace:
                self._raise_new_trace(code, expected)
        self.walk.release()

    def _note_fallback(self, code: str) -> Node | None:
        """Notes where a fallback happens; returns what was expected there."""
        self._fell_back = code
        position = self.walk.cursor
        nodes = self._graph.sequence.trace.nodes
        expected = nodes[position] if position < len(nodes) else None
        self._runner.note_fallback(code, expected, user_location())
        return expected

    def _record_on(self, code: str, output: int, alive: frozenset[int]) -> None:
        """Goes on as a traced iteration that has begun with what was replayed."""
        prefix = Prefix(self.walk, self._graph)
        trace = prefix.trace
        recorder = Recorder(self._arguments, trace, self._runner.loop, self._since)
        for known, number in prefix.outputs.items():
            value = self.walk.value(known)
            if value is not None:
                recorder.adopt_output(value, number)
        for tensor, index in prefix.tensors:
            recorder.adopt_external(tensor, index)
        self._learn_from(code, output, prefix, alive)
        self._walked = prefix.ids
        self._recorder = recorder
        recorder.start()

    def _learn_from(self, code: str, output: int, prefix: Prefix, kept: frozenset[int]) -> None:
        """Adds to the trace what made the graph unfit, so that the next one fits."""
        trace = prefix.trace
        position = len(trace.nodes)
        if code in ("unexpected-read", "early-read"):
            number = prefix.outputs[output]
            known = trace.reads.get(number)
            if known is None or known.position > position:
                trace.reads[number] = Read(number, position, user_location())
        if code in ("unexpected-read", "early-read", "kept-tensor"):
            producers = self._graph.sequence.producers
            for cut in (self.walk.cursor, *self._graph.plan.boundaries):
                if cut <= self.walk.cursor:
                    held = frozenset(prefix.outputs[o] for o in kept if producers[o] < cut)
                    prefix.keep(cut, held)

    def _raise_new_trace(self, code: str, expected: Node | None) -> None:
        self._recorder.abandon()
        self._recorder = None
        native.core.enter_plain()
        was = f"{expected.op} at {expected.location}" if expected else "the end of the step"
        raise NewTraceError(
            f"{self._runner.name}: the step did something new ({code}). Expected: {was}. "
            f"Now at: {user_location()}."
        )
