"""A plan by measuring, in a process of its own, then training by it on ranks."""

import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from launch import environment, launch

from pipeline.planning import Cluster, LayerCosts, search
from pipeline.planning.training_plan import FITS, Plan

PROGRAM = Path(__file__).parent / "ranks_plan.py"
MEASURE = """
import sys
sys.path.insert(0, {folder!r})
import keras, ranks_plan
from pipeline.planning import Cluster, plan
x, y = ranks_plan.data(0, 1)
layers = ranks_plan.layers()
found = plan(layers, keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1),
             Cluster.local_ranks(2), (x, y), schedules=("1f1b", "bpipe"))
assert found.model[0] is layers and not any(layer.built for layer in layers)
found.save({path!r})
print(found)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def found(folder):
    program = MEASURE.format(folder=str(PROGRAM.parent), path=str(folder / "measured.json"))
    subprocess.run([sys.executable, "-c", program], env=environment(), check=True, timeout=200)
    # Weights that do not fit twice, so that there have to be two stages.
    costs = LayerCosts([1e-3] * 4, [2e-3] * 4, [1.0] * 4, [1.0] * 4, [100.0] * 4)
    staged = search(costs, Cluster.uniform(2, memory=1500.0, bandwidth=1e9), [16])
    assert staged.setting.stages == 2
    staged.save(folder / "pipeline.json")
    search(costs, Cluster.uniform(4), [16]).save(folder / "other.json")
    return launch(PROGRAM, 2, str(folder), seconds=200)


def one_process_losses():
    from pipeline.runtime.model import Model
    from pipeline.runtime.structure import spec_of

    sys.path.insert(0, str(PROGRAM.parent))
    import ranks_plan
    import tensorflow as tf

    x, y = ranks_plan.data(0, 1)
    layers = ranks_plan.layers()
    model = Model(layers, seed=0)  # the same initial values as a pipeline's
    model.build(0, len(model), [spec_of(tf.constant(x))])
    optimizer, losses = keras.optimizers.SGD(0.1), []
    weights = [w for layer in layers for w in layer.trainable_weights]
    for _ in range(3):
        with tf.GradientTape() as tape:
            flowing = x
            for layer in layers:
                flowing = layer(flowing)
            loss = keras.losses.MeanSquaredError()(y, flowing)
        losses.append(float(loss))
        optimizer.apply(tape.gradient(loss, [w.value for w in weights]), weights)
    return losses


@pytest.mark.horovod
@pytest.mark.timeout(450)
def test_a_plan_trains_as_one_process_does(found):
    expected = one_process_losses()
    assert found["pipeline"]["stages"] == 2
    for name in ("measured", "pipeline"):
        np.testing.assert_allclose(found[name]["losses"], expected, rtol=1e-5)


@pytest.mark.horovod
@pytest.mark.timeout(450)
def test_a_measured_plan_has_a_winner_that_fits(found, folder):
    plan = Plan.load(folder / "measured.json")
    assert plan.best.status == FITS and plan.best.step_seconds > 0
    assert plan.setting.stages == found["measured"]["stages"]
    assert {row.setting.stages for row in plan.rows} == {1, 2}
    assert plan == Plan.load(folder / "measured.json") and json.dumps(plan.as_dict())


@pytest.mark.horovod
@pytest.mark.timeout(450)
def test_plans_for_other_ranks_or_without_a_model_are_refused(found):
    assert "the plan is for 4 ranks, the job has 2" in found["other"]
    assert "terra-pipeline run -np 4" in found["other"]
    assert "pass layers, loss= and optimizer=" in found["no_model"]
