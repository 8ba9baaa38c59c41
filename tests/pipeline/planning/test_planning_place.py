"""The placer: against brute force, HEFT, its own rules, and what cannot be placed."""

import math
import os
import random
import signal
import threading
import time

import pytest
from graphs import best_makespan, layered, random_cluster, random_graph

from pipeline.planning import (
    Cluster,
    ClusterError,
    Device,
    Edge,
    InfeasibleError,
    Link,
    Op,
    OpGraph,
    PlacementError,
    PlanningError,
    place,
)
from pipeline.planning.heft import heft
from pipeline.planning.instance import Instance


@pytest.mark.parametrize("seed", range(12))
def test_equal_devices_reach_the_best_of_all_placements(seed):
    rng = random.Random(seed)
    graph = random_graph(rng, 5, groups=seed % 2 == 1)
    cluster = Cluster.uniform(2 + seed % 2, bandwidth=rng.choice([0.5, 1.0, 4.0]))
    placement = place(graph, cluster, seconds=20)
    assert placement.is_optimal and placement.gap == 0
    assert placement.makespan == pytest.approx(best_makespan(graph, cluster), abs=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_unequal_devices_and_links_reach_the_best_of_all_placements(seed):
    rng = random.Random(100 + seed)
    graph = random_graph(rng, 5, groups=seed % 3 == 0, kinds=True)
    cluster = random_cluster(rng, 2 + seed % 2)
    placement = place(graph, cluster, seconds=20)
    assert placement.is_optimal
    assert placement.makespan == pytest.approx(best_makespan(graph, cluster), abs=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_memory_limits_reach_the_best_or_are_proven_impossible(seed):
    rng = random.Random(200 + seed)
    graph = random_graph(rng, 5)
    total = sum(node.bytes for node in graph.nodes)
    cluster = Cluster.uniform(2, memory=math.ceil(total * rng.uniform(0.45, 0.6)), bandwidth=1.0)
    best = best_makespan(graph, cluster)
    if math.isinf(best):
        with pytest.raises(InfeasibleError):
            place(graph, cluster, seconds=20)
    else:
        placement = place(graph, cluster, seconds=20)
        assert placement.makespan == pytest.approx(best, abs=1e-6)
        assert all(placement.held_bytes(d) <= cluster.devices[d].memory for d in (0, 1))


@pytest.mark.full
def test_hundreds_of_small_graphs_reach_the_best():
    for seed in range(300):
        rng = random.Random(1000 + seed)
        graph = random_graph(rng, rng.randint(1, 6), groups=rng.random() < 0.4, kinds=True)
        cluster = random_cluster(rng, rng.randint(1, 3), rng.choice([None, 25.0]))
        best = best_makespan(graph, cluster)
        if math.isinf(best):
            with pytest.raises(InfeasibleError):
                place(graph, cluster, seconds=20)
        else:
            placement = place(graph, cluster, seconds=20)
            assert placement.makespan == pytest.approx(best, abs=1e-6), seed
            assert placement.is_optimal, seed


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_is_never_worse_than_heft_and_keeps_its_own_bound(devices):
    rng = random.Random(devices)
    graph = layered(rng, 12, 4)
    cluster = Cluster.uniform(devices, bandwidth=2e9, latency=1e-5)
    listed = heft(Instance.of(graph, cluster))
    placement = place(graph, cluster, seconds=2)
    assert placement.heft == listed.makespan
    assert placement.bound <= placement.makespan <= listed.makespan
    assert placement.makespan >= graph.critical_seconds * (1 - 1e-9)
    assert placement.gap == pytest.approx(1 - placement.bound / placement.makespan)
    assert placement.speedup == pytest.approx(graph.total_seconds / placement.makespan)


def test_time_is_kept():
    start = time.monotonic()
    place(layered(random.Random(0), 20, 5), Cluster.uniform(3, bandwidth=1e9), seconds=3)
    assert time.monotonic() - start < 6


def test_a_chain_gains_nothing_and_is_proven_at_once():
    nodes = [Op(str(i), 1.0) for i in range(50)]
    edges = [Edge(str(i), str(i + 1), 8.0) for i in range(49)]
    placement = place(OpGraph(nodes, edges), Cluster.uniform(2, bandwidth=1.0))
    assert placement.is_optimal and placement.makespan == 50.0 and placement.speedup == 1.0
    assert placement.seconds < 5


@pytest.mark.parametrize(
    ("graph", "makespan"),
    [
        (OpGraph([]), 0.0),
        (OpGraph([Op("only", 2.0)]), 2.0),
        (OpGraph([Op("a", 0.0), Op("b", 0.0)], [Edge("a", "b")]), 0.0),
        (OpGraph([Op("a", 2.0), Op("b", 3.0)]), 3.0),
    ],
)
def test_small_corners(graph, makespan):
    placement = place(graph, Cluster.uniform(2), seconds=5)
    assert placement.makespan == makespan and placement.is_optimal
    assert str(placement) and placement.as_dict()["gap"] == 0


def test_times_of_any_size_are_placed():
    for scale in (1e-9, 1.0, 1e9):
        nodes = [Op("a", scale / 3), Op("b", scale / 7), Op("c", scale / 11)]
        placement = place(OpGraph(nodes), Cluster.uniform(2), seconds=5)
        assert placement.makespan == pytest.approx(scale / 3, rel=1e-6)


def test_an_operation_bound_to_a_device_stays_there():
    graph = OpGraph([Op("a", 1.0, device=1), Op("b", 1.0, device=1), Op("c", 1.0)])
    placement = place(graph, Cluster.uniform(2), seconds=5)
    assert placement.device_of["a"] == placement.device_of["b"] == 1
    assert placement.makespan == 2.0


def test_faster_devices_get_more():
    graph = OpGraph([Op(str(i), 1.0) for i in range(6)])
    devices = (Device("slow"), Device("fast", speed=2.0))
    placement = place(graph, Cluster(devices), seconds=5)
    assert placement.makespan == 2.0 and placement.serial == 3.0


# --- Ctrl-C --------------------------------------------------------------------------------------


def test_interrupt_returns_the_best_so_far():
    graph = layered(random.Random(1), 30, 6)
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    placement = place(graph, Cluster.uniform(3, bandwidth=1e9), seconds=60)
    assert time.monotonic() - start < 20
    assert placement.status == "interrupted"
    placement.check()
    assert placement.makespan <= placement.heft


# --- progress ------------------------------------------------------------------------------------


def test_progress_is_told(capsys):
    told = []
    graph = layered(random.Random(2), 10, 4)
    cluster = Cluster.uniform(2, bandwidth=1e9)
    place(graph, cluster, seconds=1, progress=lambda *now: told.append(now))
    assert told and all(bound <= makespan for _, makespan, bound in told if makespan is not None)
    place(graph, cluster, seconds=1, progress=True)
    printed = capsys.readouterr()
    assert "makespan" in printed.err and not printed.out


# --- what cannot be placed -----------------------------------------------------------------------


def test_refusals_name_what_is_at_fault():
    two = Cluster.uniform(2, memory=10.0)
    cases = [
        (OpGraph([Op("huge", 1.0, 11.0)]), two, "huge", "too-large"),
        (OpGraph([Op("a", 1.0, 6.0, "g"), Op("b", 1.0, 6.0, "g")]), two, "g", "too-large"),
        (OpGraph([Op(c, 1.0, 7.0) for c in "abc"]), two, "graph", "too-large"),
        (OpGraph([Op(c, 1.0, 6.0) for c in "abc"]), two, "no placement exists", "infeasible"),
        (OpGraph([Op("x", 1.0, seconds_on={"gpu": math.inf})]), two, "x", "unsupported"),
        (
            OpGraph([Op("p", 1.0, 0, "g", device=0), Op("q", 1.0, 0, "g", device=1)]),
            two,
            "g",
            "bound",
        ),
    ]
    for graph, cluster, name, code in cases:
        if code == "infeasible":
            cluster = Cluster.uniform(3, memory=7.0)
            graph = OpGraph([Op(c, 1.0, 4.0) for c in "abcde"])
            cluster = Cluster.uniform(3, memory=7.0)
        with pytest.raises(InfeasibleError, match=name) as caught:
            place(graph, cluster, seconds=5)
        assert caught.value.code == code
        assert isinstance(caught.value, ValueError)


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(ClusterError, match="'a'.*device 5"):
        place(OpGraph([Op("a", 1.0, device=5)]), Cluster.uniform(2))


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "5", None])
def test_a_time_that_is_none_is_refused(seconds):
    with pytest.raises(PlanningError, match="seconds"):
        place(OpGraph([Op("a", 1.0)]), Cluster.uniform(1), seconds=seconds)


