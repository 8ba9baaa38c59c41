"""The independent re-check: plays a placement through, event by event, and finds broken rules.

It shares no arithmetic with the placers. It takes only who runs where and in which order, lets
devices and messages run, and so finds when everything happens; `check` compares that with what a
placement claims, and looks at memory, groups and bindings.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from pipeline.errors import PlacementError
from pipeline.planning.cluster import Cluster
from pipeline.planning.graph import OpGraph
from pipeline.planning.instance import seconds_on

TOLERANCE = 1e-9
"""Relative: what floating-point sums in another order may differ by."""


def replay(
    graph: OpGraph, cluster: Cluster, lines: Sequence[Sequence[str]]
) -> dict[str, tuple[float, float]]:
    """Runs the operations of each device one after the other as soon as their tensors are there.

    Args:
        graph: the graph.
        cluster: the cluster.
        lines: for each device, the names of its operations in order.

    Returns:
        Name → start and end in seconds.

    Raises:
        PlacementError: if an operation is on no device or on two, or they wait for each other
            for ever.
    """
    device_of = _device_of(graph, lines)
    missing = {node.name: 0 for node in graph.nodes}  # tensors that have not arrived
    for edge in graph.edges:
        missing[edge.target] += 1
    outgoing: dict[str, list[tuple[str, float]]] = {node.name: [] for node in graph.nodes}
    for edge in graph.edges:
        outgoing[edge.source].append((edge.target, edge.bytes))
    position = [0] * len(lines)
    busy = [False] * len(lines)
    times: dict[str, tuple[float, float]] = {}
    # (time, kind, number): the end of an operation on a device, the arrival of a tensor.
    events: list[tuple[float, int, str]] = []

    def try_to_start(device: int, now: float) -> None:
        if busy[device] or position[device] >= len(lines[device]):
            return
        name = lines[device][position[device]]
        if missing[name] == 0:
            busy[device] = True
            end = now + seconds_on(graph[name], cluster.devices[device])
            times[name] = (now, end)
            heapq.heappush(events, (end, 0, name))

    for device in range(len(lines)):
        try_to_start(device, 0.0)
    while events:
        now, kind, name = heapq.heappop(events)
        device = device_of[name]
        if kind == 0:
            busy[device] = False
            position[device] += 1
            for target, size in outgoing[name]:
                delay = cluster.transfer_seconds(size, device, device_of[target])
                heapq.heappush(events, (now + delay, 1, target))
        else:
            missing[name] -= 1
        try_to_start(device, now)
    if len(times) < len(graph):
        stuck = next(name for line in lines for name in line if name not in times)
        raise PlacementError(
            f"node {stuck!r} never starts: the orders of the devices wait for each other",
            "deadlock",
            f"node {stuck!r}",
        )
    return times


def check(
    graph: OpGraph,
    cluster: Cluster,
    device_of: Mapping[str, int],
    start: Mapping[str, float],
    makespan: float,
) -> None:
    """Proves that a placement keeps every rule and takes what it claims.

    Raises:
        PlacementError: if it does not, naming the node or device.
    """
    for node in graph.nodes:
        device = device_of.get(node.name)
        if device not in range(len(cluster)):
            raise _error(node.name, f"is on device {device!r}, which is not there", "no-device")
        if node.device is not None and node.device != device:
            raise _error(node.name, f"is bound to device {node.device}, not {device}", "bound")
        if not math.isfinite(seconds_on(node, cluster.devices[device])):
            raise _error(node.name, f"cannot run on device {device}", "unsupported")
    for group, members in graph.groups.items():
        held = sorted({device_of[graph.nodes[i].name] for i in members})
        if len(held) > 1:
            text = f"is of group {group!r}, which is on devices {held}"
            raise _error(graph.nodes[members[0]].name, text, "group")
    _check_memory(graph, cluster, device_of)
    slack = TOLERANCE * max(makespan, 1e-12)
    end = {
        node.name: start[node.name] + seconds_on(node, cluster.devices[device_of[node.name]])
        for node in graph.nodes
    }
    for edge in graph.edges:
        source, target = device_of[edge.source], device_of[edge.target]
        arrival = end[edge.source] + cluster.transfer_seconds(edge.bytes, source, target)
        if start[edge.target] < arrival - slack:
            raise _error(edge.target, f"starts before the tensor of {edge.source!r}", "too-early")
    lines = lines_of(graph, cluster, device_of, start)
    for line in lines:
        for first, second in zip(line, line[1:], strict=False):
            if start[second] < end[first] - slack:
                raise _error(second, f"starts while {first!r} runs on its device", "overlap")
    last = max(end.values(), default=0.0)
    if abs(last - makespan) > slack:
        raise PlacementError(f"the makespan is {last}, not {makespan}", "makespan")
    played = replay(graph, cluster, lines)
    slowest = max((stop for _, stop in played.values()), default=0.0)
    if slowest > makespan + slack:
        raise PlacementError(f"played through it takes {slowest}, not {makespan}", "makespan")


def lines_of(
    graph: OpGraph, cluster: Cluster, device_of: Mapping[str, int], start: Mapping[str, float]
) -> list[list[str]]:
    """For each device, the names of its operations in order of their start."""
    rank = {graph.nodes[position].name: number for number, position in enumerate(graph.order)}

    def key(name: str) -> tuple[float, bool, int]:
        # What takes no time goes before what starts at the same moment and takes some.
        return (
            start[name],
            seconds_on(graph[name], cluster.devices[device_of[name]]) > 0,
            rank[name],
        )

    lines: list[list[str]] = [[] for _ in cluster.devices]
    for name in sorted(rank, key=key):
        lines[device_of[name]].append(name)
    return lines


def _device_of(graph: OpGraph, lines: Sequence[Sequence[str]]) -> dict[str, int]:
    device_of: dict[str, int] = {}
    for device, line in enumerate(lines):
        for name in line:
            if name in device_of or name not in graph.index:
                raise _error(name, "is placed twice or is no node", "placed")
            device_of[name] = device
    for node in graph.nodes:
        if node.name not in device_of:
            raise _error(node.name, "is on no device", "placed")
    return device_of


def _check_memory(graph: OpGraph, cluster: Cluster, device_of: Mapping[str, int]) -> None:
    for number, device in enumerate(cluster.devices):
        held = math.fsum(node.bytes for node in graph.nodes if device_of[node.name] == number)
        if device.memory is not None and held > device.memory * (1 + TOLERANCE):
            raise PlacementError(
                f"device {number} holds {held:,.0f} bytes, but has {device.memory:,.0f}",
                "memory",
                f"device {number}",
            )


def _error(name: str, text: str, code: str) -> PlacementError:
    return PlacementError(f"node {name!r} {text}", code, f"node {name!r}")
