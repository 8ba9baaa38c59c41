"""Errors: of the user's Python, of ops in a `try` of the step, of ops that nobody guards."""

import tensorflow as tf

from ..table import program
from ..training import mean_squared_error, regression


def linear_step(weights, x, y):
    with tf.GradientTape() as tape:
        loss = mean_squared_error(y, x @ weights)
    weights.assign_sub(0.1 * tape.gradient(loss, weights))
    return loss


@program(coexecuted=3, fallbacks=(0, None))
def error_of_user_caught_outside(terra):
    """The user's code raises between two updates; the caller catches and goes on."""
    weights, total, calls = tf.Variable(tf.ones([4, 1])), tf.Variable(0.0), 0

    @terra.function
    def train_step(x, y):
        nonlocal calls
        calls += 1
        loss = linear_step(weights, x, y)
        if calls in (5, 9):
            raise ValueError(f"step {calls} has a loss of {loss:.4f}")
        total.assign_add(loss)
        return loss

    for x, y in regression(terra.iterations):
        try:
            yield train_step(x, y)
        except ValueError as error:
            yield error, weights, total
    yield weights, total, calls


@program(coexecuted=3, fallbacks=(0, None))
def error_of_user_caught_inside(terra):
    """try, except, else and finally around Python that fails now and then, ops in each."""
    total, events = tf.Variable(0.0), []
    prices = {turn: 1.0 + turn for turn in range(terra.iterations) if turn not in (5, 9)}

    @terra.function
    def step(turn, x):
        try:
            price = prices[turn]
        except KeyError as error:
            events.append(repr(error))
            total.assign_sub(1.0)
            price = 0.5
        else:
            total.assign_add(price)
        finally:
            events.append(turn)
        return tf.reduce_mean(x) * price

    for turn, (x, _) in enumerate(regression(terra.iterations)):
        yield step(turn, x)
    yield total, events


@program(coexecuted=1, fallbacks=(0, None))
def error_of_reshape_caught_inside(terra):
    """A reshape that fails by value in a `try` of the step; the handler computes instead."""
    total = tf.Variable(tf.zeros([2]))

    @terra.function
    def step(turn, x):
        positive = tf.boolean_mask(x, x > 0)
        total.assign_add([1.0, 0.0])
        try:
            halves = tf.reshape(positive, [2, -1])
        except tf.errors.InvalidArgumentError as error:
            print("odd number of elements in step", turn)
            total.assign_add([0.0, 1.0])
            return error, tf.reduce_sum(positive)
        return None, tf.reduce_sum(halves, axis=1)

    for turn, (x, _) in enumerate(regression(terra.iterations)):
        x = tf.abs(x)
        if turn in (5, 9):
            x = tf.tensor_scatter_nd_update(x, [[0, 0]], [-1.0])
        yield step(turn, x)
    yield total


@program(coexecuted=3, fallbacks=(0, None))
def error_of_gather_caught_inside(terra):
    """A gather and an integer division whose operands are out of range now and then."""
    table, failures = tf.Variable(tf.random.normal([3, 2])), []

    @terra.function
    def step(index):
        try:
            row = tf.gather(table, index)
        except tf.errors.InvalidArgumentError as error:
            failures.append(error)
            row = tf.zeros([2])
        try:
            share = 12 // (index - 1)
        except tf.errors.InvalidArgumentError as error:
            failures.append(error)
            share = tf.constant(-1)
        table.assign_add(0.1 * tf.ones_like(table))
        return row, share

    indices = {6: 7, 9: 1}
    for turn in range(terra.iterations):
        yield step(tf.constant(indices.get(turn, 2 * (turn % 2)))), len(failures)
    yield table, failures


