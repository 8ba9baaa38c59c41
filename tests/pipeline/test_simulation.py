"""The simulator against closed formulas, its memory and transfers, pictures and traces."""

import json

import pytest
from random_player import play

import pipeline
from pipeline import schedules
from pipeline.schedules import Kind, ScheduleError
from pipeline.simulation import Costs, links_between_nodes
from pipeline.simulation.plot import plot

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 8, 16, 40)]
EQUAL = {"forward": 1.0, "backward": 1.0, "weight": 1.0}


@pytest.mark.parametrize("make", [schedules.gpipe, schedules.one_f_one_b, schedules.bpipe])
def test_step_time_is_that_of_the_formula(make):
    for p, m in SIZES:
        result = pipeline.simulate(make(p, m), Costs(forward=1.5, backward=2.25))
        assert result.step_time == pytest.approx((m + p - 1) * 3.75, rel=1e-12)
        assert result.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        assert result.exposed_transfer == 0


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("make", [schedules.interleaved, schedules.bpipe])
def test_interleaved_bubble_is_that_of_the_formula(make, v):
    for p in (2, 3, 4, 8):
        for rounds in (1, 2, 5):
            m = rounds * p
            result = pipeline.simulate(make(p, m, v), Costs(forward=1.0, backward=2.0))
            assert result.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
            assert result.step_time == pytest.approx((v * m + p - 1) * 3.0, rel=1e-12)


def test_peaks_are_those_of_the_formulas():
    for p, m in SIZES:
        result = pipeline.simulate(schedules.one_f_one_b(p, m), {"stash_bytes": 7})
        assert result.peak_count == [min(m, p - stage) for stage in range(p)]
        assert result.peak_bytes == [7 * min(m, p - stage) for stage in range(p)]
        assert pipeline.simulate(schedules.gpipe(p, m)).peak_count == [m] * p
        assert max(pipeline.simulate(schedules.bpipe(p, m)).peak_count) <= (p + 3) // 2


@pytest.mark.parametrize(
    "split", [(1, 1, 1), (1, 1.2, 0.8), (1, 0.8, 1.2), (1, 1.54, 0.85), (1, 2, 2), (2, 1, 1)]
)
def test_v_half_has_less_bubble_than_1f1b(split):
    costs = dict(zip(("forward", "backward", "weight"), map(float, split), strict=True))
    for p in (2, 3, 4, 8):
        for m in (1, 2, p, 2 * p + 1, 48):
            v_half = pipeline.simulate(schedules.v_half(p, m), costs)
            # A stage is two chunks; both schedules do the same work.
            rival = pipeline.simulate(
                schedules.one_f_one_b(p, m), {name: 2 * cost for name, cost in costs.items()}
            )
            assert v_half.step_time <= rival.step_time + 1e-9
            assert v_half.bubble <= rival.bubble + 1e-12
            assert max(v_half.peak_count) <= p + 2  # of half a stage each


@pytest.mark.full
@pytest.mark.parametrize("p", range(2, 33))
def test_v_half_has_less_bubble_than_1f1b_at_every_size(p):
    for m in (*range(1, 17), 24, 32, 33, 64, 100, 128):
        v_half = pipeline.simulate(schedules.v_half(p, m), EQUAL)
        assert v_half.bubble <= (p - 1) / (m + p - 1) + 1e-12
        assert max(v_half.peak_count) <= p + 2


@pytest.mark.parametrize("p", [4, 8, 16])
def test_v_half_has_about_half_the_bubble(p):
    m = 128
    v_half = pipeline.simulate(schedules.v_half(p, m), EQUAL)
    rival = pipeline.simulate(schedules.one_f_one_b(p, m), EQUAL)
    assert 0.4 < v_half.bubble / rival.bubble < 0.6
    assert max(v_half.peak_count) / 2 == p / 2 + 1  # BPipe's limit, in stages


def test_free_transfers_leave_bpipe_the_time_of_1f1b_whatever_the_costs():
    for p, m in [(4, 6), (5, 9), (8, 16), (9, 40), (16, 33)]:
        for seed in range(3):
            forward = [1 + (7 * stage + seed) % 5 / 3 for stage in range(p)]
            backward = [0.5 + (11 * stage + seed) % 7 for stage in range(p)]
            costs = Costs(forward=forward, backward=backward)
            plain = pipeline.simulate(schedules.one_f_one_b(p, m), costs)
            evicting = pipeline.simulate(schedules.bpipe(p, m), costs)
            assert evicting.step_time == pytest.approx(plain.step_time, rel=1e-12)


