"""A training step with everything in it, disturbed at each of its statements in each way.

The step reads a `tf.data` iterator, draws random numbers with the global seed, takes gradients,
updates one variable by assignments and another by a kernel, prints from Python and from TensorFlow,
and updates a metric. It is co-executed first; then one iteration does something else before its
k-th statement, for every k. The same program run eagerly is the truth: variables, slots, position
of the iterator, random streams, printed text, metric and Python state have to agree bit for bit,
and co-execution has to come back.
"""

import contextlib
import io
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf
from differential.observation import differences, resolve, snapshot

import terra_tf as terra
from terra_tf import native
from terra_tf.report import observers
from terra_tf.runners.retreat import Retreat

pytestmark = pytest.mark.timeout(120)

BEFORE, AFTER = 4, 2  # iterations around the disturbed one
FORCED = BEFORE  # number of the disturbed iteration
STATEMENTS = 18


@pytest.fixture(autouse=True)
def _no_retreat(monkeypatch):
    """The step may not decide by the clock that it stays eager."""
    monkeypatch.setattr(Retreat, "stay_eager", lambda self: False)


class UserError(Exception):
    """An exception of the user's program."""


# ---------------------------------------------------------------- the program


class Program:
    """A model, two optimizers, data, a metric and Python state, from one seed."""

    def __init__(self, log, position, disturbance):
        tf.random.set_seed(11)
        numbers = np.random.RandomState(4)
        data = numbers.normal(size=(64, 3)).astype(np.float32)
        dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(64, seed=2)
        self.batches = iter(dataset.batch(4, drop_remainder=True))
        self.ragged_batches = iter(dataset.batch(4))  # says nothing of the batch's size
        self.inner = keras.Variable(numbers.normal(size=(3, 3)).astype(np.float32), name="inner")
        self.outer = tf.Variable(numbers.normal(size=(3, 3)).astype(np.float32))
        self.first, self.second = tf.Variable(tf.zeros([3, 3])), tf.Variable(tf.zeros([3, 3]))
        self.momentum = keras.optimizers.SGD(0.05, momentum=0.9, name="momentum")
        self.momentum.build([self.inner])
        self.average = tf.Variable(tf.zeros([3, 3]))
        self.metric = keras.metrics.Mean(name="mean")
        self.log = f"file://{log}"
        self.turn = 0
        self.parked = tf.zeros([3])
        self.history, self.seen = [], []
        # The statement before which something happens, and what.
        self._position = position
        self._disturbance = disturbance
        self._statement = 0

    def reach(self, latest):
        """Called before each statement, with the latest tensor; whether to change the statement."""
        here, self._statement = self._statement == self._position, self._statement + 1
        return here and bool(self._disturbance(self, latest))

    def step(self, rate):
        self._statement = 0
        self.turn += 1
        with tf.GradientTape() as tape:
            batch = next(self.ragged_batches if self.reach(self.parked) else self.batches)
            noise = tf.random.uniform([4, 3], seed=5 if self.reach(batch) else None)
            hidden = tf.matmul(batch, self.inner, transpose_b=self.reach(noise))
            active = tf.nn.leaky_relu(hidden, alpha=0.1 if self.reach(hidden) else 0.2)
            mixed = tf.cumsum(active * noise, axis=0 if self.reach(active) else 1)
            output = tf.matmul(mixed, self.outer, transpose_b=self.reach(mixed))
            errors = tf.reduce_sum(tf.square(output - batch), axis=0 if self.reach(output) else 1)
            loss = tf.reduce_mean(errors, keepdims=self.reach(errors))
        weight = tf.constant(2.0) if self.reach(loss) else None
        to_inner, to_outer = tape.gradient(
            loss, [self.inner.value, self.outer], None if weight is None else [weight]
        )
        self.momentum.nesterov = self.reach(to_inner)
        self.momentum.apply([to_inner], [self.inner])
        moved = self.inner.value.read_value()
        tf.raw_ops.AssignVariableOp(
            resource=self.average.handle,
            value=0.9 * self.average + 0.1 * moved,
            validate_shape=self.reach(moved),
        )
        seen = float(tf.reduce_sum(moved))
        self.history.append(seen)
        print("step", self.turn, "moved to", seen, end="!\n" if self.reach(moved) else "\n")
        summarize = 2 if self.reach(loss) else 3
        tf.print("loss", errors, output_stream=self.log, summarize=summarize)
        self.metric.update_state(errors, sample_weight=0.5 if self.reach(errors) else None)
        tf.raw_ops.ResourceApplyAdam(
            var=self.outer.handle,
            m=self.first.handle,
            v=self.second.handle,
            beta1_power=0.9,
            beta2_power=0.999,
            lr=rate,
            beta1=0.9,
            beta2=0.999,
            epsilon=1e-7,
            grad=to_outer,
            use_nesterov=self.reach(to_outer),
        )
        last = self.outer.read_value()
        dropped = tf.nn.dropout(last, 0.5, seed=3 if self.reach(last) else None)
        self.parked = tf.reduce_sum(dropped, axis=0 if self.reach(dropped) else 1)
        self.reach(self.parked)
        self.history.append(self.turn)
        return loss, self.parked

    def state(self):
        """All that a user can look at afterwards, what comes next in every stream included."""
        return {
            "variables": [self.inner, self.outer, self.first, self.second, self.average],
            "slots": list(self.momentum.variables),
            "metric": list(self.metric.variables),
            "result": self.metric.result(),
            "next": [next(self.batches), next(self.ragged_batches)],
            "random": [tf.random.normal([3]), tf.random.uniform([2], seed=5), tf.random.normal([])],
            "parked": self.parked,
        }


