"""Fallback at every op position: nothing is lost, nothing is done twice.

A training step with two optimizer updates, gradients, a random draw, reads that steer Python and
printed text is first co-executed. Then one iteration is disturbed at its k-th op call, for every k:
by another op, by a write, by a look at a value, by keeping a tensor, by an exception, by an early
return. The same program with the same disturbance, run eagerly, is the truth: values, variables,
optimizer slots, random streams, Python state and printed text have to agree bit for bit, and
co-execution has to come back.
"""

import contextlib
import dataclasses
import functools
import io

import keras
import numpy as np
import pytest
import tensorflow as tf

import terra_tf as terra
from terra_tf import native, tensorflow_internals
from terra_tf.configuration import settings
from terra_tf.report import observers
from terra_tf.runners.retreat import Retreat

pytestmark = pytest.mark.timeout(120)

BEFORE, AFTER = 3, 2  # iterations around the disturbed one
FORCED = BEFORE  # number of the disturbed iteration
RATES = [0.1 / (1 + turn) for turn in range(BEFORE + 1 + AFTER)]


@pytest.fixture(autouse=True)
def _no_retreat(monkeypatch):
    """The step may not decide by the clock that it stays eager; a failed test spoils no other."""
    monkeypatch.setattr(Retreat, "stay_eager", lambda self: False)
    yield
    if native.core is not None and native.core.inside():
        native.core.leave()


# ---------------------------------------------------------------- the program


class Training:
    """A model, two optimizers and the Python state of a training program, from one seed."""

    def __init__(self, order: str):
        tf.random.set_seed(5)
        numbers = np.random.RandomState(3)
        self.order = order
        self.inputs = [_float32(numbers.normal(size=(4, 3))) for _ in RATES]
        self.targets = [_float32(numbers.normal(size=(4, 1))) for _ in RATES]
        self.hidden = keras.Variable(numbers.normal(size=(3, 2)).astype(np.float32))
        self.momentum = keras.optimizers.SGD(0.05, momentum=0.9)
        self.momentum.build([self.hidden])
        self.head = tf.Variable(_float32(numbers.normal(size=(2, 1))))
        self.first = tf.Variable(tf.zeros([2, 1]))
        self.second = tf.Variable(tf.zeros([2, 1]))
        self.stop_at = -1
        self.looks: list[float] = []
        self.above = 0

    def step(self, x, y, rate):
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(tf.matmul(x, self.hidden))
            noise = tf.random.uniform([4, 2])
            loss = tf.reduce_sum(tf.square(tf.matmul(hidden * noise, self.head) - y))
        gradients = tape.gradient(loss, [self.hidden.value, self.head])
        updates = [
            functools.partial(self.momentum.apply, gradients[:1], [self.hidden]),
            functools.partial(self.adam_by_kernel, gradients[1], rate),
        ]
        for number, update in enumerate(updates if self.order == "assign" else updates[::-1]):
            update()
            if number == 0:
                self.look(loss)
        return {"loss": loss, "sums": [tf.reduce_sum(self.hidden.value), tf.reduce_sum(self.head)]}

    def look(self, loss):
        """Reads behind the first update; what is found steers Python."""
        seen = float(tf.reduce_sum(self.hidden.value) + tf.reduce_sum(self.head))
        self.looks.append(seen)
        print(f"seen {seen} at loss {float(loss)}")
        if seen > -100:
            self.above += 1
            self.first.assign(self.first * 0.999)

    def adam_by_kernel(self, gradient, rate):
        tf.raw_ops.ResourceApplyAdam(
            var=self.head.handle,
            m=self.first.handle,
            v=self.second.handle,
            beta1_power=0.9,
            beta2_power=0.999,
            lr=rate,
            beta1=0.9,
            beta2=0.999,
            epsilon=1e-7,
            grad=gradient,
        )

    def statements(self, x, y, rate):
        """A step by hand: gives way after every op or library call, with what it has by then."""
        yield (weights := self.hidden.value.read_value())
        yield (hidden := tf.raw_ops.MatMul(a=x, b=weights))
        yield (noise := tf.random.uniform([4, 2]))
        yield (noisy := tf.raw_ops.Mul(x=hidden, y=noise))
        yield (head := self.head.read_value())
        yield (output := tf.raw_ops.MatMul(a=noisy, b=head))
        yield (error := tf.raw_ops.Sub(x=output, y=y))
        yield (to_head := tf.raw_ops.MatMul(a=noisy, b=error, transpose_a=True))
        yield (to_noisy := tf.raw_ops.MatMul(a=error, b=head, transpose_b=True))
        yield (to_hidden := tf.raw_ops.Mul(x=to_noisy, y=noise))
        self.adam_by_kernel(to_head, rate)
        yield to_head
        self.look(error[0, 0])
        yield error
        yield (to_weights := tf.raw_ops.MatMul(a=x, b=to_hidden, transpose_a=True))
        self.momentum.apply([to_weights], [self.hidden])
        yield to_weights
        yield (moved := tf.raw_ops.Sub(x=self.hidden.value.read_value(), y=weights))
        yield (small := tf.raw_ops.Mul(x=to_head, y=0.5))
        self.adam_by_kernel(small, rate)
        yield small
        yield tf.reduce_sum(moved) + tf.reduce_sum(self.head)

    def until(self, x, y, rate):
        """Returns after the statement number `stop_at`, by default the last."""
        for number, value in enumerate(self.statements(x, y, rate)):
            if number == self.stop_at:
                return value
        return value

    def variables(self):
        slots = {f"slot{i}": slot for i, slot in enumerate(self.momentum.variables)}
        return {
            "hidden": self.hidden,
            "head": self.head,
            "first": self.first,
            "second": self.second,
            **slots,
        }


