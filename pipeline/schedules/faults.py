"""How a refused schedule is shown: every line, cut to what surrounds the fault, and an arrow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipeline.errors import ScheduleError
from pipeline.schedules.schedule import Schedule

ARROW = "<--"
# Characters shown of a line before and after the place in question.
BEFORE, AFTER = 60, 30


class Place(NamedTuple):
    """An action of a schedule: its rank and its index in the rank's line."""

    rank: int
    position: int


def fault(schedule: Schedule, code: str, text: str, *places: Place) -> ScheduleError:
    """The error that refuses a schedule.

    Args:
        schedule: the schedule.
        code: the stable name of the fault.
        text: what is wrong, and what to do about it.
        places: the actions at fault, the first one being the error's own.
    """
    rank, position = places[0]
    message = f"schedule {schedule.name!r} refused, {code}: {text}\n{marked(schedule, places)}"
    return ScheduleError(message, code, rank, position)


def marked(schedule: Schedule, places: Iterable[Place]) -> str:
    """The lines of the schedule, with an arrow after the action at each place."""
    arrows = dict(places)
    # Lines without a fault are cut at the same share of their length.
    rank, position = next(iter(arrows.items()))
    share = position / max(1, len(schedule.actions[rank]))
    width = len(str(schedule.num_stages - 1))
    shown = []
    for rank, line in enumerate(schedule.actions):
        center = arrows.get(rank, int(share * len(line)))
        words = [str(action) for action in line]
        before = " ".join(words[: center + 1])
        after = " ".join(words[center + 1 :])
        if len(before) > BEFORE:
            before = "... " + before[-BEFORE:].partition(" ")[2]
        if len(after) > AFTER:
            after = after[:AFTER].rpartition(" ")[0] + " ..."
        arrow = ARROW if rank in arrows else ""
        shown.append(f"{rank:>{width + 2}}: {' '.join(filter(None, (before, arrow, after)))}")
    return "\n".join(shown)