# ---------------------------------------------------------------- the disturbances


def another_op(program, latest):
    program.seen.append(tf.negative(latest))


def a_write_and_a_draw(program, latest):
    program.outer.assign_add(tf.random.normal([3, 3]) + tf.reduce_mean(latest))
    program.seen.append(program.metric.total.value + program.inner.value)


def another_attribute(program, latest):
    return True


def unexpected_read(program, latest):
    program.seen.append(latest.numpy())
    if np.sum(program.seen[-1]) > 0:
        program.turn += 100


def user_exception(program, latest):
    raise UserError(program.turn, latest)


def disabled_block(program, latest):
    with terra.disable():
        program.seen.append(float(tf.reduce_sum(program.outer * latest[..., :1])))
        program.outer.assign_sub(0.1 * tf.random.uniform([3, 3]))
        program.momentum.learning_rate.assign(0.04)


def gather_fails(program, latest):
    program.seen.append(tf.gather(latest, tf.constant([0, 9])))


def reshape_fails(program, latest):
    program.seen.append(tf.reshape(latest, tf.constant([7, -1])))


def division_fails(program, latest):
    program.seen.append(tf.cast(latest, tf.int32) // tf.constant(0))


def assertion_fails(program, latest):
    tf.debugging.assert_less(latest, -1e9)


OP_ERRORS = [gather_fails, reshape_fails, division_fails, assertion_fails]

KINDS = {
    "new-op": [another_op],
    "write": [a_write_and_a_draw],
    "attribute": [another_attribute],
    "read": [unexpected_read],
    "exception": [user_exception],
    "op-error": OP_ERRORS,
    "disable": [disabled_block],
}


# ---------------------------------------------------------------- one run


def run(co_execute, log, position, disturbance, every=None):
    """A whole program; what a user sees of it, and how its iterations ran.

    Args:
      co_execute: under Terra, or eagerly.
      log: the file that `tf.print` writes.
      position: of the disturbance.
      disturbance: what happens in the iteration FORCED.
      every: what happens at that place in all other iterations.
    """
    log.write_text("")
    program = Program(log, position, lambda *_: False)
    step = terra.function(program.step) if co_execute else program.step
    returned, raised, modes, printed = [], [], [], io.StringIO()
    completed = []  # per iteration, how many ran through as co-executed before it

    def observer(_, mode):
        modes.append(mode)

    observers.add(observer)
    try:
        with contextlib.redirect_stdout(printed):
            for number in range(BEFORE + 1 + AFTER):
                completed.append(step.stats().coexecuted if co_execute else 0)
                act = disturbance if number == FORCED else every or (lambda *_: False)
                program._disturbance = act
                try:
                    result = step(0.1 / (1 + number))
                    if number == FORCED:
                        terra.sync()  # an op that failed in a graph says so here at the latest
                    returned.append(result)
                except (UserError, tf.errors.OpError) as error:
                    raised.append((number, type(error)))
                    if isinstance(error, tf.errors.OpError):
                        assert __file__ in _text(error), "the error does not name the user's line"
    finally:
        observers.remove(observer)
        native.core.leave()  # an iteration that never ended must not swallow the next test
    tensors = {"returned": returned, "seen": program.seen, **program.state()}
    return {
        "tensors": resolve(snapshot(tensors)),
        "python": {
            "raised": raised,
            "history": program.history,
            "turn": program.turn,
            "printed": printed.getvalue().splitlines(),
            "tf.print": log.read_text().splitlines(),
        },
        "modes": modes,
        "completed": completed,
        "reasons": dict(step.stats().fallback_reasons) if co_execute else {},
    }


def _text(error):
    """The message and the traceback: eager's error names the user's line by its traceback."""
    return "".join(traceback.format_exception(error))


def problems(expected, actual, ran_ahead=False):
    """What a user sees to be different.

    Args:
      expected: an eager run.
      actual: the same run, co-executed.
      ran_ahead: an op failed in the graph, so Python may have gone on for the rest of the step.
    """
    found = differences(expected["tensors"], actual["tensors"])
    for name, truth in expected["python"].items():
        value = actual["python"][name]
        if ran_ahead and name in ("history", "printed"):
            value = _without_what_was_ahead(truth, value)
        if value != truth:
            found.append(f"{name}: {value!r}, and eager: {truth!r}")
    done_before = actual["completed"][FORCED] - actual["completed"][FORCED - 1]
    if actual["modes"][FORCED] != "coexecuted" or done_before != 1:
        found.append(f"was not co-executed: {actual['modes']}")
    if actual["modes"][-1] != "coexecuted":
        found.append(f"co-execution did not return: {actual['modes']}")
    return found


def _without_what_was_ahead(truth, value):
    """`value` without the extra items that one iteration's Python left behind a failed op."""
    extra = len(value) - len(truth)
    for at in range(len(truth) + 1):
        if extra > 0 and value[:at] + value[at + extra :] == truth:
            return truth
    return value


def check_every_position(tmp_path, acts, every=None, ran_ahead=False, codes=None):
    """Compares a disturbed run with its eager twin at every position."""
    wrong, reasons = {}, set()
    for position in range(STATEMENTS):
        act = acts[position % len(acts)]
        others = every[position % len(every)] if every else None
        expected = run(False, tmp_path / "eager", position, act, others)
        try:
            actual = run(True, tmp_path / "terra", position, act, others)
        except Exception as error:
            wrong[position, act.__qualname__] = [_text(error)]
            continue
        found = problems(expected, actual, ran_ahead)
        if codes is not None and not set(actual["reasons"]) <= codes:
            found.append(f"fell back for {actual['reasons']}")
        if found:
            wrong[position, act.__qualname__] = found
        reasons |= set(actual["reasons"])
    assert not wrong, "\n\n".join(f"{at}:\n  " + "\n  ".join(f) for at, f in wrong.items())
    return reasons


# ---------------------------------------------------------------- the tests


def test_undisturbed_the_step_co_executes_and_equals_eager(tmp_path):
    expected = run(False, tmp_path / "eager", -1, None)
    actual = run(True, tmp_path / "terra", -1, None)
    assert problems(expected, actual) == []
    assert actual["modes"] == ["traced"] * 2 + ["coexecuted"] * (BEFORE - 2 + 1 + AFTER)
    assert actual["reasons"] == {}


def test_the_step_has_that_many_statements(tmp_path):
    program = Program(tmp_path / "log", -1, None)
    with contextlib.redirect_stdout(io.StringIO()):
        program.step(0.1)
    assert program._statement == STATEMENTS


CODES = {
    "new-op": {"new-op", "ended-early"},
    "write": {"new-op"},
    "attribute": {"new-op"},
    "read": {"unexpected-read", "early-read"},
    "exception": {"exception"},
    "op-error": {"new-op", "exception", "unexpected-read", "early-read"},
    "disable": {"new-op"},
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.full if k == "write" else ()) for k in KINDS]
)
def test_one_iteration_is_disturbed_at_every_statement(tmp_path, kind):
    # A tensor that only some iterations keep may cost one fallback more.
    codes = CODES[kind] | {"kept-tensor"}
    reasons = check_every_position(tmp_path, KINDS[kind], codes=codes) - {"kept-tensor"}
    assert reasons  # it did fall back


