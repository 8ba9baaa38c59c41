"""Merges one trace into a Sequence.

First the trace's nodes are aligned with the merged ones (`alignment`), and those that are new are
added between them. Then each pair of a merged node and the node of the trace that it stands for is
united: an argument that came from different places becomes a select, a number that differed is
fed from now on, a size that differed is left open.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from terra_tf.tracegraph.alignment import Alignment, align
from terra_tf.tracing.effects import Effect
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
    Read,
    Shape,
    Trace,
)

if TYPE_CHECKING:
    from terra_tf.tracegraph.sequence import Sequence as MergedSequence

_MOST_VARIANTS = 4  # of a node that differ in an attribute, before it runs in place


def same_value(a: Any, b: Any) -> bool:
    """Whether two Python values are the same to an op; floats by bits, lists item by item."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    try:
        return bool(a == b)
    except (ValueError, TypeError):
        return False


def united(a: Shape, b: Shape) -> Shape:
    """The shape that both have, with None where they differ."""
    if a is None or b is None or len(a) != len(b):
        return None
    return tuple(x if x == y else None for x, y in zip(a, b, strict=True))


class Comparison:
    """Whether nodes of a merged trace can stand for nodes of another one."""

    def __init__(self, merged: Trace, trace: Trace):
        self._merged = merged
        self._trace = trace
        self._variants = collections.Counter(
            node.identity.exact for node in merged.nodes if node.identity is not None
        )

    def shareable(self, a: Node, b: Node) -> bool:
        """Whether merged node `a` can stand for `b`, once they are united."""
        alike = (
            a.op == b.op
            and a.call == b.call
            and a.misses == b.misses
            and a.fails == b.fails
            and a.num_outputs == b.num_outputs
            and a.result == b.result
            and a.groups == b.groups
        )
        if not alike or a.misses or (a.in_place and b.in_place):
            return alike
        if a.in_place or b.in_place:
            return True
        if a.effect != b.effect or len(a.args) != len(b.args) or not self._same_ranks(a, b):
            return False
        # What has ever new attributes is united as an op in place, which takes any.
        variants = 0 if a.identity is None else self._variants[a.identity.exact]
        any_value = variants >= _MOST_VARIANTS
        return all(self._like(x, y, any_value) for x, y in zip(a.args, b.args, strict=True))

    def _same_ranks(self, a: Node, b: Node) -> bool:
        return all(
            _rank(self._merged.outputs[x].shape) == _rank(self._trace.outputs[y].shape)
            for x, y in zip(a.outputs, b.outputs, strict=True)
        )

    def _like(self, a: Arg, b: Arg, any_value: bool = False) -> bool:
        if isinstance(a, Python) or isinstance(b, Python):
            return type(a) is type(b) and (any_value or same_value(a.value, b.value))
        if isinstance(a, Items) or isinstance(b, Items):
            # Of different length, they are united as an op in place.
            return type(a) is type(b) and all(map(self._like, a.items, b.items))
        return self._like_source(_facts(self._merged, a), _facts(self._trace, b))

    def _like_source(self, a: External | OutputInfo, b: External | OutputInfo) -> bool:
        if a.dtype != b.dtype or _rank(a.shape) != _rank(b.shape):
            return False
        kinds = [x.kind if isinstance(x, External) else Kind.TENSOR for x in (a, b)]
        if Kind.RESOURCE in kinds:
            return kinds[0] is kinds[1] and a.tensor is b.tensor
        if Kind.NUMBER in kinds:
            return kinds[0] is kinds[1] and _same_kind(a.value, b.value)
        return True


def _facts(trace: Trace, source: Output | Outside) -> External | OutputInfo:
    if isinstance(source, Output):
        return trace.outputs[source.index]
    return trace.externals[source.index]


def _rank(shape: Shape) -> int | None:
    return None if shape is None else len(shape)


