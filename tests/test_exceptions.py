"""Exceptions of the user's Python in a step, and loops and generators that are left early.

Each program runs eagerly and co-executed; what it raises, holds and has written has to agree.
"""

import contextlib
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from stepping import SMALL, WARM_UP, clean, co_executes, compare, users_frames  # noqa: F401

import terra_tf as terra
from terra_tf import native

pytestmark = pytest.mark.timeout(60)

# ---------------------------------------------------------------- exceptions of the user's Python


class Unusual(Exception):
    """An exception that carries more than a text."""

    def __init__(self, tensor, note):
        super().__init__(tensor, note)
        self.note = note


def raise_plainly(x, variable):
    raise ValueError("in a helper")


def raise_from_numpy(x, variable):
    np.linalg.inv(np.zeros([2, 2]))


def raise_with_tensors(x, variable):
    raise Unusual(x * 2.0, {"sum": tf.reduce_sum(x) + variable})


def raise_chained(x, variable):
    try:
        {}["missing"]
    except KeyError as error:
        variable.assign_add(3.0)
        raise RuntimeError("chained") from error


def raise_while_handling(x, variable):
    try:
        raise_plainly(x, variable)
    except ValueError:
        variable.assign_add(5.0)
        raise_from_numpy(x, variable)


def raise_after_op_error(x, variable):
    try:
        tf.gather(x, 99)
    except tf.errors.InvalidArgumentError:
        variable.assign_add(7.0)
        raise LookupError("no such row") from None


def raise_in_generator(x, variable):
    def numbers():
        yield x
        variable.assign_add(1.0)
        raise ValueError("in a generator")

    for number in numbers():
        variable.assign_add(tf.reduce_sum(number))


def raise_in_numpy_function(x, variable):
    def fails(value):
        raise ValueError(f"in a callback of {value.sum()}")

    variable.assign_add(tf.numpy_function(fails, [x], tf.float32))


def raise_in_py_function(x, variable):
    def fails(value):
        raise ValueError("in a callback")

    variable.assign_add(tf.py_function(fails, [x], tf.float32))


def raise_in_custom_gradient(x, variable):
    @tf.custom_gradient
    def strange(value):
        def gradient(upstream):
            variable.assign_add(11.0)
            raise ArithmeticError("in a gradient")

        return value * 2.0, gradient

    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(strange(x))
    variable.assign_add(tape.gradient(loss, x)[0])


def raise_in_layer(x, variable):
    class Fails(keras.layers.Layer):
        def call(self, inputs):
            variable.assign_add(13.0)
            raise TypeError("in a layer")

    Fails(name="fails")(x[None])


def raise_in_context_manager(x, variable):
    with contextlib.ExitStack() as stack, tf.GradientTape():
        stack.callback(lambda: variable.assign_add(17.0))
        raise ValueError("in a with")


def raise_stop_iteration(x, variable):
    next(iter([]))


def raise_system_exit(x, variable):
    raise SystemExit(3)


def raise_keyboard_interrupt(x, variable):
    raise KeyboardInterrupt


def raise_type_error_of_tensorflow(x, variable):
    variable.assign_add(x + tf.constant(1))


PLACES = [value for name, value in list(globals().items()) if name.startswith("raise_")]


def chain(error):
    """An exception and those that it was raised from: type, contents, the user's lines."""
    found = []
    while error is not None:
        contents = error.args
        if isinstance(error, tf.errors.OpError):
            contents = "callback" in str(error)  # eager's text has addresses and paths
        hidden = error.__suppress_context__
        found.append((type(error).__name__, contents, users_frames(error, __file__), hidden))
        error = error.__cause__ or (None if hidden else error.__context__)
    return found


def program_of_user_exception(package, place, lead):
    """One statement of the step raises in two iterations, between writes and a draw."""
    before, after, noise = tf.Variable(0.0), tf.Variable(0.0), tf.Variable(tf.zeros([2]))
    python = []

    @package.function
    def step(turn, x):
        python.append(turn)
        before.assign_add(tf.reduce_sum(x))
        y = tf.nn.relu(x) + before
        noise.assign(tf.random.normal([2]))
        if turn in (WARM_UP, WARM_UP + 1, 2 * WARM_UP):
            try:
                place(y, before)
            finally:
                python.append("finally")
        after.assign_add(tf.reduce_sum(y))
        return after + noise

    errors, values = [], []
    for turn in range(3 * WARM_UP):
        try:
            values.append(step(turn, tf.constant([1.0, float(turn)])))
        except BaseException as error:
            errors.append(chain(error))
            values.append([variable.numpy() for variable in (before, after, noise)])
    assert co_executes(step, lambda: step(0, tf.constant([1.0, 2.0])))
    return errors, values, python, before, after, noise, tf.random.normal([2])


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_of_the_user(monkeypatch, place, lead):
    monkeypatch.setattr(terra.settings, "lead", lead)
    assert compare(program_of_user_exception, place, lead) == []


