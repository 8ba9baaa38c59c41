"""`TERRA_SYNC=1` raises at the line of the op that fails; else the message names the line."""

import traceback

import pytest
import tensorflow as tf

import terra_tf as terra

TABLE = tf.constant([1.0, 2.0, 3.0])


def warm_step():
    """A step that has co-executed, the list of what its Python did, and its variable."""
    ran, total = [], tf.Variable(0.0)

    @terra.function
    def step(index, size):
        ran.append("start")
        row = tf.gather(TABLE, index)
        ran.append("gathered")
        grid = tf.reshape(tf.range(6), size)
        total.assign_add(tf.reduce_sum(row))
        ran.append("end")
        return row, grid

    for _ in range(8):
        step(tf.constant([0, 1]), tf.constant([2, 3]))
    terra.sync()
    assert step.stats().coexecuted > 3
    ran.clear()
    return step, ran, total


BAD_INDEX = ([0, 9], [2, 3])
BAD_SIZE = ([0, 1], [4, 2])


@pytest.mark.parametrize(("arguments", "ran_before"), [(BAD_INDEX, 1), (BAD_SIZE, 2)])
def test_with_it_the_error_is_raised_at_the_line(arguments, ran_before, monkeypatch):
    monkeypatch.setattr(terra.settings, "sync", True)
    step, ran, total = warm_step()
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        step(*map(tf.constant, arguments))
    assert len(ran) == ran_before  # as in eager: nothing after the op has run
    lines = [frame.line for frame in traceback.extract_tb(caught.tb) if frame.filename == __file__]
    assert ("tf.gather" if ran_before == 1 else "tf.reshape") in lines[-1]
    assert float(total) == 8 * 3.0
    step(*map(tf.constant, ([0, 1], [2, 3])))
    assert float(total) == 9 * 3.0


def test_without_it_the_message_names_the_line_and_what_to_do(monkeypatch):
    monkeypatch.setattr(terra.settings, "sync", False)
    step, _, total = warm_step()
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        step(*map(tf.constant, BAD_INDEX))
        terra.sync()
    message = str(caught.value)
    assert "The op GatherV2 was called at" in message
    assert f'File "{__file__}", line' in message
    assert "in step" in message
    assert "TERRA_SYNC=1" in message
    assert float(total) == 8 * 3.0
