"""Instance: a graph on a cluster as the tables that the placers work with.

Operations of a group are one **unit**, placed as a whole. Making the instance is also the check
that comes before any solving: what fits nowhere is named here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeline.errors import ClusterError, InfeasibleError
from pipeline.planning.cluster import Cluster, Device
from pipeline.planning.graph import Op, OpGraph


def seconds_on(node: Op, device: Device) -> float:
    """What an operation takes on a device; infinity if it cannot run there."""
    special = node.seconds_on.get(device.kind)
    return node.seconds / device.speed if special is None else float(special)


@dataclass(frozen=True)
class Instance:
    """The tables.

    Attributes:
        graph: the graph.
        cluster: the cluster.
        seconds: [operation][device] → seconds.
        unit_of: for each operation, its unit.
        units: for each unit, its operations.
        unit_bytes: for each unit, the memory that it takes.
        allowed: for each unit, the devices that may hold it.
    """

    graph: OpGraph
    cluster: Cluster
    seconds: tuple[tuple[float, ...], ...]
    unit_of: tuple[int, ...]
    units: tuple[tuple[int, ...], ...]
    unit_bytes: tuple[float, ...]
    allowed: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, graph: OpGraph, cluster: Cluster) -> Instance:
        """The tables of a graph on a cluster.

        Raises:
            InfeasibleError: if an operation or a group fits on no device, or all of them together
                are larger than the cluster.
            ClusterError: if an operation is bound to a device that is not there.
        """
        units = list(graph.groups.values())
        units += [(i,) for i, node in enumerate(graph.nodes) if node.group is None]
        units.sort()
        unit_of = [0] * len(graph)
        for number, members in enumerate(units):
            for position in members:
                unit_of[position] = number
        seconds = tuple(
            tuple(seconds_on(node, device) for device in cluster.devices) for node in graph.nodes
        )
        sizes = tuple(math.fsum(graph.nodes[i].bytes for i in unit) for unit in units)
        allowed = tuple(
            _allowed(graph, cluster, seconds, unit, size)
            for unit, size in zip(units, sizes, strict=True)
        )
        _check_total(cluster, sizes)
        return cls(graph, cluster, seconds, tuple(unit_of), tuple(units), sizes, allowed)

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.cluster)

    @cached_property
    def links(self) -> list[list[tuple[float, float]]]:
        """[from][to] → bandwidth and latency; a device passes tensors to itself for nothing."""
        cluster = self.cluster
        return [
            [
                (math.inf, 0.0)
                if a == b
                else (cluster.link(a, b).bandwidth, cluster.link(a, b).latency)
                for b in range(self.num_devices)
            ]
            for a in range(self.num_devices)
        ]

    def memory(self, device: int) -> float:
        """The bytes of a device."""
        limit = self.cluster.devices[device].memory
        return math.inf if limit is None else limit

    def serial_seconds(self) -> float:
        """What the best single device takes for everything, whether it fits there or not."""
        return min(
            math.fsum(of_op[device] for of_op in self.seconds) for device in range(self.num_devices)
        )

    def devices_of_ops(self, of_unit: Sequence[int]) -> list[int]:
        """For each operation, the device of its unit."""
        return [of_unit[unit] for unit in self.unit_of]


def _allowed(
    graph: OpGraph,
    cluster: Cluster,
    seconds: Sequence[Sequence[float]],
    unit: tuple[int, ...],
    size: float,
) -> tuple[int, ...]:
    """The devices that may hold a unit; an error says why there is none."""
    nodes = [graph.nodes[position] for position in unit]
    what = f"node {nodes[0].name!r}"
    if len(unit) > 1:
        what = f"group {nodes[0].group!r} ({len(unit)} nodes, {nodes[0].name!r} first)"
    bound = {node.device for node in nodes if node.device is not None}
    for device in bound:
        if device >= len(cluster):
            raise ClusterError(
                f"{what} is bound to device {device}, but the cluster has {len(cluster)}",
                "no-device",
                what,
            )
    devices = [d for d in range(len(cluster)) if not bound or bound == {d}]
    if not devices:
        raise InfeasibleError(
            f"{what} must share a device, but is bound to several: {sorted(bound)}", "bound", what
        )
    able = [d for d in devices if all(math.isfinite(seconds[i][d]) for i in unit)]
    if not able:
        kinds = sorted({cluster.devices[d].kind for d in devices})
        raise InfeasibleError(
            f"{what} runs on no device of the kinds that it may use here: {', '.join(kinds)}",
            "unsupported",
            what,
        )
    fitting = [d for d in able if size <= _memory(cluster, d)]
    if not fitting:
        largest = max(_memory(cluster, d) for d in able)
        raise InfeasibleError(
            f"{what} fits nowhere: it needs {size:,.0f} bytes, the largest device that it may use "
            f"has {largest:,.0f}",
            "too-large",
            what,
        )
    return tuple(fitting)


def _memory(cluster: Cluster, device: int) -> float:
    limit = cluster.devices[device].memory
    return math.inf if limit is None else limit


def _check_total(cluster: Cluster, sizes: Sequence[float]) -> None:
    total, room = math.fsum(sizes), math.fsum(_memory(cluster, d) for d in range(len(cluster)))
    if total > room:
        raise InfeasibleError(
            f"the graph needs {total:,.0f} bytes, all devices together have {room:,.0f}",
            "too-large",
            "the whole graph",
        )
