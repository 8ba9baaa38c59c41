"""Cluster: the devices that a step may run on, and the links between them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipeline.errors import ClusterError
from pipeline.planning.checks import number


@dataclass(frozen=True)
class Device:
    """A device, or a rank that has one.

    Attributes:
        name: for people; on a real machine TensorFlow's name of the device, `/device:GPU:0`.
        memory: bytes; None: without limit.
        speed: how many times faster than the device that times were measured on.
        kind: which of an operation's times holds here, see `Op.seconds_on`.
        node: the number of the machine that it is in.
    """

    name: str
    memory: float | None = None
    speed: float = 1.0
    kind: str = "gpu"
    node: int = 0


@dataclass(frozen=True)
class Link:
    """A link from device to device.

    Attributes:
        bandwidth: bytes per second; infinity: without limit.
        latency: seconds until the first byte arrives.
    """

    bandwidth: float = math.inf
    latency: float = 0.0

    def seconds(self, size: float) -> float:
        """What a message of `size` bytes takes."""
        return self.latency + (size / self.bandwidth if size else 0.0)


@dataclass(frozen=True)
class Cluster:
    """Devices and their links.

    Attributes:
        devices: the devices; their numbers are their positions.
        local: the link between two devices of one node.
        remote: the link between two devices of different nodes; None: like `local`.
        links: (from, to) → the link of two devices, where it is another.
        cores: for ranks on processors: so many cores that all of them share; None: each its own.
        reduction: the link that an all-reduce runs over, where it is not the slowest link used.

    Raises:
        ClusterError: if there is no device, or a number is none.
    """

    devices: tuple[Device, ...]
    local: Link = field(default_factory=Link)
    remote: Link | None = None
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    cores: int | None = None
    reduction: Link | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        if not self.devices:
            raise ClusterError("the cluster has no devices", "empty", "field 'devices'")
        for position, device in enumerate(self.devices):
            if not isinstance(device, Device):
                raise ClusterError(f"device {position} must be a Device, not {device!r}", "device")
            where = f"device {position} ({device.name!r})"
            number(device.speed, where, "speed", ClusterError, positive=True)
            if device.memory is not None:
                number(device.memory, where, "memory", ClusterError, infinite=True)
        named = {"local": self.local, "remote": self.remote, "reduction": self.reduction}
        for name, link in named.items():
            if link is not None:
                _check(link, f"link {name!r}")
        for pair, link in self.links.items():
            inside = isinstance(pair, tuple) and len(pair) == 2
            if not inside or not all(end in range(len(self.devices)) for end in pair):
                raise ClusterError(f"links has {pair!r}, no pair of devices", "no-pair", "links")
            _check(link, f"link {pair}")
        if self.cores is not None and (not isinstance(self.cores, int) or self.cores < 1):
            raise ClusterError(
                f"cores must be at least 1, not {self.cores!r}", "cores", "field 'cores'"
            )

    @classmethod
    def uniform(
        cls,
        devices: int,
        memory: float | None = None,
        bandwidth: float = math.inf,
        latency: float = 0.0,
        devices_per_node: int | None = None,
        remote: Link | None = None,
        kind: str = "gpu",
        cores: int | None = None,
    ) -> Cluster:
        """A cluster of equal devices.

        Args:
            devices: their number.
            memory: bytes of each; None: without limit.
            bandwidth: bytes per second from device to device of a node.
            latency: seconds until the first byte arrives.
            devices_per_node: how many are in a node; None: all.
            remote: the link between nodes.
            kind: `gpu` or `cpu`.
            cores: cores that all devices share.

        Raises:
            ClusterError: if a number is none.
        """
        for name, count in (("devices", devices), ("devices_per_node", devices_per_node)):
            if count is not None and (not hasattr(count, "__index__") or count < 1):
                raise ClusterError(
                    f"{name} must be a whole number above 0, not {count!r}",
                    "empty" if name == "devices" else "no-number",
                    f"field {name!r}",
                )
        per_node = devices_per_node or devices
        made = (
            Device(f"/device:{kind.upper()}:{position}", memory, 1.0, kind, position // per_node)
            for position in range(devices)
        )
        return cls(tuple(made), Link(bandwidth, latency), remote, cores=cores)

    @classmethod
    def local_ranks(cls, ranks: int, memory: float | None = None) -> Cluster:
        """Ranks on the processors of this machine, which they share.

        Links are those of the shared-memory transport; reductions those of Horovod's Gloo, which
        works in cycles of a millisecond. Both are of the order that a small machine reaches; give
        a cluster of your own where they matter.

        Args:
            ranks: their number.
            memory: bytes of each; None: without limit.
        """
        made = cls.uniform(ranks, memory, 5e9, 1e-4, kind="cpu", cores=_cores())
        return replace(made, reduction=Link(1e9, 1e-3))

    def __len__(self) -> int:
        return len(self.devices)

    def link(self, source: int, target: int) -> Link:
        """The link from one device to another."""
        found = self.links.get((source, target))
        if found is not None:
            return found
        if self.remote is not None and self.devices[source].node != self.devices[target].node:
            return self.remote
        return self.local

    def transfer_seconds(self, size: float, source: int, target: int) -> float:
        """What a tensor of `size` bytes takes from one device to another; nothing on the same."""
        return 0.0 if source == target else self.link(source, target).seconds(size)

    @property
    def is_uniform(self) -> bool:
        """Whether every device and every link is like every other."""
        first = self.devices[0]
        alike = all(
            (device.memory, device.speed, device.kind) == (first.memory, first.speed, first.kind)
            for device in self.devices
        )
        return alike and self.has_equal_links

    @property
    def has_equal_links(self) -> bool:
        """Whether every link is like every other."""
        one_node = len({device.node for device in self.devices}) == 1
        return not self.links and (self.remote in (None, self.local) or one_node)

    def __str__(self) -> str:
        nodes: dict[int, list[int]] = {}
        for position, device in enumerate(self.devices):
            nodes.setdefault(device.node, []).append(position)
        lines = [f"{len(self.devices)} devices on {len(nodes)} nodes"]
        if self.cores is not None:
            lines[0] += f", {self.cores} cores for all of them"
        lines.append(f"links in a node {_link_text(self.local)}")
        if self.remote is not None:
            lines.append(f"links between nodes {_link_text(self.remote)}")
        lines += [f"link {a} -> {b} {_link_text(link)}" for (a, b), link in self.links.items()]
        for position, device in enumerate(self.devices):
            memory = "no limit" if device.memory is None else f"{device.memory / 1e9:.4g} GB"
            lines.append(
                f"  {position:>3}  node {device.node}  {device.kind}  speed {device.speed:g}  "
                f"{memory}  {device.name}"
            )
        return "\n".join(lines)


def _check(link: Link, where: str) -> None:
    if not isinstance(link, Link):
        raise ClusterError(f"{where} must be a planning.Link, not {link!r}", "link", where)
    number(link.bandwidth, where, "bandwidth", ClusterError, infinite=True, positive=True)
    number(link.latency, where, "latency", ClusterError)


def _link_text(link: Link) -> str:
    speed = "without limit" if math.isinf(link.bandwidth) else f"{link.bandwidth / 1e9:.4g} GB/s"
    return f"{speed}, latency {link.latency * 1e6:.4g} us"


def _cores() -> int:
    """The processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