def test_tensors_of_an_exception_outlive_the_step():
    variable = tf.Variable(1.0)

    def failing(x):
        raise Unusual(x * variable, {"sum": tf.reduce_sum(x)})

    @terra.function
    def step(turn, x):
        variable.assign_add(1.0)
        y = tf.exp(x)
        if turn == WARM_UP:
            failing(y)
        variable.assign_add(tf.reduce_sum(y))

    x = tf.zeros([3])
    for turn in range(WARM_UP):
        step(turn, x)
    with pytest.raises(Unusual) as raised:
        step(WARM_UP, x)
    error, copied = raised.value, pickle.loads(pickle.dumps(raised.value.args[0]))
    expected = np.float32(1 + 4 * WARM_UP + 1)
    for _ in range(3):
        step(0, x)
    assert error.args[0].numpy().tolist() == [expected] * 3
    assert copied.numpy().tolist() == [expected] * 3
    assert float(error.note["sum"]) == 3.0


def test_an_op_error_keeps_what_the_handler_raises_from_it():
    @terra.function
    def step(turn, index):
        total = tf.reduce_sum(SMALL)
        try:
            return tf.gather(SMALL, index) * total
        except tf.errors.InvalidArgumentError as error:
            raise LookupError(f"no row in step {turn}") from error

    for turn in range(WARM_UP):
        step(turn, tf.constant(turn % 3))
    with pytest.raises(LookupError, match=f"no row in step {WARM_UP}") as raised:
        step(WARM_UP, tf.constant(9))
    assert isinstance(raised.value.__cause__, tf.errors.InvalidArgumentError)
    lines = [line for _, line in users_frames(raised.value.__cause__, __file__)]
    assert lines == ["return tf.gather(SMALL, index) * total"]
    assert co_executes(step, lambda: step(0, tf.constant(1)))


# ---------------------------------------------------------------- loops that are left early


def program_of_loop(package, leave):
    """A loop of `iterate` is left in its middle, several times over."""
    total, half, seen = tf.Variable(0.0), tf.Variable(0.0), []

    def train(stop):
        for turn, x in enumerate(package.iterate([tf.constant(float(i)) for i in range(12)])):
            total.assign_add(x)
            if turn == stop:
                leave(total)
            if turn == stop and leave is no_leave:
                break
            half.assign(total / 2.0)
            seen.append(turn)

    observed = []
    for stop in (12, 9, 3, 12):
        try:
            train(stop)
        except Exception as error:
            observed.append(chain(error))
        observed.append([total.numpy(), half.numpy(), len(seen)])
        assert not native.core.inside()
    return observed, seen


def no_leave(total):
    total.assign_add(100.0)


def leave_by_exception(total):
    raise ValueError("enough")


def leave_by_op_error(total):
    tf.gather(SMALL, 99)


@pytest.mark.parametrize("leave", [no_leave, leave_by_exception, leave_by_op_error])
def test_a_loop_is_left_early(leave):
    assert compare(program_of_loop, leave) == []


def program_of_generator(package):
    """A training loop inside a generator, which gives way inside the body and is closed there."""
    total, half = tf.Variable(0.0), tf.Variable(0.0)

    def training():
        try:
            for x in package.iterate([tf.constant(float(i)) for i in range(20)]):
                total.assign_add(x)
                yield total * 2.0
                half.assign(total / 2.0)
        finally:
            total.assign_add(0.25)

    observed = []
    for length in (20, 12, 1, 20):
        generator = training()
        for number, value in enumerate(generator, start=1):
            observed.append(value)
            if number == length:
                break
        generator.close()
        observed.append([total.numpy(), half.numpy()])
        assert not native.core.inside()
    return observed, total, half


def test_a_generator_with_a_loop_in_it_is_closed():
    assert compare(program_of_generator) == []


def program_of_generator_in_step(package):
    """A step drives a generator that runs ops, and closes it early."""
    total, events = tf.Variable(0.0), []

    def values(x):
        try:
            while True:
                total.assign_add(1.0)
                x = x * 2.0
                yield x
        finally:
            events.append("closed")
            total.assign_add(100.0)

    @package.function
    def step(x, count):
        generator = values(x)
        taken = [next(generator) for _ in range(count)]
        generator.close()
        total.assign_add(0.5)
        return taken[-1]

    returned = [step(tf.constant(1.0), 2 + (turn == 8)) for turn in range(14)]
    assert co_executes(step, lambda: step(tf.constant(1.0), 2))
    return returned, events, total


def test_a_generator_in_a_step_is_closed():
    assert compare(program_of_generator_in_step) == []