def _float32(array):
    return tf.constant(array, tf.float32)


# ---------------------------------------------------------------- the disturbance


class Interposer:
    """Stands before TensorFlow's entry points; acts right before the k-th call of an iteration.

    In eager mode TensorFlow reads a variable that is passed straight to an op without a call of its
    own; Terra sends such calls to TensorFlow's slow path, which makes more of them. So that
    position k means the same in both, the eager run is sent there too: it is eager's own way.
    """

    def __init__(self, monkeypatch):
        self.active = False
        self.eager = False
        self.calls = 0
        self.position = -1
        self.act = None
        self.latest = None  # result of the latest call
        # The first step of a process replaces the entry points: it must have happened.
        terra.function(lambda: None)()
        for name in tensorflow_internals.ENTRY_POINTS:
            entry = self._before(name, tensorflow_internals.entry_point(name))
            monkeypatch.setattr(tensorflow_internals.pywrap_tfe, name, entry)

    def _before(self, name, original):
        def entry(*args):
            if self.active:
                position, self.calls = self.calls, self.calls + 1
                straight = name == "TFE_Py_FastPathExecute" and any(map(is_variable, args))
                if position == self.position:
                    self.active = False  # the calls of a replay are not the program's
                    self.act()
                    self.latest = None
                if self.eager and straight:
                    raise tensorflow_internals.FastPathMiss
            result = original(*args)  # from one line, whatever happens: it is part of the place
            if self.active:
                self.latest = result
            return result

        return entry

    @contextlib.contextmanager
    def iteration(self, position, act):
        """Acts at `position` of the calls that are made inside the block."""
        self.calls, self.position, self.act, self.latest = 0, position, act, None
        self.active = True
        try:
            yield
        finally:
            self.active = False
            self.act = self.latest = None


def is_variable(x):
    return isinstance(x, tf.Variable | keras.Variable)


@pytest.fixture
def interposer(monkeypatch):
    return Interposer(monkeypatch)


class StopHere(Exception):
    """The exception of a user's program."""


class Disturbance:
    """What happens at position k of the disturbed iteration, and what it lets a user see."""

    def __init__(self, training, interposer):
        self._training = training
        self._interposer = interposer
        self.seen = []

    def op(self):
        self.seen.append(tf.negative(tf.constant(2.0)))

    def write(self):
        self._training.head.assign_add(tf.fill([2, 1], 0.25))
        self.seen.append(tf.random.normal([2]))

    def read(self):
        self.seen += [x.numpy() for x in self._latest()]

    def keep(self):
        self.seen += self._latest()

    def throw(self):
        raise StopHere

    def _latest(self):
        latest = self._interposer.latest
        tensors = latest if isinstance(latest, list) else [] if latest is None else [latest]
        return [x for x in tensors if x.dtype not in (tf.resource, tf.variant)]


# ---------------------------------------------------------------- one run


@dataclasses.dataclass
class Outcome:
    """All that a run lets its user see, and how the step ran."""

    values: dict[str, bytes]
    python: dict[str, object]
    calls: int  # of the disturbed iteration
    modes: list[str]
    reasons: dict[str, int]


