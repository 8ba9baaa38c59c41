"""Table: a schedule's actions as columns of numbers, so that a check is a few array operations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from pipeline.schedules.actions import COMPUTE, STASH_TRANSFERS, Action, Kind

KINDS = tuple(Kind)
CODES = {kind: code for code, kind in enumerate(KINDS)}
NO_PEER = -1

_COMPUTES = np.array([kind in COMPUTE for kind in KINDS])
_MOVES_STASHES = np.array([kind in STASH_TRANSFERS for kind in KINDS])


class Table:
    """The actions of all lines, one after the other.

    Attributes:
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

    def __init__(self, lines: Sequence[Sequence[Action]]) -> None:
        lengths = [len(line) for line in lines]
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        columns = tuple(zip(*chain.from_iterable(lines), strict=True)) or ((), (), (), ())
        count = sum(lengths)
        self.rank = np.repeat(np.arange(len(lines), dtype=np.int32), lengths)
        self.kind = np.fromiter(map(CODES.__getitem__, columns[0]), np.int32, count)
        self.microbatch = np.fromiter(columns[1], np.int32, count)
        self.chunk = np.fromiter(columns[2], np.int32, count)
        self.peer = np.fromiter(
            (NO_PEER if peer is None else peer for peer in columns[3]), np.int32, count
        )
        self.computes = _COMPUTES[self.kind]
        self.moves_stashes = _MOVES_STASHES[self.kind]
        sums = np.concatenate([[0], np.cumsum(self.computes)])
        self.before = (sums[:-1] - sums[self.starts[self.rank]]).astype(np.int32)

    def line(self, rank: int) -> slice:
        """The actions of a rank."""
        return slice(int(self.starts[rank]), int(self.starts[rank + 1]))

    def position(self, at: int) -> int:
        """The place of an action in its line."""
        return int(at - self.starts[self.rank[at]])

    def has(self, kind: Kind) -> bool:
        """Whether there is such an action."""
        return bool((self.kind == CODES[kind]).any())
