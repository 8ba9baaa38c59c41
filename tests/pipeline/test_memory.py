"""BPipe's promise, in real processes: fewer stashes, less memory, the same step time."""

from pathlib import Path

import pytest
from launch import launch

pytestmark = [pytest.mark.horovod, pytest.mark.full]
PROGRAM = Path(__file__).parent / "ranks_memory.py"
# Tensors of this size and more are given back to the system as soon as they are freed; with oneDNN,
# TensorFlow would keep them in a pool.
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10), "TF_ENABLE_ONEDNN_OPTS": "0"}


def of_ranks(found, schedule, column):
    return [rank[column] for rank in found[schedule]["ranks"]]


@pytest.mark.timeout(900)
def test_eight_stages_hold_five_stashes_where_1f1b_holds_eight():
    found = launch(PROGRAM, 8, "1f1b,bpipe", "64", "8192", "16", "4", seconds=850, **AT_ONCE)
    assert of_ranks(found, "1f1b", 0) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert max(of_ranks(found, "bpipe", 0)) <= 5
    fullest = max(of_ranks(found, "1f1b", 1))
    assert max(of_ranks(found, "bpipe", 1)) <= 0.66 * fullest
    assert found["1f1b"]["losses"] == found["bpipe"]["losses"], "bit-equal"
    # The processes' resident memory shows the same; the first and last ranks also hold the batch.
    grown, ledger = of_ranks(found, "1f1b", 2), of_ranks(found, "1f1b", 1)
    assert grown[1] - grown[6] == pytest.approx(ledger[1] - ledger[6], rel=0.2)
    assert max(of_ranks(found, "bpipe", 2)[1:7]) <= 0.9 * grown[1]


@pytest.mark.timeout(600)
def test_moving_stashes_costs_little_processor_time():
    # Much to compute for each byte of a stash, so that copies are about 2% of it.
    found = launch(PROGRAM, 4, "1f1b,bpipe", "1024", "256", "8", "4", seconds=550)
    assert max(of_ranks(found, "bpipe", 0)) == 3
    assert min(found["bpipe"]["cpu"]) <= 1.05 * min(found["1f1b"]["cpu"])
