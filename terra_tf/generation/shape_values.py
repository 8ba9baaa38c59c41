"""Finds what Python asks of shapes: values that need no graph, since the shapes are known before.

`tf.shape(x)[0]` that Python reads, or that an op in place takes, is known as soon as the op that
makes `x` was matched. Such nodes are answered by the native half at once (native/shape_values.cc);
the graph computes them as well, for its own use, and hands them out where a shape turns out to
depend on values after all.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from terra_tf.tracegraph.sequence import Sequence
from terra_tf.tracing.effects import Effect, makes_shape_of_values
from terra_tf.tracing.trace import Kind, Node, Output, Outside, Trace


class ShapeValue(enum.IntEnum):
    """How a node's outputs follow from shapes; numbers as in native/program.h."""

    NONE = 0
    SHAPE = 1
    SIZE = 2
    RANK = 3
    COMPUTED = 4


_OF_SHAPES = {
    "Shape": ShapeValue.SHAPE,
    "ShapeN": ShapeValue.SHAPE,
    "Size": ShapeValue.SIZE,
    "Rank": ShapeValue.RANK,
}
_COMPUTED_NAMES = """
Add AddV2 BroadcastGradientArgs Cast ConcatV2 Equal ExpandDims FloorDiv FloorMod GatherV2 Greater
GreaterEqual Identity Less LessEqual LogicalAnd LogicalNot LogicalOr Max Maximum Min Minimum Mul
Neg NotEqual Pack Prod RealDiv Reshape Slice Squeeze StridedSlice Sub Sum Unpack
"""
_COMPUTED = frozenset(_COMPUTED_NAMES.split())


def shape_values(sequence: Sequence, uncertain: set[int]) -> dict[int, ShapeValue]:
    """Nodes to be answered without the graph, and how.

    Args:
      sequence: a snapshot.
      uncertain: outputs whose shape depends on values.
    """
    found = _Finder(sequence, uncertain)
    for k, node in enumerate(sequence.trace.nodes):
        found.visit(k, node)
    return found.asked_for()


def sized_by_values(sequence: Sequence) -> set[int]:
    """Outputs whose shape depends on values that the graph computes."""
    trace = sequence.trace
    found: set[int] = set()
    for node in trace.nodes:
        taken = {s.index for s in node.inputs if isinstance(s, Output)}
        for source in node.inputs:
            if isinstance(source, Outside):
                taken |= trace.externals[source.index].alternatives
        if makes_shape_of_values(node.op) or not found.isdisjoint(taken):
            found.update(node.outputs)
    return found


def follow_from_shapes(trace: Trace) -> set[int]:
    """Outputs of a trace whose values follow from shapes alone, as far as ops tell."""
    found: set[int] = set()
    for node in trace.nodes:
        outputs = [source.index for source in node.inputs if isinstance(source, Output)]
        computed = node.op in _COMPUTED and outputs and found.issuperset(outputs)
        if node.op in _OF_SHAPES or computed:
            found.update(node.outputs)
    return found


class _Finder:
    def __init__(self, sequence: Sequence, uncertain: set[int]):
        self._sequence = sequence
        self._nodes = sequence.trace.nodes
        self._uncertain = uncertain
        self._kinds: dict[int, ShapeValue] = {}  # node -> how it could be answered

    def visit(self, k: int, node: Node) -> None:
        if node.in_place or node.misses or node.effect is not Effect.PURE:
            return
        if node.op in _OF_SHAPES:
            if all(map(self._has_known_shape, node.inputs)):
                self._kinds[k] = _OF_SHAPES[node.op]
        elif (
            node.op in _COMPUTED
            and any(map(self._follows, node.inputs))
            and all(self._follows(x) or self._is_given(x) for x in node.inputs)
        ):
            self._kinds[k] = ShapeValue.COMPUTED

    def _has_known_shape(self, source: Output | Outside) -> bool:
        if isinstance(source, Outside):
            return True
        in_place = self._nodes[self._sequence.producers[source.index]].in_place
        return in_place or source.index not in self._uncertain

    def _follows(self, source: Output | Outside) -> bool:
        return isinstance(source, Output) and (
            self._sequence.producers[source.index] in self._kinds
        )

    def _is_given(self, source: Output | Outside) -> bool:
        """Whether Python has the value by itself."""
        if isinstance(source, Output):
            return False
        return self._sequence.trace.externals[source.index].kind in (Kind.SMALL, Kind.NUMBER)

    def asked_for(self) -> dict[int, ShapeValue]:
        """Those of the nodes that Python looks at, and what these and their shapes depend on."""
        looked_at = {output for output, _ in self._sequence.reads}
        for node in self._nodes:
            if node.in_place or self._is_sized_by_inputs(node):
                looked_at.update(x.index for x in node.inputs if isinstance(x, Output))
        shapes: set[int] = set()  # outputs whose shape is asked for
        wanted = {self._sequence.producers[output] for output in looked_at}
        for k in range(len(self._nodes) - 1, -1, -1):
            node = self._nodes[k]
            if k in wanted and k in self._kinds:
                if self._kinds[k] is ShapeValue.COMPUTED:
                    wanted.update(self._makers(filter(self._follows, node.inputs)))
                else:
                    shapes.update(self._outputs(node.inputs))
            elif not shapes.isdisjoint(node.outputs):
                wanted.update(self._makers(filter(self._follows, node.inputs)))
                shapes.update(self._outputs(node.inputs))
        return {k: kind for k, kind in self._kinds.items() if k in wanted}

    def _is_sized_by_inputs(self, node: Node) -> bool:
        """Whether sizes of its outputs may be given by values, as those of a reshape are."""
        return any(self._sequence.trace.outputs[o].shape is None for o in node.outputs) or any(
            None in self._sequence.trace.outputs[o].shape for o in node.outputs
        )

    def _makers(self, sources: Iterable[Output]) -> list[int]:
        return [self._sequence.producers[source.index] for source in sources]

    def _outputs(self, sources: Iterable[Output | Outside]) -> set[int]:
        """The outputs that some sources are, or may be."""
        found: set[int] = set()
        for source in sources:
            if isinstance(source, Output):
                found.add(source.index)
            else:
                found |= self._sequence.trace.externals[source.index].alternatives
        return found
