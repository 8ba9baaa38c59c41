"""The validator: what it refuses, with which arrow, and the limits that it checks."""

import re

import pytest

from pipeline import schedules
from pipeline.schedules import Action, Kind, Schedule, ScheduleError

# Changes of the lines of bpipe(4, 6): the rank, what to replace, by what, then the fault's code and
# what stands before the arrow.
FAULTS = {
    "no forward": (1, "F3 ", "", "missing-forward", "1", "B3"),
    "no backward": (2, " B4 ", " ", "missing-backward", "2", "F4"),
    "forward twice": (0, "F4 SEND_F4>1", "F4 F4 SEND_F4>1", "duplicate", "0", "F4"),
    "backward first": (3, "F5 B5", "B5 F5", "backward-first", "3", "B5"),
    "no receive": (1, "RECV_F2<0 ", "", "not-received", "1", "F2"),
    "receive too late": (2, "RECV_B5<3 B4", "B4", "not-received", "2", "B5"),
    "no send": (0, "SEND_F2>1 ", "", "not-sent", "0", "F2"),
    "send too early": (3, "B4 SEND_B4>2", "SEND_B4>2 B4", "sent-too-early", "3", "SEND_B4>2"),
    "send to another": (0, "SEND_F1>1", "SEND_F1>2", "not-sent", "0", "F1"),
    "send too much": (
        2,
        "F5 SEND_F5>3",
        "F5 SEND_F5>3 SEND_F5>0",
        "unexpected-message",
        "2",
        "SEND_F5>0",
    ),
    "send to itself": (0, "SEND_F1>1", "SEND_F1>0", "bad-peer", "0", "SEND_F1>0"),
    "send to nobody": (0, "SEND_F1>1", "SEND_F1>9", "bad-peer", "0", "SEND_F1>9"),
    "a gap": (3, "F5 B5 SEND_B5>2", "F9 B9 SEND_B9>2", "odd-microbatch", "3", "F9"),
    "one too many": (3, "B5 SEND_B5>2", "B5 SEND_B5>2 F6 B6", "odd-microbatch", "3", "F6"),
    "one too few": (1, ("F5 SEND_F5>2", "B5 SEND_B5>0"), "", "missing-forward", "1", "RECV_F5<0"),
    "no load": (0, "LOAD1<3 ", "", "missing-load", "0", "B1"),
    "load too late": (0, "LOAD3<3 RECV_B3<1 B2", "RECV_B3<1 B2", "missing-load", "0", "B3"),
    "load after use": (
        0,
        "LOAD4<3 RECV_B4<1 B3 RECV_B5<1 B4",
        "RECV_B4<1 B3 RECV_B5<1 B4 LOAD4<3",
        "load-after-backward",
        "0",
        "B4",
    ),
    "load without evict": (0, "EVICT3>3 ", "", "load-without-evict", "0", "LOAD3<3"),
    "load before evict": (
        0,
        ("EVICT3>3", "LOAD3<3"),
        ("LOAD3<3", "EVICT3>3"),
        "load-before-evict",
        "0",
        "LOAD3<3",
    ),
    "evict after use": (
        0,
        ("EVICT3>3 ", "B4 B5"),
        ("", "B4 B5 EVICT3>3"),
        "evict-after-backward",
        "0",
        "EVICT3>3",
    ),
    "evicted twice": (
        0,
        ("EVICT1>3", "LOAD1<3"),
        ("EVICT1>3 EVICT1>2", "LOAD1<3 LOAD1<2"),
        "evicted-twice",
        "0",
        "EVICT1>2",
    ),
    "load twice": (0, "LOAD3<3", "LOAD3<3 LOAD3<3", "duplicate", "0", "LOAD3<3"),
    "evict before forward": (
        0,
        "F1 SEND_F1>1 EVICT1>3",
        "EVICT1>3 F1 SEND_F1>1",
        "evict-before-forward",
        "0",
        "EVICT1>3",
    ),
    "no accept": (3, "ACCEPT4<0 ", "", "return-without-accept", "3", "RETURN4>0"),
    "no return": (3, "RETURN4>0 ", "", "missing-return", "3", "ACCEPT4<0"),
    "neither accept nor return": (3, ("ACCEPT4<0 ", "RETURN4>0 "), "", "unpaired", "0", "EVICT4>3"),
    "another partner": (
        3,
        ("ACCEPT4<0", "RETURN4>0"),
        ("ACCEPT4<1", "RETURN4>1"),
        "unpaired",
        "0",
        "EVICT4>3",
    ),
    "transfers in another order": (
        3,
        ("ACCEPT1<0 ", "ACCEPT3<0 "),
        ("", "ACCEPT3<0 ACCEPT1<0 "),
        "stash-order",
        "0",
        "EVICT1>3",
    ),
}


