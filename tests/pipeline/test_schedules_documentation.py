"""The documentation of schedules says what is so: its tables and examples, computed again."""

import re
from pathlib import Path

import pipeline
from pipeline import schedules
from pipeline.schedules import Action, Kind, Schedule

DOCS = Path(pipeline.__file__).parent / "docs"
TEXT = (DOCS / "schedules.md").read_text()
WHOLE = {"forward": 2, "backward": 4}
HALF = {"forward": 1, "backward": 1, "weight": 1}
# Name in the table → generator, its further arguments, costs of a chunk, chunks.
COMPARED = {
    "1F1B": (schedules.one_f_one_b, (), WHOLE, 1),
    "interleaved, v=2": (schedules.interleaved, (2,), {"forward": 1, "backward": 2}, 2),
    "BPipe": (schedules.bpipe, (), WHOLE, 1),
    "V-Half": (schedules.v_half, (), HALF, 2),
}


def test_table_that_compares_schedules():
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| (.*) \|$", TEXT, re.M)
    assert len(rows) == 3 * len(COMPARED)
    for p, name, figures in rows:
        make, more, costs, chunks = COMPARED[name]
        m = 4 * int(p)
        schedule = make(int(p), m, *more)
        result = pipeline.simulate(schedule, costs)
        peaks = [count / chunks for count in schedule.validate().peak_counts]
        messages = sum(
            action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
            for line in schedule.actions
            for action in line
        )
        assert figures.split(" | ") == [
            f"{result.bubble:.1%}",
            f"{max(peaks):g}",
            f"{min(peaks):g}",
            f"{messages / m:g}",
            f"{result.stash_traffic / m:.2f}",
        ]


def test_example_in_text_form():
    example = re.search(r"```\n(0: .*?)```", TEXT, re.S)[1]
    assert Schedule.parse(example) == schedules.one_f_one_b(2, 2)


def test_actions_in_the_table():
    table = TEXT[TEXT.index("| action | meaning |") : TEXT.index("Communication actions are")]
    first_column = [row.split("|")[1] for row in table.splitlines() if row]
    named = re.findall(r"`(.+?)`", " ".join(first_column))
    assert {Action.parse(name).kind for name in named} == set(Kind)


def test_picture_is_there():
    assert (DOCS / "1f1b-bpipe.png").read_bytes().startswith(b"\x89PNG")
