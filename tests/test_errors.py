"""Ops that fail by value: in the graph and in place, handled in the step and not.

Each program runs eagerly and co-executed. Types, messages, tracebacks, variables, random streams
and printed text have to agree, nothing behind a failed op may have become visible, and the step has
to co-execute again. An op that fails in a graph may be reported later than in eager: at the latest
when the next call starts, before its user code, and then its message names the user's line.
"""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from stepping import SMALL, WARM_UP, clean, co_executes, compare, users_frames  # noqa: F401

import terra_tf as terra

pytestmark = pytest.mark.timeout(60)


class Failing:
    """An op with values that it takes, which vary, and one at which it fails."""

    all = {}

    def __init__(self, *good, bad):
        self.good, self.bad = good, bad

    def __call__(self, op):
        """Registers the op; it stands in the function's first line."""
        self.op = op
        self.line = op.__code__.co_firstlineno + 2  # below the decorator and the `def`
        Failing.all[op.__name__] = self
        return self


@Failing([0, 1], [1, 2], bad=[0, 9])
def gather(state, value):
    return tf.gather(SMALL, value)


@Failing([[0, 1]], [[1, 1]], bad=[[5, 5]])
def gather_nd(state, value):
    return tf.gather_nd(SMALL, value)


@Failing([0, 1], [1, 0], bad=[0, 7])
def gather_of_variable(state, value):
    return tf.gather(state.table, value)


@Failing([2, 3], [3, 2], bad=[4, 2])
def reshape(state, value):
    return tf.reshape(SMALL, value)


@Failing(1, 2, bad=0)
def division_of_integers(state, value):
    return tf.constant([6, 8]) // value


@Failing(1, 2, bad=0)
def remainder_of_integers(state, value):
    return tf.constant([6, 8]) % value


@Failing(1, 2, bad=-1)
def power_of_integers(state, value):
    return tf.pow(tf.constant([2, 3]), value)


@Failing([0, 1], [1, 0], bad=[0, 0])
def transpose(state, value):
    return tf.transpose(SMALL, value)


@Failing(0, 1, bad=3)
def sum_over_axis(state, value):
    return tf.reduce_sum(SMALL, value)


@Failing(0, 1, bad=3)
def cumulative_sum(state, value):
    return tf.cumsum(SMALL, value)


@Failing(0, 1, bad=3)
def argmax_over_axis(state, value):
    return tf.argmax(SMALL, value)


@Failing(0, 1, bad=3)
def concatenation(state, value):
    return tf.concat([SMALL, SMALL], value)


@Failing([1], [0], bad=[5])
def reverse(state, value):
    return tf.reverse(SMALL, value)


@Failing([1, 0], [0, 1], bad=[3, 1])
def slice_of_rows(state, value):
    return tf.slice(SMALL, value, [1, 1])


@Failing([1, 2], [2, 1], bad=[2, 2])
def split_by_sizes(state, value):
    return tf.split(SMALL, value, num=2)[0]


@Failing([2, 3], [3, 2], bad=[-1, 2])
def fill(state, value):
    return tf.fill(value, 1.0)


@Failing([1, 2], [2, 1], bad=[-1, 2])
def tile(state, value):
    return tf.tile(SMALL, value)


@Failing([[1, 0], [0, 1]], [[0, 1], [1, 0]], bad=[[-1, 0], [0, 0]])
def pad(state, value):
    return tf.pad(SMALL, value)


@Failing([3, 2], [4, 3, 2], bad=[4, 2])
def broadcast(state, value):
    return tf.broadcast_to(SMALL, value)


@Failing(2, 3, bad=-2)
def one_hot(state, value):
    return tf.one_hot([0, 1], value)


@Failing(1, 2, bad=3)
def top_k(state, value):
    return tf.math.top_k(SMALL, value).values


@Failing(1, 2, bad=0)
def range_by_step(state, value):
    return tf.range(0, 6, value)


@Failing("1", "2", bad="one")
def number_from_string(state, value):
    return tf.strings.to_number(value)


@Failing(1.0, 2.0, bad=0.0)
def inverse(state, value):
    return tf.linalg.inv(value * tf.eye(2))


@Failing(1.0, 2.0, bad=float("nan"))
def numerics(state, value):
    return tf.debugging.check_numerics(value * SMALL, "by value")


@Failing(1.0, 2.0, bad=-1.0)
def assertion(state, value):
    return tf.debugging.assert_positive(value)


@Failing([0, 1], [1, 0], bad=[0, 7])
def sparse_optimizer_kernel(state, value):
    return tf.raw_ops.ResourceSparseApplyMomentum(
        var=state.table.handle,
        accum=state.slot.handle,
        lr=0.1,
        grad=SMALL[:2],
        indices=value,
        momentum=0.9,
    )


@Failing([0, 1], [1, 0], bad=[0, 7])
def scatter(state, value):
    return state.table.scatter_nd_update(value[:, None], SMALL[:2])


@Failing([0, 1], [1, 0], bad=[0, 7])
def optimizer_of_keras(state, value):
    return state.optimizer.apply([tf.IndexedSlices(SMALL[:2], value, [3, 2])], [state.weights])


@Failing(1, 2, bad=3)
def python_function(state, value):
    return tf.py_function(state.fails_at_three, [value], tf.int32)


@Failing(1, 2, bad=3)
def random_in_place(state, value):
    return tf.random.uniform([2], value, 3, tf.int32)


@Failing(0, 1, bad=2)
def file_in_place(state, value):
    return tf.io.read_file(tf.gather(state.files, value))


