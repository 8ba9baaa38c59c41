"""The transport of our own: shared-memory rings on one host, TCP between hosts.

All bytes are moved by C++ threads (`pipeline/native`), without Python and its lock.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from pipeline import native
from pipeline.communication.rendezvous import Address, Exchange, host_identity, local_interface
from pipeline.communication.transport import TransportCounters
from pipeline.errors import CommunicationError, CommunicationTimeout

WINDOW_BYTES = 64 << 20
"""Bytes that a rank holds at most for each peer's messages that nobody has asked for yet."""

# Seconds that messages get to leave when a transport closes.
_CLOSING_SECONDS = 2.0


class NativeTransport:
    """Messages over the native links; see `Transport` for the methods.

    Args:
        rank: this process's rank.
        peers: the ranks to talk to; each must name this one among its own peers.
        secret: 16 bytes that only the job's ranks know.
        exchange: brings every rank's address to every rank.
        timeout: seconds that a connection or a wait may take.
        only_tcp: go over TCP even where memory could be shared.
        interface: the IPv4 address to listen at; by default, what `local_interface` finds.

    Raises:
        CommunicationError: if the native part is missing or a peer cannot be reached.
    """

    name = "native"

    def __init__(
        self,
        rank: int,
        peers: Iterable[int],
        secret: bytes,
        exchange: Exchange,
        timeout: float = 60.0,
        only_tcp: bool = False,
        interface: str | None = None,
    ) -> None:
        if native.core is None:
            raise CommunicationError(native.problem)
        self.timeout = timeout
        self.silence: Callable[[], str] = str
        self.reason: Callable[[], str] = str
        self._endpoint = native.core.Endpoint(
            rank, secret, interface or local_interface(), WINDOW_BYTES
        )
        # Also when the interpreter ends: its threads must not outlive it.
        weakref.finalize(self, self._endpoint.close, _CLOSING_SECONDS)
        addresses = exchange(
            Address(
                host_identity(),
                self._endpoint.unix_name,
                self._endpoint.interface,
                self._endpoint.port,
            )
        )
        for peer in sorted(set(peers) - {rank}):
            self._connect(rank, peer, addresses, only_tcp)

    def _connect(self, rank: int, peer: int, addresses: list[Address], only_tcp: bool) -> None:
        mine, theirs = addresses[rank], addresses[peer]
        if rank > peer:
            # The lower rank listens, so that each pair makes one connection.
            try:
                if mine.host == theirs.host and not only_tcp:
                    self._endpoint.connect_local(peer, theirs.unix_name, self.timeout)
                else:
                    self._endpoint.connect_tcp(peer, theirs.interface, theirs.port, self.timeout)
            except RuntimeError as error:
                raise CommunicationError(
                    f"rank {rank} cannot connect to rank {peer}: {error}"
                ) from None
        elif not self._endpoint.expect(peer, self.timeout):
            raise CommunicationTimeout(
                f"rank {peer} did not connect to rank {rank} within {self.timeout:g} s"
            )

    def isend(
        self,
        peer: int,
        tag: int,
        tensors: Sequence[tf.Tensor],
        buffered: bool = True,
        after: Any = None,
    ) -> Any:
        """See `Transport`."""
        transfer = self._endpoint.send(peer, tag, buffered, after)
        native.operations.pipeline_send(transfer.id, tensors)
        return transfer

    def irecv(self, peer: int, tag: int, after: Any = None) -> Any:
        """See `Transport`."""
        return self._endpoint.receive(peer, tag, after)

    def forward(self, peer: int, tag: int, received: Any) -> Any:
        """See `Transport`."""
        return self._endpoint.forward(peer, tag, received)

    def wait(self, transfer: Any, what: str, timeout: float | None = None) -> list[tf.Tensor]:
        """See `Transport`."""
        seconds = self.timeout if timeout is None else timeout
        if not transfer.wait(seconds):
            raise CommunicationTimeout(f"{what}: nothing came within {seconds:g} s{self.silence()}")
        problem = transfer.problem
        if problem is not None:
            if transfer.was_cut:
                problem = self.reason() or problem
            raise CommunicationError(f"{what}: {problem}")
        dtypes = transfer.dtypes
        return native.operations.pipeline_take(transfer.id, T=dtypes) if dtypes else []

    def kind_of(self, peer: int) -> str:
        """See `Transport`."""
        return self._endpoint.kind_of(peer)

    def counters(self) -> TransportCounters:
        """See `Transport`."""
        return TransportCounters(**self._endpoint.counters())

    def abort(self, why: str) -> None:
        """See `Transport`."""
        self._endpoint.abort(why)

    def fail(self, why: str) -> None:
        """See `Transport`."""
        self._endpoint.fail(why)

    def close(self) -> None:
        """See `Transport`."""
        self._endpoint.close(_CLOSING_SECONDS)
