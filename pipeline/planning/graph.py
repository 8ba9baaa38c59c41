"""OpGraph: a step of a model as operations with times and sizes, joined by the tensors they pass.

It is plain data: written by hand, measured by `OpGraph.profile`, read from JSON by
`planning.graph_json`, placed by `planning.placer`. A graph is checked when it is made, so that
whoever gets one may rely on it.
"""

from __future__ import annotations

import graphlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any

from pipeline.errors import GraphError
from pipeline.planning.checks import number


@dataclass(frozen=True)
class Op:
    """An operation, or several fused into one.

    Attributes:
        name: unique in its graph.
        seconds: what it takes on a device of speed 1.
        bytes: what it keeps on its device during the whole step: weights, outputs.
        group: operations of one group must share a device; None: of no group.
        seconds_on: kind of device → seconds there, in place of `seconds` over the device's speed;
            infinity: it cannot run on that kind.
        device: the number of the device that it is bound to, or None.
        backward: whether it belongs to the backward pass.
        members: the names of the operations that were fused into it; empty: it is a single one.
    """

    name: str
    seconds: float
    bytes: float = 0.0
    group: str | None = None
    seconds_on: Mapping[str, float] = field(default_factory=dict)
    device: int | None = None
    backward: bool = False
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edge:
    """A tensor that one operation makes and another needs.

    Attributes:
        source: the name of the operation that makes it.
        target: the name of the one that needs it.
        bytes: its size; 0 for an order without data.
    """

    source: str
    target: str
    bytes: float = 0.0