def changed(schedule, rank, old, new):
    """The schedule's text with texts of one line replaced, each of which is there once."""
    lines = str(schedule).splitlines()
    olds = (old,) if isinstance(old, str) else old
    news = (new,) * len(olds) if isinstance(new, str) else new
    for number, before in enumerate(olds):
        assert lines[rank].count(before) == 1, (lines[rank], before)
        lines[rank] = lines[rank].replace(before, f"{{{number}}}")
    lines[rank] = lines[rank].format(*news)
    return Schedule.parse("\n".join(lines), "planted")


def arrows(error):
    """What stands before each arrow, as (rank, action)."""
    marked = [line for line in str(error).splitlines() if "<--" in line]
    return [
        (line.split(":")[0].strip(), line.split("<--")[0].split()[-1].rstrip(":"))
        for line in marked
    ]


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_refused_with_an_arrow(name):
    rank, old, new, code, at_rank, before_arrow = FAULTS[name]
    schedule = changed(schedules.bpipe(4, 6), rank, old, new)
    with pytest.raises(ScheduleError) as caught:
        schedule.validate()
    error = caught.value
    assert error.code == code
    assert str(error.rank) == at_rank
    shown = arrows(error)
    assert (at_rank, before_arrow) == shown[0]
    assert str(schedule.actions[error.rank][error.position]) == shown[0][1]
    # Every line is shown.
    for line in range(4):
        assert re.search(rf"^ +{line}: ", str(error), re.M)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("0: F0.999999999 B0.999999999", "odd-chunk"),
        ("0: F0.1 B0.1", "odd-chunk"),
        ("0: F999999999 B999999999", "odd-microbatch"),
        ("0: F0 SEND_F0>999999999 B0", "bad-peer"),
        ("0:", "empty"),
    ],
)
def test_numbers_far_apart_are_refused_before_anything_is_sized_by_them(text, code):
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text).validate()
    assert caught.value.code == code


F, B, SEND = Kind.FORWARD, Kind.BACKWARD, Kind.SEND_FORWARD


@pytest.mark.parametrize(
    ("lines", "error", "message"),
    [
        ((), ScheduleError, "a line for each rank"),
        ((("F0", "B0"),), TypeError, "must hold schedules.Action, not 'F0'"),
        (((Action("F", 0), Action(B, 0)),), TypeError, "must be a schedules.Kind, not 'F'"),
        (((Action(F, -1), Action(B, -1)),), ScheduleError, "-1 is no number"),
        (((Action(F, 0, -1), Action(B, 0, -1)),), ScheduleError, "-1 is no number"),
        (((Action(F, 0.5), Action(B, 0.5)),), ScheduleError, "0.5 is no number"),
        (((Action(F, 2**40), Action(B, 2**40)),), ScheduleError, "up to nine digits"),
        (((Action(F, 0), Action(SEND, 0), Action(B, 0)),), ScheduleError, "has a peer"),
        (((Action(F, 0), Action(SEND, 0, 0, -1), Action(B, 0)),), ScheduleError, "-1 is no"),
        (((Action(F, 0, 0, 1), Action(B, 0)),), ScheduleError, "has no peer"),
    ],
)
def test_what_no_text_could_say_is_refused(lines, error, message):
    with pytest.raises(error, match=message):
        Schedule(lines).validate()


