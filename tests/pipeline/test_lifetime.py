"""Several pipelines in a program, their checkpoints and their end, and a long run.

The programs are in `ranks_lifetime.py`.
"""

from pathlib import Path

import pytest
from launch import launch
from test_runtime import SGD, all_true, at_most, equals, judge

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(400)]
PROGRAM = Path(__file__).parent / "ranks_lifetime.py"

# In the order of the cases: what the refusal says.
REFUSALS = [
    "there is no checkpoint",
    "has no file checkpoint.json",
    "has no file checkpoint.json",
    "does not have the checksum in",
    "bytes instead of",
    "does not have the checksum it names",
    "it has no file",
    "is damaged: checkpoint.json",
    "is of another model",
    "is of another optimizer",
]


def says_what_is_wrong(found):
    assert len(found["messages"]) == len(REFUSALS)
    for message, wanted in zip(found["messages"], REFUSALS, strict=True):
        assert wanted in message, found["messages"]


def memory_is_flat(found):
    assert found["growth"] < 0.5, found


PLAIN = {
    "bad_checkpoints_are_refused": [
        says_what_is_wrong,
        all_true("alike", "unchanged", "goes_on"),
    ],
    "another_thread_is_refused": [all_true("refused"), at_most(SGD, "loss")],
}
FULL = {
    "two_pipelines_train_in_turns": [at_most(SGD, "loss", "weights", "loss_2", "weights_2")],
    "evaluation_on_fewer_ranks": [
        equals(counts=[0, 0, 4, 3]),
        at_most(SGD, "loss"),
        all_true("trains_on"),
    ],
    "memory_comes_back": [all_true("collected", "returned"), memory_is_flat],
    "checkpoint_of_replicas": [
        all_true("position", "resumed_bit_equal"),
        equals(steps=3),
        at_most(SGD, "outputs"),
    ],
    "checkpoint_between_accumulated_calls": [all_true("bit_equal"), at_most(SGD, "other_p")],
    "keras_files": [all_true("refused"), at_most(1e-6, "weights", "keras", "sequential")],
}


@pytest.fixture(scope="module")
def full():
    return launch(PROGRAM, 4, *FULL, seconds=500)


@pytest.mark.parametrize("name", PLAIN)
def test_case(samples, name):
    judge(samples[name], PLAIN[name])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FULL)
def test_case_of_the_full_run(full, name):
    judge(full[name], FULL[name])


@pytest.mark.full
def test_two_thousand_steps():
    found = launch(PROGRAM, 4, "soak", seconds=1700)["soak"]
    assert "error" not in found, found["error"]
    assert found["drift"] < 1e-4 and found["learned"], found
    assert found["growth"] < 12, found  # MB over the last four fifths
    assert found["traces"] <= 2, found
