"""The simulator against real runs of the runtime."""

import pytest

import pipeline
from pipeline.schedules import GENERATORS

pytestmark = pytest.mark.horovod
STAGES = 4


@pytest.mark.parametrize("name", ["steps_of_stages_that_sleep"])
def test_simulated_step_is_within_ten_percent_of_the_real_one(samples, name):
    results = samples[name]
    assert "error" not in results, results["error"]
    m, forward = results["microbatches"], results["forward"]
    for schedule_name, run in results["measured"].items():
        # What a stage took for one micro-batch, of which its forward is known.
        backward = [seconds / m - forward for seconds in run["computed"]]
        schedule = GENERATORS[schedule_name](STAGES, m)
        simulated = pipeline.simulate(schedule, {"forward": forward, "backward": backward})
        assert run["seconds"] == pytest.approx(simulated.step_time, rel=0.1), schedule_name
        assert all(a <= b for a, b in zip(run["peaks"], simulated.peak_count, strict=True))
