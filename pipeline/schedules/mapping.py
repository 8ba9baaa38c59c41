"""Pair-adjacent mapping: which process runs which stage, so that partners share a node.

BPipe moves whole stashes between stage x and stage p-1-x, many times the bytes of a boundary
tensor, so partners belong on one node, where links are fast (Kim et al., BPipe, ICML 2023). Pairs
are placed one after the other, (0, p-1), (1, p-2), ..., so that most neighbours share a node, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mapping:
    """Which process runs which stage.

    Attributes:
        ranks: for each replica, the process (global rank) of each stage.
        nodes: the node of each process.
    """

    ranks: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """The number of stages p."""
        return len(self.ranks[0])

    def nodes_of_stages(self, replica: int = 0) -> list[int]:
        """The node of each stage of a replica, as `links_between_nodes` takes it."""
        return [self.nodes[rank] for rank in self.ranks[replica]]

    @property
    def split_pairs(self) -> list[tuple[int, int, int]]:
        """The pairs that are not on one node, as (replica, stage, its partner)."""
        last = self.num_stages - 1
        return [
            (replica, stage, last - stage)
            for replica in range(len(self.ranks))
            for stage in range((last + 1) // 2)
            if len({self.nodes_of_stages(replica)[at] for at in (stage, last - stage)}) > 1
        ]

    @property
    def boundaries_between_nodes(self) -> int:
        """How many pairs of neighbour stages are on different nodes."""
        return sum(
            a != b
            for replica in range(len(self.ranks))
            for nodes in [self.nodes_of_stages(replica)]
            for a, b in zip(nodes[:-1], nodes[1:], strict=True)
        )

    def __str__(self) -> str:
        last = self.num_stages - 1
        lines = ["replica  stage  partner  rank  node"]
        for replica, ranks in enumerate(self.ranks):
            for stage, rank in enumerate(ranks):
                partner = last - stage if last != 2 * stage else "-"
                lines.append(
                    f"{replica:>7}  {stage:>5}  {partner:>7}  {rank:>4}  {self.nodes[rank]:>4}"
                )
        pairs = len(self.ranks) * (self.num_stages // 2)
        lines.append(
            f"{pairs - len(self.split_pairs)} of {pairs} pairs on one node; "
            f"{self.boundaries_between_nodes} boundaries between nodes"
        )
        return "\n".join(lines)


def pair_adjacent(
    num_stages: int, num_nodes: int, slots: int | Sequence[int], replicas: int = 1
) -> Mapping:
    """Places stages so that as many pairs of partners as possible share a node.

    Args:
        num_stages: the number of stages p.
        num_nodes: the number of nodes.
        slots: how many processes a node runs, the same on all or one number for each. Processes
            are numbered node by node, as `horovodrun` does.
        replicas: how many copies of the pipeline train data-parallel.

    Returns:
        The mapping; its text reports which pairs share a node.

    Raises:
        ValueError: if a number is not positive or the slots are too few.
    """
    counts = [slots] * num_nodes if isinstance(slots, int) else list(slots)
    if min(num_stages, num_nodes, replicas, *counts, 1) < 1 or len(counts) != num_nodes:
        raise ValueError(
            "stages, nodes, slots and replicas must be positive, with one number of slots a node; "
            f"got {num_stages} stages, {num_nodes} nodes, slots {slots}, {replicas} replicas"
        )
    if sum(counts) < num_stages * replicas:
        raise ValueError(
            f"{replicas} replicas of {num_stages} stages need {num_stages * replicas} processes, "
            f"but the nodes run {sum(counts)}; add nodes or slots"
        )
    nodes = [node for node, count in enumerate(counts) for _ in range(count)]
    free = [[rank for rank, at in enumerate(nodes) if at == node] for node in range(num_nodes)]
    placed = [[-1] * num_stages for _ in range(replicas)]
    last = num_stages - 1
    single: list[tuple[int, int]] = []  # (replica, stage) that has no place beside a partner
    for replica in range(replicas):
        for stage in range(num_stages // 2):
            home = next((ranks for ranks in free if len(ranks) >= 2), None)
            if home is None:
                single += [(replica, stage), (replica, last - stage)]
            else:
                placed[replica][stage] = home.pop(0)
                placed[replica][last - stage] = home.pop(0)
        if num_stages % 2:
            single.append((replica, num_stages // 2))
    for replica, stage in sorted(single):
        # Beside the stage before, if there is room.
        before = placed[replica][stage - 1] if stage else -1
        home = free[nodes[before]] if before >= 0 else []
        home = home or next(ranks for ranks in free if ranks)
        placed[replica][stage] = home.pop(0)
    return Mapping(tuple(map(tuple, placed)), tuple(nodes))
