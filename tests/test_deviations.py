"""Every known way in which a co-executed program differs from plain eager, with its reason.

Silent ones first, then those that show as an error or as lost speed. A test here states what
happens today; a deviation that goes away takes its test with it.
"""

import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf

import terra_tf as terra

# --- silent --------------------------------------------------------------------------------------


def test_python_runs_ahead_of_an_op_that_fails():
    """An error in the graph arrives later than in eager, so Python of the step has run on by then.

    Reason: waiting at each op that may fail would be eager mode. Nothing of TensorFlow's becomes
    visible behind the failed op, and an op in a `try` of the step fails right there; what Python
    itself did in between (here: an append) cannot be undone.
    """
    table = tf.Variable(tf.ones([3, 2]))
    total = tf.Variable(0.0)
    seen = []

    @terra.function
    def step(index):
        row = tf.gather(table, index)
        seen.append(int(index.shape[0]))
        total.assign_add(1.0)
        return row

    good, bad = tf.constant([0, 1]), tf.constant([0, 7])
    for _ in range(6):
        step(good)
    assert step.stats().coexecuted > 0
    with pytest.raises(tf.errors.InvalidArgumentError, match="test_deviations.py"):
        step(bad)
        terra.sync()
    assert float(total) == 6.0  # as in eager
    assert len(seen) == 7  # in eager: 6
    assert step(good).shape == (2, 2)


def test_a_tensor_outlives_its_last_name_until_the_iteration_ends():
    """Weak references to tensors die, and finalizers run, at the end of the iteration.

    Reason: the PythonRunner holds what it has handed out, to know it again as an argument.
    """
    alive = []

    @terra.function
    def step(x):
        y = x * 2.0
        reference = weakref.ref(y)
        z = y + 1.0
        del y
        alive.append(reference() is not None)
        return z

    for turn in range(8):
        assert float(step(tf.constant(float(turn)))) == 2.0 * turn + 1.0
    assert step.stats().coexecuted > 0
    assert alive[-1]  # in eager: False


def test_memory_shared_by_dlpack_may_be_seen_later():
    """Who changes a tensor's memory behind TensorFlow's back may change what a step still reads.

    Reason: the graph reads an argument when it comes to it. Arrays passed as such are copied; a
    tensor that shares its memory through DLPack looks like any other.
    """
    room = np.zeros([1024 + 16], np.float32)
    start = -room.ctypes.data % 64 // 4  # TensorFlow takes aligned memory only
    array = room[start : start + 1024]
    shared = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    step = terra.function(lambda x: tf.reduce_max(x + 0.0))
    for turn in range(8):
        array[:] = turn
        assert float(step(shared)) == turn  # read at once: as in eager
    assert step.stats().coexecuted > 0


@pytest.mark.parametrize("options", [{"numerics": "fast"}, {"xla": True}])
def test_last_digits_where_they_are_given_up(options):
    """`numerics="fast"` and `xla=True` compute the same but round it differently.

    Reason: that is what they are for; Grappler and XLA reorder and fuse arithmetic.
    """
    generator = np.random.default_rng(0)
    x = tf.constant(generator.normal(size=(64, 64)), tf.float32)

    def fn(x):
        y = tf.nn.softmax(tf.matmul(x, x) * 0.1) / 3.0
        return tf.reduce_sum(tf.exp(tf.tanh(y) * 1.7 - tf.sin(x)) * (y + 1.0))

    step = terra.function(fn, **options)
    for _ in range(8):
        np.testing.assert_allclose(float(step(x)), float(fn(x)), rtol=1e-5)
    assert step.stats().coexecuted > 0


# --- raised, or slower ---------------------------------------------------------------------------


def test_a_step_whose_variables_another_thread_uses_stays_eager():
    """Results are eager's, at eager's speed.

    Reason: the other thread has to see each write of the step where eager makes it, so none can be
    held back. A co-executed iteration falls back when another thread comes to one of its variables.
    """
    shared = tf.Variable(0.0)

    @terra.function
    def step(factor):
        shared.assign_add(1.0)
        thread = threading.Thread(target=lambda: shared.assign(shared * factor))
        thread.start()
        thread.join()
        return shared.read_value()

    expected = 0.0
    for turn in range(8):
        expected = (expected + 1.0) * 2.0
        assert float(step(tf.constant(2.0))) == expected, turn
    assert step.stats().coexecuted == 0


def test_a_forked_child_stays_eager():
    """A forked child has no GraphRunner thread, so its steps run eagerly (same results)."""
    from terra_tf.configuration import settings
    from terra_tf.runners import python_runner

    assert not settings.disabled
    try:
        python_runner._in_forked_child()
        assert settings.disabled
    finally:
        settings.disabled = False
