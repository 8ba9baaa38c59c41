"""Fusing operations, so that a traced step of thousands becomes a graph of a few hundred.

Two rules, neither of which can make a cycle: an operation joins the only one that it needs, or the
only one that needs it. Chains are joined first, at no cost but the freedom to cut them; then tiny
operations, the smallest first, which delays others by little. A fused operation starts when
everything is there that any member needs, and ends when all are done, so that too much fusing makes
a step look slower: what was fused is kept only while critical path and list schedules stay within
the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from pipeline.planning.cluster import Cluster
from pipeline.planning.graph import Edge, Op, OpGraph
from pipeline.planning.heft import heft
from pipeline.planning.instance import Instance

_WIDTHS = (2, 4, 8)
"""The numbers of devices on which list schedules are compared, as many as pay at most."""


def fuse(graph: OpGraph, max_ops: int = 300, tolerance: float = 0.02) -> OpGraph:
    """A graph of fewer operations whose makespan is about the same.

    Args:
        graph: the graph.
        max_ops: the number of operations to come down to, if the tolerance allows.
        tolerance: by which share critical path and list schedules may become longer.

    Returns:
        The fused graph; `Op.members` has the names of what was fused.
    """
    wanted = _lengths(graph)
    best = _apply(graph, _Fuser(graph).chains())
    if not _is_close(best, wanted, tolerance):
        best = graph
    threshold = graph.total_seconds * tolerance / max(1, 50 * len(graph))
    while len(best) > max_ops and threshold < graph.total_seconds:
        smaller = _apply(best, _Fuser(best).tiny(threshold, len(best) - max_ops))
        smaller = _apply(smaller, _Fuser(smaller).chains())
        if len(smaller) < len(best):
            if not _is_close(smaller, wanted, tolerance):
                break
            best = smaller
        threshold *= 2
    return best


def _lengths(graph: OpGraph) -> list[float]:
    lengths = [graph.critical_seconds]
    for width in _WIDTHS:
        found = heft(Instance.of(_unbound(graph), Cluster.uniform(width)))
        assert found is not None  # nothing limits it
        lengths.append(found.makespan)
    return lengths


def _unbound(graph: OpGraph) -> OpGraph:
    """The graph with nothing bound to a device or to a kind of device."""
    nodes = [replace(node, device=None, seconds_on={}) for node in graph.nodes]
    return OpGraph(nodes, graph.edges)


def _is_close(graph: OpGraph, wanted: list[float], tolerance: float) -> bool:
    # Half of it is left for what list schedules do not show.
    limits = [length * (1 + tolerance / 2) for length in wanted]
    return all(length <= limit for length, limit in zip(_lengths(graph), limits, strict=True))


class _Fuser:
    """Decides which operations join; a union-find over positions."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.parent = list(range(len(graph)))
        self.op: list[Op] = list(graph.nodes)
        self.before = [{source for source, _ in pairs} for pairs in graph.incoming]
        self.after = [{target for target, _ in pairs} for pairs in graph.outgoing]

    def find(self, position: int) -> int:
        while self.parent[position] != position:
            self.parent[position] = self.parent[self.parent[position]]
            position = self.parent[position]
        return position

    def chains(self) -> list[int]:
        """For each operation the one that it is joined to, where nothing else is between."""
        for position in self.graph.order:
            own = self.find(position)
            if len(self.before[own]) == 1:
                (source,) = self.before[own]
                if len(self.after[source]) == 1:
                    self._join(source, own)
        return [self.find(position) for position in range(len(self.graph))]

    def tiny(self, threshold: float, most: int) -> list[int]:
        """The same for operations shorter than so many seconds, at most so many of them."""
        for position in sorted(range(len(self.graph)), key=lambda p: self.graph.nodes[p].seconds):
            own = self.find(position)
            if most <= 0 or self.graph.nodes[position].seconds > threshold:
                break
            if self.op[own].seconds > threshold:
                continue  # it has grown
            for source, target in self._partners(own):
                if self._join(source, target):
                    most -= 1
                    break
        return [self.find(position) for position in range(len(self.graph))]

    def _partners(self, own: int) -> Iterator[tuple[int, int]]:
        if len(self.after[own]) == 1:
            yield own, next(iter(self.after[own]))
        if len(self.before[own]) == 1:
            yield next(iter(self.before[own])), own

    def _join(self, source: int, target: int) -> bool:
        """Makes one of two, the source's place becoming the joint one."""
        joined = _joined(self.op[source], self.op[target])
        if joined is None:
            return False
        self.parent[target] = source
        self.op[source] = joined
        self.after[source].discard(target)
        for other in self.before[target] - {source}:
            self.after[other].discard(target)
            self.after[other].add(source)
            self.before[source].add(other)
        for other in self.after[target]:
            self.before[other].discard(target)
            self.before[other].add(source)
            self.after[source].add(other)
        return True


def _joined(one: Op, other: Op) -> Op | None:
    """Two operations as one; None if they may sit apart or have nothing in common."""
    for name in ("group", "device"):
        first, second = getattr(one, name), getattr(other, name)
        if first is not None and second is not None and first != second:
            return None
    if one.seconds_on.keys() != other.seconds_on.keys() or one.backward != other.backward:
        return None
    if (one.group is None) != (other.group is None) and (one.device or other.device) is not None:
        return None
    group = one.group if one.group is not None else other.group
    return Op(
        name=one.name,
        seconds=one.seconds + other.seconds,
        bytes=one.bytes + other.bytes,
        group=group,
        seconds_on={
            kind: seconds + other.seconds_on[kind] for kind, seconds in one.seconds_on.items()
        },
        device=one.device if one.device is not None else other.device,
        backward=one.backward,
        members=(one.members or (one.name,)) + (other.members or (other.name,)),
    )


def _apply(graph: OpGraph, joined: list[int]) -> OpGraph:
    """The graph with its operations joined: for each, the position that it goes to."""
    members: dict[int, list[int]] = {}
    for position in graph.order:
        members.setdefault(joined[position], []).append(position)
    names: dict[int, str] = {}
    nodes = []
    for root, positions in members.items():
        op = graph.nodes[positions[0]]
        for position in positions[1:]:
            together = _joined(op, graph.nodes[position])
            assert together is not None  # _Fuser has asked
            op = together
        nodes.append(op)
        names[root] = op.name
    # Of the tensors between two, the largest decides when the last one arrives.
    sizes: dict[tuple[str, str], float] = {}
    for edge in graph.edges:
        pair = tuple(names[joined[graph.index[end]]] for end in (edge.source, edge.target))
        if pair[0] != pair[1]:
            sizes[pair] = max(sizes.get(pair, -math.inf), edge.bytes)
    return OpGraph(nodes, (Edge(*pair, size) for pair, size in sizes.items()))
