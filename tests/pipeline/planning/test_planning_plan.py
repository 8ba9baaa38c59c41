"""Plans: partitions against brute force, the search by its own rules, files, refusals."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest

from pipeline.planning import Cluster, Device, InfeasibleError, Link, PlanningError
from pipeline.planning.model_costs import LayerCosts
from pipeline.planning.planner import plan as plan_model
from pipeline.planning.planner import search
from pipeline.planning.stage_partition import best_cuts
from pipeline.planning.training_plan import FITS, NO_MEMORY, Plan
from pipeline.schedules import GENERATORS
from pipeline.simulation import simulate


def all_cuts(count: int, stages: int):
    return itertools.combinations(range(1, count), stages - 1)


@pytest.mark.parametrize("seed", range(40))
def test_cuts_are_the_best_of_all(seed):
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    stages = rng.randint(1, count)
    seconds = [float(rng.randint(0, 9)) for _ in range(count)]
    sizes = [float(rng.randint(0, 9)) for _ in range(count)]
    speeds = [rng.choice([1.0, 2.0]) for _ in range(stages)]
    limits = [float(rng.randint(8, 30)) for _ in range(stages)]

    def slowest(cuts):
        ends = [0, *cuts, count]
        spans = list(zip(ends, ends[1:], strict=False))
        if any(sum(sizes[a:b]) > limits[s] for s, (a, b) in enumerate(spans)):
            return math.inf
        return max(sum(seconds[a:b]) / speeds[s] for s, (a, b) in enumerate(spans))

    best = min(map(slowest, all_cuts(count, stages)))
    options = {"speeds": speeds, "sizes": sizes, "limits": limits}
    if math.isinf(best):
        with pytest.raises(InfeasibleError):
            best_cuts(seconds, stages, **options)
    else:
        assert slowest(best_cuts(seconds, stages, **options)) == best


def test_too_few_layers_are_refused():
    with pytest.raises(PlanningError, match="2 items"):
        best_cuts([1.0, 1.0], 3)


def costs(layers: int = 8, **changes) -> LayerCosts:
    fields = {
        "forward": [1e-3] * layers,
        "backward": [2e-3] * layers,
        "stash_bytes": [10e6] * layers,
        "output_bytes": [1e5] * layers,
        "weight_bytes": [4e6] * layers,
        "fixed_seconds": 1e-3,
    }
    return LayerCosts(**{**fields, **changes})


def cluster(devices: int = 4, memory: float | None = None, **fields) -> Cluster:
    return Cluster.uniform(devices, memory, bandwidth=50e9, latency=5e-6, **fields)


def test_without_limits_replicas_win_and_cheap_links_matter():
    plan = search(costs(), cluster(), [64])
    assert plan.setting.stages == 1 and plan.setting.replicas == 4
    slow = Cluster.uniform(4, bandwidth=20e6)  # reductions cost more than bubbles
    assert search(costs(), slow, [64]).setting.stages == 4


def test_memory_decides_and_the_table_says_what_ran_out():
    # One device cannot hold the weights of all layers; four stages can.
    heavy = costs(weight_bytes=[400e6] * 8)
    plan = search(heavy, cluster(memory=4e9), [64])
    assert plan.setting.stages == 4
    assert all(max(row.peak_bytes) <= 4e9 for row in plan.fitting())
    refused = [row for row in plan.rows if row.status == NO_MEMORY]
    assert any(row.setting.stages == 1 for row in refused)
    text = str(plan)
    assert "out of memory: stage 0 needs" in text and "launch: terra-pipeline run -np 4" in text


def test_bpipe_wins_where_eviction_saves_recomputation():
    # Large micro-batches pay here. At m=4 a stash of a stage has 320 MB; 1F1B would hold four.
    heavy = costs(weight_bytes=[400e6] * 8, fixed_seconds=0.05)
    limit = 4 * 800e6 + 3.1 * 320e6
    plan = search(heavy, cluster(memory=limit), [64], schedules=("1f1b", "bpipe"))
    assert plan.setting.schedule == "bpipe" and plan.setting.microbatches == 4
    assert plan.setting.policy == "evict" and max(plan.best.peak_bytes) <= limit
    without = search(heavy, cluster(memory=limit), [64], schedules=("1f1b",))
    assert without.best.step_seconds > 1.05 * plan.best.step_seconds
    assert "pipelines without BPipe: at best" in plan.explain()
    roomy = search(heavy, cluster(memory=2 * limit), [64], schedules=("1f1b", "bpipe"))
    assert roomy.setting.schedule == "1f1b"


def test_partners_share_a_node_where_links_between_nodes_are_slow():
    heavy = costs(weight_bytes=[400e6] * 8, fixed_seconds=0.05)
    machine = Cluster.uniform(
        4,
        4 * 800e6 + 3.1 * 320e6,
        bandwidth=100e9,
        devices_per_node=2,
        remote=Link(1e9),
    )
    plan = search(heavy, machine, [64], schedules=("1f1b", "bpipe"))
    assert plan.setting.schedule == "bpipe"
    node = [machine.devices[device].node for device in plan.setting.order]
    assert node[0] == node[3] and node[1] == node[2]


@pytest.mark.parametrize("seed", range(6))
def test_no_setting_of_the_space_beats_the_winner(seed):
    """The winner against every setting, each priced by the simulator without any pruning."""
    rng = random.Random(seed)
    layers = rng.randint(4, 9)
    given = costs(
        layers,
        forward=[rng.uniform(0.5, 2) * 1e-3 for _ in range(layers)],
        backward=[rng.uniform(1, 4) * 1e-3 for _ in range(layers)],
        stash_bytes=[rng.uniform(5, 20) * 1e6 for _ in range(layers)],
        weight_bytes=[rng.uniform(1, 40) * 1e6 for _ in range(layers)],
        fixed_seconds=rng.choice([0.0, 5e-4]),
    )
    memory = rng.uniform(0.4, 2.0) * 1e9
    machine = cluster(4, memory)
    try:
        plan = search(given, machine, [32], schedules=("1f1b", "gpipe"))
    except InfeasibleError:
        plan = None
    best = math.inf
    for stages in (1, 2, 4):
        replicas, share = 4 // stages, 32 * stages // 4
        for count in (1, 2, 4, 8, 16, 32):
            if count > share or (stages > 1 and count == 1):
                continue
            seconds = given.layer_seconds(math.ceil(share / count))
            sizes = [given.copies * w for w in given.weight_bytes]
            try:
                cuts = best_cuts(seconds, stages, sizes=sizes, limits=[memory] * stages)
            except InfeasibleError:
                continue
            for name in ("1f1b", "gpipe") if stages > 1 else ("1f1b",):
                for recomputed in range(stages + 1):
                    step = price(given, cuts, stages, count, share, name, recomputed, memory)
                    ends = [0, *cuts, layers]
                    held = [sum(given.weight_bytes[a:b]) for a, b in itertools.pairwise(ends)]
                    if replicas > 1:
                        step += 2 * (replicas - 1) * (max(held) / replicas / 50e9 + 5e-6)
                    best = min(best, step)
    if plan is None:
        assert math.isinf(best)
    else:
        assert plan.best.step_seconds == pytest.approx(best)


def price(given, cuts, stages, count, share, name, recomputed, memory):
    """The step time of a setting, infinite if it does not fit."""
    microbatch = math.ceil(share / count)
    kept, again = (given.stages(cuts, microbatch, flag) for flag in (False, True))
    pick = [again if s < recomputed else kept for s in range(stages)]
    result = simulate(
        GENERATORS[name](stages, count),
        {
            "forward": [p.forward[s] for s, p in enumerate(pick)],
            "backward": [p.backward[s] for s, p in enumerate(pick)],
            "stash_bytes": [p.stash_bytes[s] for s, p in enumerate(pick)],
            "boundary_bytes": [p.boundary_bytes[s] for s, p in enumerate(pick)],
            "bandwidth": 50e9,
            "latency": 5e-6,
        },
    )
    ends = [0, *cuts, given.num_layers]
    for stage, (a, b) in enumerate(itertools.pairwise(ends)):
        static = given.copies * sum(given.weight_bytes[a:b])
        if static + result.peak_bytes[stage] > memory:
            return math.inf
    return result.step_time


def test_time_to_target_may_prefer_a_smaller_batch():
    plan = search(costs(), cluster(), [16, 64, 256], epochs=lambda batch: 10.0)
    assert plan.setting.batch == 256  # the largest uses the devices best
    steep = search(costs(), cluster(), [16, 64, 256], epochs=lambda batch: batch / 16)
    assert steep.setting.batch == 16
    assert steep.best.target_seconds == pytest.approx(steep.best.step_seconds / 16)


def test_shared_cores_make_replicas_no_faster():
    alone = search(costs(), cluster(4), [64]).best
    shared = search(costs(), cluster(4, cores=2), [64]).best
    assert shared.step_seconds == pytest.approx(2 * alone.step_seconds, rel=0.25)


def test_unequal_devices_get_unequal_stages():
    fast = (Device("a", 3e9, 3.0), Device("b", 3e9, 1.0))
    plan = search(
        costs(weight_bytes=[120e6] * 8), Cluster(fast, Link(50e9)), [32], schedules=("1f1b",)
    )
    assert plan.setting.stages == 2 and plan.setting.cuts[0] >= 5


def test_a_file_gives_back_the_plan(tmp_path):
    plan = search(costs(), cluster(memory=1e9), [64])
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and str(again) == str(plan)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PlanningError, match="no plan"):
        Plan.load(tmp_path / "plan.json")


def test_refusals_say_what_is_at_fault():
    with pytest.raises(InfeasibleError, match="nothing fits into memory; the closest is dp"):
        search(costs(), cluster(memory=1e6), [64])
    with pytest.raises(PlanningError, match="no schedule 'x'"):
        search(costs(), cluster(), [64], schedules=("x",))
    with pytest.raises(PlanningError, match=r"E\(B\)"):
        search(costs(), cluster(), [64, 128])
    with pytest.raises(PlanningError, match="batch size"):
        search(costs(), cluster(), [0])
    with pytest.raises(PlanningError, match="fewer samples"):
        search(costs(2), cluster(4), [1])
    with pytest.raises(PlanningError, match="layer 1.*'forward'"):
        costs(2, forward=[1.0, -1.0])
    with pytest.raises(PlanningError, match="'backward' has 1"):
        costs(2, backward=[1.0])
    with pytest.raises(PlanningError, match="'forward' is empty"):
        LayerCosts([], [], [], [], [])
    data = [[0.0]], [[0.0]]
    for model, batch, message in (
        (("mse", None), data, "loss must be callable, not 'mse'"),
        ((abs, "sgd"), data, "optimizer must be of Keras, not 'sgd'"),
        ((abs, SimpleNamespace(get_config=dict)), (None, None), "batch must hold samples"),
    ):
        with pytest.raises(PlanningError, match=message):
            plan_model([], *model, cluster(), batch)
    with pytest.raises(PlanningError, match=r"E\(64\)"):
        search(costs(), cluster(), [64], epochs=lambda batch: math.nan)


def test_pruned_rows_say_why_and_fit_rows_are_sorted():
    plan = search(costs(), cluster(), [64])
    rates = [row.samples_per_second for row in plan.fitting()]
    assert rates == sorted(rates, reverse=True)
    assert all(row.why for row in plan.rows if row.status != FITS)
