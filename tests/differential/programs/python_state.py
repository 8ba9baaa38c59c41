"""Python runs every time: counters, containers, attributes, generators, files, other libraries."""

import collections
import contextlib
import itertools
import pathlib
import random
import tempfile

import numpy as np
import tensorflow as tf

from ..table import program
from ..training import mean_squared_error, regression


@program()
def python_containers(terra):
    """A counter, a list, a dictionary, a set and an attribute that the step changes."""

    class Trainer:
        calls = 0

        def __init__(self):
            self.history, self.seen, self.by_parity = [], set(), collections.Counter()
            self.weights = tf.Variable(tf.ones([4, 1]))

        def train_step(self, x, y):
            Trainer.calls += 1
            self.seen.add(Trainer.calls % 4)
            self.by_parity["odd" if Trainer.calls % 2 else "even"] += 1
            loss = mean_squared_error(y, x @ self.weights)
            self.weights.assign_sub(0.01 * tf.transpose(tf.reduce_mean(x, 0, keepdims=True)))
            self.history.append((Trainer.calls, loss))
            return loss

    trainer = Trainer()
    step = terra.function(trainer.train_step)
    for x, y in regression(terra.iterations):
        yield step(x, y), Trainer.calls
    yield trainer


@program()
def python_counter_is_fed(terra):
    """A Python counter that enters the computation as a number: bias correction by hand."""
    average, calls = tf.Variable(0.0), 0

    @terra.function
    def step(x):
        nonlocal calls
        calls += 1
        average.assign(0.9 * average + 0.1 * tf.reduce_mean(x))
        return average / (1 - 0.9**calls)

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield average, calls


@program(coexecuted=4, fallbacks=(0, 2))
def python_early_stopping(terra):
    """Patience counted in Python from the loss that the step returned."""
    weights = tf.Variable(tf.ones([4, 1]))
    best, patience, waited, steps = float("inf"), 2, 0, 0

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ weights)
        weights.assign_sub(0.4 * tape.gradient(loss, weights))
        return loss

    for x, y in regression(terra.iterations):
        loss = float(train_step(x, y))
        steps += 1
        if loss < best:
            best, waited = loss, 0
        else:
            waited += 1
        if waited > patience:
            print("stopped early")
            break
    yield best, waited, steps, weights


@program()
def python_warm_up_attribute(terra):
    """A schedule on an attribute of the step's object, read by the next step."""

    class Temperature:
        def __init__(self):
            self.value = 2.0

        def __call__(self, logits):
            self.value = max(0.5, self.value * 0.9)
            return tf.nn.softmax(logits / self.value)

    temperature = Temperature()
    step = terra.function(temperature)
    for x, _ in regression(terra.iterations):
        yield step(x), temperature.value


@program()
def python_generators_and_iterators(terra):
    """A generator and an itertools cycle advanced once a step, and closed at the end."""
    closed = []

    def weights():
        try:
            for k in itertools.count(1):
                yield 1.0 / k
        finally:
            closed.append(True)

    source, names = weights(), itertools.cycle("abc")
    step = terra.function(lambda x: (next(names), tf.reduce_sum(x) * next(source)))
    for x, _ in regression(terra.iterations):
        yield step(x)
    source.close()
    yield closed, next(names)


@program()
def python_context_managers(terra):
    """The user's own context manager around ops, `finally`, a stack of exits."""
    events = []

    @contextlib.contextmanager
    def section(name):
        events.append(f"enter {name}")
        try:
            yield name.upper()
        finally:
            events.append(f"leave {name}")

    @terra.function
    def step(x):
        with section("outer") as outer, contextlib.ExitStack() as stack:
            total = tf.reduce_sum(x)
            stack.callback(events.append, f"callback {outer}")
            with section("inner"):
                return total * 2.0

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield events


@program()
def python_files(terra):
    """A log file that the step appends a line to, with the loss in it."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log.csv")

        @terra.function
        def step(turn, x):
            loss = tf.reduce_mean(x**2)
            with log.open("a") as file:
                file.write(f"{turn},{loss:.8f}\n")
            return loss

        for turn, (x, _) in enumerate(regression(terra.iterations)):
            yield step(turn, x)
        yield log.read_text()


@program()
def python_numpy_and_random(terra):
    """NumPy's and Python's random streams used in the step, one draw a step each."""
    weights = tf.Variable(tf.ones([4, 1]))

    @terra.function
    def step(x):
        noise = np.random.normal(size=[8, 4]).astype(np.float32)
        scale = random.uniform(0.5, 1.5)
        weights.assign_add(0.01 * tf.ones([4, 1]) * scale)
        return tf.matmul(x + noise, weights), scale

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield weights


@program()
def python_numpy_statistics(terra):
    """NumPy computes on the step's tensors, and its result goes back into the step."""
    weights, history = tf.Variable(tf.ones([4, 1])), []

    @terra.function
    def step(x):
        outputs = x @ weights
        median = np.median(outputs.numpy())
        history.append(float(median))
        weights.assign_sub(0.1 * tf.ones_like(weights) * np.float32(np.mean(history[-3:])))
        return tf.reduce_sum(outputs - median)

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield weights, history


@program()
def python_arrays_as_inputs(terra):
    """NumPy arrays, lists and scalars that vary, passed straight into TensorFlow's ops."""
    weights = tf.Variable(tf.ones([3, 2]))

    @terra.function
    def step(array, row, factor, shift):
        outputs = tf.matmul(array, weights) * factor + shift
        return tf.concat([outputs, tf.constant([row])], axis=0) + np.float32(0.5)

    for turn in range(terra.iterations):
        array = np.full([2, 3], turn, np.float32)
        yield step(array, [float(turn), -1.0], turn % 3, np.float64(turn) / 7)


@program()
def python_array_changed_in_place(terra):
    """A NumPy buffer that the program overwrites between steps and within one."""
    buffer = np.zeros([4], np.float32)

    @terra.function
    def step(turn):
        first = tf.reduce_sum(tf.constant(buffer))
        buffer[turn % 4] += 1.5
        return first, tf.convert_to_tensor(buffer) * 2.0

    for turn in range(terra.iterations):
        yield step(turn)
        buffer[0] -= 0.25
    yield buffer


@program(coexecuted=6, fallbacks=(0, 2))
def python_recursion(terra):
    """A recursive function over a nested list of variables: the same helper, many stacks."""
    tree = [tf.Variable(1.0), [tf.Variable(2.0), [tf.Variable(3.0)]], tf.Variable(4.0)]

    def add_up(node, depth):
        if isinstance(node, tf.Variable):
            node.assign_add(0.1 * depth)
            return node * float(depth)
        return tf.add_n([add_up(child, depth + 1) for child in node])

    step = terra.function(lambda: add_up(tree, 0))
    for _ in range(terra.iterations):
        yield step()
    yield tree


@program(coexecuted=6, fallbacks=(0, 2))
def python_globals_and_defaults(terra):
    """A global of the module changed between steps, and a mutable default argument."""

    @terra.function
    def step(x, seen=[]):  # noqa: B006 (a mutable default is the subject)
        seen.append(len(seen))
        return tf.reduce_sum(x) * SCALE["value"], list(seen)

    SCALE["value"] = 1.0
    for turn, (x, _) in enumerate(regression(terra.iterations)):
        SCALE["value"] += turn * 0.5
        yield step(x)


SCALE = {"value": 1.0}
