"""Costs: what the actions of a schedule take, in seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from pipeline.schedules import Kind, Schedule

# One number for all stages, or one for each: of the ranks, or of the virtual stages.
PerStage = float | Sequence[float]
# One number for all pairs of ranks, a table [from][to], or some pairs' numbers by (from, to).
PerPair = float | Sequence[Sequence[float]] | Mapping[tuple[int, int], float]


@dataclass(frozen=True)
class Costs:
    """The costs of one step's actions.

    Attributes:
        forward: seconds of a forward, per micro-batch and chunk.
        backward: seconds of a backward; where the schedule splits it, of the input gradient alone.
        weight: seconds of a weight gradient. A schedule that does not split backward spends
            `backward + weight` in its backward.
        recompute: seconds that backward needs first to compute a stash anew.
        transfer: seconds that a boundary tensor takes from one rank to another; None: by its bytes.
        evict: seconds that a stash takes, there or back; None: by its bytes.
        boundary_bytes: bytes of a boundary tensor.
        stash_bytes: bytes of a stash of one micro-batch and chunk.
        bandwidth: bytes per second from one rank to another; None: without limit.
        latency: seconds until the first byte arrives.
        cores: None: every rank computes on its own. A number: so many cores for all ranks, which
            take turns. A list: the core of each rank; those with the same one take turns.

    `forward` to `recompute`, `boundary_bytes` and `stash_bytes` are one number, or a list with one
    for each rank or for each virtual stage. `bandwidth` and `latency` are one number, a table
    [from rank][to rank], which `links_between_nodes` makes, or a mapping from (from, to) to the
    number; pairs that it leaves out cost nothing.
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    weight: PerStage = 0.0
    recompute: PerStage = 0.0
    transfer: float | None = None
    evict: float | None = None
    boundary_bytes: PerStage = 0
    stash_bytes: PerStage = 0
    bandwidth: PerPair | None = None
    latency: PerPair = 0.0
    cores: int | Sequence[int] | None = None

    @classmethod
    def of(cls, costs: Costs | Mapping[str, Any]) -> Costs:
        """Costs as they are, or made of a mapping with their fields.

        Raises:
            ValueError: if the mapping has a field that costs have not.
            TypeError: if it is neither.
        """
        if isinstance(costs, cls):
            return costs
        if not isinstance(costs, Mapping):
            raise TypeError(f"costs must be pipeline.Costs or a mapping, not {costs!r}")
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(costs) - set(names))
        if unknown:
            raise ValueError(f"costs have no {unknown[0]!r}; they have {', '.join(names)}")
        return cls(**costs)


