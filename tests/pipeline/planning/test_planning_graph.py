"""Graphs and clusters: what they hold, JSON of both forms, and every refusal by name."""

import json
import math
import random

import pytest
from graphs import layered, random_graph

from pipeline.planning import Cluster, ClusterError, Device, Edge, GraphError, Link, Op, OpGraph
from pipeline.planning.heft import heft
from pipeline.planning.instance import Instance


def refuse(match: str, code: str, make) -> None:
    with pytest.raises(GraphError, match=match) as caught:
        make()
    assert caught.value.code == code and isinstance(caught.value, ValueError)


def test_a_cycle_is_shown():
    edges = [Edge("a", "b"), Edge("b", "c"), Edge("c", "a"), Edge("d", "a")]
    refuse("cycle: '.'", "cycle", lambda: OpGraph([Op(c, 1.0) for c in "abcd"], edges))
    refuse("'a'.*itself", "cycle", lambda: OpGraph([Op("a", 1.0)], [Edge("a", "a")]))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (-1.0, "negative"),
        (math.nan, "nan"),
        (math.inf, "infinite"),
        ("3", "no-number"),
        (None, "no-number"),
        (True, "no-number"),
    ],
)
def test_numbers_that_are_none_are_named_with_their_field(value, code):
    refuse("'conv'.*'seconds'", code, lambda: OpGraph([Op("conv", value)]))
    refuse("'conv'.*'bytes'", code, lambda: OpGraph([Op("conv", 1.0, value)]))
    nodes = [Op("a", 1.0), Op("b", 1.0)]
    refuse("'a' -> 'b'.*'bytes'", code, lambda: OpGraph(nodes, [Edge("a", "b", value)]))


def test_names_and_ends_are_checked():
    refuse("'a'", "duplicate", lambda: OpGraph([Op("a", 1.0), Op("a", 2.0)]))
    refuse("'z'", "unknown-node", lambda: OpGraph([Op("a", 1.0)], [Edge("a", "z")]))
    refuse("text", "name", lambda: OpGraph([Op(7, 1.0)]))
    refuse("'device'", "device", lambda: OpGraph([Op("a", 1.0, device=-1)]))


def test_what_a_graph_knows():
    graph = OpGraph(
        [Op("c", 3.0), Op("a", 1.0, 10), Op("b", 2.0)], [Edge("a", "c", 5), Edge("a", "b")]
    )
    assert graph.total_seconds == 6.0 and graph.critical_seconds == 4.0
    assert graph.critical_path == ("a", "c")
    assert [graph.nodes[i].name for i in graph.order][0] == "a"
    assert "3 operations, 2 tensors" in str(graph)


@pytest.mark.parametrize("seed", range(5))
def test_json_gives_back_the_same(seed, tmp_path):
    graph = random_graph(random.Random(seed), 8, groups=True, kinds=True)
    graph.save(tmp_path / "graph.json")
    assert OpGraph.load(tmp_path / "graph.json") == graph


def test_the_foreign_form_is_read_and_written(tmp_path):
    data = {
        "maxFPGAs": 2,
        "nodes": [
            {"id": 1, "fpgaLatency": 2.0, "cpuLatency": 20.0, "size": 8.0, "colorClass": 1},
            {"id": 2, "fpgaLatency": 4.0, "cpuLatency": 40.0, "size": 8.0, "colorClass": 2},
            {
                "id": 3,
                "fpgaLatency": 1.0,
                "cpuLatency": 10.0,
                "size": 0.0,
                "colorClass": 1,
                "isBackwardNode": True,
            },
            {"id": 4, "supportedOnFpga": 0, "cpuLatency": 3.0, "size": 1.0, "colorClass": 4},
        ],
        "edges": [{"sourceId": 1, "destId": 2, "cost": 99.0, "size": 1000.0}],
    }
    (tmp_path / "foreign.json").write_text(json.dumps(data))
    graph = OpGraph.load(tmp_path / "foreign.json")
    assert graph["1"].seconds == 0.002 and graph["1"].seconds_on == {"cpu": 0.02}
    assert graph.groups == {"1": (0, 2)} and graph["3"].backward and not graph["1"].backward
    assert graph["4"].seconds_on == {"cpu": 0.003, "gpu": math.inf}
    assert graph.edges == (Edge("1", "2", 1000.0),)
    graph.save(tmp_path / "again.json", "dnn-partitioning")
    again = OpGraph.load(tmp_path / "again.json")
    assert again == graph


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d["nodes"][0].pop("fpgaLatency"), "node '1'.*'fpgaLatency'"),
        (lambda d: d["nodes"][0].pop("id"), "node number 0.*'id'"),
        (lambda d: d["nodes"][0].update(fpgaLatency=-1), "node '1'.*'fpgaLatency'"),
        (lambda d: d["nodes"][0].update(fpgaLatency=math.nan), "node '1'.*'fpgaLatency'"),
        (lambda d: d["nodes"][1].update(size="big"), "node '2'.*'size'"),
        (lambda d: d["edges"][0].pop("size"), "'1' -> '2'.*'size'"),
        (lambda d: d["edges"][0].pop("destId"), "edge number 0.*'destId'"),
        (lambda d: d["edges"][0].update(destId=9), "'9'"),
        (lambda d: d["edges"].append({"sourceId": 2, "destId": 1, "size": 0}), "cycle"),
        (lambda d: d.pop("edges"), "'edges'"),
        (lambda d: d.update(nodes=3), "'nodes'"),
        (lambda d: d["nodes"][1].update(id=["2"]), "node number 1.*'id'"),
        (lambda d: d.update(nodes=[{"id": "a", "seconds": 1, "members": 5}]), "'a'.*'members'"),
    ],
)
def test_files_that_are_no_graphs_are_refused(change, match, tmp_path):
    node = {"cpuLatency": 1.0, "fpgaLatency": 1.0, "size": 1.0}
    data = {
        "nodes": [{"id": 1, **node}, {"id": 2, **node}],
        "edges": [{"sourceId": 1, "destId": 2, "size": 1.0}],
    }
    change(data)
    (tmp_path / "graph.json").write_text(json.dumps(data))
    with pytest.raises(GraphError, match=match):
        OpGraph.load(tmp_path / "graph.json")


