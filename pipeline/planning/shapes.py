"""The shapes that the search for a plan goes through: replicas, stages, micro-batches, devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.planning.cluster import Cluster
from pipeline.schedules import Schedule

_MOST_ROUNDS = 16
"""Micro-batches for each stage, at most; more only make messages smaller."""


@dataclass(frozen=True)
class Shape:
    """What stays the same while schedules and policies are tried.

    Attributes:
        batch: samples of all replicas in a step.
        replicas: dp.
        stages: pp.
        microbatches: m of each replica.
        microbatch: samples in the largest one.
        order: for each rank, its device.
    """

    batch: int
    replicas: int
    stages: int
    microbatches: int
    microbatch: int
    order: tuple[int, ...]


def shapes(cluster: Cluster, num_layers: int, batch_sizes: Sequence[int]) -> Iterator[Shape]:
    """All shapes that use every device of the cluster."""
    devices = len(cluster)
    for batch in batch_sizes:
        for stages in range(1, min(devices, num_layers) + 1):
            if devices % stages or batch < devices // stages:
                continue
            replicas = devices // stages
            share = math.ceil(batch / replicas)
            for count in _counts(share, stages):
                microbatch = math.ceil(share / count)
                order = tuple(range(devices))
                yield Shape(batch, replicas, stages, count, microbatch, order)


def order_of(schedule: Schedule, cluster: Cluster) -> tuple[int, ...]:
    """For each rank, in order of replica and stage, its device, as the runtime will place it.

    In order, but for BPipe on several nodes: there partners share a node.
    """
    nodes = [device.node for device in cluster.devices]
    if not schedule.evicts or len(set(nodes)) == 1:
        return tuple(range(len(nodes)))
    from pipeline.runtime.places import place_stages  # which loads TensorFlow

    return tuple(rank for ranks in place_stages(schedule, nodes).ranks for rank in ranks)


def _counts(share: int, stages: int) -> list[int]:
    """Numbers of micro-batches to try: powers of two, and multiples of the stages."""
    most = min(share, _MOST_ROUNDS * stages)
    counts = {2**i for i in range(most.bit_length())}
    if stages > 1:
        counts |= {stages * 2**i for i in range(most.bit_length())}
        counts -= {1}
    return sorted(count for count in counts if count <= most) or [most]