@pytest.mark.parametrize(
    ("limits", "error", "message"),
    [
        ({"limit": float("nan")}, ValueError, "limit must be a number that is not negative"),
        ({"limit": -1}, ValueError, "limit must be a number that is not negative"),
        ({"limit": "5"}, TypeError, "limit must be a number or one for each rank"),
        ({"limit": [3, None, 3, 3]}, TypeError, "not None"),
        ({"limit": [3, 3]}, ValueError, "limit has 2 numbers for 4 ranks"),
        ({"stash_bytes": -1}, ValueError, "stash_bytes must be"),
        ({"stash_bytes": 1, "byte_limit": float("nan")}, ValueError, "byte_limit must be"),
    ],
)
def test_limits_that_are_none_are_refused(limits, error, message):
    with pytest.raises(error, match=message):
        schedules.bpipe(4, 8).validate(**limits)


@pytest.mark.parametrize(
    ("rank", "changes", "code", "before_arrow"),
    [
        (1, {"W2.1": ""}, "missing-weight", "B2.1"),
        (0, {"B0": "W0", "W0": "B0"}, "weight-first", "W0"),
        (3, {"F0.1": ""}, "missing-forward", "B0.1"),
        (3, {"F0": "F0.1", "F0.1": "F0"}, "not-computed", "F0.1"),  # handed on within the rank
    ],
)
def test_planted_fault_of_a_split_schedule(rank, changes, code, before_arrow):
    lines = str(schedules.v_half(4, 4)).splitlines()
    lines[rank] = " ".join(changes.get(word, word) for word in lines[rank].split())
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse("\n".join(lines)).validate()
    assert (caught.value.code, arrows(caught.value)[0]) == (code, (str(rank), before_arrow))


def test_circle_of_needs_is_a_deadlock():
    # Rank 0 wants a gradient before it sends what the gradient depends on.
    schedule = Schedule.parse(
        "0: F0 F1 SEND_F0>1 RECV_B0<1 B0 SEND_F1>1 RECV_B1<1 B1\n"
        "1: RECV_F0<0 RECV_F1<0 F0 F1 B0 SEND_B0>0 B1 SEND_B1>0"
    )
    with pytest.raises(
        ScheduleError, match="wait for each other: rank 0 at B0, rank 1 at F1"
    ) as at:
        schedule.validate()
    assert at.value.code == "deadlock"
    assert arrows(at.value) == [("0", "B0"), ("1", "F1")]


@pytest.mark.parametrize(
    ("text", "transport"),
    [
        # Rank 0 runs ahead farther than rank 1 asks for; both wait for a send of their own.
        (
            "0: F0 SEND_F0>1 F1 SEND_F1>1 F2 SEND_F2>1 F3 SEND_F3>1 RECV_B0<1 B0 RECV_B1<1 B1 "
            "RECV_B2<1 B2 RECV_B3<1 B3\n"
            "1: RECV_F0<0 F0 B0 SEND_B0>0 RECV_F1<0 F1 B1 SEND_B1>0 RECV_F2<0 F2 B2 SEND_B2>0 "
            "RECV_F3<0 F3 B3 SEND_B3>0",
            "rendezvous sends",
        ),
        # The second message is asked for first, and the first one is in its way.
        (
            "0: F0 F1 SEND_F0>1 SEND_F1>1 RECV_B1<1 B1 RECV_B0<1 B0\n"
            "1: RECV_F1<0 F1 B1 SEND_B1>0 RECV_F0<0 F0 B0 SEND_B0>0",
            "bounded buffers",
        ),
    ],
)
def test_sends_that_wait_are_a_deadlock(text, transport):
    with pytest.raises(ScheduleError, match=f"under {transport} these wait") as caught:
        Schedule.parse(text).validate()
    assert caught.value.code == "deadlock"


def test_grouped_sends_and_receives_are_no_deadlock():
    text = (
        "0: F0 SEND_F0>1 F1 SEND_F1>1 RECV_B0<1 B0 F2 SEND_F2>1 RECV_B1<1 B1 RECV_B2<1 B2\n"
        "1: RECV_F0<0 F0 B0 SEND_B0>0 RECV_F1<0 F1 B1 SEND_B1>0 RECV_F2<0 F2 B2 SEND_B2>0"
    )
    assert Schedule.parse(text).validate().peak_counts == (2, 1)


