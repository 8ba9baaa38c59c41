"""Training in real processes against one process that trains eagerly.

The programs are in `ranks_runtime.py`; see `conftest.py` for the launch of the samples.
"""

from pathlib import Path

import pytest
from launch import launch

pytestmark = pytest.mark.horovod
PROGRAM = Path(__file__).parent / "ranks_runtime.py"
# Of each tensor's largest magnitude: SGD in float32, other optimizers, float64.
SGD, ADAPTIVE, DOUBLE, HALF = 3e-6, 1e-4, 1e-10, 1e-2


def at_most(limit, *names):
    def check(found):
        assert {name: found[name] for name in names if found[name] > limit} == {}

    return check


def all_true(*names):
    def check(found):
        assert [found[name] for name in names] == [True] * len(names)

    return check


def equals(**expected):
    def check(found):
        assert {name: found[name] for name in expected} == expected

    return check


def errors_and_losses(found):
    assert found["errors"] == 3
    assert found["loss"] > 0 and found["other_replica"] > 0


def few_traces(found):
    # Two functions at most: one for the first shape, one for all others.
    assert found["traces"] == [1, 1, 2, 2, 2, 2, 2]


# Case → what must hold of what it found, one check or several.
PLAIN = {
    "batch_norm_equals_microbatches_in_one_process": [at_most(SGD, "loss", "weights", "states")],
    "replicas_and_tied_weights": [
        # Weights that start at zero are small, so rounding weighs more.
        at_most(SGD, "loss", "loss_4"),
        at_most(3e-5, "weights", "weights_4"),
    ],
    "dictionaries_skips_and_unused_weights": [
        at_most(SGD, "loss_stopped", "weights_stopped", "loss_decay", "weights_decay")
    ],
    "layer_losses_and_sample_weights": [
        at_most(SGD, "loss", "weights", "loss_dp", "weights_dp"),
    ],
    "evaluate_predict_metrics": [
        at_most(SGD, "loss", "small", "outputs", "accuracy", "training_accuracy"),
        all_true("only_last"),
    ],
    "errors_leave_the_pipeline_usable": [errors_and_losses],
    "ledger_counts_what_bpipe_promises": [equals(table=4, bpipe=[3, 3, 2, 3])],
}
"""The sample of the plain run; what it leaves out needs more than a minute."""

FULL = {
    "schedules_equal_one_process": [at_most(SGD, "loss", "weights"), all_true("bit_equal")],
    "dropout_agrees_between_schedules_and_partitions": [
        all_true("bit_equal"),
        at_most(SGD, "loss"),
    ],
    "dropout_masks_differ_between_steps_and_microbatches": [all_true("different")],
    "adam_and_float64": [
        at_most(DOUBLE, "loss_float64", "weights_float64"),
        at_most(ADAPTIVE, "loss_adam", "weights_adam"),
    ],
    "uneven_replicas": [at_most(SGD, "loss", "weights")],
    "unbuilt_layers_start_alike": [at_most(SGD, "loss", "weights")],
    "clipping": [
        at_most(SGD, "loss_norm", "weights_norm", "loss_global", "weights_global"),
        at_most(ADAPTIVE, "loss_value", "weights_value"),
    ],
    "learning_rate_schedule_and_accumulation": [at_most(ADAPTIVE, "loss", "weights")],
    "legacy_optimizer": [at_most(ADAPTIVE, "loss", "weights")],
    "mixed_precision_with_loss_scale": [
        at_most(HALF, "loss", "weights"),
        all_true("scales_agree", "scale_fell", "then_learned"),
    ],
    "partitions_and_modes": [at_most(SGD, "loss", "weights")],
    "odd_shapes_are_not_traced_again": [few_traces],
    "checkpoints": [all_true("resumed_bit_equal"), at_most(SGD, "outputs")],
}


@pytest.mark.parametrize("name", PLAIN)
def test_case(samples, name):
    judge(samples[name], PLAIN[name])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FULL)
def test_case_of_the_full_run(name):
    judge(launch(PROGRAM, 4, name, seconds=550)[name], FULL[name])


def judge(found, checks):
    assert "error" not in found, found["error"]
    for check in checks:
        check(found)