class ScheduleCosts:
    """The costs of one schedule's actions: `Costs` with every number looked up and checked.

    Args:
        schedule: the schedule.
        costs: its costs.

    Raises:
        ValueError: if a list has the wrong length or a number is negative or not finite.
        TypeError: if something is not a number.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.costs = costs
        forward = self._per_stage("forward")
        backward = self._per_stage("backward")
        weight = self._per_stage("weight")
        recompute = self._per_stage("recompute")
        whole = [b + r for b, r in zip(backward, recompute, strict=True)]
        if not schedule.splits_backward:
            whole = [b + w for b, w in zip(whole, weight, strict=True)]
        # Kind → virtual stage → seconds.
        self.seconds = {Kind.FORWARD: forward, Kind.BACKWARD: whole, Kind.WEIGHT: weight}
        self.stash_bytes = self._per_stage("stash_bytes")
        self.boundary_bytes = self._per_stage("boundary_bytes")
        # One number each: a transfer's seconds hold for all pairs.
        self.transfer = self._optional("transfer")
        self.evict = self._optional("evict")
        self.latency = self._per_pair("latency", otherwise=0.0)
        self.bandwidth = None
        if costs.bandwidth is not None:
            self.bandwidth = self._per_pair("bandwidth", otherwise=math.inf)
        if self.bandwidth is not None and any(0 in row for row in self.bandwidth):
            raise ValueError("bandwidth must be greater than 0; None means without limit")

    def boundary_seconds(self, source: int, target: int, virtual_stage: int) -> float:
        """Seconds for the boundary tensor that `virtual_stage` made."""
        if self.transfer is not None:
            return self.transfer
        return self._seconds(self.boundary_bytes[virtual_stage], source, target)

    def stash_seconds(self, source: int, target: int, virtual_stage: int) -> float:
        """Seconds for a stash of `virtual_stage`."""
        if self.evict is not None:
            return self.evict
        return self._seconds(self.stash_bytes[virtual_stage], source, target)

    def core_of_ranks(self) -> tuple[list[int], list[int]]:
        """For each rank, the group of cores that it computes on; for each group, their number."""
        cores, num_stages = self.costs.cores, self.schedule.num_stages
        if cores is None:
            return list(range(num_stages)), [1] * num_stages
        for core in cores if _is_sequence(cores) else [cores]:
            if isinstance(core, bool) or not hasattr(core, "__index__"):
                raise TypeError(
                    f"cores must be a number of cores or the core of each rank, not {core!r}"
                )
        if not _is_sequence(cores):
            if cores < 1:
                raise ValueError(f"cores must be at least 1, not {cores}")
            return [0] * num_stages, [int(cores)]
        if len(cores) != num_stages:
            raise ValueError(f"cores has {len(cores)} numbers for {num_stages} ranks")
        names = sorted(set(cores))
        return [names.index(core) for core in cores], [1] * len(names)

    def _seconds(self, size: float, source: int, target: int) -> float:
        seconds = self.latency[source][target]
        if self.bandwidth is not None:
            seconds += size / self.bandwidth[source][target]
        return seconds

    def _per_stage(self, name: str) -> list[float]:
        """The numbers for each virtual stage."""
        value = getattr(self.costs, name)
        schedule = self.schedule
        if not _is_sequence(value):
            return [_number(name, value)] * schedule.num_virtual_stages
        if len(value) == schedule.num_virtual_stages:
            return [_number(name, item) for item in value]
        if len(value) == schedule.num_stages:
            place = schedule.placement.rank_and_chunk
            return [
                _number(name, value[place(stage, schedule.num_stages)[0]])
                for stage in range(schedule.num_virtual_stages)
            ]
        raise ValueError(
            f"{name} has {len(value)} numbers; give one for all, one for each of the "
            f"{schedule.num_stages} ranks, or one for each of the {schedule.num_virtual_stages} "
            "virtual stages"
        )

    def _per_pair(self, name: str, otherwise: float) -> list[list[float]]:
        """The table of a cost; `otherwise` is for the pairs that a mapping leaves out."""
        value = getattr(self.costs, name)
        num_stages = self.schedule.num_stages
        if isinstance(value, Mapping):
            table = [[otherwise] * num_stages for _ in range(num_stages)]
            for pair, number in value.items():
                if pair not in product(range(num_stages), repeat=2):
                    raise ValueError(f"{name} has {pair!r}, which is no pair of ranks (from, to)")
                table[pair[0]][pair[1]] = _number(name, number)
            return table
        if not _is_sequence(value):
            return [[_number(name, value)] * num_stages for _ in range(num_stages)]
        if len(value) != num_stages or any(len(row) != num_stages for row in value):
            raise ValueError(f"{name} must be one number or a table of {num_stages}x{num_stages}")
        # A rank has no link to itself, so that its number there means nothing.
        return [
            [_number(name, item) if source != target else 1.0 for target, item in enumerate(row)]
            for source, row in enumerate(value)
        ]

    def _optional(self, name: str) -> float | None:
        value = getattr(self.costs, name)
        if _is_sequence(value):
            raise TypeError(f"{name} must be one number, not {value!r}; differ by bytes and links")
        return None if value is None else _number(name, value)


def links_between_nodes(
    nodes: Sequence[int], local: tuple[float, float], remote: tuple[float, float]
) -> dict[str, list[list[float]]]:
    """Tables of bandwidth and latency for ranks on several nodes.

    Args:
        nodes: the node of each rank.
        local: bytes per second and seconds of latency between ranks of one node.
        remote: the same between nodes.

    Returns:
        The fields `bandwidth` and `latency` of `Costs`.
    """
    links = [[local if a == b else remote for b in nodes] for a in nodes]
    return {
        "bandwidth": [[bandwidth for bandwidth, _ in row] for row in links],
        "latency": [[latency for _, latency in row] for row in links],
    }


def per_rank(name: str, value: PerStage, num_stages: int) -> list[float]:
    """One number for each stage, from one for all or one for each.

    Raises:
        ValueError: if there are neither one nor as many as stages, or one is negative.
        TypeError: if one is no number.
    """
    if not _is_sequence(value):
        return [_number(name, value)] * num_stages
    if len(value) != num_stages:
        raise ValueError(
            f"{name} has {len(value)} numbers; give one for all or one for each of the "
            f"{num_stages} stages"
        )
    return [_number(name, item) for item in value]


def positive(name: str, value: Any) -> float:
    """A number that is finite and greater than 0.

    Raises:
        ValueError: if it is not.
        TypeError: if it is no number.
    """
    if not _number(name, value):
        raise ValueError(f"{name} must be greater than 0")
    return float(value)


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping)


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or a list of numbers, not {value!r}") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name} must be finite and not negative, not {value!r}")
    return number
