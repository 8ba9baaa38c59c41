"""Errors: of ops in the graph and in place, of the user's Python, of Ctrl-C, handled and not.

Each program runs eagerly and co-executed. Types, messages, tracebacks, variables, random streams
and printed text have to agree, nothing behind a failed op may have become visible, and the step has
to co-execute again. An op that fails in a graph may be reported later than in eager: at the latest
when the next call starts, before its user code, and then its message names the user's line.
"""

import contextlib
import pathlib
import pickle
import signal
import time
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf
from differential.observation import differences, resolve, snapshot

import terra_tf as terra
from terra_tf import native
from terra_tf.runners.retreat import Retreat

pytestmark = pytest.mark.timeout(60)

WARM_UP = 6  # calls after which a step co-executes


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
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


def users_frames(error):
    """The lines of this file in a traceback, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [(frame.name, frame.line) for frame in frames if frame.filename == __file__]


# ---------------------------------------------------------------- ops that fail by value

SMALL = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


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
        if users_frames(error)[-1][0] != failing.op.__name__:
            assert f'{__file__}", line {failing.line}, in {failing.op.__name__}' in str(error)
    assert found == []


@pytest.mark.parametrize("how", ["sync", "read", "next call"])
@pytest.mark.parametrize("visible", [False, True], ids=["variables", "visible"])
@pytest.mark.parametrize("name", Failing.all)
def test_an_op_fails_by_value(tmp_path, name, visible, how):
    check_failing_op(tmp_path, Failing.all[name], visible, how)


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
        found.append((type(error).__name__, contents, users_frames(error), hidden))
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
    lines = [line for _, line in users_frames(raised.value.__cause__)]
    assert lines == ["return tf.gather(SMALL, index) * total"]
    assert co_executes(step, lambda: step(0, tf.constant(1)))


# ---------------------------------------------------------------- Ctrl-C


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
        self.reads = False
        self.finished = 0
        self.step = terra.function(self._step)
        for turn in range(WARM_UP):
            self.reads = turn % 2 == 0
            self.step(tf.constant([turn + 2, turn + 2]))
        self.reads = True
        for turn in range(WARM_UP):
            self.step(tf.constant([turn + 2, turn + 2]))
        terra.sync()
        self.calls = self.finished

    def _step(self, size):
        self.before.assign_add(1.0)
        x = tf.fill(size, 0.5)
        for _ in range(self.products):
            x = tf.raw_ops.Mul(x=tf.raw_ops.MatMul(a=x, b=x), y=0.0)  # looks at no shape
        total = tf.raw_ops.Sum(input=x, axis=[0, 1])
        self.after.assign_add(1.0 + total)
        if self.reads:
            float(total)
        self.finished += 1

    def state(self):
        return float(self.before), float(self.after), self.finished


SIZE = [1500, 1500]


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

    @terra.function
    def step(x):
        for variable in variables:
            variable.assign_add(x)

    for _ in range(WARM_UP):
        step(tf.constant(1.0))
    calls = WARM_UP
    for attempt in range(30):
        with interrupt_after(0.002 + 0.0007 * attempt):
            while True:
                step(tf.constant(1.0))
        values = [int(variable.numpy()) for variable in variables]
        assert values == sorted(values, reverse=True) and values[0] - values[-1] <= 1, values
        assert values[0] >= calls
        for variable in variables:
            variable.assign(float(values[0]))
        calls = values[0]
        assert not native.core.inside()
    assert co_executes(step, lambda: step(tf.constant(1.0)))


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
