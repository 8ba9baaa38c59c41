"""Small things that all ranks tell each other, through rank 0 and over the transport.

They go over the transport and not over Horovod, so that a rank that is missing leads to an error
with a name within the time limit.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.communication.transport import Transfer, Transport, encode

_TO_HUB = encode("TO_HUB")
_FROM_HUB = encode("FROM_HUB")


class Hub:
    """This rank's view of the group; every method is called by all ranks in the same order.

    Args:
        transport: of rank 0 connected to all ranks, of all ranks to rank 0.
        rank: this rank.
        size: the number of ranks.
    """

    def __init__(self, transport: Transport, rank: int, size: int) -> None:
        self._transport = transport
        self._rank = rank
        self._size = size

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    def exchange(self, numbers: list[float], what: str) -> np.ndarray:
        """Every rank's numbers: float64 of the shape [ranks, numbers].

        Args:
            numbers: this rank's; as many on every rank.
            what: what they are for, for the error.
        """
        rows = self._gather(tf.constant(numbers, tf.float64), what)
        if self._rank == 0:
            rows = [tf.stack(rows)]
        return self._scatter(rows, what)[0].numpy()

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's value, on every rank; values are plain data, as JSON has it."""
        mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
        parts = self._scatter(self._gather(tf.constant(mine), what), what)
        return [json.loads(part.numpy().tobytes()) for part in parts]

    def _gather(self, mine: tf.Tensor, what: str) -> list[tf.Tensor]:
        """Every rank's tensor on rank 0, nothing elsewhere."""
        if self._rank != 0:
            self._transport.isend(0, _TO_HUB, [mine])
            return []
        transfers: list[tuple[int, Transfer]] = [
            (peer, self._transport.irecv(peer, _TO_HUB)) for peer in range(1, self._size)
        ]
        return [
            mine,
            *(self._transport.wait(t, f"{what}, from rank {peer}")[0] for peer, t in transfers),
        ]

    def _scatter(self, tensors: list[tf.Tensor], what: str) -> list[tf.Tensor]:
        """Rank 0's tensors on every rank."""
        if self._rank == 0:
            for peer in range(1, self._size):
                self._transport.isend(peer, _FROM_HUB, tensors)
            return tensors
        return self._transport.wait(self._transport.irecv(0, _FROM_HUB), f"{what}, from rank 0")