class Checked:
    """An op that each iteration calls, and that fails in one of them by the value it is given."""

    def __init__(self, op, good, bad):
        # The good values vary, so that no graph takes them for constants.
        self._op, self._bad = op, tf.constant(bad)
        self._good = [tf.constant(value) for value in good]

    def passes(self, program, latest):
        self._call(latest, self._good[program.turn % len(self._good)])

    def fails(self, program, latest):
        self._call(latest, self._bad)

    def _call(self, latest, value):
        self._op(tf.tile(tf.reshape(latest, [-1]), [2]), value)


CHECKED = {
    "gather": (tf.gather, [[0, 1], [1, 0]], [0, 99]),
    "division": (lambda latest, value: tf.cast(latest, tf.int32) // value, [1, 2], 0),
    "reshape": (tf.reshape, [[-1, 1], [1, -1]], [7, -1]),
    "numerics": (
        lambda latest, value: tf.debugging.check_numerics(latest + value, "by value"),
        [0.0, 1.0],
        float("nan"),
    ),
}


# The plain run takes the ops in turn, the full one takes each at every statement.
@pytest.mark.parametrize(
    "ops",
    [
        pytest.param(list(CHECKED), id="in-turn"),
        *[pytest.param([op], id=op, marks=pytest.mark.full) for op in CHECKED],
    ],
)
def test_an_op_of_each_iteration_fails_in_one_at_every_statement(tmp_path, ops):
    checked = [Checked(*CHECKED[op]) for op in ops]
    fails, passes = [op.fails for op in checked], [op.passes for op in checked]
    check_every_position(tmp_path, fails, passes, ran_ahead=True)
