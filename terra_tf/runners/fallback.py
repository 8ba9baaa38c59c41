"""Fallback: brings a co-executed iteration to the state that eager would have, exactly.

The graph is stopped. What stood behind an opened gate has been made and stays; everything after the
last passed boundary is executed again, eagerly and in program order, effects included, as far as
something needs it that the graph has not finished. Ops that ran in place are not repeated. Then
every placeholder that Python still holds becomes a plain tensor.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from terra_tf import tensorflow_internals
from terra_tf.generation.generated import GeneratedGraph
from terra_tf.tracing.effects import Effect
from terra_tf.tracing.trace import Kind, Node, Output, Outside


class Replay:
    """Executes the validated part of a walk eagerly."""

    def __init__(self, walk: Any, graph: GeneratedGraph):
        """Prepares a replay of `walk`, which went along `graph`."""
        self._walk = walk
        self._trace = graph.sequence.trace
        self._graph = graph
        self._positions: list[int] | None = None  # of what is to be executed

    def run(self) -> None:
        """Replays from the walk's base to its cursor.

        Ctrl-C may interrupt it anywhere; called again, it goes on where it was.

        Raises:
          tf.errors.OpError: what eager would have raised at an op; the message names its line.
        """
        if self._positions is None:
            self._walk.complete_boundaries()
            # Whoever does not wait for the replay has left the graph the time to get far.
            there = self._walk.take_finished(self._walk.interrupted)
            self._walk.stop_graph(self._taken_from_before_the_base())
            self._positions = self._needed(frozenset(there))
        for k in self._positions:
            if k >= self._walk.base:
                self._make(k)

    def _needed(self, there: frozenset[int]) -> list[int]:
        """What has effects, may fail or makes what Python holds, and what that takes; in order."""
        wanted = set(self._walk.alive()) - there
        fallible = self._graph.plan.fallible
        positions = []
        for k in reversed(self._walk.path):
            node = self._trace.nodes[k]
            if k < self._walk.base or node.misses or node.in_place:
                continue
            needed = node.effect in (Effect.ASSIGN, Effect.WRITE) or fallible[k]
            if needed or not wanted.isdisjoint(node.outputs):
                positions.append(k)
                wanted.update(s.index for s in node.inputs if isinstance(s, Output))
                wanted -= there
        return positions[::-1]

    def _taken_from_before_the_base(self) -> list[int]:
        """Outputs that nodes to be replayed take from nodes that are not."""
        nodes = [self._trace.nodes[k] for k in self._walk.path if k >= self._walk.base]
        first = nodes[0].first_output if nodes else 0
        # What runs in place is not repeated, and names what it was given in any trace.
        repeated = [node for node in nodes if not node.in_place]
        inputs = {s.index for node in repeated for s in node.inputs if isinstance(s, Output)}
        return sorted(index for index in inputs if index < first)

    def _make(self, k: int) -> None:
        node = self._trace.nodes[k]
        inputs = [self._input(source) for source in node.inputs]
        call, args = tensorflow_internals.raw_call(node.op, inputs, node.attrs, node.num_outputs)
        try:
            self._walk.make(k, call, args)
        except Exception as error:
            raise located_error(error, node) from None

    def _input(self, source: Output | Outside) -> tf.Tensor:
        if isinstance(source, Output):
            return self._walk.made_before(source.index)
        external = self._trace.externals[source.index]
        if external.kind is Kind.RESOURCE:
            return external.tensor
        feed = self._graph.slots.external_feeds.get(source.index)
        return external.tensor if feed is None else self._walk.feed(feed)


_HINT = (
    "It failed in a graph, so Python may have run on before it was told. With TERRA_SYNC=1 in the "
    "environment the error is raised at that line itself."
)


def located_error(error: Exception, node: Node) -> Exception:
    """The public exception for a failed op, naming the user's line."""
    public = tensorflow_internals.status_error(error)
    if not isinstance(public, tf.errors.OpError):
        return public
    lines = [
        f'  File "{file}", line {line}, in {name}' for file, line, name in node.location.frames
    ]
    where = "\n".join(
        ["", f"The op {node.op} was called at (innermost line first):", *lines, _HINT]
    )
    return type(public)(public.node_def, public.op, public.message + where)
