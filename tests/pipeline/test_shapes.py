"""Odd shapes, structures and types against one process; see `ranks_shapes.py`."""

from pathlib import Path

import pytest
from launch import launch

pytestmark = pytest.mark.horovod
PROGRAM = Path(__file__).parent / "ranks_shapes.py"
# Of each tensor's largest magnitude.
SGD, HALF = 3e-6, 2e-2
# Where weights start at zero, rounding weighs more.
SMALL_WEIGHTS = 3e-5
PLAIN = ("nested_structures_and_skip_connections",)
FULL = (
    "nested_structures_in_every_way",
    "skips_that_become_more_and_fewer",
    "micro_batches_fewer_than_stages_and_ragged",
    "batch_and_length_change_between_steps",
    "stages_without_weights",
    "boundaries_of_half_precision",
    "labels_and_masks_of_the_last_stage",
    "masks_of_keras_travel",
    "batch_norm_and_dropout_agree_between_policies",
)
LIMITS = {
    "boundaries_of_half_precision": HALF,
    "batch_and_length_change_between_steps": SMALL_WEIGHTS,
    "labels_and_masks_of_the_last_stage": SMALL_WEIGHTS,
}


def check(found, name):
    assert "error" not in found, found["error"]
    assert found.pop("bit_equal", True) is True
    limit = LIMITS.get(name, SGD)
    assert found
    assert {what: value for what, value in found.items() if value > limit} == {}


@pytest.mark.parametrize("name", PLAIN)
def test_case(samples, name):
    check(samples[name], name)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FULL)
def test_case_of_the_full_run(name):
    check(launch(PROGRAM, 4, name, seconds=550)[name], name)
