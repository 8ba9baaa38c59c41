"""Placement: which operation runs on which device, and when."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from pipeline.planning.cluster import Cluster
from pipeline.planning.graph import OpGraph
from pipeline.planning.instance import seconds_on
from pipeline.planning.replay import check, lines_of


@dataclass(frozen=True)
class Placement:
    """A placed graph.

    Attributes:
        graph: the graph.
        cluster: the cluster.
        device_of: name of an operation → the number of its device.
        start: name of an operation → when it starts, in seconds.
        makespan: when the last one ends.
        bound: no placement is faster than that.
        heft: the makespan of the list schedule that the solver began with.
        serial: what the best single device takes, whether it fits there or not.
        status: `optimal`, `feasible` (the time was up) or `interrupted` (Ctrl-C).
        seconds: how long the search took.
    """

    graph: OpGraph
    cluster: Cluster
    device_of: Mapping[str, int]
    start: Mapping[str, float]
    makespan: float
    bound: float
    heft: float
    serial: float
    status: str = "feasible"
    seconds: float = 0.0

    @property
    def gap(self) -> float:
        """The share of the makespan by which a better placement could still be faster."""
        return max(0.0, (self.makespan - self.bound) / self.makespan) if self.makespan else 0.0

    @property
    def speedup(self) -> float:
        """How many times faster than the best single device."""
        return self.serial / self.makespan if self.makespan else 1.0

    @property
    def is_optimal(self) -> bool:
        """Whether no placement is faster."""
        return self.status == "optimal"

    def end(self, name: str) -> float:
        """When an operation ends."""
        device = self.cluster.devices[self.device_of[name]]
        return self.start[name] + seconds_on(self.graph[name], device)

    def lines(self) -> list[list[str]]:
        """For each device, the names of its operations in order."""
        return lines_of(self.graph, self.cluster, self.device_of, self.start)

    def busy_seconds(self, device: int) -> float:
        """How long a device computes."""
        return math.fsum(
            seconds_on(node, self.cluster.devices[device])
            for node in self.graph.nodes
            if self.device_of[node.name] == device
        )

    def held_bytes(self, device: int) -> float:
        """What a device holds."""
        return math.fsum(
            node.bytes for node in self.graph.nodes if self.device_of[node.name] == device
        )

    def cut_edges(self) -> list[Any]:
        """The tensors that go from device to device."""
        return [
            edge
            for edge in self.graph.edges
            if self.device_of[edge.source] != self.device_of[edge.target]
        ]

    def check(self) -> None:
        """Proves by an independent simulation that it keeps every rule; see `planning.replay`.

        Raises:
            PlacementError: if it does not, naming the node.
        """
        check(self.graph, self.cluster, self.device_of, self.start, self.makespan)

    def as_dict(self) -> dict[str, Any]:
        """The figures and the placement, for JSON."""
        return {
            "makespan": self.makespan,
            "bound": self.bound,
            "gap": self.gap,
            "speedup": self.speedup,
            "status": self.status,
            "heft": self.heft,
            "serial": self.serial,
            "seconds": self.seconds,
            "devices": len(self.cluster),
            "device_of": dict(self.device_of),
            "start": dict(self.start),
        }

    def __str__(self) -> str:
        cut = self.cut_edges()
        lines = [
            f"makespan {self.makespan:.6g} s, {self.status}; nothing is faster than "
            f"{self.bound:.6g} s (gap {self.gap:.2%})",
            f"{self.speedup:.3f} times as fast as one device ({self.serial:.6g} s); "
            f"the list schedule (HEFT) takes {self.heft:.6g} s",
            f"{len(cut)} of {len(self.graph.edges)} tensors move, "
            f"{sum(edge.bytes for edge in cut) / 1e6:.6g} MB",
            "device  operations  computes s   busy     bytes MB",
        ]
        for device, line in enumerate(self.lines()):
            busy = self.busy_seconds(device)
            share = busy / self.makespan if self.makespan else 0.0
            lines.append(
                f"{device:>6}  {len(line):>10}  {busy:>10.6g}  {share:>5.1%}  "
                f"{self.held_bytes(device) / 1e6:>11.6g}"
            )
        return "\n".join(lines)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws the devices over time into a PNG file.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        from pipeline.planning.plots import plot_placement

        plot_placement(self, path)
