"""Table: a schedule's actions as columns of numbers, so that a pass is a few array operations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from pipeline.errors import ScheduleError
from pipeline.schedules.actions import COMPUTE, STASH_TRANSFERS, Action, Kind, action_of

KINDS = tuple(Kind)
CODES = {kind: code for code, kind in enumerate(KINDS)}
NO_PEER = -1
_BEYOND = 10**9  # numbers of the text form have up to nine digits

# Actions as numbers, one column each; the rows are kind, micro-batch, chunk and peer.
Columns = np.ndarray

_COMPUTES = np.array([kind in COMPUTE for kind in KINDS])
_MOVES_STASHES = np.array([kind in STASH_TRANSFERS for kind in KINDS])


class Table:
    """The actions of all lines, one after the other.

    Args:
        columns: the actions.
        starts: where each line begins; one more than lines.

    Attributes:
        columns: the actions; int32.
        starts: where each line begins; one more than lines.
        rank: of each action, int32 like the following.
        kind: its number in `KINDS`.
        microbatch: its micro-batch.
        chunk: its model chunk.
        peer: the other rank, or `NO_PEER`.
        computes: whether it computes; bool.
        moves_stashes: whether it is a stash transfer; bool.
        before: the number of computations before it in its line.
    """

    def __init__(self, columns: Columns, starts: np.ndarray) -> None:
        self.columns = columns
        self.starts = starts
        self.kind, self.microbatch, self.chunk, self.peer = columns
        self.rank = np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
        self.computes = _COMPUTES[self.kind]
        self.moves_stashes = _MOVES_STASHES[self.kind]
        sums = np.concatenate([[0], np.cumsum(self.computes)])
        self.before = (sums[:-1] - sums[starts[self.rank]]).astype(np.int32)

    @classmethod
    def of_lines(cls, lines: Sequence[Columns]) -> Table:
        """The table of lines of columns."""
        columns = np.concatenate(lines, axis=1, dtype=np.int32)
        return cls(columns, _starts([line.shape[1] for line in lines]))

    @classmethod
    def of_actions(cls, lines: Sequence[Sequence[Action]]) -> Table:
        """The table of lines of actions.

        Raises:
            TypeError: if something is no action.
            ScheduleError: if a number of an action is out of range, or there is no line.
        """
        if not len(lines):
            raise ScheduleError("a schedule needs a line for each rank, it has none")
        for action in chain.from_iterable(lines):
            _check(action)
        fields = tuple(zip(*chain.from_iterable(lines), strict=True)) or ((), (), (), ())
        columns = np.empty((4, len(fields[0])), np.int32)
        columns[0] = [*map(CODES.__getitem__, fields[0])]
        columns[1:3] = fields[1:3]
        columns[3] = [NO_PEER if peer is None else peer for peer in fields[3]]
        return cls(columns, _starts([*map(len, lines)]))

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """For each line, its actions."""
        kinds, microbatches, chunks, peers = self.columns.tolist()
        fields = zip(
            map(KINDS.__getitem__, kinds),
            microbatches,
            chunks,
            (None if peer == NO_PEER else peer for peer in peers),
            strict=True,
        )
        actions = tuple(map(action_of, fields))
        starts = self.starts.tolist()
        return tuple(actions[a:b] for a, b in zip(starts, starts[1:], strict=False))

    def line(self, rank: int) -> slice:
        """The actions of a rank."""
        return slice(int(self.starts[rank]), int(self.starts[rank + 1]))

    def position(self, at: int) -> int:
        """The place of an action in its line."""
        return int(at - self.starts[self.rank[at]])

    def has(self, kind: Kind) -> bool:
        """Whether there is such an action."""
        return bool((self.kind == CODES[kind]).any())


def _check(action: Action) -> None:
    """Refuses what is no action, or one that has no text form."""
    if not isinstance(action, Action):
        raise TypeError(f"lines must hold schedules.Action, not {action!r}; see Schedule.parse")
    kind, *numbers, peer = action
    if not isinstance(kind, Kind):
        raise TypeError(f"an action's kind must be a schedules.Kind, not {kind!r}")
    if (peer is None) != (kind in COMPUTE):
        needs = "no peer" if kind in COMPUTE else "a peer"
        raise ScheduleError(
            f"{tuple(action)!r} is not an action: {kind!r} has {needs}", "no-action"
        )
    for number in numbers if peer is None else (*numbers, peer):
        if not hasattr(number, "__index__") or not 0 <= number < _BEYOND:
            raise ScheduleError(
                f"{tuple(action)!r} is not an action: {number!r} is no number from 0 on of up to "
                "nine digits",
                "no-action",
            )


def row(kind: Kind, microbatches: Sequence[int] | np.ndarray, chunk: int = 0) -> Columns:
    """A computation of each of these micro-batches, in their order."""
    columns = np.empty((4, len(microbatches)), np.int32)
    for number, value in enumerate((CODES[kind], microbatches, chunk, NO_PEER)):
        columns[number] = value
    return columns


def _starts(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