@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 16), (8, 40), (16, 40)])
def test_transfers_up_to_a_forward_are_hidden(p, m):
    plain = pipeline.simulate(schedules.one_f_one_b(p, m), Costs(forward=1, backward=2))
    hidden = pipeline.simulate(schedules.bpipe(p, m), Costs(forward=1, backward=2, evict=0.9))
    assert hidden.step_time == plain.step_time
    assert hidden.exposed_transfer == 0
    assert hidden.stash_traffic > 0
    assert hidden.transfer_seconds == pytest.approx(0.9 * hidden.stash_traffic)
    slow = pipeline.simulate(schedules.bpipe(p, m), Costs(forward=1, backward=2, evict=4))
    assert slow.step_time > plain.step_time
    assert slow.exposed_transfer > 0
    assert max(slow.peak_count) <= (p + 3) // 2


def test_simulated_memory_is_never_above_what_was_proven():
    for make in (schedules.bpipe, schedules.one_f_one_b, schedules.v_half):
        schedule = make(8, 11)
        proven = schedule.validate().peak_counts
        for evict in (0.0, 0.4, 3.0, 50.0):
            result = pipeline.simulate(schedule, Costs(evict=evict, transfer=evict / 10))
            assert all(a <= b for a, b in zip(result.peak_count, proven, strict=True))
            assert all(held[-1].count == 0 for held in result.memory)
        assert all(a <= b for a, b in zip(play(schedule, 5), proven, strict=True))


def test_one_boundary_transfer_by_hand():
    # Two stages, one micro-batch: F on 0, transfer, F and B on 1, transfer, B on 0.
    costs = Costs(forward=1, backward=2, boundary_bytes=[10, 30], bandwidth=20, latency=0.25)
    result = pipeline.simulate(schedules.one_f_one_b(2, 1), costs)
    there, back = 0.25 + 10 / 20, 0.25 + 30 / 20
    assert result.step_time == pytest.approx(1 + there + 3 + back + 2)
    assert result.exposed_per_stage == pytest.approx([back, there])
    assert result.bubble_per_stage == pytest.approx([1 - 3 / result.step_time] * 2)


def test_seconds_of_a_transfer_take_the_place_of_its_bytes():
    by_bytes = Costs(stash_bytes=40, bandwidth=100, boundary_bytes=20)
    by_seconds = Costs(stash_bytes=40, evict=0.4, transfer=0.2)
    one, other = (pipeline.simulate(schedules.bpipe(4, 8), c) for c in (by_bytes, by_seconds))
    assert one.step_time == pytest.approx(other.step_time)
    assert one.peak_bytes == other.peak_bytes == [120, 120, 80, 120]


def test_links_between_nodes_are_slower():
    links = links_between_nodes([0, 0, 1, 1], local=(100.0, 0.0), remote=(10.0, 1.0))
    assert links["bandwidth"][0] == [100.0, 100.0, 10.0, 10.0]
    assert links["latency"][3] == [1.0, 1.0, 0.0, 0.0]
    costs = {"boundary_bytes": 10, "stash_bytes": 10}
    schedule = schedules.bpipe(4, 8)
    far = pipeline.simulate(schedule, {**costs, **links})
    near = pipeline.simulate(schedule, {**costs, "bandwidth": 100.0})
    assert far.step_time > near.step_time
    named = {"bandwidth": {(0, 1): 5.0}, "latency": {(1, 0): 0.5}, "boundary_bytes": 10}
    assert pipeline.simulate(schedules.gpipe(2, 1), named).step_time == 1 + 2 + 1 + 2 + 0.5 + 2
    # Stashes are what counts, and partners on one node move them fast.
    nodes = schedules.pair_adjacent(4, 2, 2).nodes_of_stages()
    exposed = [
        pipeline.simulate(
            schedule, {"stash_bytes": 100, **links_between_nodes(at, (100.0, 0.0), (10.0, 0.0))}
        ).exposed_transfer
        for at in (nodes, [0, 0, 1, 1])
    ]
    assert exposed[0] == 0 < exposed[1]


def test_one_core_does_all_the_work_in_turn():
    schedule = schedules.one_f_one_b(4, 8)
    for cores in (1, [0, 0, 0, 0]):
        result = pipeline.simulate(schedule, Costs(forward=1, backward=2, cores=cores))
        assert result.step_time == pytest.approx(4 * 8 * 3)
    two = pipeline.simulate(schedule, Costs(forward=1, backward=2, cores=2))
    assert 4 * 8 * 3 / 2 <= two.step_time < 4 * 8 * 3 / 2 + 10
    pinned = pipeline.simulate(schedule, Costs(forward=1, backward=2, cores=[0, 1, 1, 0]))
    assert pinned.step_time >= 4 * 8 * 3 / 2
    many = pipeline.simulate(schedule, Costs(forward=1, backward=2, cores=4))
    assert many.step_time == 33


