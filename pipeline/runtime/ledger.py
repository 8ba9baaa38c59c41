"""The ledger: which stashes a rank has held, when, and how large they were.

Every stash in this process counts from the moment its memory is taken until it is given back: the
rank's own, and on an acceptor those of its partner. A stash on its way counts at both ends. The
times of transfers come from the threads that move the bytes, so the peaks are those of every moment
and not only of moments between two actions.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pipeline.communication.transport import Transfer


@dataclass
class Holding:
    """A stash in this process.

    Attributes:
        lent: whether it belongs to the partner.
        bytes: its size.
        begin: when its memory was taken; nanoseconds of the monotonic clock.
        end: when it was given back; 0 if not yet.
        arrival: the transfer that brings it, if one does: then that says `begin` and `bytes`.
        departure: the transfer that takes it away, if one does: then that says `end`.
    """

    lent: bool
    bytes: int
    begin: int
    end: int = 0
    arrival: Transfer | None = None
    departure: Transfer | None = None

    def release(self) -> None:
        """Its memory is given back now."""
        self.end = time.monotonic_ns()

    def settle(self) -> None:
        """Takes times and size from transfers that are done, and lets go of these."""
        if self.arrival is not None and self.arrival.done:
            self.begin, self.bytes = self.arrival.started, self.arrival.bytes
            self.arrival = None
        if self.departure is not None and self.departure.done:
            self.end = self.departure.finished
            self.departure = None


@dataclass(frozen=True)
class Peak:
    """The most that was held at one moment.

    Attributes:
        count: of stashes.
        bytes: of stashes; not necessarily at the same moment.
        lent_bytes: of stashes that belong to the partner.
    """

    count: int = 0
    bytes: int = 0
    lent_bytes: int = 0

    def joined(self, other: Peak) -> Peak:
        """The larger of both, each for itself."""
        return Peak(
            max(self.count, other.count),
            max(self.bytes, other.bytes),
            max(self.lent_bytes, other.lent_bytes),
        )


class Ledger:
    """The stashes of one step."""

    def __init__(self) -> None:
        self._holdings: list[Holding] = []

    def make(self, size: int, begin: int) -> Holding:
        """An own stash that a forward pass made, which took memory since it began."""
        return self._add(Holding(False, size, begin))

    def arrive(self, arrival: Transfer, lent: bool) -> Holding:
        """A stash that a transfer brings."""
        return self._add(Holding(lent, 0, time.monotonic_ns(), arrival=arrival))

    def _add(self, holding: Holding) -> Holding:
        self._holdings.append(holding)
        return holding

    def peak(self) -> Peak:
        """The peaks so far; every transfer must be done."""
        changes: list[tuple[int, int, int, int]] = []
        for holding in self._holdings:
            holding.settle()
            lent = holding.bytes if holding.lent else 0
            changes.append((holding.begin, 1, holding.bytes, lent))
            if holding.end:
                changes.append((holding.end, -1, -holding.bytes, -lent))
        # At the same moment, what is given back comes first.
        changes.sort()
        peak = Peak()
        count = size = lent_size = 0
        for _, one, bytes_, lent in changes:
            count += one
            size += bytes_
            lent_size += lent
            peak = peak.joined(Peak(count, size, lent_size))
        return peak