# --- the re-check --------------------------------------------------------------------------------


def test_the_check_finds_every_broken_rule():
    from dataclasses import replace

    graph = OpGraph(
        [Op("a", 1.0, 4.0), Op("b", 2.0, 4.0), Op("c", 1.0, 4.0, device=0)],
        [Edge("a", "b", 3.0), Edge("b", "c", 3.0)],
    )
    placement = place(graph, Cluster.uniform(2, memory=12.0, bandwidth=1.0), seconds=5)
    placement.check()
    broken = [
        (replace(placement, device_of={**placement.device_of, "c": 1}), "bound"),
        (replace(placement, device_of={**placement.device_of, "a": 7}), "no-device"),
        (replace(placement, start={**placement.start, "b": 0.5}), "too-early"),
        (replace(placement, makespan=3.0), "makespan"),
        (replace(placement, device_of={"a": 1, "b": 0, "c": 0}), "too-early"),
        (replace(placement, cluster=Cluster.uniform(2, memory=11.0)), "memory"),
    ]
    for wrong, code in broken:
        with pytest.raises(PlacementError) as caught:
            wrong.check()
        assert caught.value.code == code
    both = OpGraph([Op("a", 1.0), Op("b", 1.0)])
    side = place(both, Cluster.uniform(2), seconds=5)
    with pytest.raises(PlacementError, match="runs on its device"):
        replace(side, device_of={"a": 0, "b": 0}).check()
    grouped = OpGraph([Op("a", 1.0, group="g"), Op("b", 1.0, group="g")])
    with pytest.raises(PlacementError, match="group 'g'"):
        replace(side, graph=grouped, device_of={"a": 0, "b": 1}).check()


def test_links_between_nodes_cost_what_they_say():
    graph = OpGraph([Op("a", 1.0, device=0), Op("b", 1.0, device=2)], [Edge("a", "b", 10.0)])
    cluster = Cluster.uniform(
        4, bandwidth=10.0, devices_per_node=2, remote=Link(bandwidth=2.0, latency=0.5)
    )
    assert place(graph, cluster, seconds=5).makespan == pytest.approx(1 + 5.5 + 1)
