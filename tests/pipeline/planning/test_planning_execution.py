"""Profiling and running placed steps, on two logical devices of a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent


def run(*command: str, seconds: float) -> str:
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stdout


@pytest.fixture(scope="module")
def found():
    printed = run(str(HERE / "two_devices.py"), seconds=280)
    line = next(line for line in printed.splitlines() if line.startswith("FOUND"))
    return json.loads(line[len("FOUND") :])


def test_devices_are_found_with_their_link(found):
    assert found["devices"] == ["/device:CPU:0", "/device:CPU:1"]
    assert 0 <= found["latency"] < 0.1


def test_profiles_have_times_and_bytes(found):
    inference = found["inference"]
    assert inference["operations"] > 20 and inference["positive"] and inference["critical"]
    # Outputs of convolutions: 4 x 16 x 16 x 16 (or 8) numbers of 4 bytes.
    assert found["bytes"] == [4 * 16 * 16 * 8 * 4, 4 * 16 * 16 * 16 * 4]


def test_profiling_leaves_variables_alone(found):
    assert found["profiling_changes_nothing"]


def test_fused_graphs_run_the_same(found):
    fused = found["fused"]
    assert fused["operations"] < found["inference"]["operations"]
    assert fused["total"] and fused["same"]


def test_placed_inference_has_the_same_results(found):
    inference = found["inference"]
    assert inference["both_used"] and inference["again"]
    assert inference["same_as_one_device"]
    assert inference["close"] <= 1e-5  # eager TensorFlow picks other kernels for convolutions
    assert found["measured"]


def test_placed_training_has_the_same_results(found):
    assert found["training"] == {"losses": True, "weights": True, "bound": True}


def test_control_flow_and_terra_steps_are_placed(found):
    assert found["control_flow"] and found["terra"]


def test_refusals_say_what_is_at_fault(found):
    refusals = found["refusals"]
    assert refusals["other"].startswith("other-step: the placement is of another step")
    assert "TensorFlow has no device '/device:GPU:0' here" in refusals["missing"]
    assert "takes 1 tensors, its arguments hold 0" in refusals["arguments"]
    assert refusals["callable"].startswith("no-step")


@pytest.mark.full
def test_predictions_are_within_a_tenth_of_what_is_measured():
    """Needs two processors that do nothing else."""
    rows = json.loads(run("-m", "pipeline.benchmarks.placement", "--json", seconds=600))
    assert len(rows) >= 3
    assert all(abs(row["error"]) <= 0.1 for row in rows), rows