def run(co_execute, interposer, order, kind, position):
    """One whole program, disturbed at one position of one iteration."""
    training = Training(order)
    step = training.until if kind == "return" else training.step
    if co_execute:
        step = terra.function(step)
    disturbance = Disturbance(training, interposer)
    interposer.eager = not co_execute
    modes, output, returned, raised, calls = [], io.StringIO(), [], [], 0

    def observer(_, mode):
        modes.append(mode)

    observers.add(observer)
    try:
        with contextlib.redirect_stdout(output):
            for number, rate in enumerate(RATES):
                at = position if number == FORCED else -1
                if kind == "return":
                    training.stop_at, at = at, -1
                try:
                    with interposer.iteration(at, getattr(disturbance, kind, None)):
                        returned.append(
                            step(training.inputs[number], training.targets[number], rate)
                        )
                except StopHere:
                    raised.append(number)
                if number == FORCED:
                    calls = interposer.calls
    finally:
        observers.remove(observer)
    values = {
        "returned": returned,
        "seen": disturbance.seen,
        "variables": training.variables(),
        "random": tf.random.normal([3]),
    }
    python = {
        "printed": output.getvalue(),
        "looks": training.looks,
        "above": training.above,
        "raised": raised,
    }
    reasons = dict(step.stats().fallback_reasons) if co_execute else {}
    return Outcome(bytes_of(values), python, calls, modes, reasons)


def bytes_of(value, name=""):
    """Every array in nested containers, by its path; with dtype and shape."""
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    else:
        array = np.asarray(value)
        return {name: f"{array.dtype}{array.shape}".encode() + array.tobytes()}
    return {k: v for key, item in pairs for k, v in bytes_of(item, f"{name}.{key}").items()}


def differences(expected, actual):
    """What a user sees to be different between two runs."""
    names = expected.values.keys() | actual.values.keys()
    found = [n for n in sorted(names) if expected.values.get(n) != actual.values.get(n)]
    for name, value in expected.python.items():
        if actual.python[name] != value:
            found.append(f"{name}: {actual.python[name]!r}, and eager: {value!r}")
    return found


def check(expected, actual, reasons):
    """All that is wrong with a disturbed co-executed run."""
    problems = differences(expected, actual)
    if actual.modes[BEFORE - 1 : FORCED + 1] != ["coexecuted"] * 2:
        problems.append(f"was not co-executed: {actual.modes}")
    if actual.modes[-1:] != ["coexecuted"]:
        problems.append(f"co-execution did not return: {actual.modes}")
    if sum(actual.reasons.values()) > 1 or not set(actual.reasons) <= reasons:
        problems.append(f"fell back for {actual.reasons}")
    return problems


def check_every_position(interposer, monkeypatch, ways, kind, reasons):
    """Compares a disturbed run with its eager twin at every position.

    The (order, lead) pairs of `ways` are taken in turn, one a position. All of `reasons`, and no
    other ones, must come up as codes of the fallbacks that the disturbance `kind` causes.
    """
    positions = count_positions(interposer, kind)
    assert positions > (15 if kind == "return" else 35)
    wrong, seen_reasons = {}, set()
    for position in range(positions):
        order, lead = ways[position % len(ways)]
        monkeypatch.setattr(settings, "lead", lead)
        expected = run(False, interposer, order, kind, position)
        try:
            actual = run(True, interposer, order, kind, position)
        except Exception as error:
            wrong[position, order, lead] = [f"raised {error!r}"]
            native.core.leave()  # else what comes next would be part of this iteration
            continue
        problems = check(expected, actual, reasons)
        if problems:
            wrong[position, order, lead] = problems
        seen_reasons |= set(actual.reasons)
    assert not wrong, "\n".join(f"{key}: {'; '.join(found)}" for key, found in wrong.items())
    assert seen_reasons == reasons


def count_positions(interposer, kind):
    """How many positions an iteration has; the same in each order of the updates."""
    if kind == "return":
        training = Training("kernel")
        return sum(1 for _ in training.statements(training.inputs[0], training.targets[0], 0.1))
    assign, kernel = (run(False, interposer, order, "nothing", -1).calls for order in ORDERS)
    assert assign == kernel
    return assign


# ---------------------------------------------------------------- the tests

ORDERS = ["assign", "kernel"]  # which of the updates comes first
WAYS = [(order, lead) for lead in (1, 0) for order in ORDERS]

# The plain run takes the ways in turn, the full one takes each at every position.
every_way = pytest.mark.parametrize(
    "ways",
    [
        pytest.param(WAYS, id="in-turn"),
        *[pytest.param([way], id="{}-lead{}".format(*way), marks=pytest.mark.full) for way in WAYS],
    ],
)