def test_text_that_is_no_json_is_refused(tmp_path):
    for text in (b"{nodes:", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "graph.json").write_bytes(text)
        with pytest.raises(GraphError, match="not JSON"):
            OpGraph.load(tmp_path / "graph.json")
    (tmp_path / "graph.json").write_text("[]")
    with pytest.raises(GraphError, match="nodes and edges"):
        OpGraph.load(tmp_path / "graph.json")


# --- clusters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Cluster(()), "no devices"),
        (lambda: Cluster.uniform(0), "devices"),
        (lambda: Cluster.uniform(2, bandwidth=0.0), "bandwidth"),
        (lambda: Cluster.uniform(2, bandwidth=-1.0), "bandwidth"),
        (lambda: Cluster.uniform(2, bandwidth=math.nan), "bandwidth"),
        (lambda: Cluster.uniform(2, latency=-1.0), "latency"),
        (lambda: Cluster.uniform(2, memory=-1.0), "device 0.*memory"),
        (lambda: Cluster((Device("a", speed=0.0),)), "device 0.*speed"),
        (lambda: Cluster((Device("a"),), links={(0, 1): Link()}), "pair"),
        (lambda: Cluster.uniform(1, cores=0), "cores"),
    ],
)
def test_clusters_that_are_none_are_refused(make, match):
    with pytest.raises(ClusterError, match=match):
        make()


def test_links_of_a_cluster():
    cluster = Cluster.uniform(
        4, bandwidth=100.0, devices_per_node=2, remote=Link(10.0, 1.0), latency=0.5
    )
    assert cluster.transfer_seconds(50.0, 0, 0) == 0.0
    assert cluster.transfer_seconds(50.0, 0, 1) == 1.0
    assert cluster.transfer_seconds(50.0, 1, 2) == 6.0
    assert "2 nodes" in str(cluster) and not cluster.has_equal_links


# --- fusing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_fusing_keeps_time_bytes_and_every_name(seed):
    graph = layered(random.Random(seed), 60, 4)
    extra = [Op(f"tiny{i}", 1e-7, 1.0) for i in range(200)]
    edges = [Edge(graph.nodes[i].name, f"tiny{i}", 1.0) for i in range(200)]
    graph = OpGraph([*graph.nodes, *extra], [*graph.edges, *edges])
    fused = graph.fuse(max_ops=240)
    assert len(fused) < len(graph)
    assert fused.total_seconds == pytest.approx(graph.total_seconds)
    assert sum(n.bytes for n in fused.nodes) == pytest.approx(sum(n.bytes for n in graph.nodes))
    names = [name for node in fused.nodes for name in (node.members or (node.name,))]
    assert sorted(names) == sorted(node.name for node in graph.nodes)
    for devices in (2, 3, 4):
        cluster = Cluster.uniform(devices)
        listed = [heft(Instance.of(one, cluster)).makespan for one in (graph, fused)]
        assert listed[1] == pytest.approx(listed[0], rel=0.02)
    assert fused.critical_seconds <= graph.critical_seconds * 1.02
    assert fused.critical_seconds >= graph.critical_seconds * (1 - 1e-9)


def test_fusing_binds_nothing_that_was_free():
    nodes = [
        Op("read", 1e-9, device=0),
        Op("conv", 1.0),
        Op("relu", 1e-9),
        Op("grad", 1e-9, backward=True),
    ]
    edges = [Edge("read", "conv"), Edge("conv", "relu"), Edge("relu", "grad")]
    fused = OpGraph([*nodes, Op("member", 1e-9, group="g")], [*edges, Edge("relu", "member")]).fuse(
        1
    )
    assert {node.name: node.device for node in fused.nodes} == {
        "read": 0,
        "conv": None,
        "grad": None,
        "member": None,
    }
    assert fused["conv"].members == ("conv", "relu") and fused["member"].group == "g"
