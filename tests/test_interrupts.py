"""Ctrl-C in a step: it stops within a second, and nothing is lost or done twice.

What the step had called before the interrupt happens as in eager, but nobody waits for it: the
exception comes out at once, and whoever then looks at a variable or a tensor of the step gets what
eager would show there.
"""

import contextlib
import os
import signal
import time

import pytest
import tensorflow as tf
from stepping import WARM_UP, clean, co_executes  # noqa: F401

import terra_tf as terra
from terra_tf import native

pytestmark = pytest.mark.timeout(60)


@contextlib.contextmanager
def interrupt_after(seconds):
    """Ctrl-C in the block, as the timer's signal; yields a list with its time and the catch's."""
    times = []

    def handler(*_):
        times.append(time.monotonic())
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield times
        times.append(time.monotonic())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


class Slow:
    """A step whose graph takes long for large sizes; the size is a value, not a shape."""

    products = 60

    def __init__(self):
        self.before, self.after = tf.Variable(0.0), tf.Variable(0.0)
        self.reads = self.surprises = False
        self.kept = None
        self.finished = 0
        self.step = terra.function(self._step)
        for turn in range(WARM_UP):
            self.reads = turn % 2 == 0
            self.step(tf.constant([turn + 2, turn + 2]))
        self.reads = True
        for turn in range(WARM_UP):
            self.step(tf.constant([turn + 2, turn + 2]))
        terra.sync()

    def _step(self, size):
        self.before.assign_add(1.0)
        x = tf.fill(size, 0.5)
        for _ in range(self.products):
            x = tf.raw_ops.Mul(x=tf.raw_ops.MatMul(a=x, b=x), y=0.0)  # looks at no shape
        self.kept = total = tf.raw_ops.Sum(input=x, axis=[0, 1])
        self.after.assign_add(1.0 + total)
        if self.surprises:  # an op that no trace has
            tf.exp(total)
        if self.reads:
            self.look(total)
        self.finished += 1

    @staticmethod
    def look(total):
        float(total)

    def state(self):
        return float(self.before), float(self.after), self.finished


SIZE = [1500, 1500]  # takes seconds
SHORTER = [1200, 1200]


def test_ctrl_c_while_the_step_waits_for_a_value():
    slow = Slow()
    n = slow.finished
    with interrupt_after(0.5) as times:
        slow.step(tf.constant(SIZE))
    assert times[1] - times[0] < 1
    assert slow.state() == (n + 1, n + 1, n), "the step had called both assignments"
    assert co_executes(slow.step, lambda: slow.step(tf.constant([2, 2])))
    assert slow.state() == (n + 3, n + 3, n + 2)


def test_ctrl_c_again_while_what_was_interrupted_is_made_up_for():
    slow = Slow()
    n = slow.finished
    with interrupt_after(0.2):
        slow.step(tf.constant(SIZE))
    for look in (slow.state, terra.sync, lambda: slow.step(tf.constant([2, 2])), slow.kept.numpy):
        with interrupt_after(0.1) as times:
            look()
        assert times[1] - times[0] < 1
    assert slow.finished == n
    assert slow.state() == (n + 1, n + 1, n)
    assert float(slow.kept) == 0.0
    assert co_executes(slow.step, lambda: slow.step(tf.constant([2, 2])))


def test_ctrl_c_while_a_fallback_replays():
    slow = Slow()
    n = slow.finished
    slow.surprises = True
    with interrupt_after(0.2) as times:
        slow.step(tf.constant(SHORTER))
    assert times[1] - times[0] < 1
    slow.surprises = False
    assert slow.state() == (n + 1, n + 1, n)
    assert co_executes(slow.step, lambda: slow.step(tf.constant([2, 2])))


def test_ctrl_c_that_the_step_handles():
    slow = Slow()
    n = slow.finished
    handled = []

    def look(total):
        try:
            float(total)
        except KeyboardInterrupt:
            handled.append(time.monotonic())
            raise

    slow.look = look
    with interrupt_after(0.2) as times:
        slow.step(tf.constant(SHORTER))
    assert handled[0] - times[0] < 1
    del slow.look
    assert slow.state() == (n + 1, n + 1, n)
    assert co_executes(slow.step, lambda: slow.step(tf.constant([2, 2])))


def test_a_fork_after_ctrl_c_waits_for_what_was_interrupted():
    slow = Slow()
    n = slow.finished
    with interrupt_after(0.2):
        slow.step(tf.constant(SHORTER))
    child = os.fork()
    if child == 0:
        os._exit(0 if float(slow.before) == n + 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert slow.state() == (n + 1, n + 1, n)


def test_ctrl_c_while_a_sync_waits():
    slow = Slow()
    slow.reads = False
    for _ in range(4):
        slow.step(tf.constant([2, 2]))
    n = slow.finished
    with interrupt_after(0.5) as times:
        slow.step(tf.constant(SIZE))
        terra.sync()
    assert times[1] - times[0] < 1
    terra.sync()  # what was started finishes, once
    assert slow.state() == (n + 1, n + 1, n + 1)
    assert co_executes(slow.step, lambda: slow.step(tf.constant([2, 2])))


def test_ctrl_c_while_the_next_call_waits(monkeypatch):
    monkeypatch.setattr(terra.settings, "lead", 0)
    slow = Slow()
    slow.reads = False
    for _ in range(4):
        slow.step(tf.constant([2, 2]))
    n = slow.finished
    with interrupt_after(0.5) as times:
        slow.step(tf.constant(SIZE))
        slow.step(tf.constant([2, 2]))
    assert times[1] - times[0] < 1
    assert slow.finished in (n, n + 1)
    finished = slow.finished
    assert slow.state() == (finished, finished, finished)
    assert co_executes(slow.step, lambda: slow.step(tf.constant([2, 2])))


@pytest.mark.parametrize("how", ["computes", "sleeps"])
def test_ctrl_c_while_python_loops(how):
    before, after, turns = tf.Variable(0.0), tf.Variable(0.0), [0]

    @terra.function
    def step(seconds):
        before.assign_add(1.0)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            turns[0] += 1
            if how == "sleeps":
                time.sleep(seconds)
        after.assign_add(1.0)

    for _ in range(WARM_UP):
        step(0.0)
    with interrupt_after(0.3) as times:
        step(20.0)
    assert times[1] - times[0] < 1
    assert (float(before), float(after)) == (WARM_UP + 1, WARM_UP)
    assert co_executes(step, lambda: step(0.0))


def test_ctrl_c_between_any_two_ops_leaves_a_state_of_eager():
    """Wherever the signal comes, the variables are those of an eager prefix of the step."""
    variables = [tf.Variable(0.0) for _ in range(30)]
    one = tf.constant(1.0)  # made once: TensorFlow crashes, without Terra too, if interrupted in it

    @terra.function
    def step(x):
        for variable in variables:
            variable.assign_add(x)

    for _ in range(WARM_UP):
        step(one)
    calls = WARM_UP
    for attempt in range(30):
        with interrupt_after(0.002 + 0.0007 * attempt):
            while True:
                step(one)
        values = [int(variable.numpy()) for variable in variables]
        assert values == sorted(values, reverse=True) and values[0] - values[-1] <= 1, values
        assert values[0] >= calls
        for variable in variables:
            variable.assign(float(values[0]))
        calls = values[0]
        assert not native.core.inside()
    assert co_executes(step, lambda: step(one))
