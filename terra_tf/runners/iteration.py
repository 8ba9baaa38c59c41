"""The three ways in which one iteration runs: eager, traced, co-executed.

Each is begun before the user's code and then either ends with it or aborts with an exception.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Hashable
from collections.abc import Sequence as Tensors
from typing import TYPE_CHECKING, Any

from terra_tf import native
from terra_tf.errors import NewTraceError
from terra_tf.generation.generated import GeneratedGraph
from terra_tf.runners import in_flight
from terra_tf.runners.fallback import Replay
from terra_tf.runners.graph_runner import graph_runner
from terra_tf.tracegraph.sequence import Sequence
from terra_tf.tracing.location import user_location
from terra_tf.tracing.recorder import Recorder
from terra_tf.tracing.trace import Items, Kind, Outside, Read, Trace

if TYPE_CHECKING:
    from terra_tf.runners.python_runner import PythonRunner


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
        self.thread = threading.get_ident()
        self.walk = native.core.Walk(graph.program, self._on_fallback)

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
        if trace is None:
            self._runner.aborted(self._fell_back, self._sequence)
        else:
            self._runner.learn(self._key, trace, fallen_back=(self._fell_back, self._sequence))

    def _finish_recording(self) -> Trace | None:
        recorder, self._recorder = self._recorder, None
        return recorder.finish() if recorder is not None else None

    def abort(self) -> None:
        """Called when the user's code has raised."""
        if self.walk.closed:  # the exception came after the end
            in_flight.add(self)
            return
        try:
            if self._fell_back is None:
                self.walk.fallback("exception")
        finally:
            if self._recorder is not None:
                self._recorder.abandon()
                self._recorder = None
            native.core.leave()
            self._runner.aborted(self._fell_back, self._sequence)

    def recover(self) -> None:
        """Replays an iteration whose graph failed after Python had left it."""
        self._replay()

    # --- fallback ---

    def _on_fallback(self, code: str, output: int) -> None:
        """Called by the native half at the op, read or end that no trace covers."""
        self._fell_back = code
        alive = frozenset(self.walk.alive())
        position = self.walk.cursor
        expected = self._sequence.trace.nodes[position : position + 1]
        self._runner.note_fallback(code, expected[0] if expected else None, user_location())
        self.walk.leave_to_plain()
        try:
            self._replay()
        finally:
            self.walk.close()
        if code not in ("exception", "other-thread"):
            self._record_on(code, output, alive)
            if self._runner.raises_on_new_trace:
                self._raise_new_trace(code, expected)
        self.walk.release()

    def _replay(self) -> None:
        Replay(self.walk, self._sequence, self._graph).run()

    def _record_on(self, code: str, output: int, alive: frozenset[int]) -> None:
        """Goes on as a traced iteration that has begun with what was replayed."""
        prefix = self._prefix()
        recorder = Recorder(self._arguments, prefix, self._runner.loop)
        for number in range(len(prefix.outputs)):
            value = self.walk.value(number)
            if value is not None:
                recorder.adopt_output(value, number)
        for index, external in enumerate(prefix.externals):
            feed = self._graph.slots.external_feeds.get(index)
            if external.kind is Kind.RESOURCE:
                recorder.adopt_external(external.tensor, index)
            elif external.kind is Kind.TENSOR and feed is not None:
                value = self.walk.feed(feed)
                if value is not None:
                    recorder.adopt_external(value, index)
        self._learn_from(code, output, prefix, alive)
        self._recorder = recorder
        recorder.start()

    def _prefix(self) -> Trace:
        trace, position = self._sequence.trace, self.walk.cursor
        nodes = trace.nodes[:position]
        outputs = sum(node.num_outputs for node in nodes)
        externals = 1 + max(
            (source.index for node in nodes for source in _outside(node.args)), default=-1
        )
        return Trace(
            # Copies, because a recorder may still change the effect of a node.
            nodes=[dataclasses.replace(node) for node in nodes],
            outputs=trace.outputs[:outputs],
            externals=[dataclasses.replace(x) for x in trace.externals[:externals]],
            reads={o: r for o, r in self._sequence.reads.items() if r.position <= position},
            kept={p: kept for p, kept in self._sequence.kept.items() if p <= position},
        )

    def _learn_from(self, code: str, output: int, prefix: Trace, kept: frozenset[int]) -> None:
        """Adds to the trace what made the graph unfit, so that the next one fits."""
        position = self.walk.cursor
        if code in ("unexpected-read", "early-read"):
            known = prefix.reads.get(output)
            if known is None or known.position > position:
                prefix.reads[output] = Read(output, position, user_location())
        if code in ("unexpected-read", "early-read", "kept-tensor"):
            prefix.kept[position] = prefix.kept.get(position, frozenset()) | kept
            for cut in self._graph.plan.boundaries:
                if cut <= position:
                    before = frozenset(o for o in kept if self._sequence.producers[o] < cut)
                    prefix.kept[cut] = prefix.kept.get(cut, frozenset()) | before

    def _raise_new_trace(self, code: str, expected: list[Any]) -> None:
        self._recorder.abandon()
        self._recorder = None
        native.core.enter_plain()
        was = f"{expected[0].op} at {expected[0].location}" if expected else "the end of the step"
        raise NewTraceError(
            f"{self._runner.name}: the step did something new ({code}). Expected: {was}. "
            f"Now at: {user_location()}."
        )


def _outside(args: tuple[Any, ...]) -> list[Outside]:
    found = []
    for arg in args:
        if isinstance(arg, Items):
            found += _outside(arg.items)
        elif isinstance(arg, Outside):
            found.append(arg)
    return found