def test_weight_gradients_and_recomputation_belong_to_backward():
    whole = pipeline.simulate(schedules.gpipe(3, 5), Costs(forward=1, backward=2))
    parts = pipeline.simulate(
        schedules.gpipe(3, 5), Costs(forward=1, backward=0.5, weight=0.7, recompute=0.8)
    )
    assert parts.step_time == pytest.approx(whole.step_time)
    split = pipeline.simulate(schedules.v_half(2, 2), EQUAL)
    kinds = [box.action.kind for box in split.computations]
    assert kinds.count(Kind.WEIGHT) == kinds.count(Kind.BACKWARD) == 8


def test_step_that_costs_nothing(tmp_path):
    result = pipeline.simulate(schedules.gpipe(2, 2), {"forward": 0, "backward": 0})
    assert (result.step_time, result.bubble) == (0, 0)
    pytest.importorskip("matplotlib")
    result.plot(tmp_path / "nothing.png")


@pytest.mark.parametrize(
    ("costs", "error", "message"),
    [
        ({"speed": 1}, ValueError, "have no 'speed'; they have forward"),
        ({"forward": [1, 2]}, ValueError, "forward has 2 numbers"),
        ({"forward": -1}, ValueError, "finite and not negative"),
        ({"backward": float("nan")}, ValueError, "finite and not negative"),
        ({"evict": "fast"}, TypeError, "evict must be a number"),
        ({"bandwidth": 0}, ValueError, "bandwidth must be greater than 0"),
        ({"bandwidth": [[1, 2], [3, 4]]}, ValueError, "a table of 4x4"),
        ({"latency": {(0, 9): 1}}, ValueError, "which is no pair of ranks"),
        ({"cores": 0}, ValueError, "cores must be at least 1"),
        ({"cores": [0, 1]}, ValueError, "cores has 2 numbers for 4 ranks"),
        ({"cores": 1.5}, TypeError, "cores must be a number of cores"),
        ({"cores": [0, 0, 0, "a"]}, TypeError, "cores must be a number of cores"),
        ([], TypeError, "must be pipeline.Costs or a mapping"),
        (7, TypeError, "must be pipeline.Costs or a mapping"),
    ],
)
def test_impossible_costs_are_refused(costs, error, message):
    with pytest.raises(error, match=message):
        pipeline.simulate(schedules.one_f_one_b(4, 4), costs)


def test_schedule_that_cannot_run_is_refused():
    text = str(schedules.one_f_one_b(2, 2)).replace("SEND_F1>1 ", "")
    with pytest.raises(ScheduleError, match="<--"):
        pipeline.simulate(schedules.Schedule.parse(text))


def test_only_schedules_are_simulated():
    with pytest.raises(TypeError, match="must be a schedules.Schedule, not str"):
        pipeline.simulate("1f1b")


def test_result_is_readable_and_json():
    result = pipeline.simulate(schedules.bpipe(4, 8), Costs(stash_bytes=1000, evict=0.5))
    text = str(result)
    assert "bpipe, p=4, m=8: step 33 s, bubble 27.3%" in text
    assert len(text.splitlines()) == 2 + 4
    assert json.loads(json.dumps(result.as_dict()))["peak_count"] == [3, 3, 2, 3]


def test_picture_is_a_png_of_readable_size(tmp_path):
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "one.png", tmp_path / "two.png", tmp_path / "split.png"]
    one = pipeline.simulate(schedules.one_f_one_b(4, 8))
    two = pipeline.simulate(schedules.bpipe(4, 8), Costs(evict=0.5))
    one.plot(pictures[0])
    plot([one, two], str(pictures[1]))
    pipeline.simulate(schedules.v_half(3, 4), EQUAL).plot(pictures[2])
    for picture in pictures:
        content = picture.read_bytes()
        assert content.startswith(b"\x89PNG")
        width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
        assert 200 < height < width < 1500
    with pytest.raises(ValueError, match="no simulation"):
        plot([], pictures[0])


def test_chrome_trace_holds_the_timeline(tmp_path):
    result = pipeline.simulate(schedules.bpipe(4, 6), Costs(evict=0.5, transfer=0.1, stash_bytes=5))
    result.chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    computed = [event for event in spans if event["cat"] == "compute"]
    assert len(computed) == 4 * 6 * 2
    assert len(spans) == len(computed) + 2 * len(result.transfers)
    assert max(e["ts"] + e["dur"] for e in computed) == pytest.approx(result.step_time * 1e6)
    evictions = {(e["pid"], e["name"]) for e in spans if e["cat"] == "EVICT"}
    assert (0, "EVICT1>3") in evictions
    held = [event["args"]["count"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert max(held) == 3
    # No rank computes two things at once.
    for rank in range(4):
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in computed if e["pid"] == rank)
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(row[:-1], row[1:], strict=True))
