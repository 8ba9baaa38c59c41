"""Placements: which part of the model each chunk of each rank holds.

The model is cut into p·v virtual stages in the order of its layers, v of them on each of p ranks.
A placement says which: in a loop (chunk after chunk around the ranks, as interleaved 1F1B has it)
or in a zigzag (down the ranks and up again, the V of V-Half). With one chunk both are the same.
"""

from __future__ import annotations

from enum import Enum


class Placement(Enum):
    """How virtual stages are laid out over ranks and their chunks."""

    LOOP = "loop"
    ZIGZAG = "zigzag"

    def virtual_stage(self, rank: int, chunk: int, num_ranks: int) -> int:
        """The virtual stage that `rank` holds as its model chunk `chunk`."""
        if self is Placement.ZIGZAG and chunk % 2:
            rank = num_ranks - 1 - rank
        return chunk * num_ranks + rank

    def rank_and_chunk(self, virtual_stage: int, num_ranks: int) -> tuple[int, int]:
        """Where the virtual stage is: the inverse of `virtual_stage`."""
        chunk, rank = divmod(virtual_stage, num_ranks)
        if self is Placement.ZIGZAG and chunk % 2:
            rank = num_ranks - 1 - rank
        return rank, chunk
