"""The ten programs of the paper: each runs, co-executes, and computes what eager computes.

A few iterations of each; `tools/bench --no-onednn`, which the long tests run, makes many.
"""

import contextlib
import importlib
import io
import os
import runpy
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import terra_tf as terra

PAPER = Path(__file__).resolve().parent.parent / "examples" / "paper"
# oneDNN computes some convolutions in another way in graphs; what it changes grows in training.
CONVOLUTIONS = {"dropblock", "sdpoint", "dcgan", "resnet50", "faster_rcnn", "yolov3"}
OTHERS = {"music_transformer", "bert_classification", "bert_qa", "gpt2"}
STEPS = 4
# Those whose way through the step differs from call to call: more calls until one is known.
MOST = {"sdpoint": 14, "yolov3": 10}


@pytest.fixture
def load(monkeypatch):
    """Gives the module of a script."""
    monkeypatch.syspath_prepend(str(PAPER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name in CONVOLUTIONS | OTHERS:
            del sys.modules[name]


def train(module, wrap, steps):
    """Trains; gives the wrapped step, its losses, what it printed, and all variables."""
    keras.utils.set_random_seed(1)
    train_step, batches, variables = module.build()
    step = wrap(train_step)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        losses = [float(step(*batches[number % len(batches)])) for number in range(steps)]
        terra.sync()
    return step, np.array(losses), printed.getvalue(), [v.numpy() for v in variables()]


def test_all_scripts_are_tested():
    scripts = {file.stem for file in PAPER.glob("*.py")}
    assert scripts == CONVOLUTIONS | OTHERS | {"scenes"}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", sorted(CONVOLUTIONS | OTHERS))
def test_program(load, name):
    module = load(name)
    steps = MOST.get(name, STEPS)
    step, losses, printed, variables = train(module, terra.function, steps)
    _, expected, eager_printed, eager_variables = train(module, lambda fn: fn, steps)
    assert np.isfinite(expected).all()
    assert len(set(expected)) == steps  # it does train
    assert step.stats().coexecuted > 0
    assert len(variables) == len(eager_variables)
    if name in CONVOLUTIONS and os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "0":
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        assert printed.count("\n") == eager_printed.count("\n")
        return
    assert losses.tobytes() == expected.tobytes()
    assert printed == eager_printed
    for ours, theirs in zip(variables, eager_variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CONVOLUTIONS | OTHERS))
def test_script(monkeypatch, capsys, name):
    """As a user starts it."""
    monkeypatch.syspath_prepend(str(PAPER))
    runpy.run_path(str(PAPER / f"{name}.py"), run_name="__main__")
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "step" in line or "loss" in line
    ]
    assert len(lines) >= 10