@dataclass(frozen=True, init=False)
class OpGraph:
    """Operations and the tensors between them; no cycle.

    Args:
        nodes: the operations.
        edges: the tensors; several between two operations each take their own time.

    Raises:
        GraphError: if a name is not unique, a number is none, an edge ends nowhere, or there is a
            cycle.
    """

    nodes: tuple[Op, ...]
    edges: tuple[Edge, ...] = ()

    def __init__(self, nodes: Iterable[Op], edges: Iterable[Edge | Sequence[Any]] = ()) -> None:
        object.__setattr__(self, "nodes", tuple(_checked(node) for node in nodes))
        joined = (edge if isinstance(edge, Edge) else Edge(*edge) for edge in edges)
        object.__setattr__(self, "edges", tuple(joined))
        index: dict[str, int] = {}
        for position, node in enumerate(self.nodes):
            if index.setdefault(node.name, position) != position:
                raise GraphError(
                    f"two nodes are called {node.name!r}; names must be unique",
                    "duplicate",
                    f"node {node.name!r}",
                )
        object.__setattr__(self, "index", index)
        self._check_edges()
        object.__setattr__(self, "order", self._topological_order())

    index: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """Name → position in `nodes`."""
    order: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The positions of `nodes` so that each comes after what it needs."""

    def _check_edges(self) -> None:
        for edge in self.edges:
            where = f"edge {edge.source!r} -> {edge.target!r}"
            for end in (edge.source, edge.target):
                if end not in self.index:
                    raise GraphError(f"{where}: there is no node {end!r}", "unknown-node", where)
            if edge.source == edge.target:
                raise GraphError(f"{where}: a node cannot need itself", "cycle", where)
            number(edge.bytes, where, "bytes", GraphError)

    def _topological_order(self) -> tuple[int, ...]:
        sorter: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()
        for position in range(len(self.nodes)):
            sorter.add(position)
        for edge in self.edges:
            sorter.add(self.index[edge.target], self.index[edge.source])
        try:
            return tuple(sorter.static_order())
        except graphlib.CycleError as error:
            names = [repr(self.nodes[position].name) for position in error.args[1]]
            shown = names if len(names) <= 12 else [*names[:6], "...", *names[-5:]]
            raise GraphError(
                f"the graph has a cycle: {' -> '.join(shown)}", "cycle", f"node {names[0]}"
            ) from None

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, name: str) -> Op:
        return self.nodes[self.index[name]]

    @cached_property
    def incoming(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """For each node, the positions of those that it needs, with the bytes that come."""
        found: list[list[tuple[int, float]]] = [[] for _ in self.nodes]
        for edge in self.edges:
            found[self.index[edge.target]].append((self.index[edge.source], float(edge.bytes)))
        return tuple(map(tuple, found))

    @cached_property
    def outgoing(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """For each node, the positions of those that need it, with the bytes that go."""
        found: list[list[tuple[int, float]]] = [[] for _ in self.nodes]
        for edge in self.edges:
            found[self.index[edge.source]].append((self.index[edge.target], float(edge.bytes)))
        return tuple(map(tuple, found))

    @cached_property
    def total_seconds(self) -> float:
        """What all operations take one after the other on a device of speed 1."""
        return math.fsum(node.seconds for node in self.nodes)

    @cached_property
    def critical_path(self) -> tuple[str, ...]:
        """The names along the longest chain, transfers not counted."""
        best = [0.0] * len(self.nodes)
        via: list[int | None] = [None] * len(self.nodes)
        for position in self.order:
            before = max(self.incoming[position], key=lambda pair: best[pair[0]], default=None)
            if before is not None:
                via[position] = before[0]
                best[position] = best[before[0]]
            best[position] += self.nodes[position].seconds
        at = max(range(len(self.nodes)), key=best.__getitem__, default=None)
        path = []
        while at is not None:
            path.append(self.nodes[at].name)
            at = via[at]
        return tuple(reversed(path))

    @property
    def critical_seconds(self) -> float:
        """The time of the longest chain, transfers not counted."""
        return math.fsum(self[name].seconds for name in self.critical_path)

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Group → the positions of its operations."""
        found: dict[str, list[int]] = {}
        for position, node in enumerate(self.nodes):
            if node.group is not None:
                found.setdefault(node.group, []).append(position)
        return {name: tuple(members) for name, members in found.items()}

    def __str__(self) -> str:
        seconds, path = self.total_seconds, self.critical_seconds
        lines = [
            f"{len(self.nodes)} operations, {len(self.edges)} tensors, "
            f"{sum(node.bytes for node in self.nodes) / 1e6:.6g} MB",
            f"one after the other {seconds:.6g} s, longest chain {path:.6g} s"
            + (f" (at most {seconds / path:.2f} times as fast)" if path else ""),
        ]
        longest = sorted(self.nodes, key=lambda node: -node.seconds)[:8]
        for node in longest:
            share = node.seconds / seconds if seconds else 0.0
            lines.append(f"  {node.seconds * 1e3:>10.4g} ms {share:>6.1%}  {node.name}")
        if len(self.nodes) > len(longest):
            rest = math.fsum(node.seconds for node in self.nodes) - math.fsum(
                node.seconds for node in longest
            )
            lines.append(f"  {rest * 1e3:>10.4g} ms         {len(self.nodes) - len(longest)} more")
        return "\n".join(lines)

    # --- where graphs come from and go to ------------------------------------------------------

    @classmethod
    def profile(cls, fn: Callable[..., Any], *args: Any, **options: Any) -> OpGraph:
        """Measures a TensorFlow step; see `planning.profiling.profile`."""
        from pipeline.planning.profiling import profile

        return profile(fn, *args, **options)

    @classmethod
    def from_dict(cls, data: Any) -> OpGraph:
        """Reads what JSON holds; see `planning.graph_json.from_dict`."""
        from pipeline.planning.graph_json import from_dict

        return from_dict(data)

    def as_dict(self, form: str = "planning") -> dict[str, Any]:
        """What JSON is to hold; see `planning.graph_json.as_dict`."""
        from pipeline.planning.graph_json import as_dict

        return as_dict(self, form)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> OpGraph:
        """Reads a JSON file of either form; see `planning.graph_json`."""
        from pipeline.planning.graph_json import load

        return load(path)

    def save(self, path: str | PathLike[str], form: str = "planning") -> None:
        """Writes a JSON file; see `planning.graph_json`."""
        from pipeline.planning.graph_json import save

        save(self, path, form)

    def fuse(self, max_ops: int = 300, tolerance: float = 0.02) -> OpGraph:
        """A smaller graph that takes about as long; see `planning.fusion.fuse`."""
        from pipeline.planning.fusion import fuse

        return fuse(self, max_ops, tolerance)


def _checked(node: Op) -> Op:
    """The node, once its fields are what they have to be."""
    if not isinstance(node, Op):
        raise GraphError(f"nodes must be planning.Op, not {node!r}", "no-op")
    where = f"node {node.name!r}"
    if not isinstance(node.name, str) or not node.name:
        raise GraphError(f"{where}: a name must be a text that is not empty", "name", where)
    number(node.seconds, where, "seconds", GraphError)
    number(node.bytes, where, "bytes", GraphError)
    for kind, seconds in node.seconds_on.items():
        number(seconds, where, f"seconds_on[{kind!r}]", GraphError, infinite=True)
    if node.device is not None and (
        isinstance(node.device, bool) or not isinstance(node.device, int) or node.device < 0
    ):
        raise GraphError(
            f"{where}, field 'device': must be the number of a device, not {node.device!r}",
            "device",
            where,
        )
    return node
