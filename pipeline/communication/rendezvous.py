"""How ranks find each other: addresses, the host's identity, and the exchange over Horovod."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from pipeline.errors import UsageError

# Linux: asks for the address of an interface.
_SIOCGIFADDR = 0x8915


class Address(NamedTuple):
    """Where a rank can be reached.

    Attributes:
        host: equal for ranks that can meet at a Unix socket, see `host_identity`.
        unix_name: the abstract name of its Unix socket.
        interface: the IPv4 address it listens at.
        port: the TCP port.
    """

    host: str
    unix_name: str
    interface: str
    port: int


Exchange = Callable[[Address], list[Address]]
"""Gives this rank's address to all and returns all ranks' addresses; a collective."""


def host_identity() -> str:
    """A name shared by exactly the processes that can reach each other's abstract Unix sockets.

    Those are the processes of one kernel boot and one network namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


def local_interface() -> str:
    """The IPv4 address at which other hosts of the job reach this one.

    `PIPELINE_INTERFACE` names it, by its address or as the system does. Otherwise it is the
    loopback if the job runs on one host, else Horovod's interface (`--network-interfaces`), or the
    one that leads to Horovod's rendezvous server.

    Raises:
        UsageError: if there is no such interface.
    """
    named = os.environ.get("PIPELINE_INTERFACE")
    if named:
        return address_of(named)
    server = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if not server or os.environ.get("HOROVOD_CROSS_SIZE", "1") == "1":
        return "127.0.0.1"
    interface = os.environ.get("HOROVOD_GLOO_IFACE")
    if interface:
        return address_of(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((server, 9))  # sends nothing, only finds the route
        return probe.getsockname()[0]


def address_of(interface: str) -> str:
    """The IPv4 address of an interface, which may be given by its address as well.

    Raises:
        UsageError: if there is no such interface.
    """
    with contextlib.suppress(OSError):
        return socket.inet_ntoa(socket.inet_aton(interface))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
        except OSError as error:
            raise UsageError(
                f"no network interface {interface!r} with an address: {error}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def gather_over_horovod(value: list[Any]) -> list[list[Any]]:
    """Every rank's list of plain data, on every rank of the Horovod job; a collective."""
    import horovod.tensorflow as hvd

    line = json.dumps(value).encode() + b"\n"
    mine = tf.constant(list(line), tf.uint8)
    lines = bytes(hvd.allgather(mine, name="pipeline/addresses").numpy()).splitlines()
    return [json.loads(line) for line in lines]


def exchange_over_horovod(address: Address) -> list[Address]:
    """The `Exchange` of a Horovod job."""
    return [Address(*row) for row in gather_over_horovod(list(address))]


def shared_secret() -> bytes:
    """16 random bytes, the same on every rank of the Horovod job; a collective."""
    import horovod.tensorflow as hvd

    mine = tf.constant(list(secrets.token_bytes(16)), tf.uint8)
    return bytes(hvd.broadcast(mine, root_rank=0, name="pipeline/secret").numpy())
