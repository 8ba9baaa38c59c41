"""Schedules: their text, their properties over many sizes, what an independent player finds."""

import copy
import dataclasses
import pickle
import subprocess
import sys
import time

import pytest
from random_player import play

import pipeline
from pipeline import schedules
from pipeline.schedules import (
    GENERATORS,
    Action,
    Kind,
    Placement,
    Schedule,
    ScheduleError,
    pair_adjacent,
)

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8, 13, 16) for m in (1, 2, 3, 5, 8, 9, 16, 33)]
EVERY_SIZE = [(p, m) for p in range(2, 33) for m in range(1, 129)]
SMALL_SIZES = [(1, 2), (2, 3), (3, 4), (4, 6), (4, 4), (5, 9), (6, 8), (8, 11)]
MAKERS = {
    **GENERATORS,
    "interleaved-3": lambda p, m: schedules.interleaved(p, m, 3),
    "bpipe-2": lambda p, m: schedules.bpipe(p, m, 2),
}
every_schedule = pytest.mark.parametrize("name", MAKERS)


def check(name, p, m):
    """What holds for every size; making a schedule has proven it already."""
    schedule = MAKERS[name](p, m)
    peaks = schedule.validate().peak_counts
    assert (schedule.num_stages, schedule.num_microbatches) == (p, m)
    if name == "gpipe":
        assert peaks == (m,) * p
    elif name == "1f1b":
        assert peaks == tuple(min(m, p - stage) for stage in range(p))
    elif name == "bpipe":
        check_bpipe(schedule, p, m, peaks)
    elif name == "bpipe-2":
        assert max(peaks) <= 2 * p + 1
    elif name == "v-half":
        assert max(peaks) <= p + 2
    return schedule


def check_bpipe(schedule, p, m, peaks):
    limit = (p + 3) // 2  # ⌈(p+2)/2⌉
    assert max(peaks) <= limit
    evictors = {
        rank
        for rank, line in enumerate(schedule.actions)
        if any(action.kind is Kind.EVICT for action in line)
    }
    assert evictors == {stage for stage in range(p) if min(m, p - stage) > limit}


@every_schedule
def test_every_size_is_proven(name):
    for p, m in SIZES:
        check(name, p, m)


@pytest.mark.full
@pytest.mark.parametrize("name", GENERATORS)
def test_really_every_size_is_proven(name):
    for p, m in EVERY_SIZE:
        check(name, p, m)


@every_schedule
def test_the_largest_size_takes_a_fraction_of_a_second(name):
    begin = time.process_time()
    check(name, 32, 128)
    assert time.process_time() - begin < 0.5


def test_schedules_made_of_numbers_are_plain_data():
    schedule = schedules.bpipe(4, 8)
    again = Schedule(schedule.actions, "mine", Placement.LOOP)
    assert again == schedule and hash(again) == hash(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == copy.deepcopy(schedule) == schedule
    assert dataclasses.replace(schedule, name="other").actions is schedule.actions
    assert schedule.table.columns.tolist() == again.table.columns.tolist()


@every_schedule
def test_text_comes_back(name):
    for p, m in SIZES:
        schedule = MAKERS[name](p, m)
        again = Schedule.parse(str(schedule))
        assert again == schedule
        assert again.num_chunks == schedule.num_chunks
        if p > 1:  # with one rank, a loop and a zigzag are the same
            assert again.placement is schedule.placement
        assert again.validate().peak_counts == schedule.validate().peak_counts


@every_schedule
@pytest.mark.parametrize("seed", range(3))
def test_random_courses_end_and_keep_what_was_proven(name, seed):
    for p, m in SMALL_SIZES:
        schedule = MAKERS[name](p, m)
        most = play(schedule, seed)
        proven = schedule.validate().peak_counts
        assert all(a <= b for a, b in zip(most, proven, strict=True)), (p, m, most, proven)


MOVES = {Kind.EVICT, Kind.LOAD, Kind.ACCEPT, Kind.RETURN}


def test_evicting_leaves_the_order_of_computation_alone():
    for p, m in SIZES:
        plain, evicting = schedules.one_f_one_b(p, m), schedules.bpipe(p, m)
        for before, after in zip(plain.actions, evicting.actions, strict=True):
            assert before == tuple(a for a in after if a.kind not in MOVES)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "bpipe"])
def test_gradients_accumulate_in_the_same_order(name):
    for line in MAKERS[name](8, 16).actions:
        assert [a.microbatch for a in line if a.kind is Kind.BACKWARD] == list(range(16))


def test_text_of_a_small_schedule():
    assert str(schedules.one_f_one_b(2, 2)) == (
        "0: F0 SEND_F0>1 RECV_B0<1 F1 SEND_F1>1 RECV_B1<1 B0 B1\n"
        "1: RECV_F0<0 F0 RECV_F1<0 B0 SEND_B0>0 F1 B1 SEND_B1>0"
    )


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("F0", Action(Kind.FORWARD, 0)),
        ("B12.1", Action(Kind.BACKWARD, 12, 1)),
        ("W3", Action(Kind.WEIGHT, 3)),
        ("SEND_F0>1", Action(Kind.SEND_FORWARD, 0, 0, 1)),
        ("RECV_B7.2<0", Action(Kind.RECV_BACKWARD, 7, 2, 0)),
        ("EVICT0>3", Action(Kind.EVICT, 0, 0, 3)),
        ("LOAD0<3", Action(Kind.LOAD, 0, 0, 3)),
        ("ACCEPT0<0", Action(Kind.ACCEPT, 0, 0, 0)),
        ("RETURN0>0", Action(Kind.RETURN, 0, 0, 0)),
    ],
)
def test_text_of_an_action(text, action):
    assert Action.parse(text) == action
    assert str(action) == text


