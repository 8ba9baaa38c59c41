"""What a user calls: `terra.function`, `terra.iterate`, settings."""

import gc
import os
import subprocess
import sys
import textwrap

import pytest
import tensorflow as tf

import terra_tf as terra

pytestmark = pytest.mark.timeout(60)

X = tf.constant([1.0, 2.0])


class Scaled:
    """An object with a co-executed method."""

    def __init__(self, factor):
        self.factor = tf.Variable(factor)

    @terra.function
    def step(self, x):
        return tf.reduce_sum(x * self.factor)


def test_settings_stay_the_settings_whatever_was_imported_before():
    assert isinstance(terra.settings.lead, int)
    assert terra.settings.disabled is False


def test_a_bound_method_keeps_its_object_alive():
    step = Scaled(2.0).step
    gc.collect()
    for _ in range(5):
        assert float(step(X)) == 6.0


def test_objects_that_compare_equal_are_still_two_objects():
    class Equal(Scaled):
        def __eq__(self, other):
            return isinstance(other, Equal)

        def __hash__(self):
            return 1

    one, ten = Equal(1.0), Equal(10.0)
    for _ in range(5):
        assert float(one.step(X)) == 3.0
        assert float(ten.step(X)) == 30.0


def test_an_object_with_a_co_executed_method_can_be_freed():
    import weakref

    scaled = Scaled(2.0)
    for _ in range(5):
        scaled.step(X)
    terra.sync()
    reference = weakref.ref(scaled)
    del scaled
    gc.collect()
    assert reference() is None


def test_a_list_argument_that_grows_does_not_keep_a_step_from_co_executing():
    @terra.function
    def step(x, history):
        y = x * 2.0
        history.append(len(history))
        return y

    history = []
    for _ in range(10):
        assert step(X, history).numpy().tolist() == [2.0, 4.0]
    assert history == list(range(10))
    assert step.stats().coexecuted >= 6


def test_a_text_argument_that_changes_does_not_keep_a_step_from_co_executing():
    seen = []

    @terra.function
    def step(x, name):
        seen.append(name)
        return x * 2.0

    for turn in range(10):
        step(X, f"batch {turn}")
    assert seen == [f"batch {turn}" for turn in range(10)]
    assert step.stats().coexecuted >= 6


def test_a_try_around_a_loop_does_not_put_the_ops_of_its_body_in_place():
    """`except KeyboardInterrupt` around the training loop: the handler is outside the iteration."""
    from terra_tf.region import loop_regions

    total = tf.Variable(0.0)
    terra.stats().reset()
    try:
        for x in terra.iterate([X] * 10, name="loop in a try"):
            total.assign_add(tf.reduce_sum(x))
    except KeyboardInterrupt:
        pass
    assert float(total) == 30.0
    assert terra.stats().coexecuted >= 6
    (region,) = [r for r in loop_regions() if r.name == "loop in a try"]
    (sequence,) = region.runner.tracegraph.sequences
    assert [node.op for node in sequence.trace.nodes if node.in_place] == []


def test_loops_that_are_not_run_any_more_are_forgotten(monkeypatch):
    """As in a notebook whose cell is run again and again: each time it is other code."""
    from terra_tf import region as region_of_loops
    from terra_tf.runners.retreat import Retreat

    monkeypatch.setattr(Retreat, "stay_eager", lambda self: False)  # never for its speed
    source = """
def train(total):
    for x in terra.iterate([X] * 5):
        total.assign_add(tf.reduce_sum(x))
"""
    total = tf.Variable(0.0)

    def define():
        names = {"terra": terra, "tf": tf, "X": X}
        exec(source, names)
        return names["train"]

    kept = define()
    terra.stats().reset()
    before = list(region_of_loops._loops.values())
    kept(total)
    (its_region,) = (
        region
        for region in region_of_loops._loops.values()
        if not any(region is other for other in before)
    )
    for _ in range(region_of_loops._MOST_LOOPS + 3):
        define()(total)
        kept(total)
    assert len(region_of_loops._loops) == region_of_loops._MOST_LOOPS
    assert any(its_region is region for region in region_of_loops._loops.values())
    rounds = region_of_loops._MOST_LOOPS + 3
    assert float(total) == 15.0 * (2 * rounds + 1)
    # Each new loop learns anew, the old one goes on; what is forgotten still counts.
    assert terra.stats().coexecuted == 3 * rounds + 5 * rounds + 3


