"""Where in the lines the actions are, by kind and micro-batch: of one rank, and of all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from pipeline.schedules.actions import Kind
from pipeline.schedules.faults import Place, fault
from pipeline.schedules.table import KINDS, NO_PEER

if TYPE_CHECKING:
    from pipeline.schedules.schedule import Schedule

MISSING = -1

# For each micro-batch, the position of one kind of action in the line, or MISSING; int32.
Row = np.ndarray


class LineIndex:
    """The positions of the actions in one rank's line.

    Attributes:
        rank: the rank.
        rows: (kind, chunk, peer) → the row of those actions; only what the line has.
    """

    def __init__(self, rank: int, num_microbatches: int) -> None:
        self.rank = rank
        self.rows: dict[tuple[Kind, int, int | None], Row] = {}
        self._nowhere = np.full(num_microbatches, MISSING, np.int32)

    def row(self, kind: Kind, chunk: int, peer: int | None = None) -> Row:
        """The row of these actions; all MISSING if the line has none."""
        return self.rows.get((kind, chunk, peer), self._nowhere)


class Index:
    """The positions of the actions in all lines.

    Attributes:
        lines: the index of each rank's line.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Makes the index.

        Raises:
            ScheduleError: if an action is there twice or its peer is no other rank.
        """
        table = schedule.table
        _check_peers(schedule)
        # Every kind, chunk, and peer of a rank has a row, numbered in this order.
        self._sizes = (
            schedule.num_stages,
            len(KINDS),
            schedule.num_chunks,
            schedule.num_stages + 1,
        )
        keys = self._keys(table.rank, table.kind, table.chunk, table.peer)
        present = np.zeros(math.prod(self._sizes), bool)
        present[keys] = True
        self._number = np.cumsum(present) - 1
        shape = int(present.sum()), schedule.num_microbatches
        self._rows = np.full(shape, MISSING, np.int32)
        positions = np.arange(len(keys)) - table.starts[table.rank]
        places = self._number[keys], table.microbatch
        self._rows[places] = positions
        if not np.array_equal(self._rows[places], positions):
            raise _duplicate(schedule)
        self.lines = [LineIndex(rank, shape[1]) for rank in range(schedule.num_stages)]
        columns = np.unravel_index(np.flatnonzero(present), self._sizes)
        of_rows = zip(*(column.tolist() for column in columns), self._rows, strict=True)
        for rank, kind, chunk, peer, row in of_rows:
            self.lines[rank].rows[KINDS[kind], chunk, None if peer == 0 else peer - 1] = row

    def positions(
        self,
        rank: np.ndarray,
        kind: np.ndarray,
        chunk: np.ndarray,
        peer: np.ndarray | int,
        microbatch: np.ndarray,
    ) -> np.ndarray:
        """Where these actions, all of which are there, are in their lines."""
        return self._rows[self._number[self._keys(rank, kind, chunk, peer)], microbatch]

    def _keys(
        self, rank: np.ndarray, kind: np.ndarray, chunk: np.ndarray, peer: np.ndarray | int
    ) -> np.ndarray:
        _, kinds, chunks, peers = self._sizes
        return ((rank.astype(np.int64) * kinds + kind) * chunks + chunk) * peers + peer + 1


def _check_peers(schedule: Schedule) -> None:
    table = schedule.table
    has_peer = table.peer != NO_PEER
    wrong = has_peer & ((table.peer == table.rank) | (table.peer >= schedule.num_stages))
    if wrong.any():
        at = int(wrong.argmax())
        raise fault(
            schedule,
            "bad-peer",
            f"the peer must be another rank, 0 to {schedule.num_stages - 1}",
            Place(int(table.rank[at]), table.position(at)),
        )


def _duplicate(schedule: Schedule) -> Exception:
    """The error for the first action that is in its line already."""
    for rank, line in enumerate(schedule.actions):
        seen = set()
        for position, action in enumerate(line):
            if action in seen:
                return fault(
                    schedule,
                    "duplicate",
                    "this action is in the line already; take one out",
                    Place(rank, position),
                )
            seen.add(action)
    raise AssertionError("there is no duplicate")
