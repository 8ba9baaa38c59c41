"""What a co-executed iteration has done before it fell back, as the beginning of a trace.

The recorder goes on from there. Nodes that the iteration skipped are left out, so outputs and
externals are numbered anew, and a select becomes whatever the program has passed there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from terra_tf.generation.generated import GeneratedGraph
from terra_tf.tensorflow_internals import dtype_and_shape
from terra_tf.tracing.trace import (
    Arg,
    External,
    Items,
    Kind,
    Node,
    Output,
    OutputInfo,
    Outside,
    Python,
    Trace,
)


class Prefix:
    """The beginning of a trace.

    Attributes:
      trace: what was done.
      outputs: numbers of outputs, by those in the graph's sequence.
      tensors: (tensor, external) for outside tensors that the program may pass again.
      ids: of the sequence's nodes that its nodes are.
    """

    def __init__(self, walk: Any, graph: GeneratedGraph):
        """Makes the prefix of what `walk` has run along `graph`; its values are settled."""
        self._walk = walk
        self._graph = graph
        self._sequence = graph.sequence
        self._path: list[int] = walk.path
        self.trace = Trace()
        self.outputs: dict[int, int] = {}
        self.tensors: list[tuple[Any, int]] = []
        self.ids = tuple(self._sequence.ids[k] for k in self._path)
        self._externals: dict[int, int] = {}
        self._number_of: dict[int, int] = {}  # id of a tensor that is an output -> its number
        self._positions = {k: position for position, k in enumerate(self._path)}
        for k in self._path:
            self._add(self._sequence.trace.nodes[k])
        self._add_looks()

    def _add(self, node: Node) -> None:
        trace = self._sequence.trace
        first = len(self.trace.outputs)
        if node.in_place:  # it takes whatever it is given
            known = (s for s in node.inputs if isinstance(s, Output) and s.index in self.outputs)
            args, inputs = (), tuple(self._arg(source) for source in known)
        else:
            args = tuple(self._arg(arg) for arg in node.args)
            inputs = tuple(self._arg(source) for source in node.inputs)
        # A copy, because a recorder may still change the effect of a node.
        self.trace.nodes.append(
            dataclasses.replace(
                node,
                args=args,
                inputs=inputs,
                first_output=first,
                gradient_of=self._positions.get(node.gradient_of),
                count=1,
            )
        )
        for i, output in enumerate(node.outputs):
            self.outputs[output] = first + i
            value = self._walk.value(output)
            if value is None:
                self.trace.outputs.append(trace.outputs[output])
            else:
                self._number_of[id(value)] = first + i
                self.trace.outputs.append(OutputInfo(*dtype_and_shape(value)))

    def _arg(self, arg: Arg) -> Arg:
        if isinstance(arg, Items):
            return Items(tuple(self._arg(item) for item in arg.items))
        if isinstance(arg, Python):
            return arg
        if isinstance(arg, Output):
            return Output(self.outputs[arg.index])
        external = self._sequence.trace.externals[arg.index]
        if external.kind is Kind.SELECT:
            return self._selected(arg.index)
        if arg.index not in self._externals:
            self._externals[arg.index] = self._outside(arg.index, external)
        return Outside(self._externals[arg.index])

    def _fed(self, index: int) -> Any:
        feed = self._graph.slots.external_feeds.get(index)
        return None if feed is None else self._walk.feed(feed)

    def _selected(self, index: int) -> Output | Outside:
        tensor = self._fed(index)
        number = self._number_of.get(id(tensor))
        if number is not None:
            return Output(number)
        for known, place in self.tensors:
            if known is tensor:
                return Outside(place)
        added = self._new(External(Kind.TENSOR, *dtype_and_shape(tensor)))
        self.tensors.append((tensor, added))
        return Outside(added)

    def _outside(self, index: int, external: External) -> int:
        added = self._new(dataclasses.replace(external))
        value = self._fed(index)
        if external.kind is Kind.RESOURCE:
            self.tensors.append((external.tensor, added))
        elif value is not None:
            self.trace.externals[added].shape = dtype_and_shape(value)[1]
            if external.kind is Kind.TENSOR:
                self.tensors.append((value, added))
        return added

    def _new(self, external: External) -> int:
        self.trace.externals.append(external)
        return len(self.trace.externals) - 1

    # --- looks at values ---

    def _position(self, known: int) -> int:
        """The position in the prefix that one in the sequence comes to."""
        return sum(k < known for k in self._path)

    def _add_looks(self) -> None:
        for (output, known), read in self._sequence.reads.items():
            if output in self.outputs and known <= self._walk.cursor:
                number = self.outputs[output]
                place = dataclasses.replace(read, output=number, position=self._position(known))
                earlier = self.trace.reads.get(number)
                if earlier is None or place.position < earlier.position:
                    self.trace.reads[number] = place
        for known, held in self._sequence.kept.items():
            if known <= self._walk.cursor:
                self.keep(known, frozenset(self.outputs[o] for o in held if o in self.outputs))

    def keep(self, known: int, held: frozenset[int]) -> None:
        """Notes outputs that are kept at a position of the sequence."""
        position = self._position(known)
        self.trace.kept[position] = self.trace.kept.get(position, frozenset()) | held
