"""Which rank runs which stage of which replica.

Replicas are runs of p ranks in a row. In each, stage x is on its x-th rank, unless the schedule
moves stashes and the replica's ranks are on several nodes: then stages are placed so that partners
share a node (`schedules.pair_adjacent`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import tensorflow as tf

from pipeline.communication.rendezvous import host_identity
from pipeline.schedules import Mapping, Schedule, pair_adjacent


@dataclass(frozen=True)
class Place:
    """Where this process is.

    Attributes:
        rank: Horovod's.
        mapping: of all stages to ranks.
    """

    rank: int
    mapping: Mapping

    @cached_property
    def _position(self) -> tuple[int, int]:
        return next(
            (replica, ranks.index(self.rank))
            for replica, ranks in enumerate(self.mapping.ranks)
            if self.rank in ranks
        )

    @property
    def replica(self) -> int:
        """Which of the pipelines that train side by side."""
        return self._position[0]

    @property
    def stage(self) -> int:
        """The line of the schedule that it runs."""
        return self._position[1]

    @property
    def num_stages(self) -> int:
        """The number of stages p."""
        return self.mapping.num_stages

    @property
    def num_replicas(self) -> int:
        """The number of replicas r."""
        return len(self.mapping.ranks)

    def peer(self, stage: int) -> int:
        """Horovod's rank of another stage of this replica."""
        return self.mapping.ranks[self.replica][stage]

    def stage_of(self, rank: int) -> int:
        """The stage of any rank."""
        return next(ranks.index(rank) for ranks in self.mapping.ranks if rank in ranks)


def place_stages(schedule: Schedule, nodes: Sequence[int]) -> Mapping:
    """Maps the stages of all replicas to ranks.

    Args:
        schedule: of each replica.
        nodes: the node of each rank; a multiple of p of them.
    """
    num_stages = schedule.num_stages
    placed = []
    for first in range(0, len(nodes), num_stages):
        of_replica = list(nodes[first : first + num_stages])
        order = list(range(num_stages))
        if schedule.evicts and len(set(of_replica)) > 1:
            # The replica's ranks, node by node.
            order.sort(key=lambda at, of=of_replica: of.index(of[at]))
            counts = [of_replica.count(node) for node in dict.fromkeys(of_replica)]
            found = pair_adjacent(num_stages, len(counts), counts).ranks[0]
            order = [order[at] for at in found]
        placed.append(tuple(first + at for at in order))
    return Mapping(tuple(placed), tuple(nodes))


def find_nodes(size: int) -> list[int]:
    """The node of each rank, numbered from 0; a collective of all ranks if there are several.

    Nodes are hosts; `PIPELINE_NODE`, set on all ranks, names them otherwise, for example by rack.
    """
    import horovod.tensorflow as hvd

    named = os.environ.get("PIPELINE_NODE")
    if named is None and hvd.cross_size() == 1:
        return [0] * size
    line = json.dumps(named or host_identity()).encode() + b"\n"
    lines = hvd.allgather(tf.constant(list(line), tf.uint8), name="pipeline/nodes")
    names = bytes(lines.numpy()).splitlines()
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]