@Failing(0, 1, bad=2)
def function_in_place(state, value):
    return state.function(value)


class State:
    """What a step writes, and what failing ops need."""

    def __init__(self, folder):
        self.table, self.slot = tf.Variable(tf.ones([3, 2])), tf.Variable(tf.ones([3, 2]))
        self.before, self.after = tf.Variable(0.0), tf.Variable(0.0)
        self.noise = tf.Variable(tf.zeros([2]))
        self.weights = keras.Variable(np.ones([3, 2], np.float32), name="weights")
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9, name="momentum")
        self.optimizer.build([self.weights])
        for name in ("one", "two"):
            pathlib.Path(folder, name).write_text(name)
        self.files = tf.constant([str(pathlib.Path(folder, n)) for n in ("one", "two", "none")])
        self.function = tf.function(lambda value: tf.gather([1.0, 2.0], value))
        self.log = pathlib.Path(folder, "log")
        self.log.write_text("")

    @staticmethod
    def fails_at_three(value):
        return tf.constant([5, 6, 7])[int(value)]

    def seen(self):
        variables = [self.table, self.slot, self.before, self.after, self.noise, self.weights]
        slots = list(self.optimizer.variables)
        return variables, slots, tf.random.normal([2]), self.log.read_text()


def failing_step(state, op, visible, started):
    """A step in which `op` stands between writes, before a draw and a print if `visible`."""

    def step(value):
        started.append(value)
        state.before.assign_add(1.0)
        state.table.assign_add(tf.fill([3, 2], 0.5))
        result = op(state, value)
        state.after.assign_add(1.0)
        state.table.assign(state.table * 1.5)
        if visible:
            state.noise.assign(tf.random.uniform([2]))
            tf.print("after", state.before, output_stream=f"file://{state.log}")
        return result

    return step


def program_of_failing_op(package, folder, failing, visible, how, errors):
    """Two calls fail among others that do not; `how` says when the program asks for the error."""
    state, started = State(folder), []
    step = package.function(failing_step(state, failing.op, visible, started))
    good = [tf.constant(value) for value in failing.good]
    for _ in range(2):
        for turn in range(WARM_UP):
            step(good[turn % len(good)])
        with pytest.raises(tf.errors.OpError) as raised:
            step(tf.constant(failing.bad))
            if how == "sync":
                package.sync()
            elif how == "read":
                state.after.numpy()
            else:
                calls = len(started)
                try:
                    step(good[0])
                finally:
                    assert len(started) == calls, "user code ran before the error was raised"
        errors.append(raised.value)
        step(good[0])
    assert co_executes(step, lambda: step(good[-1]))
    return state.seen(), [type(error) for error in errors]


def check_failing_op(tmp_path, failing, visible, how):
    errors = []

    def program(package):
        errors.clear()
        return program_of_failing_op(package, tmp_path, failing, visible, how, errors)

    found = compare(program)
    for error in errors:
        # Raised where the op stands, the traceback shows the line; else the message has to.
        if users_frames(error, __file__)[-1][0] != failing.op.__name__:
            assert f'{__file__}", line {failing.line}, in {failing.op.__name__}' in str(error)
    assert found == []


@pytest.mark.parametrize("how", ["sync", "read", "next call"])
@pytest.mark.parametrize("visible", [False, True], ids=["variables", "visible"])
@pytest.mark.parametrize("name", Failing.all)
def test_an_op_fails_by_value(tmp_path, name, visible, how):
    check_failing_op(tmp_path, Failing.all[name], visible, how)


def test_a_tensor_from_behind_an_error_raises_that_error():
    """Python ran ahead and has such tensors; they never show a value."""
    kept, total = [], tf.Variable(0.0)

    @terra.function
    def step(index):
        row = tf.gather(SMALL, index)
        kept[:] = [row * 2.0, row.shape]
        total.assign_add(tf.reduce_sum(row))
        return tf.cast(row, tf.int32)

    for turn in range(WARM_UP):
        step(tf.constant(turn % 3))
    returned = step(tf.constant(9))
    for _ in range(2):
        for tensor in (kept[0], returned):
            with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
                tensor.numpy()
            with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
                tf.add(tensor, tensor)
    assert co_executes(step, lambda: step(tf.constant(1)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
        float(returned[0])


# ---------------------------------------------------------------- handled in the step


def program_of_handled_error(package, folder, failing):
    """The step handles the error of its op, and the caller sees at once that it did."""
    state, caught = State(folder), []

    @package.function
    def step(turn, value):
        state.before.assign_add(1.0)
        try:
            failing.op(state, value)
            state.after.assign_add(0.5)
        except tf.errors.OpError as error:
            caught.append((turn, type(error).__name__))
            state.before.assign_add(10.0)
        else:
            state.after.assign_add(1.0)
        finally:
            state.table.assign(state.table * 1.5)
        return tf.reduce_sum(state.table)

    returned = []
    good = [tf.constant(value) for value in failing.good]
    for turn in range(3 * WARM_UP):
        bad = turn in (WARM_UP, WARM_UP + 1, 2 * WARM_UP)
        value = tf.constant(failing.bad) if bad else good[turn % len(good)]
        returned.append(step(turn, value))
        assert bool(caught and caught[-1][0] == turn) == bad, "not handled in its iteration"
    assert co_executes(step, lambda: step(0, good[0]))
    return returned, caught, state.seen()


@pytest.mark.parametrize("name", Failing.all)
def test_an_error_is_handled_in_the_step(tmp_path, name):
    assert compare(program_of_handled_error, tmp_path, Failing.all[name]) == []
