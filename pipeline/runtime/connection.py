"""Connects the ranks: once a job by the watch, and for each pipeline as its schedule needs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import native
from pipeline.communication import ending
from pipeline.communication.collectives import Collectives
from pipeline.communication.horovod_transport import HorovodTransport
from pipeline.communication.native_transport import NativeTransport
from pipeline.communication.process_sets import process_set
from pipeline.communication.rendezvous import (
    Address,
    exchange_over_horovod,
    gather_over_horovod,
    local_interface,
    shared_secret,
)
from pipeline.communication.transport import Transport
from pipeline.communication.watch import Watch
from pipeline.errors import UsageError
from pipeline.runtime.places import Place
from pipeline.schedules import Schedule

_NAMES = ("auto", "tcp", "horovod")


@dataclass(frozen=True)
class Job:
    """What all pipelines of this process share.

    Attributes:
        secret: 16 bytes that only the job's ranks know.
        watch: over its ranks.
    """

    secret: bytes
    watch: Watch


_job: Job | None = None


def join_job(rank: int, size: int, timeout: float) -> Job:
    """The job of this process; the first call is a collective over all ranks."""
    global _job
    if _job is None:
        collectives = Collectives("", timeout, None)
        secret = collectives.run("the first meeting of all ranks", [], shared_secret)

        def exchange(address: list[Any]) -> list[list[Any]]:
            what = "the exchange of addresses between all ranks"
            return collectives.run(what, [], lambda: gather_over_horovod(address))

        watch = Watch(rank, size, secret, local_interface(), exchange, timeout)
        ending.prepare(watch)
        _job = Job(secret, watch)
    return _job


def connect(
    schedule: Schedule,
    place: Place,
    size: int,
    wanted: str,
    collectives: Collectives,
    secret: bytes,
) -> Transport:
    """The transport of a pipeline; a collective over all ranks.

    Args:
        schedule: whose peers are to be connected.
        place: where this rank is.
        size: the number of ranks in the job.
        wanted: `auto`, `tcp` or `horovod`.
        collectives: of the pipeline, with its time limit and its name, the same on all ranks.
        secret: of the job.

    Raises:
        ValueError: if `wanted` is none of these.
    """
    if wanted not in _NAMES:
        raise UsageError(f"transport must be one of {', '.join(_NAMES)}, not {wanted!r}")
    pairs = peer_pairs(schedule, place.mapping.ranks)
    # Rank 0 talks to all, to exchange what all have to know.
    pairs |= {(0, rank) for rank in range(1, size)}
    timeout = collectives.timeout
    if wanted == "horovod" or (wanted == "auto" and native.core is None):

        def make_set(ranks: Iterable[int]) -> object:
            members = sorted(ranks)
            return collectives.run(
                f"making a process set of ranks {members}", [], lambda: process_set(members)
            )

        transport: Transport = HorovodTransport(
            place.rank, pairs, collectives.name, timeout, make_set
        )
    else:

        def exchange(address: Address) -> list[Address]:
            what = "the exchange of addresses between all ranks"
            return collectives.run(what, [], lambda: exchange_over_horovod(address))

        transport = NativeTransport(
            place.rank,
            {b if a == place.rank else a for a, b in pairs if place.rank in (a, b)},
            secret,
            exchange,
            timeout,
            only_tcp=wanted == "tcp",
        )
    transport.silence, transport.reason = collectives.silence, collectives.reason
    return transport


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