@pytest.mark.parametrize(
    "text",
    ["", "f0", "F", "F0>1", "SEND_F0", "SEND_F0<1", "RECV_F0>1", "EVICT0", "F0.", "X1", "B-1"],
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no line"),
        ("# only a comment\n\n", "holds no line"),
        ("F0 B0", "does not begin with a rank"),
        ("0: F0 B0\n0: F1", "has a line already"),
        ("0: F0 B0\n2: F0 B0", "rank 1 has no line"),
        ("999999999999: F0 B0", "rank 0 has no line"),
        ("0: F0 BB0", "(?s)line 1: 'BB0' is not an action.*0: F0 BB0 <--"),
    ],
)
def test_what_is_no_schedule_is_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.parse(text)


def test_only_text_is_read():
    with pytest.raises(TypeError, match="read from a str, not from bytes"):
        Schedule.parse(b"0: F0 B0")


def test_comments_and_blank_lines_are_ignored():
    text = "# mine\n\n0: F0 B0 # the only rank\n"
    assert Schedule.parse(text) == schedules.gpipe(1, 1)


@pytest.mark.parametrize("name", GENERATORS)
def test_impossible_sizes_are_refused(name):
    make = GENERATORS[name]
    for sizes in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(ValueError, match="must be at least 1"):
            make(*sizes)
    for sizes in ((2.0, 4), (4, "8"), (True, 4)):
        with pytest.raises(TypeError, match="must be an int"):
            make(*sizes)
    with pytest.raises(ValueError, match="model chunks"):
        schedules.interleaved(4, 4, 0)


@pytest.mark.parametrize("placement", Placement)
def test_placements_hold_each_part_once(placement):
    for p in (1, 2, 5):
        for v in (1, 2, 3):
            stages = [placement.virtual_stage(r, c, p) for c in range(v) for r in range(p)]
            assert sorted(stages) == list(range(p * v))
            for rank in range(p):
                for chunk in range(v):
                    stage = placement.virtual_stage(rank, chunk, p)
                    assert placement.rank_and_chunk(stage, p) == (rank, chunk)


def test_tags_are_the_same_at_both_ends_and_unique():
    for name in MAKERS:
        schedule = MAKERS[name](4, 6)
        ends = {}
        for rank, line in enumerate(schedule.actions):
            for action in line:
                if action.peer is not None:
                    ends.setdefault(schedule.tag(rank, action), []).append((rank, action.peer))
        for there, back in ends.values():
            assert there == back[::-1]
    with pytest.raises(ValueError, match="has no tag"):
        schedule.tag(0, Action(Kind.FORWARD, 0))


def test_grid_shows_every_computation_and_every_move():
    schedule = schedules.bpipe(4, 8)
    shown = schedule.grid()
    assert max(map(len, shown.splitlines())) <= 120
    words = shown.split()
    for name in ("F0", "F7", "B0", "B7"):
        assert words.count(name) == 4
    for move in ("1>3", "1<3", "1<0", "1>0"):
        assert words.count(move) == 1
    assert "step 33, bubble 27.3%" in shown


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("p", "nodes", "slots"), [(4, 2, 4), (8, 2, 8), (7, 4, 4), (6, 3, 4)])
def test_partners_share_a_node(p, nodes, slots, replicas):
    mapping = pair_adjacent(p, nodes, slots, replicas)
    used = [rank for ranks in mapping.ranks for rank in ranks]
    assert len(set(used)) == p * replicas
    assert mapping.split_pairs == []
    for ranks in mapping.ranks:
        for stage in range(p):
            partner = p - 1 - stage
            assert ranks[stage] // slots == ranks[partner] // slots
    pairs = p // 2 * replicas
    assert f"{pairs} of {pairs} pairs on one node" in str(mapping)


def test_pairs_that_cannot_share_a_node_are_reported():
    mapping = pair_adjacent(4, 4, 1)
    assert mapping.split_pairs == [(0, 0, 3), (0, 1, 2)]
    assert "0 of 2 pairs on one node" in str(mapping)
    assert pair_adjacent(4, 3, [1, 2, 1]).split_pairs == [(0, 1, 2)]
    with pytest.raises(ValueError, match="need 4 processes, but the nodes run 3"):
        pair_adjacent(4, 3, 1)
    with pytest.raises(ValueError, match="must be positive"):
        pair_adjacent(0, 1, 1)


def test_import_loads_no_tensorflow():
    code = (
        "import sys, pipeline\n"
        "pipeline.schedules.bpipe(4, 8).grid()\n"
        "pipeline.simulate(pipeline.schedules.gpipe(2, 2), pipeline.Costs())\n"
        "print(sorted({'tensorflow', 'keras', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
    assert issubclass(pipeline.ScheduleError, ValueError)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = pipeline.Nothing
