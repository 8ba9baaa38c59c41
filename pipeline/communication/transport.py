"""The interface that every transport has: post a send or a receive, go on, wait for it later.

A message is a tag and a list of tensors. It pairs with the receive of the same tag at the other
rank; messages of one tag arrive in the order of their sends. Nothing blocks but `wait`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf


class Transfer(Protocol):
    """A message on its way; what `isend` and `irecv` return.

    Attributes:
        done: whether it has ended, well or not.
        bytes: of its tensors; of a receive, once it is done.
        posted: when it was asked for here, in nanoseconds of the host's monotonic clock.
        peer_posted: of a receive that is done, when the peer asked for the send; 0 where unknown.
        started: when its data began to move; 0 if not yet.
        finished: when it was through; 0 if not yet.
    """

    done: bool
    bytes: int
    posted: int
    peer_posted: int
    started: int
    finished: int


@dataclass
class TransportCounters:
    """What a transport has carried since it began.

    Attributes:
        messages_sent: the number of messages.
        messages_received: the number of messages.
        bytes_sent: of tensors.
        bytes_received: of tensors.
        cpu_seconds: processor time of the transport's own threads.
    """

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    cpu_seconds: float = 0.0


class Transport(Protocol):
    """Point-to-point messages between this rank and its peers.

    Attributes:
        name: `native` or `horovod`.
        timeout: seconds that `wait` waits at most, unless told otherwise.
        silence: what is known of other ranks when a wait took too long, to add to its error.
        reason: why another rank has failed, after a moment if need be, where a connection just
            ended; empty if nothing is known.
    """

    name: str
    timeout: float
    silence: Callable[[], str]
    reason: Callable[[], str]

    def isend(
        self,
        peer: int,
        tag: int,
        tensors: Sequence[tf.Tensor],
        buffered: bool = True,
        after: Transfer | None = None,
    ) -> Transfer:
        """Posts a message to `peer`; its memory may be held until the transfer is done.

        Args:
            peer: the other rank.
            tag: see `encode`.
            tensors: of plain numbers; may be none.
            buffered: whether the message may travel before the peer has asked for it, as far as
                the peer's window allows. Without, the peer never holds it unasked.
            after: a transfer that has to end before this one is posted.
        """

    def irecv(self, peer: int, tag: int, after: Transfer | None = None) -> Transfer:
        """Posts the receive of a message from `peer`, now or when `after` has ended."""

    def forward(self, peer: int, tag: int, received: Transfer) -> Transfer:
        """Sends on, unbuffered, what a receive gets when it is done; nobody else may take it."""

    def wait(self, transfer: Transfer, what: str, timeout: float | None = None) -> list[tf.Tensor]:
        """Waits until a transfer is done.

        Args:
            transfer: what `isend` or `irecv` returned.
            what: what is waited for, for the error.
            timeout: in place of the transport's.

        Returns:
            The tensors of a receive; none of a send.

        Raises:
            CommunicationError: if it failed, naming `what` and why.
            CommunicationTimeout: if it took too long.
        """

    def kind_of(self, peer: int) -> str:
        """What messages to `peer` go over, for example `shared-memory`."""

    def counters(self) -> TransportCounters:
        """What was carried so far."""

    def abort(self, why: str) -> None:
        """Tells all peers that this rank gives up: what they wait for ends with `why`."""

    def fail(self, why: str) -> None:
        """Ends, with `why`, all that is under way here; called by another thread."""

    def close(self) -> None:
        """Ends the transport and its threads; what was sent gets a moment to leave."""


def encode(kind: str, microbatch: int = 0, stage: int = 0) -> int:
    """A tag from what a message holds.

    Args:
        kind: a short name, for example `F` or `EVICT`; names differ by their CRC.
        microbatch: less than 2**20.
        stage: the virtual stage, less than 2**16.
    """
    return (zlib.crc32(kind.encode()) & 0x7FFFFFF) << 36 | microbatch << 16 | stage
