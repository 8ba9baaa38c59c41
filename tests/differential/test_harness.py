"""The harness itself: it must see every kind of difference, and no difference where there is none.

Each test here breaks something on purpose: a value's last bit, an iteration that is lost or made
twice, Python that is frozen by `tf.function`, a print or a random draw too many, a dead process.
"""

import random
import sys

import numpy as np
import pytest
import tensorflow as tf

from . import harness
from .capture import capture_output
from .observation import differences, resolve, snapshot
from .table import Program, load, program
from .worker import Worker

pytestmark = pytest.mark.timeout(120)
TABLE = load()


def compared(one, other, tolerance=0.0):
    return differences(resolve(snapshot(one)), resolve(snapshot(other)), tolerance)


def problems_of(name, make_candidate):
    """What the harness says about a row under a candidate of the test's own."""
    row = TABLE[name]
    eager = harness.run(row, harness.Eager(row.iterations))
    assert not eager.error
    return harness.compare(eager, harness.run(row, make_candidate(row.iterations)), row.tolerance)


class Sabotage(harness.Eager):
    """Eager execution, but `around(call)` replaces every call of a step."""

    def __init__(self, iterations, around):
        super().__init__(iterations)
        self.around = around

    def function(self, fn=None, **options):
        if fn is None:
            return self.function
        calls = []

        def step(*args, **kwargs):
            calls.append(None)
            return self.around(len(calls), lambda: fn(*args, **kwargs))

        return step


