"""The subcommands place, hybrid and plan."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from graphs import layered

from pipeline.cli import main
from pipeline.planning import Edge, Op, OpGraph


@pytest.fixture
def graph(tmp_path):
    nodes = [Op(name, 1.0, 5.0) for name in "abcd"]
    edges = [Edge("a", "b", 10.0), Edge("a", "c", 10.0), Edge("b", "d", 1.0), Edge("c", "d", 1.0)]
    path = tmp_path / "graph.json"
    OpGraph(nodes, edges).save(path)
    return str(path)


def test_place_prints_json_with_every_field(graph, capsys):
    arguments = ["place", graph, "--devices", "2", "--bandwidth", "100", "--seconds", "5"]
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["makespan"] == pytest.approx(3.1)
    assert shown["bound"] == pytest.approx(3.1) and shown["gap"] == 0
    assert shown["speedup"] == pytest.approx(4 / 3.1)
    assert set(shown["device_of"]) == set("abcd") == set(shown["start"])
    assert set(shown["device_of"].values()) == {0, 1}


def test_place_prints_text_and_draws(graph, capsys, tmp_path):
    picture = tmp_path / "step.png"
    arguments = ["place", graph, "--devices", "3", "--speeds", "1,2,1", "--plot", str(picture)]
    assert main([*arguments, "--seconds", "3", "--latency", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "makespan" in printed and "gap" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--bandwidth", "0"], "bandwidth"),
        (["--bandwidth", "nan"], "bandwidth"),
        (["--memory", "4"], "'a' fits nowhere"),
        (["--memory", "9"], "together"),
        (["--seconds", "-1"], "seconds"),
        (["--speeds", "1"], "--speeds"),
    ],
)
def test_place_refuses_by_name(graph, capsys, more, text):
    assert main(["place", graph, "--devices", "2", *more]) == 2
    printed = capsys.readouterr()
    assert text in printed.err and not printed.out


def test_place_refuses_files_that_are_no_graphs(tmp_path, capsys):
    path = tmp_path / "cycle.json"
    node = {"cpuLatency": 1, "fpgaLatency": 1, "size": 0}
    edges = [{"sourceId": a, "destId": b, "size": 1} for a, b in ((1, 2), (2, 1))]
    path.write_text(json.dumps({"nodes": [{"id": 1, **node}, {"id": 2, **node}], "edges": edges}))
    assert main(["place", str(path), "--devices", "2"]) == 2
    assert "cycle: '1' -> '2'" in capsys.readouterr().err
    assert main(["place", str(tmp_path / "none.json"), "--devices", "2"]) == 2


def test_ctrl_c_prints_the_best_so_far(tmp_path):
    path = tmp_path / "large.json"
    layered(random.Random(0), 40, 6).save(path)
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "place", str(path), "--devices", "3", "--json"]
        + ["--bandwidth", "1e9", "--seconds", "100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    process.stderr.readline()  # the search has begun
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    shown = json.loads(printed)
    assert shown["status"] == "interrupted" and shown["makespan"] <= shown["heft"]


def test_hybrid_prints_curves_crossover_and_best(tmp_path, capsys):
    path = tmp_path / "model.json"
    data = {"batch": 10, "epochs": {"10": 4, "20": 5, "40": 10}, "model_speedup": {"2": 1.5}}
    path.write_text(json.dumps(data))
    assert main(["hybrid", str(path), "--devices", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["speedup"]["1"]["4"] == pytest.approx(1.6)
    assert shown["speedup"]["2"]["4"] == pytest.approx(2.4)
    assert shown["crossover"]["2"] == 4 and shown["best"]["ways"] == 2
    assert main(["hybrid", str(path), "--devices", "4", "--plot", str(tmp_path / "x.png")]) == 0
    assert "2-way model parallel workers win from 4 devices on" in capsys.readouterr().out
    data.pop("epochs")
    path.write_text(json.dumps(data))
    assert main(["hybrid", str(path), "--devices", "4"]) == 2
    assert "'epochs', E(B)" in capsys.readouterr().err


def test_plan_of_given_costs(tmp_path, capsys):
    path = tmp_path / "layers.json"
    costs = {
        "forward": [1e-3] * 8,
        "backward": [2e-3] * 8,
        "stash_bytes": [1e7] * 8,
        "output_bytes": [1e5] * 8,
        "weight_bytes": [4e8] * 8,
    }
    path.write_text(json.dumps(costs))
    saved = tmp_path / "plan.json"
    arguments = ["plan", str(path), "--batch", "64", "--devices", "4", "--bandwidth", "50e9"]
    assert main([*arguments, "--memory", "6e9", "--save", str(saved)]) == 0
    printed = capsys.readouterr().out
    assert "best: dp" in printed and "out of memory" in printed and "launch: " in printed
    assert main([*arguments, "--memory", "6e9", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["best"] == json.loads(saved.read_text())["best"]
    assert main([*arguments, "--memory", "1e6"]) == 2
    assert "nothing fits" in capsys.readouterr().err
    assert main(["plan", str(path), "--devices", "4"]) == 2
    assert "--batch" in capsys.readouterr().err
    costs.pop("weight_bytes")
    path.write_text(json.dumps(costs))
    assert main(arguments) == 2
    assert "'weight_bytes'" in capsys.readouterr().err
    assert main(["plan", "nothing.py:f", "--devices", "2"]) == 2
