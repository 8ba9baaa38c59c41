"""The shapes that the search for a plan goes through: replicas, stages, micro-batches, devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.planning.cluster import Cluster
from pipeline.schedules import pair_adjacent

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
                for order in _orders(cluster, stages):
                    yield Shape(batch, replicas, stages, count, microbatch, order)


def _orders(cluster: Cluster, stages: int) -> list[tuple[int, ...]]:
    """The devices of the ranks: in order, and with BPipe's partners on one node."""
    devices = range(len(cluster))
    orders = [tuple(devices)]
    nodes = [device.node for device in cluster.devices]
    slots = nodes.count(nodes[0])
    if len(set(nodes)) > 1 and stages > 2 and slots * len(set(nodes)) == len(nodes):
        mapping = pair_adjacent(stages, len(set(nodes)), slots, len(nodes) // stages)
        order = tuple(rank for ranks in mapping.ranks for rank in ranks)
        if order not in orders:
            orders.append(order)
    return orders


def _counts(share: int, stages: int) -> list[int]:
    """Numbers of micro-batches to try: powers of two, and multiples of the stages."""
    most = min(share, _MOST_ROUNDS * stages)
    counts = {2**i for i in range(most.bit_length())}
    if stages > 1:
        counts |= {stages * 2**i for i in range(most.bit_length())}
        counts -= {1}
    return sorted(count for count in counts if count <= most) or [most]
