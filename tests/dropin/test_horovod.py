"""Horovod loops on two ranks that take different branches: no deadlock, and plain eager's results.

The truth is the same program under `python` with `TERRA_DISABLE=1`.
"""

import functools
import re
import sys
from pathlib import Path

import pytest

from dropin.scripts import TERRA, execute, terra_run

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(420)]

HERE = Path(__file__).resolve().parent
HOROVODRUN = (Path(sys.executable).parent / "horovodrun", "-np", "2", "--gloo")


def ranks(*command, **environment):
    """Runs a command on two ranks; returns each rank's lines, and the other ones together."""
    done = execute(*HOROVODRUN, *command, folder=HERE, seconds=200, **environment)
    assert done.code == 0, done.output + done.errors
    found = {0: [], 1: []}
    for line in done.output.splitlines():
        match = re.fullmatch(r"\[(\d)\]<stdout>:(rank \d .*|ran \d .*)", line)
        if match:
            found[int(match[1])].append(match[2])
    return found


@functools.cache
def plain():
    return ranks(sys.executable, HERE / "ranks.py", "plain", TERRA_DISABLE="1")


def assert_equal(found):
    for rank in (0, 1):
        assert found[rank][:-1] == plain()[rank][:-1]
        assert len(found[rank]) > 25
        _, _, coexecuted, fallen_back = found[rank][-1].split()
        assert int(coexecuted) + int(fallen_back) > 8, found[rank][-1]
        assert int(coexecuted) > 0, found[rank][-1]
    assert plain()[0][-1] == "ran 0 0 0"


def test_loop_of_a_script():
    assert_equal(ranks(*TERRA, "run", HERE / "ranks.py", "plain"))


@pytest.mark.full
def test_step_of_the_programs_own():
    assert_equal(ranks(sys.executable, HERE / "ranks.py", "function"))


@pytest.mark.full
def test_a_rank_alone_in_eager_mode():
    """One rank co-executes and the other one does not at all."""
    program = (
        "import os, runpy, sys; rank = os.environ['HOROVOD_RANK'];"
        "os.environ.update({'TERRA_DISABLE': '1'} if rank == '1' else {});"
        f"sys.argv[:] = ['terra', 'run', {str(HERE / 'ranks.py')!r}, 'plain'];"
        "runpy.run_module('terra_tf', run_name='__main__')"
    )
    found = ranks(sys.executable, "-c", program)
    assert [found[rank][:-1] for rank in (0, 1)] == [plain()[rank][:-1] for rank in (0, 1)]
    assert found[1][-1] == "ran 1 0 0"
    assert int(found[0][-1].split()[2]) > 0


def test_what_horovod_does_silently_wrong_is_refused():
    done = terra_run(HERE / "ranks.py", "optimizer", folder=HERE, seconds=200)
    lines = done.output.splitlines()
    names = 2 * ["DistributedOptimizer"] + ["PartialDistributedOptimizer", "load_model"]
    for line, name in zip(lines, names, strict=False):
        assert line.startswith(f"rank 0 SilentlyWrongError Horovod's {name} does not reduce"), done
    assert len(lines) > len(names)
