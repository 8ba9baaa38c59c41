"""What a user calls: `terra.function`, `terra.iterate`, settings."""

import gc

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
    from terra_tf import api

    total = tf.Variable(0.0)
    terra.stats().reset()
    try:
        for x in terra.iterate([X] * 10, name="loop in a try"):
            total.assign_add(tf.reduce_sum(x))
    except KeyboardInterrupt:
        pass
    assert float(total) == 30.0
    assert terra.stats().coexecuted >= 6
    (region,) = [r for r in api._loops.values() if r.name == "loop in a try"]
    (sequence,) = region.runner.tracegraph.sequences
    assert [node.op for node in sequence.trace.nodes if node.in_place] == []