def _same_kind(a: Any, b: Any) -> bool:
    """Whether numbers are passed in the same form, whatever their values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same_kind, a, b))
    return True


class Merger:
    """One merge; see the module's text.

    Attributes:
      added: after `run`, for each node of the sequence, whether it is new; empty if none is.
      branched: whether the trace went a way that no earlier one went.
    """

    def __init__(self, sequence: MergedSequence, trace: Trace, walked: tuple[int, ...]):
        """Prepares the merge of `trace` into `sequence`; see `Sequence.merge`."""
        self._sequence = sequence
        self._merged = sequence.trace
        self._trace = trace
        self._walked = walked
        self._externals: dict[int, int] = {}  # of the trace -> of the sequence
        self._taken: set[int] = set()  # externals of the sequence that one of the trace's is
        self._selects: dict[tuple[Output | Outside, Output | Outside], Outside] = {}
        self._selected: dict[int, Output | Outside] = {}  # select -> what the trace passes
        self._resources = {
            id(x.tensor): index
            for index, x in enumerate(self._merged.externals)
            if x.kind is Kind.RESOURCE
        }
        self._news = False
        self.added: list[bool] = []
        self.branched = False

    def run(self) -> bool:
        """Merges; returns whether the trace showed anything new."""
        sequence = self._sequence
        known = self._known_positions()
        compare = Comparison(self._merged, self._trace)
        alignment = align(self._merged.nodes, self._trace.nodes, known, compare.shareable)
        path = self._insert(alignment) if None in alignment else alignment
        outputs = self._outputs_along(path)
        new = self.added
        for t, k in enumerate(path):
            if new and new[k]:
                self._complete(self._merged.nodes[k], path, outputs)
            else:
                self._unite(self._merged.nodes[k], self._trace.nodes[t], outputs)
                self._unite_forward(self._merged.nodes[k], self._trace.nodes[t], path)
        for mine, other in outputs.items():
            self._unite_output(other, self._trace.outputs[mine])
        self._count(path)
        self._cut(path)
        self._merge_looks(path, outputs)
        sequence.seen += 1
        return self._news

    def _known_positions(self) -> list[int]:
        if not self._walked:
            return []
        positions = {number: k for k, number in enumerate(self._sequence.ids)}
        known = [positions.get(number) for number in self._walked]
        return [] if None in known else known

    # --- new nodes ---

    def _insert(self, alignment: Alignment) -> list[int]:
        """Adds the nodes that are new; returns where all of the trace's are now."""
        self._news = self.branched = True
        order: list[tuple[int | None, int | None]] = []  # (merged, trace)
        following, added = 0, []
        for t, k in enumerate(alignment):
            if k is None:
                added.append(t)
                continue
            order += self._interleaved(range(following, k), added)
            order.append((k, t))
            following, added = k + 1, []
        order += self._interleaved(range(following, len(self._merged.nodes)), added)
        self._renumber(order)
        self.added = [k is None for k, _ in order]
        path = [0] * len(alignment)
        for position, (_, t) in enumerate(order):
            if t is not None:
                path[t] = position
        return path

    def _interleaved(
        self, skipped: Sequence[int], added: Sequence[int]
    ) -> list[tuple[int | None, int | None]]:
        """Nodes that the trace skips and nodes that it adds at the same place, in program order."""
        order: list[tuple[int | None, int | None]] = []
        i = 0
        for t in added:
            node = self._trace.nodes[t]
            while i < len(skipped) and _comes_before(self._merged.nodes[skipped[i]], node):
                order.append((skipped[i], None))
                i += 1
            order.append((None, t))
        return order + [(k, None) for k in skipped[i:]]

    def _renumber(self, order: list[tuple[int | None, int | None]]) -> None:
        sequence, merged = self._sequence, self._merged
        positions: dict[int, int] = {}
        outputs: dict[int, int] = {}
        nodes: list[Node] = []
        infos: list[OutputInfo] = []
        for position, (old, t) in enumerate(order):
            source = merged.nodes[old] if old is not None else self._trace.nodes[t]
            node = dataclasses.replace(source, first_output=len(infos))
            if old is not None:
                positions[old] = position
                outputs.update(zip(source.outputs, node.outputs, strict=True))
                infos += merged.outputs[
                    source.first_output : source.first_output + source.num_outputs
                ]
            else:
                node.count = 0
                infos += self._trace.outputs[
                    source.first_output : source.first_output + source.num_outputs
                ]
            nodes.append(node)
        for old, position in positions.items():
            node = nodes[position]
            if node.gradient_of is not None:
                node.gradient_of = positions[node.gradient_of]
            node.args = tuple(_mapped(arg, outputs) for arg in merged.nodes[old].args)
            node.inputs = tuple(_mapped(source, outputs) for source in node.inputs)
        end = len(merged.nodes)
        positions[end] = len(order)
        for external in merged.externals:
            external.alternatives = frozenset(outputs[o] for o in external.alternatives)
        merged.nodes, merged.outputs = nodes, infos
        sequence.reads = {
            (outputs[o], _after(positions, p)): Read(outputs[o], _after(positions, p), r.location)
            for (o, p), r in sequence.reads.items()
        }
        kept: dict[int, frozenset[int]] = {}
        for p, held in sequence.kept.items():
            mapped = frozenset(outputs[o] for o in held)
            for position in {positions[p], _after(positions, p)}:
                kept[position] = kept.get(position, frozenset()) | mapped
        sequence.kept = kept
        sequence.dynamic = {outputs[o] for o in sequence.dynamic}
        sequence.cuts = {positions[p] for p in sequence.cuts}
        for position, (old, _) in enumerate(order):
            if (old is None) != (position > 0 and order[position - 1][0] is None):
                sequence.cuts.add(position)
        sequence.cuts.discard(0)
        sequence.producers = [k for k, n in enumerate(nodes) for _ in range(n.num_outputs)]

    def _outputs_along(self, path: list[int]) -> dict[int, int]:
        """Outputs of the trace -> of the sequence."""
        return {
            mine: other
            for t, k in enumerate(path)
            for mine, other in zip(
                self._trace.nodes[t].outputs, self._merged.nodes[k].outputs, strict=True
            )
        }

    def _complete(self, node: Node, path: list[int], outputs: dict[int, int]) -> None:
        """Names what a node that was added refers to as the sequence names it."""
        if node.gradient_of is not None:
            node.gradient_of = path[node.gradient_of]
        node.args = tuple(self._named(arg, outputs) for arg in node.args)
        node.inputs = tuple(self._named(source, outputs) for source in node.inputs)
        if not node.in_place and not node.misses:
            node.inputs = flat_inputs(node.args)

    def _named(self, arg: Arg, outputs: dict[int, int]) -> Arg:
        if isinstance(arg, Items):
            return Items(tuple(self._named(item, outputs) for item in arg.items))
        if isinstance(arg, Output):
            return Output(outputs[arg.index])
        if isinstance(arg, Outside):
            return Outside(self._external(arg.index))
        return arg

    def _external(self, index: int) -> int:
        """The sequence's external for one of the trace's, a new one if need be."""
        external = self._trace.externals[index]
        if external.kind is Kind.RESOURCE and id(external.tensor) in self._resources:
            return self._resources[id(external.tensor)]
        if external.kind is Kind.TENSOR and index in self._externals:
            return self._externals[index]
        added = self._add(dataclasses.replace(external))
        if external.kind is Kind.RESOURCE:
            self._resources[id(external.tensor)] = added
        elif external.kind is Kind.TENSOR:
            self._externals[index] = added
            self._taken.add(added)
        return added

    def _add(self, external: External) -> int:
        self._merged.externals.append(external)
        return len(self._merged.externals) - 1

    # --- nodes that are there ---

    def _unite(self, mine: Node, other: Node, outputs: dict[int, int]) -> None:
        if mine.misses:
            return
        if mine.in_place or other.in_place or not _same_form(mine.args, other.args):
            self._unite_in_place(mine, other, outputs)
            return
        mine.args = tuple(
            self._united(a, b, outputs) for a, b in zip(mine.args, other.args, strict=True)
        )
        mine.inputs = flat_inputs(mine.args)

    def _unite_forward(self, mine: Node, other: Node, path: list[int]) -> None:
        """A backward node that was not always the same forward node's is nobody's."""
        if mine.gradient_of is None:
            return
        if other.gradient_of is None or path[other.gradient_of] != mine.gradient_of:
            mine.gradient_of, self._news = None, True

    def _unite_in_place(self, mine: Node, other: Node, outputs: dict[int, int]) -> None:
        effects = {mine.effect, other.effect}
        if not mine.in_place:
            self._news = True
            mine.args, mine.attrs = (), ()
        self._news |= Effect.BARRIER in effects and mine.effect is not Effect.BARRIER
        mine.effect = Effect.BARRIER if Effect.BARRIER in effects else Effect.LOCAL
        taken = {s.index for s in mine.inputs if isinstance(s, Output)}
        also = {outputs[s.index] for s in other.inputs if isinstance(s, Output)}
        self._news |= not also <= taken
        mine.inputs = tuple(Output(index) for index in sorted(taken | also))

    def _united(self, a: Arg, b: Arg, outputs: dict[int, int]) -> Arg:
        if isinstance(a, Items):
            return Items(
                tuple(self._united(x, y, outputs) for x, y in zip(a.items, b.items, strict=True))
            )
        if isinstance(a, Python):
            return a
        if isinstance(a, Output):
            if isinstance(b, Output) and outputs[b.index] == a.index:
                return a
            return self._select(a, b, outputs)
        external = self._merged.externals[a.index]
        if external.kind is Kind.RESOURCE:
            return a
        if external.kind is Kind.SELECT:
            source = self._mapped_source(b, outputs)
            if self._selected.setdefault(a.index, source) != source:
                return self._select(a, b, outputs)  # shared by inputs that are not always the same
            self._widen(external, b, outputs)
            return a
        if isinstance(b, Output):
            return self._select(a, b, outputs)
        theirs = self._trace.externals[b.index]
        if external.kind is not theirs.kind:
            return self._select(a, b, outputs)
        if external.kind is Kind.TENSOR and not self._is_same(a.index, b.index):
            return self._select(a, b, outputs)
        self._unite_external(external, theirs)
        return a

    def _is_same(self, mine: int, other: int) -> bool:
        """Whether a tensor of the trace stands where the sequence has this very one."""
        known = self._externals.get(other)
        if known is None and mine not in self._taken:
            self._externals[other] = mine
            self._taken.add(mine)
            return True
        return known == mine

    def _unite_external(self, mine: External, other: External) -> None:
        shape = united(mine.shape, other.shape)
        if shape != mine.shape:
            mine.shape, self._news = shape, True
        if not mine.varies and (other.varies or mine.content != other.content):
            mine.varies = self._news = True

    def _select(self, a: Output | Outside, b: Output | Outside, outputs: dict[int, int]) -> Outside:
        """A select of two sources; inputs that have both in common share it."""
        source = self._mapped_source(b, outputs)
        if (a, source) not in self._selects:
            self._news = self.branched = True
            facts = _facts(self._merged, a)
            own = frozenset({a.index}) if isinstance(a, Output) else frozenset()
            if isinstance(facts, External):
                own = facts.alternatives
            select = External(Kind.SELECT, facts.dtype, facts.shape, alternatives=own)
            self._widen(select, b, outputs)
            added = self._add(select)
            self._selected[added] = source
            self._selects[a, source] = Outside(added)
        return self._selects[a, source]

    def _mapped_source(self, b: Output | Outside, outputs: dict[int, int]) -> Output | Outside:
        return Output(outputs[b.index]) if isinstance(b, Output) else b

    def _widen(self, select: External, b: Output | Outside, outputs: dict[int, int]) -> None:
        shape = united(select.shape, _facts(self._trace, b).shape)
        if shape != select.shape:
            select.shape, self._news = shape, True
        if isinstance(b, Output) and outputs[b.index] not in select.alternatives:
            select.alternatives |= {outputs[b.index]}
            self._news = True

    def _unite_output(self, output: int, other: OutputInfo) -> None:
        mine = self._merged.outputs[output]
        if mine.shape == other.shape:
            return
        shape = united(mine.shape, other.shape)
        if shape != mine.shape:
            self._merged.outputs[output] = OutputInfo(mine.dtype, shape)
            self._news = True
        self._sequence.dynamic.add(output)

    # --- the path as a whole ---

    def _count(self, path: list[int]) -> None:
        nodes, seen = self._merged.nodes, self._sequence.seen
        always = sum(node.count == seen for node in nodes)
        for k in path:
            nodes[k].count += 1
        if sum(node.count == seen + 1 for node in nodes) != always:
            self._news = self.branched = True

    def _cut(self, path: list[int]) -> None:
        cuts, size = self._sequence.cuts, len(self._merged.nodes)
        before = len(cuts)
        for a, b in zip([-1, *path], [*path, size], strict=True):
            if b != a + 1:
                cuts.update(k for k in (a + 1, b) if 0 < k < size)
        if len(cuts) != before:
            self._news = self.branched = True

    def _merge_looks(self, path: list[int], outputs: dict[int, int]) -> None:
        sequence = self._sequence
        for read in self._trace.reads.values():
            # Right after the node before it, so that it belongs to the same block.
            position = path[read.position - 1] + 1 if read.position else 0
            place = (outputs[read.output], position)
            if place not in sequence.reads:
                sequence.reads[place] = Read(*place, read.location)
                self._news = True
        for position, held in self._trace.kept.items():
            mapped = frozenset(outputs[o] for o in held)
            after = path[position - 1] + 1 if position else 0
            at = path[position] if position < len(path) else len(self._merged.nodes)
            for place in {after, at}:
                known = sequence.kept.get(place, frozenset())
                if not mapped <= known:
                    sequence.kept[place] = known | mapped
                    self._news = True


