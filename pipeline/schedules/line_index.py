"""LineIndex: where in a rank's line the actions are, by kind and micro-batch."""

from __future__ import annotations

from pipeline.schedules.actions import Kind
from pipeline.schedules.faults import Place, fault
from pipeline.schedules.schedule import Schedule

MISSING = -1

# For each micro-batch, the position of one kind of action in the line, or MISSING.
Row = list[int]


class LineIndex:
    """The positions of the actions in one rank's line.

    Attributes:
        rank: the rank.
        rows: (kind, chunk, peer) → the row of those actions; only what the line has.

    Raises:
        ScheduleError: if an action is there twice or its peer is no other rank.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.rank = rank
        self.num_microbatches = schedule.num_microbatches
        self.rows: dict[tuple[Kind, int, int | None], Row] = {}
        rows = self.rows
        for position, (kind, microbatch, chunk, peer) in enumerate(schedule.actions[rank]):
            row = rows.get((kind, chunk, peer))
            if row is None:
                if peer is not None and (peer == rank or not 0 <= peer < schedule.num_stages):
                    raise fault(
                        schedule,
                        "bad-peer",
                        f"the peer must be another rank, 0 to {schedule.num_stages - 1}",
                        Place(rank, position),
                    )
                row = rows[kind, chunk, peer] = [MISSING] * self.num_microbatches
            if row[microbatch] != MISSING:
                raise fault(
                    schedule,
                    "duplicate",
                    "this action is in the line already; take one out",
                    Place(rank, position),
                )
            row[microbatch] = position

    def row(self, kind: Kind, chunk: int, peer: int | None = None) -> Row:
        """The row of these actions; all MISSING if the line has none."""
        row = self.rows.get((kind, chunk, peer))
        return [MISSING] * self.num_microbatches if row is None else row
