"""Chooses the ops of a generated graph that XLA compiles, for `terra_tf.function(xla=True)`.

TensorFlow's own auto-clustering does the work: it joins marked neighbours into clusters, compiles
each when it first runs, and runs the plain ops of a cluster where XLA cannot compile it. What is
marked are pure ops that XLA has a kernel for, that cannot fail (XLA does not report a bad index as
eager does) and whose sizes are fixed (it would compile once for every size). Communication ops,
variables and everything else with an effect stay outside.

A cluster starts when all of its inputs are there. So an op that comes before a value for which
Python may wait must not share a cluster with one after it: that one may need a feed that Python
makes only after its wait. Hence the line of ops is cut into *spans*, wherever a value leaves the
graph and where a block begins or ends, and no cluster crosses from one into another.
"""

from __future__ import annotations

import collections

import tensorflow as tf

from terra_tf import tensorflow_internals

_WORTH_IT = 4  # ops of a span; compiling fewer gains nothing

MAY_FAIL = "may fail, which XLA would not report"
SIZES_VARY = "have sizes that vary"
TOO_FEW = "have no neighbours to be compiled with"


class Compilation:
    """What is marked for XLA in one graph.

    Attributes:
      marked: how many ops.
      spans: how many groups of ops that may become a cluster, or several.
      left: reason -> how many pure ops were left to TensorFlow's kernels.
      without_kernel: op type -> how many ops XLA has no kernel for.
    """

    def __init__(self) -> None:
        self.marked = 0
        self.spans = 0
        self.left: collections.Counter[str] = collections.Counter()
        self.without_kernel: collections.Counter[str] = collections.Counter()
        self._span: list[tf.Operation] = []

    def consider(self, operation: tf.Operation, fallible: bool) -> None:
        """Adds a pure op to the current span if XLA can and may compile it."""
        if operation.type not in tensorflow_internals.xla_kernels():
            self.without_kernel[operation.type] += 1
        elif fallible:
            self.left[MAY_FAIL] += 1
        elif not all(t.shape.is_fully_defined() for t in (*operation.inputs, *operation.outputs)):
            self.left[SIZES_VARY] += 1
        else:
            self._span.append(operation)

    def cut(self) -> None:
        """Ends the current span: a value leaves the graph here, or a block begins or ends."""
        if len(self._span) < _WORTH_IT:
            if self._span:
                self.left[TOO_FEW] += len(self._span)
        else:
            for operation in self._span:
                tensorflow_internals.mark_for_xla(operation, f"span{self.spans}")
            self.spans += 1
            self.marked += len(self._span)
        self._span = []

    def __str__(self) -> str:
        left = [f"{count} {reason}" for reason, count in self.left.most_common()]
        if self.without_kernel:
            kinds = ", ".join(f"{op} ({n})" for op, n in self.without_kernel.most_common(5))
            left.append(f"{self.without_kernel.total()} have no kernel of XLA's: {kinds}")
        others = "; ".join(left) or "none"
        return (
            f"{self.marked} ops marked for compilation, in {self.spans} groups between values that "
            f"Python may ask for; pure ops that stay with TensorFlow's kernels: {others}"
        )