def _same_form(a: Sequence[Arg], b: Sequence[Arg]) -> bool:
    """Whether lists have the same length and attributes the same values."""
    for x, y in zip(a, b, strict=True):
        if isinstance(x, Items) and len(x.items) != len(y.items):
            return False
        if isinstance(x, Python) and not same_value(x.value, y.value):
            return False
    return True


def _comes_before(a: Node, b: Node) -> bool:
    """Whether `a` probably comes before `b` where both are called by the same function."""
    if a.location.place[1:] != b.location.place[1:]:
        return False
    return a.identity.order < b.identity.order


def _after(positions: dict[int, int], position: int) -> int:
    """Where a position right behind a node is now."""
    return positions[position - 1] + 1 if position else 0


def _mapped(arg: Arg, outputs: dict[int, int]) -> Arg:
    if isinstance(arg, Output):
        return Output(outputs[arg.index])
    if isinstance(arg, Items):
        return Items(tuple(_mapped(item, outputs) for item in arg.items))
    return arg


def flat_inputs(args: tuple[Arg, ...]) -> tuple[Output | Outside, ...]:
    """The tensor inputs among a node's arguments."""
    flat: list[Output | Outside] = []
    for arg in args:
        if isinstance(arg, Items):
            flat += flat_inputs(arg.items)
        elif not isinstance(arg, Python):
            flat.append(arg)
    return tuple(flat)
