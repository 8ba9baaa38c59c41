"""Stage modes, terra around the loop, several pipelines, lifetimes; see `ranks_modes.py`."""

from pathlib import Path

import pytest
from launch import launch

pytestmark = pytest.mark.horovod
PROGRAM = Path(__file__).parent / "ranks_modes.py"
# Of each tensor's largest magnitude; where weights start at zero, rounding weighs more.
LIMIT = 3e-5
M, P = 8, 4
KEPT, REPEATED = [M] * P, [2 * M] * P


def stashes(found):
    for mode in ("eager", "terra"):
        kept, lent = found[f"{mode} 1f1b keep"], found[f"{mode} bpipe keep"]
        assert kept["counts"] == [4, 3, 2, 1] and lent["counts"] == [3, 3, 2, 3]
        assert kept["calls"] == KEPT
        assert lent["bytes"][0] < kept["bytes"][0] and lent["lent"][3] > 0
        for schedule in ("1f1b", "bpipe"):
            again = found[f"{mode} {schedule} recompute"]
            assert again["calls"] == REPEATED
            assert again["bytes"][0] < found[f"{mode} {schedule} keep"]["bytes"][0]
    # What an eager stage lends comes back as it was; a co-executed one repeats it.
    assert found["eager bpipe keep"]["calls"] == KEPT
    assert found["eager bpipe keep"]["bytes"][0] * 4 == found["eager 1f1b keep"]["bytes"][0] * 3
    assert found["terra bpipe keep"]["calls"][1:] == KEPT[1:]


def numbers(found):
    flags = {name: value for name, value in found.items() if isinstance(value, bool)}
    assert all(flags.values()), flags
    large = {n: v for n, v in found.items() if n not in flags and v > LIMIT}
    assert large == {}


PLAIN = {
    "stages_with_branches_of_python_train": numbers,
}
FULL = {
    "stages_with_branches_of_python_train_in_every_way": numbers,
    "stashes_of_eager_stages_are_kept_and_lent": stashes,
    "stage_modes_equal_one_process": numbers,
    "terra_around_the_training_loop": numbers,
    "inner_functions_in_every_mode": numbers,
    "several_pipelines_take_turns": numbers,
}


@pytest.mark.parametrize("name", PLAIN)
def test_case(samples, name):
    assert "error" not in samples[name], samples[name]["error"]
    PLAIN[name](samples[name])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FULL)
def test_case_of_the_full_run(name):
    found = launch(PROGRAM, 4, name, seconds=550)[name]
    assert "error" not in found, found["error"]
    FULL[name](found)