@program(coexecuted=2, fallbacks=(0, None))
def error_of_assertion_caught_inside(terra):
    """tf.debugging assertions and check_numerics in a `try`: a bad batch is skipped."""
    weights, skipped = tf.Variable(tf.ones([4, 1])), []

    @terra.function
    def train_step(x, y):
        try:
            tf.debugging.assert_all_finite(x, "inputs")
            tf.debugging.assert_less(tf.reduce_max(x), 50.0, message="too large")
            tf.debugging.Assert(tf.reduce_min(x) > -50.0, [tf.reduce_min(x)])
        except tf.errors.InvalidArgumentError as error:
            skipped.append(error)
            return None
        return linear_step(weights, x, y)

    bad = {4: float("nan"), 7: 100.0, 9: -100.0}
    for turn, (x, y) in enumerate(regression(terra.iterations)):
        if turn in bad:
            x = tf.tensor_scatter_nd_update(x, [[0, 0]], [bad[turn]])
        yield train_step(x, y)
    yield weights, skipped


@program(coexecuted=3, fallbacks=(0, None))
def error_of_shapes_caught_inside(terra):
    """A matrix product of shapes that do not fit, caught in the step."""
    weights = tf.Variable(tf.ones([4, 1]))

    @terra.function
    def step(x):
        try:
            return tf.matmul(x, weights)
        except (tf.errors.InvalidArgumentError, ValueError) as error:
            weights.assign_add(tf.ones([4, 1]))
            return type(error)

    for turn in range(terra.iterations):
        yield step(tf.ones([2, 3 if turn in (5, 8) else 4]))
    yield weights


@program(coexecuted=3, fallbacks=(0, None))
def error_of_op_leaves_step(terra):
    """An op fails in the middle of the step; nothing that comes after it is visible."""
    before, after = tf.Variable(0.0), tf.Variable(0.0)

    @terra.function
    def step(x, index):
        before.assign_add(1.0)
        value = tf.gather(x, index)
        after.assign_add(value)
        return value, tf.random.uniform([2])

    for turn in range(terra.iterations):
        try:
            result = step(tf.constant([1.0, 2.0, 3.0]), tf.constant(9 if turn in (6, 8) else 1))
            terra.sync()
            yield result
        except tf.errors.InvalidArgumentError as error:
            yield error, before.numpy(), after.numpy()
    yield before, after


@program(coexecuted=3, fallbacks=(0, None))
def error_at_end_of_data(terra):
    """An iterator is exhausted in the step; the step starts the next epoch."""
    dataset = tf.data.Dataset.range(10).batch(2)
    source = {"iterator": iter(dataset), "epochs": 0}

    @terra.function
    def step():
        try:
            batch = next(source["iterator"])
        except StopIteration:
            source["iterator"] = iter(dataset)
            source["epochs"] += 1
            batch = next(source["iterator"])
        return tf.reduce_sum(batch)

    for _ in range(terra.iterations):
        yield step(), source["epochs"]


@program(coexecuted=3, fallbacks=(0, None))
def error_in_context_managers(terra):
    """An exception passes through a tape, a context manager and `finally`, with ops in them."""
    entered, total = [], tf.Variable(0.0)

    class Section:
        def __enter__(self):
            entered.append(1)

        def __exit__(self, kind, error, trace):
            total.assign_add(1.0 if kind is None else 10.0)
            return False

    @terra.function
    def step(turn, x):
        try:
            with tf.GradientTape() as tape, Section():
                tape.watch(x)
                loss = tf.reduce_sum(x**2)
                if turn in (4, 8):
                    raise RuntimeError("in the middle")
            return tape.gradient(loss, x)
        finally:
            total.assign_add(0.5)

    for turn, (x, _) in enumerate(regression(terra.iterations)):
        try:
            yield step(turn, x)
        except RuntimeError as error:
            yield error, total
    yield total, entered


@program(coexecuted=1, fallbacks=(0, None))
def error_of_wrong_types(terra):
    """Errors that TensorFlow's Python raises: wrong dtypes, unknown shapes, a bool of a row."""
    total = tf.Variable(0.0)

    @terra.function
    def step(turn, x):
        total.assign_add(1.0)
        kinds = []
        if turn % 3 == 2:
            for attempt in (
                lambda: x + tf.constant(1),
                lambda: bool(x),
                lambda: tf.reshape(x, "ten"),
                lambda: total.assign([1.0, 2.0]),
            ):
                try:
                    attempt()
                except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
                    kinds.append(type(error).__name__)
        return kinds, tf.reduce_sum(x)

    for turn in range(terra.iterations):
        yield step(turn, tf.constant([1.0, float(turn)]))
    yield total
