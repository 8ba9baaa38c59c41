"""Pipeline schedules as data: generators, text form, validator, time grid.

from pipeline import schedules

schedule = schedules.bpipe(8, 16)
print(schedule)             # one line of actions a rank, see `schedules.actions`
print(schedule.grid())      # the same over time
print(schedule.validate())  # proves it, and tells what each stage holds at most
"""

from pipeline.errors import ScheduleError
from pipeline.schedules.actions import Action, Kind
from pipeline.schedules.generators import (
    GENERATORS,
    bpipe,
    build,
    gpipe,
    interleaved,
    one_f_one_b,
    v_half,
)
from pipeline.schedules.mapping import Mapping, pair_adjacent
from pipeline.schedules.placement import Placement
from pipeline.schedules.schedule import Schedule, Tag
from pipeline.schedules.validation import ValidationReport, validate

__all__ = [
    "GENERATORS",
    "Action",
    "Kind",
    "Mapping",
    "Placement",
    "Schedule",
    "ScheduleError",
    "Tag",
    "ValidationReport",
    "bpipe",
    "build",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "pair_adjacent",
    "v_half",
    "validate",
]
