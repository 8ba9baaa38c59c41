"""What all ranks did in the latest step, in the form of a simulation.

So the picture and the Chrome trace of a real step are those of a simulated one, and the two can be
laid side by side. Times are those of the hosts' monotonic clocks: between hosts they differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.communication.hub import Hub
from pipeline.runtime.step import StepResult
from pipeline.schedules import Action, Schedule
from pipeline.simulation import Costs, Simulation
from pipeline.simulation.costs import ScheduleCosts
from pipeline.simulation.result import Computation, Transfer


def record(
    schedule: Schedule, placed: Sequence[Sequence[int]], hub: Hub, result: StepResult
) -> Simulation | None:
    """The step's course on rank 0, with the replicas' stages one after the other; None elsewhere.

    Args:
        schedule: of each replica.
        placed: for each replica the rank of each stage.
        hub: of all ranks, which call this together.
        result: of this rank.
    """
    kept = [list(event) for event in result.events if event.kind in ("compute", "send")]
    rows = hub.gather([kept, result.exposed, result.stash_bytes], "the timeline")
    if not hub.is_root:
        return None
    rows = [rows[rank] for ranks in placed for rank in ranks]
    whole = side_by_side(schedule, len(placed))
    first = min((event[2] for events, _, _ in rows for event in events), default=0)
    computations, transfers = [], []
    for rank, (events, _, _) in enumerate(rows):
        shift = rank - rank % schedule.num_stages
        for text, kind, begin, end in events:
            action = _shifted(Action.parse(text), shift)
            start, stop = (begin - first) * 1e-9, (end - first) * 1e-9
            if kind == "compute":
                computations.append(Computation(action, rank, start, stop))
            else:
                transfers.append(Transfer(action, rank, action.peer, start, stop))
    computations.sort(key=lambda computation: computation.start)
    transfers.sort(key=lambda transfer: transfer.start)
    costs = ScheduleCosts(whole, Costs(stash_bytes=[size for _, _, size in rows]))
    return Simulation(whole, costs, computations, transfers, [exposed for _, exposed, _ in rows])


def side_by_side(schedule: Schedule, num_replicas: int) -> Schedule:
    """The schedule of all replicas, which do not talk to each other."""
    lines = [
        tuple(_shifted(action, replica * schedule.num_stages) for action in line)
        for replica in range(num_replicas)
        for line in schedule.actions
    ]
    return Schedule(tuple(lines), schedule.name, schedule.placement)


def _shifted(action: Action, shift: int) -> Action:
    return action if action.peer is None else action._replace(peer=action.peer + shift)