# ---------------------------------------------------------------- options and snapshots


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"numerics": "exact"}, ValueError, "numerics must be"),
        ({"on_new_trace": "raise"}, ValueError, "on_new_trace must be"),
        ({"max_graphs": 0}, ValueError, "max_graphs must be"),
    ],
)
def test_a_wrong_option_is_refused(options, error, text):
    with pytest.raises(error, match=text):
        terra.function(lambda x: x, **options)


def test_what_is_not_callable_is_refused():
    with pytest.raises(TypeError, match="takes a callable, not int"):
        terra.function(3)


def test_a_new_trace_can_raise_with_the_state_of_eager():
    total, branch = tf.Variable(0.0), [False]

    @terra.function(on_new_trace="error")
    def step(x):
        total.assign_add(x)
        y = x * 2.0
        return tf.sin(y) if branch[0] else tf.cos(y)

    for _ in range(6):
        step(tf.constant(1.0))
    assert step.stats().coexecuted > 0
    branch[0] = True
    with pytest.raises(terra.NewTraceError, match=r"Expected: Cos at .*test_api\.py"):
        step(tf.constant(1.0))
    assert float(total) == 7.0
    branch[0] = False
    assert float(step(tf.constant(0.0))) == 1.0


def test_stats_are_a_snapshot_and_can_be_zeroed():
    step = terra.function(lambda x: x + 1.0, name="one")
    for _ in range(6):
        step(tf.constant(1.0))
    stats = step.stats()
    assert stats.traced == 2
    assert stats.coexecuted == 4
    assert stats.graphs == 1
    step(tf.constant(1.0))
    assert stats.coexecuted == 4  # a snapshot
    stats.reset()
    assert step.stats().coexecuted == 0
    assert "'one'" in terra.explain(step)
    assert [graph.name for graph in step.graphs()]


def test_no_more_than_max_graphs_are_kept():
    step = terra.function(lambda x: x * 2.0, max_graphs=2)
    for size in (1, 2, 3, 4):
        for _ in range(4):
            assert step(tf.ones([size])).shape == (size,)
    assert len(step.graphs()) <= 2


# ---------------------------------------------------------------- whole processes


def run_script(text, **environment):
    """Runs a script in a process of its own; returns (exit code, stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout, done.stderr


TRAINING = """
    weights = tf.Variable(tf.ones([4, 4]))

    @terra.function
    def step(x):
        weights.assign_sub(0.1 * tf.matmul(x, weights))
        return tf.reduce_sum(weights)

    values = [float(step(tf.ones([4, 4]) * (turn / 10))) for turn in range(8)]
    print(values, step.stats().coexecuted)
"""


def test_one_inter_op_thread_is_enough():
    head = """
    import tensorflow as tf
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    import terra_tf as terra
    """
    code, text, errors = run_script(head + TRAINING)
    assert code == 0, errors
    assert int(text.split()[-1]) > 0
    _, eager, _ = run_script(head + TRAINING, TERRA_DISABLE="1")
    assert eager.rsplit(maxsplit=1)[0] == text.rsplit(maxsplit=1)[0]
    assert eager.split()[-1] == "0"


def test_without_the_native_core_everything_is_eager_with_one_warning():
    head = """
    import sys
    sys.modules["terra_tf.native._core"] = None  # makes its import fail
    import tensorflow as tf
    import terra_tf as terra
    """
    code, text, errors = run_script(head + TRAINING)
    assert code == 0, errors
    assert text.split()[-1] == "0"
    assert errors.count("RuntimeWarning") == 1
    assert "pip install --no-build-isolation" in errors


def test_importing_the_package_does_not_import_tensorflow():
    code, text, _ = run_script("import sys, terra_tf; print('tensorflow' in sys.modules)")
    assert (code, text.strip()) == (0, "False")
