"""The time grid of a schedule: one row a rank, one column a unit of time, for people.

A forward takes one unit, a backward two (input and weight gradients one each where the schedule
splits them), transfers nothing. Where stashes move, a second row says which, and to or from whom.
"""

from __future__ import annotations

from pipeline.schedules import Kind, Schedule
from pipeline.schedules.actions import STASH
from pipeline.simulation.costs import Costs
from pipeline.simulation.result import Simulation
from pipeline.simulation.simulator import simulate

IDLE = "."
GOES_ON = "="  # a computation that began in an earlier column
BETWEEN_BLOCKS = ""


def grid(schedule: Schedule, width: int = 120) -> str:
    """The schedule over time.

    Args:
        schedule: the schedule.
        width: the number of characters in a row; what is longer goes on in a block below.

    Raises:
        ScheduleError: if the schedule cannot be run.
    """
    split = schedule.splits_backward
    result = simulate(schedule, Costs(forward=1, backward=1 if split else 2, weight=float(split)))
    columns = int(result.step_time)
    rows: list[tuple[str, list[str]]] = [("time", [str(time) for time in range(columns)])]
    for rank in range(schedule.num_stages):
        rows.append((f"rank {rank}", _computations(result, rank, columns)))
        moves = _stash_moves(result, rank, columns)
        if any(moves):
            rows.append(("", moves))
    head = (
        f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} "
        f"micro-batches, a forward takes 1, a backward 2{' (B 1, W 1)' if split else ''}; "
        f"step {columns}, bubble {result.bubble:.1%}"
    )
    foot = f"most stashes held: {' '.join(map(str, result.peak_count))}"
    if schedule.evicts:
        foot += "\n1>3: stash 1 goes to rank 3; 1<3: it comes from there"
    return "\n".join([head, *_blocks(rows, width), foot])


def _computations(result: Simulation, rank: int, columns: int) -> list[str]:
    cells = [IDLE] * columns
    for action, of_rank, start, end in result.computations:
        if of_rank == rank:
            cells[int(start)] = str(action)
            for column in range(int(start) + 1, int(end)):
                cells[column] = GOES_ON
    return cells


def _stash_moves(result: Simulation, rank: int, columns: int) -> list[str]:
    """The stashes that leave or reach the rank, in the column before which they do."""
    moves: list[list[str]] = [[] for _ in range(columns)]
    for action, source, target, start, _ in result.transfers:
        if action.kind not in STASH or rank not in (source, target):
            continue
        name = str(action._replace(kind=Kind.FORWARD, peer=None))[1:]
        sign, other = (">", target) if rank == source else ("<", source)
        moves[min(int(start), columns - 1)].append(f"{name}{sign}{other}")
    return [",".join(names) for names in moves]


def _blocks(rows: list[tuple[str, list[str]]], width: int) -> list[str]:
    """The rows, cut into blocks of columns that fit into the width."""
    head = max(len(name) for name, _ in rows) + 2
    cell = max((len(text) for _, cells in rows for text in cells), default=1) + 1
    per_block = max(1, (width - head) // cell)
    columns = len(rows[0][1])
    lines = []
    for first in range(0, columns, per_block):
        if first:
            lines.append(BETWEEN_BLOCKS)
        for name, cells in rows:
            shown = "".join(f"{text:>{cell}}" for text in cells[first : first + per_block])
            lines.append(f"{name:<{head}}{shown}".rstrip())
    return lines
