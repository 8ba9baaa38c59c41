"""Every optimizer on two stages and two replicas against one process; see `ranks_optimizers.py`."""

from pathlib import Path

import pytest
from launch import launch

pytestmark = pytest.mark.horovod
PROGRAM = Path(__file__).parent / "ranks_optimizers.py"
# Of each tensor's largest magnitude. Losses and weights in half precision round otherwise.
LIMITS = {"loss_scale_with_clipping_on_two_replicas": 1e-2}
ADAPTIVE = 1e-4


def check(found, name):
    assert "error" not in found, found["error"]
    assert found
    limit = LIMITS.get(name, ADAPTIVE)
    assert {what: value for what, value in found.items() if value > limit} == {}


@pytest.mark.parametrize("name", ["optimizers_sample"])
def test_optimizers_that_are_unlike_the_others(samples, name):
    check(samples[name], name)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "optimizers_of_keras",
        "optimizers_of_tf_keras",
        "tied_weights_on_two_replicas",
        "loss_scale_with_clipping_on_two_replicas",
    ],
)
def test_optimizers(name):
    check(launch(PROGRAM, 4, name, seconds=550)[name], name)
