"""The simulator against real runs of the runtime."""

from pathlib import Path

import pytest
from launch import launch

import pipeline
from pipeline.schedules import GENERATORS

pytestmark = pytest.mark.horovod
STAGES = 4


def test_simulated_step_is_within_ten_percent_of_the_real_one():
    results = launch(Path(__file__).with_name("ranks_sleeping.py"), STAGES, seconds=110)
    m, forward = results["microbatches"], results["forward"]
    for name, run in results["measured"].items():
        # What a stage took for one micro-batch, of which its forward is known.
        backward = [seconds / m - forward for seconds in run["computed"]]
        schedule = GENERATORS[name](STAGES, m)
        simulated = pipeline.simulate(schedule, {"forward": forward, "backward": backward})
        assert run["seconds"] == pytest.approx(simulated.step_time, rel=0.1), name
        assert all(a <= b for a, b in zip(run["peaks"], simulated.peak_count, strict=True))
