"""Blocks of a graph under construction that an iteration may skip.

A block that may be skipped is a conditional region made of raw Switch and Merge: its ops come after
the taken side of a Switch on a decision of Python's, so that all of them are dead where the block
is skipped, and nothing is computed or checked. Deadness must not leave the block by a control edge,
so whatever comes after it waits for a Merge of the block's end with the other side of the Switch.

No Switch is needed for tensors that enter a block, and no Merge for those that leave it: an op that
takes a tensor out of a block is only reached where that block was taken, since the PythonRunner
checks where each argument comes from, and where that differs, the value goes through a select.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import tensorflow as tf

from terra_tf import tensorflow_internals


class OpenBlock:
    """A block that may be skipped.

    Attributes:
      taken: the op that all ops of the block come after; dead where it is skipped.
      decision: whether it is taken; there in any case.
    """

    def __init__(self, graph: tf.Graph, decision: tf.Tensor):
        """Adds the Switch.

        Args:
          graph: to which ops are added.
          decision: a bool, true where the block is taken.
        """
        self._graph = graph
        self.decision = self._decision = decision
        skipped, taken = self._op("Switch", decision, decision, T=decision.dtype).outputs
        self._skipped = skipped
        self.taken = self._op("Identity", taken, T=taken.dtype)

    def _op(self, op: str, *inputs: tf.Tensor, **attrs: object) -> tf.Operation:
        return tensorflow_internals.create_graph_op(self._graph, op, inputs, attrs)

    @functools.cached_property
    def skipped(self) -> tf.Operation:
        """An op that is there only where the block is skipped."""
        return self._op("Identity", self._skipped, T=self._skipped.dtype)

    def end(self, operations: Iterable[tf.Operation]) -> tf.Operation:
        """An op that comes after some of the block's, and is there even where it is skipped."""
        with self._graph.control_dependencies(list(operations)):
            taken = self._op("Identity", self.taken.outputs[0], T=self._decision.dtype)
        return self.merge(taken.outputs[0], self._skipped).op

    def if_taken(self, tensor: tf.Tensor) -> tf.Tensor:
        """A tensor, dead where the block is skipped, even if it comes from before the block."""
        return self._op("Switch", tensor, self._decision, T=tensor.dtype).outputs[1]

    def unless_taken(self, tensor: tf.Tensor) -> tf.Tensor:
        """A tensor from before the block, dead where the block is taken."""
        return self._op("Switch", tensor, self._decision, T=tensor.dtype).outputs[0]

    def merge(self, taken: tf.Tensor, skipped: tf.Tensor) -> tf.Tensor:
        """Whichever of two tensors is there."""
        return self._op("Merge", taken, skipped, T=taken.dtype, N=2).outputs[0]