@pytest.mark.parametrize(("order", "lead"), WAYS)
def test_undisturbed_the_step_co_executes_and_equals_eager(interposer, monkeypatch, order, lead):
    monkeypatch.setattr(settings, "lead", lead)
    expected = run(False, interposer, order, "nothing", -1)
    actual = run(True, interposer, order, "nothing", -1)
    assert differences(expected, actual) == []
    assert actual.reasons == {}
    assert actual.modes == ["traced"] * 2 + ["coexecuted"] * (len(RATES) - 2)
    assert actual.calls == expected.calls


@pytest.mark.parametrize("ways", [[("assign", 1)], [("kernel", 0)]], ids=["lead1", "lead0"])
def test_another_op_at_every_position(interposer, monkeypatch, ways):
    check_every_position(interposer, monkeypatch, ways, "op", {"new-op"})


@every_way
def test_a_write_and_a_random_draw_at_every_position(interposer, monkeypatch, ways):
    check_every_position(interposer, monkeypatch, ways, "write", {"new-op"})


@every_way
def test_an_exception_at_every_position(interposer, monkeypatch, ways):
    check_every_position(interposer, monkeypatch, ways, "throw", {"exception"})


@every_way
def test_a_look_at_the_latest_value_at_every_position(interposer, monkeypatch, ways):
    reasons = {"unexpected-read"}
    check_every_position(interposer, monkeypatch, ways, "read", reasons)


@every_way
def test_a_tensor_kept_at_every_position(interposer, monkeypatch, ways):
    check_every_position(interposer, monkeypatch, ways, "keep", {"kept-tensor"})


@every_way
def test_an_early_return_at_every_statement(interposer, monkeypatch, ways):
    check_every_position(interposer, monkeypatch, ways, "return", {"ended-early"})


# ---------------------------------------------------------------- what went wrong once


def test_a_longer_trace_leaves_the_sequence_it_began_on_as_it_was():
    """A later fallback on the old graph must still replay every write.

    The iteration with a random draw makes a longer trace, in which the write before the draw runs
    in place. The first sequence, still expected by calls with "b", has the write in its graph.
    """

    def run(wrap):
        total = tf.Variable(0.0)
        now = 0

        def program(x, who):
            total.assign_add(x)
            y = tf.exp(x)
            if now == 6:
                y = y + tf.random.normal([]) * 0.0
            if now == 8:
                raise StopHere
            return y

        step = wrap(program)
        totals = []
        for turn in range(10):
            now = turn
            with contextlib.suppress(StopHere):
                step(tf.constant(1.0), "b" if turn in (1, 8) else "a")
            totals.append(float(total))
        return totals, step

    totals, step = run(terra.function)
    assert totals == run(lambda program: program)[0]
    assert step.stats().fallback_reasons == {"new-op": 1, "exception": 1}


def test_a_replay_behind_an_open_gate_has_the_values_that_python_has_dropped():
    """`hidden` is made before the boundary, used behind it, and gone when the step ends."""
    weights = tf.Variable([1.0, 1.0])
    parked = []
    now = 0

    def program(x):
        hidden = tf.exp(x)
        tf.raw_ops.ResourceApplyGradientDescent(var=weights.handle, alpha=0.1, delta=x)
        float(tf.reduce_sum(weights.read_value()))  # opens the gate
        doubled = hidden * 2.0
        del hidden
        if now == 4:
            parked.append(doubled)
        return doubled + 1.0

    x = tf.constant([1.0, 2.0])
    expected = program(x).numpy().tolist()
    step = terra.function(program)
    for now in range(8):  # noqa: B007 - the program sees it
        assert step(x).numpy().tolist() == expected
    assert parked[0].numpy().tolist() == [value - 1.0 for value in expected]
    assert step.stats().fallback_reasons == {"kept-tensor": 1}


def test_an_error_in_a_replay_leaves_the_step(monkeypatch):
    """Whatever goes wrong in a fallback, the next call is an iteration of its own again."""
    from terra_tf.runners import fallback

    stop = False

    @terra.function
    def step(x):
        y = x + 1.0
        return y if stop else y * 2.0

    x = tf.constant([1.0, 2.0])
    for _ in range(4):
        step(x)

    def broken(*_):
        raise RuntimeError("broken on purpose")

    stop = True
    with monkeypatch.context() as patch:
        patch.setattr(fallback.Replay, "run", broken)
        with pytest.raises(RuntimeError, match="on purpose"):
            step(x)
    assert not native.core.inside()
    stop = False
    assert step(x).numpy().tolist() == [4.0, 6.0]