def test_deadlock_of_stash_transfers_is_found():
    # The acceptor asks for the stash only after a backward that needs the evictor to go on.
    good = str(schedules.bpipe(4, 4))
    assert good.splitlines()[3].startswith("3: ACCEPT1<0 ACCEPT2<0 RECV_F0<2 F0")
    lines = good.splitlines()
    lines[3] = (
        lines[3]
        .replace("ACCEPT1<0 ACCEPT2<0 ", "")
        .replace("RETURN1>0", "ACCEPT1<0 ACCEPT2<0 RETURN1>0")
    )
    Schedule.parse("\n".join(lines)).validate()  # late, but it ends
    lines[3] = re.sub(r"(ACCEPT|RETURN)\d[<>]0 ", "", lines[3]).replace(
        "B3 SEND_B3>2", "ACCEPT1<0 ACCEPT2<0 RETURN1>0 RETURN2>0 B3 SEND_B3>2"
    )
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse("\n".join(lines)).validate()
    assert caught.value.code == "deadlock"


def test_schedule_that_does_nothing_is_refused():
    with pytest.raises(ScheduleError, match="no line has a forward"):
        Schedule.parse("0:\n1:").validate()


def test_limits_are_for_all_ranks_or_for_each():
    schedule = schedules.one_f_one_b(4, 8)
    assert schedule.validate(limit=4).peak_counts == (4, 3, 2, 1)
    schedule.validate(limit=[4, 3, 2, 1])
    with pytest.raises(ScheduleError, match="rank 0 may hold 4 stashes here, its limit is 3") as at:
        schedule.validate(limit=3)
    assert (at.value.code, arrows(at.value)[0]) == ("over-limit", ("0", "F3"))
    with pytest.raises(ScheduleError, match="rank 2 may hold 2") as at:
        schedule.validate(limit=[4, 3, 1, 1])
    with pytest.raises(ValueError, match="limit has 2 numbers for 4 ranks"):
        schedule.validate(limit=[4, 3])


def test_bytes_are_limited_too():
    schedule = schedules.bpipe(4, 8)
    report = schedule.validate(stash_bytes=[40, 10, 10, 20], byte_limit=[120, 30, 20, 100])
    # Rank 3 holds one of its own and at most two of rank 0.
    assert report.peak_bytes == (120, 30, 20, 100)
    with pytest.raises(ScheduleError, match="rank 3 may hold 100 bytes"):
        schedule.validate(stash_bytes=[40, 10, 10, 20], byte_limit=[120, 30, 20, 99])
    with pytest.raises(ValueError, match="pass stash_bytes too"):
        schedule.validate(byte_limit=5)
    assert report.bytes[0][0] == (0, 40)


def test_counts_over_time_of_a_small_schedule():
    report = schedules.one_f_one_b(2, 2).validate()
    line = schedules.one_f_one_b(2, 2).actions[0]
    held = [(str(line[at]), amount) for at, amount in report.counts[0]]
    assert held == [("F0", 1), ("F1", 2), ("B0", 2), ("B1", 1)]
    assert "valid" in str(report)


def test_transfers_that_may_overlap_count_at_both_ends():
    # A forward right after the eviction does not wait for it, the one after that does.
    schedule = Schedule.parse(
        "0: F0 SEND_F0>1 EVICT0>1 F1 SEND_F1>1 F2 SEND_F2>1 LOAD0<1 RECV_B0<1 B0 RECV_B1<1 B1 "
        "RECV_B2<1 B2\n"
        "1: ACCEPT0<0 RECV_F0<0 F0 B0 SEND_B0>0 RETURN0>0 RECV_F1<0 F1 B1 SEND_B1>0 RECV_F2<0 F2 "
        "B2 SEND_B2>0"
    )
    report = schedule.validate()
    line = schedule.actions[0]
    held = {str(line[at]): amount for at, amount in report.counts[0]}
    assert (held["F1"], held["F2"], held["LOAD0<1"]) == (2, 2, 3)
    assert report.peak_counts == (3, 2)


def test_long_schedules_are_proven_quickly():
    # 25,000 actions; generous for a busy machine, but a quadratic check would take minutes.
    import time

    schedule = Schedule.parse(str(schedules.bpipe(32, 128)))
    start = time.process_time()
    schedule.validate()
    assert time.process_time() - start < 2
