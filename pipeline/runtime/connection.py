"""Connects the ranks of a job as a schedule needs it."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline import native
from pipeline.communication.horovod_transport import HorovodTransport
from pipeline.communication.native_transport import NativeTransport
from pipeline.communication.rendezvous import exchange_over_horovod, shared_secret
from pipeline.communication.transport import Transport
from pipeline.errors import UsageError
from pipeline.runtime.places import Place
from pipeline.schedules import Schedule

_NAMES = ("auto", "tcp", "horovod")


def connect(
    schedule: Schedule, place: Place, size: int, wanted: str, timeout: float, name: str
) -> Transport:
    """The transport of a pipeline; a collective over all ranks.

    Args:
        schedule: whose peers are to be connected.
        place: where this rank is.
        size: the number of ranks in the job.
        wanted: `auto`, `tcp` or `horovod`.
        timeout: seconds that a wait may take.
        name: of the pipeline, the same on all ranks.

    Raises:
        ValueError: if `wanted` is none of these.
    """
    if wanted not in _NAMES:
        raise UsageError(f"transport must be one of {', '.join(_NAMES)}, not {wanted!r}")
    pairs = peer_pairs(schedule, place.mapping.ranks)
    # Rank 0 talks to all, to exchange what all have to know.
    pairs |= {(0, rank) for rank in range(1, size)}
    if wanted == "horovod" or (wanted == "auto" and native.core is None):
        return HorovodTransport(place.rank, pairs, name, timeout)
    peers = {b if a == place.rank else a for a, b in pairs if place.rank in (a, b)}
    return NativeTransport(
        place.rank,
        peers,
        shared_secret(),
        exchange_over_horovod,
        timeout,
        only_tcp=wanted == "tcp",
    )


def peer_pairs(schedule: Schedule, placed: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """The pairs of Horovod ranks that a schedule has talk to each other, the lower one first.

    Neighbour virtual stages are among them also where they only hand over specs.

    Args:
        schedule: of each replica.
        placed: for each replica the rank of each stage.
    """
    lines = {
        (min(rank, action.peer), max(rank, action.peer))
        for rank, line in enumerate(schedule.actions)
        for action in line
        if action.peer is not None
    }
    owners = [
        schedule.placement.rank_and_chunk(stage, schedule.num_stages)[0]
        for stage in range(schedule.num_virtual_stages)
    ]
    lines |= {(min(pair), max(pair)) for pair in zip(owners, owners[1:], strict=False)}
    return {
        (min(ranks[one], ranks[other]), max(ranks[one], ranks[other]))
        for ranks in placed
        for one, other in lines
        if one != other
    }
