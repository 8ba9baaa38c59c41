"""What the tests of errors share: run a program eagerly and co-executed, and compare."""

import contextlib
import traceback

import pytest
import tensorflow as tf
from differential.observation import differences, resolve, snapshot

import terra_tf as terra
from terra_tf import native
from terra_tf.runners.retreat import Retreat

WARM_UP = 6  # calls after which a step co-executes
SMALL = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """The step may not decide by the clock that it stays eager; no region may stay open."""
    monkeypatch.setattr(Retreat, "stay_eager", lambda self: False)
    yield
    open_region = native.core.inside()
    native.core.leave()
    with contextlib.suppress(tf.errors.OpError):
        terra.sync()  # an error that nobody asked for is not the next test's
    assert not open_region


class Eager:
    """Stands for the package in a program that runs as plain TensorFlow does."""

    function = staticmethod(lambda fn: fn)
    iterate = staticmethod(iter)
    sync = staticmethod(lambda: None)


def compare(program, *args):
    """Runs a program, a function of the package, eagerly and co-executed; says what differs."""
    tf.random.set_seed(7)
    expected = resolve(snapshot(program(Eager, *args)))
    tf.random.set_seed(7)
    actual = resolve(snapshot(program(terra, *args)))
    return differences(expected, actual)


def co_executes(step, call):
    """Whether the step runs through as co-executed, after at most one call that does not."""
    call()
    before = step.stats().coexecuted if isinstance(step, terra.Step) else None
    call()
    terra.sync()
    return before is None or step.stats().coexecuted == before + 1


def users_frames(error, file):
    """The lines of a test's file in a traceback, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [(frame.name, frame.line) for frame in frames if frame.filename == file]