NAN = np.float32("nan")
DIFFERENT = {
    "last bit": (tf.constant(1.0), tf.constant(np.nextafter(np.float32(1), np.float32(2)))),
    "sign of zero": (tf.constant([0.0]), tf.constant([-0.0])),
    "sign of NaN": (tf.constant([NAN]), tf.constant([-NAN])),
    "dtype": (tf.constant(1, tf.int32), tf.constant(1, tf.int64)),
    "shape": (tf.ones([2]), tf.ones([1, 2])),
    "tensor and array": (tf.ones([2]), np.ones([2], np.float32)),
    "tensor and number": (tf.constant(1.0), 1.0),
    "string": (tf.constant(["a", "b"]), tf.constant(["a", "c"])),
    "variable": (tf.Variable(1.0), tf.Variable(2.0)),
    "Python float": ([0.1 + 0.2], [0.3]),
    "int and bool": (1, True),
    "list and tuple": ([1], (1,)),
    "length": ([1], [1, 2]),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "set": ({1, 2}, {1, 3}),
    "error type": (ValueError("x"), TypeError("x")),
    "error message": (ValueError("x"), ValueError("y")),
    "op error": (
        tf.errors.NotFoundError(None, None, "a"),
        tf.errors.NotFoundError(None, None, "b"),
    ),
    "sparse": (tf.sparse.eye(2), tf.sparse.eye(2) * 2.0),
    "ragged": (tf.ragged.constant([[1], []]), tf.ragged.constant([[], [1]])),
    "deep inside": ({"a": [(tf.ones([1]), None)]}, {"a": [(tf.zeros([1]), None)]}),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_difference_is_seen(name):
    one, other = DIFFERENT[name]
    assert compared(one, other)
    assert not compared(one, one)


def test_equal_values_are_equal():
    value = {
        "nan": tf.constant([NAN, 1.0]),
        "none": None,
        "text": "a",
        "b16": tf.ones([2], "bfloat16"),
    }
    same = {
        "nan": tf.constant([NAN, 1.0]),
        "none": None,
        "text": "a",
        "b16": tf.ones([2], "bfloat16"),
    }
    assert not compared(value, same)


def test_longer_message_of_an_op_error_is_accepted():
    eager = "{{function_node __wrapped__X_device_/job:a}} Bad index 3 [Op:X] name: "
    graph = "Bad index 3\n\t [[{{node X}}]] (train.py, line 7)"
    errors = [tf.errors.InvalidArgumentError(None, None, text) for text in (eager, graph)]
    assert not compared(*errors)
    assert compared(*reversed(errors))


def test_tolerance_is_for_floating_point_only():
    assert not compared(tf.constant(1.0), tf.constant(1.00001), 1e-4)
    assert compared(tf.constant(1.0), tf.constant(1.001), 1e-4)
    assert compared(tf.constant(10_000_000), tf.constant(10_000_001), 1e-4)


def test_snapshot_copies_python_and_keeps_values_of_variables():
    state, variable = {"seen": [1]}, tf.Variable(1.0)
    taken = resolve(snapshot([state, variable]))
    state["seen"].append(2)
    variable.assign(5.0)
    found = differences(taken, resolve(snapshot([state, variable])))
    assert any("['seen'][1]" in line for line in found)
    assert any(line.startswith("[1]:") for line in found)


def test_unknown_objects_are_refused():
    with pytest.raises(TypeError, match="yield the parts"):
        snapshot(random.Random())


@pytest.mark.parametrize("name", ["raw_mlp_assign_sub", "parked_recurrent_state", "rate_schedules"])
def test_lost_iteration_is_seen(name):
    results = []

    def skip_the_sixth(call, step):
        if call != 6:
            results.append(step())
        return results[-1]

    assert problems_of(name, lambda count: Sabotage(count, skip_the_sixth))


@pytest.mark.parametrize("name", ["raw_momentum", "layer_batch_normalization", "value_queues"])
def test_iteration_made_twice_is_seen(name):
    def repeat_the_last(call, step):
        result = step()
        if call == TABLE[name].iterations:
            step()
        return result

    assert problems_of(name, lambda count: Sabotage(count, repeat_the_last))


def test_print_and_random_draw_too_many_are_seen():
    def talk(call, step):
        if call == 7:
            print("a line of its own")
        return step()

    def draw(call, step):
        result = step()
        if call == TABLE["raw_momentum"].iterations:
            tf.random.uniform([1])
        return result

    assert "printed line 0" in problems_of("raw_momentum", lambda n: Sabotage(n, talk))[0]
    (problem,) = problems_of("raw_momentum", lambda n: Sabotage(n, draw))
    assert problem.startswith("random stream afterwards ['of TensorFlow']")


class Frozen(harness.Eager):
    """`tf.function`, which runs Python once: right for few programs of the table."""

    def function(self, fn=None, **options):
        return tf.function if fn is None else tf.function(fn)


@pytest.mark.parametrize(
    "name",
    [
        *("python_counter_is_fed", "python_generators_and_iterators", "python_warm_up_attribute"),
        *("rate_drops_late", "read_loss_every_fourth_step", "python_numpy_and_random"),
        *("gradient_custom", "parked_recurrent_state", "branch_by_coin", "in_place_tf_print"),
    ],
)
def test_frozen_python_is_seen(name):
    assert problems_of(name, Frozen)


def test_capture_keeps_the_order_of_python_and_tensorflow():
    with capture_output() as output:
        print("one")
        tf.print("two", output_stream=sys.stdout)
        print("three")
    assert output.text == "one\ntwo\nthree\n"


def test_missing_proof_reads_the_counters():
    row = Program("row", None, 12, 8, 1, 2, 0.0, "3")
    good = {"traced": 3, "coexecuted": 8, "fallen_back": 1, "fallback_reasons": {}}
    assert not harness.missing_proof(row, good)
    for changed in ({"coexecuted": 7}, {"fallen_back": 0}, {"fallen_back": 3}, {"traced": 0}):
        assert harness.missing_proof(row, {**good, **changed}), changed


def test_program_that_fails_by_itself_is_reported():
    def build(terra):
        yield 1
        raise KeyError("mistake")

    verdict = harness.check(Program("broken", build, 12, 8, 0, 0, 0.0, "3"), "eager")
    assert "mistake" in verdict.problems[0]


def test_table_refuses_two_rows_of_one_name():
    def raw_momentum(terra):
        """Another one."""

    with pytest.raises(ValueError, match="two programs"):
        program()(raw_momentum)


def test_worker_survives_a_crash_and_a_hang():
    worker = Worker("3")
    try:
        assert not worker.run("raw_forward_only", 60.0, candidate="eager").problems
        worker._process.kill()
        (problem,) = worker.run("raw_forward_only", 60.0, candidate="eager").problems
        assert "died" in problem
        (problem,) = worker.run("raw_forward_only", 0.0, candidate="eager").problems
        assert "no answer within" in problem
        assert not worker.run("raw_forward_only", 60.0, candidate="eager").problems
    finally:
        assert worker.close() is None
