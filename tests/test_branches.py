"""Steps whose iterations differ: branches, loops of varying length, varying shapes, failing ops.

Each program runs as plain eager TensorFlow and co-executed, from the same seed, and has to give the
same bits: results, variables, printed text. What it is for is that one graph serves iterations that
differ, so the share of co-executed iterations and the number of graphs are stated, too.
"""

import dataclasses
import random
import threading

import numpy as np
import pytest
import tensorflow as tf

import terra_tf as terra
from terra_tf.runners.retreat import Retreat

pytestmark = pytest.mark.timeout(200)

SIZE = 8


@pytest.fixture(autouse=True)
def never_retreats(monkeypatch):
    """The step may not decide by the clock that it stays eager."""
    monkeypatch.setattr(Retreat, "stay_eager", lambda self: False)


@dataclasses.dataclass
class Outcome:
    """What a program showed.

    Attributes:
      results: per iteration.
      variables: at the end.
      text: what was printed.
    """

    results: list
    variables: list
    text: str


@dataclasses.dataclass
class Run:
    """How a step ran: its final stats, and for each iteration, whether it was co-executed."""

    stats: terra.Stats
    coexecuted: list[bool]

    def share(self, start, end=None):
        """Share of co-executed iterations between two of them."""
        part = self.coexecuted[start:end]
        return sum(part) / len(part)


def bits(value):
    """Tensors and arrays as (dtype, shape, bytes), lists item by item, other values as text."""
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    if isinstance(value, (tf.Tensor, tf.Variable, np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype == object:  # text
            return array.shape, array.tolist()
        return str(array.dtype), array.shape, array.tobytes()
    return repr(value)


def check(make, turns, path, *, seed=7):
    """Compares a program's eager and co-executed run bit for bit.

    Args:
      make: called with an address for printed text; returns a step, which takes a source of
        randomness, and the variables that it changes.
      turns: iterations.
      path: a directory.
      seed: of the source of randomness.

    Returns:
      The Run of the co-executed one.
    """
    expected, _ = run(make, turns, path / "eager.txt", seed, lambda step: step)
    actual, how = run(make, turns, path / "coexecuted.txt", seed, terra.function)
    for turn, (a, b) in enumerate(zip(expected.results, actual.results, strict=True)):
        assert a == b, f"iteration {turn} of {turns} (co-executed: {how.coexecuted[turn]})"
    assert expected.variables == actual.variables
    assert expected.text == actual.text
    return how


def run(make, turns, printed, seed, wrap):
    """One run: its Outcome, and its Run if it has stats."""
    tf.random.set_seed(seed)
    rng = random.Random(seed)
    printed.write_text("")
    function, variables = make(f"file://{printed}")
    step = wrap(function)
    coexecuted, results = [], []
    for _ in range(turns):
        before = step.stats().coexecuted if isinstance(step, terra.Step) else 0
        results.append(step(rng))
        if isinstance(step, terra.Step):
            coexecuted.append(step.stats().coexecuted > before)
    terra.sync()
    outcome = Outcome(bits(results), bits(list(variables)), printed.read_text())
    how = Run(step.stats(), coexecuted) if isinstance(step, terra.Step) else None
    return outcome, how


def values(seed, *shape):
    return np.random.RandomState(seed).randn(*shape).astype(np.float32) * 0.3


def weights(seed=1, *shape):
    return tf.Variable(values(seed, *(shape or (SIZE, SIZE))))


X = tf.constant(values(9, 4, SIZE))


# ---------------------------------------------------------------- many ways through one step


def coin_flips(count):
    """Residual layers, each of which an iteration takes or not, trained."""

    def make(_):
        layers = [weights(seed) for seed in range(count)]

        def step(rng):
            with tf.GradientTape() as tape:
                x = X
                for w in layers:
                    if rng.random() < 0.5:
                        x = x + tf.nn.relu(x @ w)
                loss = tf.reduce_mean(x * x)
            for w, gradient in zip(layers, tape.gradient(loss, layers), strict=True):
                if gradient is not None:
                    w.assign_sub(0.01 * gradient)
            return loss

        return step, layers

    return make


@pytest.mark.parametrize(
    ("count", "turns"), [(5, 60), pytest.param(12, 160, marks=pytest.mark.full)]
)
def test_independent_coin_flips_are_one_graph(count, turns, tmp_path):
    how = check(coin_flips(count), turns, tmp_path)
    known = turns // 2 if count < 12 else 60
    assert how.share(known) >= 0.95
    assert how.stats.graphs <= 6
    assert how.stats.build_seconds < 20
    assert how.stats.branches > 0


def random_loop(longest):
    """A recurrent cell, applied for a random number of turns, trained through all of them."""

    def make(_):
        w, v = weights(), tf.Variable(np.zeros(SIZE, np.float32))

        def step(rng):
            with tf.GradientTape() as tape:
                h = X
                for _ in range(rng.randint(1, longest)):
                    a = tf.tanh(h @ w + v)
                    b = tf.sigmoid(a * 2.0)
                    h = h * 0.9 + a * b - 0.01 * tf.square(a)
                loss = tf.reduce_mean(h * h)
            for variable, gradient in zip((w, v), tape.gradient(loss, [w, v]), strict=True):
                variable.assign_sub(0.01 * gradient)
            return loss

        return step, [w, v]

    return make


@pytest.mark.parametrize(
    ("longest", "turns", "known"),
    [(8, 60, 40), pytest.param(50, 250, 150, marks=pytest.mark.full)],
)
def test_loops_of_random_length_are_one_graph(longest, turns, known, tmp_path):
    how = check(random_loop(longest), turns, tmp_path)
    assert how.share(known) >= 0.9
    assert how.stats.graphs <= 8
    assert how.stats.loops > 0


def random_shapes(longest):
    """A batch of a random size, with its size used in Python, trained."""

    def make(_):
        w = weights()

        def step(rng):
            size = rng.randint(1, longest)
            x = tf.constant(values(size, size, SIZE))
            with tf.GradientTape() as tape:
                h = tf.nn.softmax(tf.reshape(tf.tanh(x @ w), (-1, 4)))
                loss = tf.reduce_mean(h * h) + tf.reduce_sum(h) / float(h.shape[0])
            w.assign_sub(0.01 * tape.gradient(loss, w))
            return loss

        return step, [w]

    return make


@pytest.mark.parametrize(
    ("longest", "turns"), [(60, 60), pytest.param(300, 200, marks=pytest.mark.full)]
)
def test_varying_shapes_are_one_graph(longest, turns, tmp_path):
    how = check(random_shapes(longest), turns, tmp_path)
    assert how.share(turns // 2) >= 0.9
    assert how.stats.graphs <= 4


def test_shapes_of_arguments_that_vary_are_one_graph():
    w = weights()
    step = terra.function(lambda x: tf.reduce_sum(tf.tanh(x @ w), axis=1) + float(x.shape[0]))
    for turn in range(60):
        x = tf.constant(values(turn, 1 + 37 * turn % 61, SIZE))
        assert bits(step(x)) == bits(tf.reduce_sum(tf.tanh(x @ w), axis=1) + float(x.shape[0]))
    assert step.stats().graphs <= 4
    assert step.stats().coexecuted >= 50


def test_sixty_lengths_of_text_are_one_graph():
    """Lengths that come once each: nothing is learned twice."""
    table = weights(3, 20, SIZE)

    def embed(tokens):
        h = tf.gather(table, tokens)
        weight = tf.nn.softmax(tf.matmul(h, h, transpose_b=True))
        return tf.reduce_mean(weight @ h, axis=0)

    step = terra.function(embed)
    lengths = random.Random(3).sample(range(1, 200), 60)
    before = 0
    for turn, length in enumerate(lengths):
        tokens = tf.constant(np.random.RandomState(length).randint(0, 20, length))
        assert bits(step(tokens)) == bits(embed(tokens)), length
        if turn == 19:
            before = step.stats().coexecuted
    assert step.stats().coexecuted - before >= 36
    assert step.stats().graphs <= 4


# ---------------------------------------------------------------- programs of every kind


def masked(_):
    """Shapes that depend on values: what is left of a mask, what is unique."""
    w = weights()

    def step(rng):
        x = X * rng.uniform(0.5, 2.0)
        chosen = tf.boolean_mask(x, x[:, 0] > rng.uniform(-0.3, 0.3))
        y = tf.reduce_sum(tf.tanh(chosen @ w), axis=0)
        unique, places = tf.unique(tf.cast(tf.reshape(x * 3.0, [-1]), tf.int32))
        found = tf.where(unique > 0)
        w.assign_sub(0.01 * tf.tile(y[None], [SIZE, 1]))
        return y, unique, places, found, tf.size(found)

    return step, [w]


def optimizer_in_branch(_):
    """An optimizer's update and an assignment of a value from before the branch, in a branch."""
    w, last = weights(), tf.Variable(0.0)
    optimizer = tf.keras.optimizers.Adam(0.1)
    optimizer.build([w])
    variables = [w, last, *(variable.value for variable in optimizer.variables)]

    def step(rng):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(X @ w))
        gradient = tape.gradient(loss, w)
        scaled = loss * 2.0
        if rng.random() < 0.5:
            optimizer.apply_gradients([(gradient, w)])
            last.assign(scaled)
        return loss, last.read_value() + 1.0

    return step, variables


def assign_from_before(_):
    """An assignment in a branch of values from before it, computed, constant or passed through."""
    a, b, c = (tf.Variable(np.float32([1, 2])) for _ in range(3))
    constant = tf.constant([5.0, 6.0])

    def step(rng):
        before = tf.sin(a + 1.0)
        same = a.read_value()
        way = rng.randrange(4)
        if way == 0:
            b.assign(before)
        elif way == 1:
            b.assign(constant)
            c.assign(same)
        elif way == 2:
            c.assign_add(before * 0.1)
        after = a.assign_add(b * 0.01 + c * 0.01)
        return before, b + c, after.read_value()

    return step, [a, b, c]


def nested(_):
    """Branches in branches in a loop."""
    w, v = weights(), tf.Variable(np.float32(1.0))

    def step(rng):
        x = X
        for _ in range(3):
            if rng.random() < 0.5:
                x = tf.tanh(x @ w)
                if rng.random() < 0.5:
                    x = x * 2.0
                    v.assign_add(tf.reduce_mean(x))
                else:
                    x = tf.nn.relu(x) + 0.1
                    if rng.random() < 0.5:
                        x = x - v
            else:
                x = tf.sin(x)
        return tf.reduce_sum(x, axis=1)

    return step, [w, v]


def picked(_):
    """A tensor picked from a list by a random index; lists of varying length."""
    w = weights()

    def step(rng):
        with tf.GradientTape() as tape:
            made = [X @ w, tf.sin(X), X * w[0], tf.zeros_like(X)]
            one, other = made[rng.randrange(4)], made[rng.randrange(4)]
            some = rng.sample(made, rng.randint(1, 4))
            loss = tf.reduce_sum(tf.add_n(some) + one - other * 0.5)
        gradient = tape.gradient(loss, w)
        if gradient is not None:
            w.assign_sub(0.001 * gradient)
        return loss, tf.concat(some, axis=0)

    return step, [w]


def early_exit(_):
    """Returns from three places."""
    w = weights()

    def step(rng):
        x = X @ w
        if rng.random() < 0.3:
            return x
        w.assign_sub(0.01 * tf.tanh(w))
        x = tf.sin(x)
        if rng.random() < 0.5:
            return x, tf.reduce_sum(x)
        w.assign_add(0.02 * tf.ones_like(w))
        return [tf.cos(x)]

    return step, [w]


def break_and_continue(_):
    w = weights()

    def step(rng):
        x = X
        for turn in range(6):
            if rng.random() < 0.3:
                continue
            x = tf.tanh(x @ w) + float(turn)
            if rng.random() < 0.2:
                break
            x = x * 0.5
        else:
            x = x - 1.0
        w.assign_sub(0.001 * tf.matmul(x, x, transpose_a=True))
        return x

    return step, [w]


def while_on_a_tensor(_):
    """How long the loop runs is for a tensor's value to say."""
    v = tf.Variable(1.1)

    def step(rng):
        x = tf.constant(rng.uniform(0.5, 4.0))
        turns = 0
        while x < 10.0:
            x = x * v + 0.5
            turns += 1
        if tf.reduce_sum(x) > 10.5:
            v.assign(v * 0.99 + 0.015)
        return x, turns

    return step, [v]


def recursion(_):
    w = weights()

    def tree(rng, x, depth):
        if depth == 0 or rng.random() < 0.3:
            return tf.sin(x)
        return tf.tanh(tree(rng, x @ w, depth - 1) + tree(rng, x * 0.5, depth - 1))

    def step(rng):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tree(rng, X, 3))
        gradient = tape.gradient(loss, w)
        if gradient is not None:
            w.assign_sub(0.1 * gradient)
        return loss

    return step, [w]


def generator(_):
    w = weights()

    def chunks(rng):
        x = X
        while rng.random() < 0.7:
            x = tf.tanh(x @ w)
            yield x
            x = x + 0.1

    def step(rng):
        total = tf.zeros([SIZE])
        for chunk in chunks(rng):
            total += tf.reduce_sum(chunk, axis=0)
        w.assign_sub(0.001 * tf.tile(total[None], [SIZE, 1]))
        return total

    return step, [w]


def failing(_):
    """Ops that fail, caught where a branch was taken; what was written before stays."""
    v = tf.Variable(np.float32([1, 2, 3]))

    def step(rng):
        x = v * 2.0
        if rng.random() < 0.5:
            v.assign_add([0.1, 0.1, 0.1])
            try:
                x = tf.gather(x, rng.choice([0, 2, 7]))
                v.assign(v * 0.9)
            except tf.errors.InvalidArgumentError:
                x = tf.reduce_sum(x) - 1.0
        else:
            try:
                x = tf.reshape(x, [rng.choice([3, 4]), 1])
            except tf.errors.InvalidArgumentError:
                x = tf.zeros([2]) + v[0]
        return x, v.read_value()

    return step, [v]


def effects_in_place(printed):
    """Prints, Python functions and random numbers in branches."""
    v = tf.Variable(np.float32([1, 2]))
    calls = []

    def python(x):
        calls.append(x.numpy().tolist())
        v.assign_add([0.5, 0.0])
        return x * 2.0

    def step(rng):
        x = v + 1.0
        if rng.random() < 0.5:
            tf.print("in a branch", x, output_stream=printed)
            x = tf.exp(-x)
        if rng.random() < 0.4:
            x = tf.py_function(python, [x], tf.float32) + v
        elif rng.random() < 0.5:
            x += tf.random.uniform([2])
            v.assign(tf.sin(x))
            tf.print("else", v, output_stream=printed)
        return x, list(calls[-1:]), v.read_value()

    return step, [v]


def assigned_in_branch(_):
    """Variables that are assigned in a branch, read after it; one with a look in between."""
    a, b = tf.Variable(1.0), tf.Variable(2.0)

    def step(rng):
        if rng.random() < 0.5:
            a.assign(b * 1.01)
        elif rng.random() < 0.5:
            a.assign_sub(0.3)
            b.assign_add(a)
        y = a * 3.0 + b
        seen = float(y)
        if seen > 9.0:
            b.assign(tf.sqrt(tf.abs(y)))
        return y, seen, a + b

    return step, [a, b]


def written_in_branch(_):
    """A kernel's write in place in a branch, read after the join, with a look behind it."""
    w, slot = tf.Variable(np.float32([1, 2])), tf.Variable(np.float32([0, 0]))

    def step(rng):
        gradient = tf.sin(w * 2.0)
        if rng.random() < 0.6:
            tf.raw_ops.ResourceApplyMomentum(
                var=w.handle, accum=slot.handle, lr=0.1, grad=gradient, momentum=0.9
            )
        y = w + slot
        total = float(tf.reduce_sum(y))
        if rng.random() < 0.3:
            slot.scatter_nd_add([[0]], [0.25])
        return y, total, slot.read_value()

    return step, [w, slot]


def python_in_loop(printed):
    """Python functions that change a variable, prints and assignments in turns of a loop."""
    v = tf.Variable(np.float32([1, 2]))

    def python(x):
        v.assign_add(x * 0.01)
        return x + v

    def step(rng):
        x = v * 1.0
        for turn in range(rng.randrange(5)):
            if rng.random() < 0.5:
                x = tf.py_function(python, [x], tf.float32)
                x.set_shape([2])
            else:
                x = tf.sin(x)
            if rng.random() < 0.3:
                tf.print(turn, x, output_stream=printed)
            if rng.random() < 0.3:
                v.assign(x)
        return x

    return step, [v]


def skipped_python_between(_):
    """A slow write, then two Python functions: the second sees it where the first is skipped."""
    v = tf.Variable(0.0)
    heavy = tf.constant(np.full((500, 500), 0.002, np.float32))
    seen = []

    def step(rng):
        first, second = rng.random() < 0.5, rng.random() < 0.5
        x = heavy * (v + 1.0)
        for _ in range(8):
            x = tf.matmul(x, heavy)
        v.assign(x[0, 0] + rng.random())
        if first:
            tf.py_function(lambda: seen.append(("first", float(v))), [], [])
        if second:
            tf.py_function(lambda: seen.append(("second", float(v))), [], [])
        return seen[-1:]

    return step, [v]


def boundary_in_branch(_):
    """What makes a write visible is in a branch; where that is skipped, the look is behind it."""
    w, v = tf.Variable(np.float32([1, 2])), tf.Variable(np.float32([0, 0]))
    calls = []

    def step(rng):
        tf.raw_ops.ResourceApplyGradientDescent(
            var=w.handle, alpha=0.1, delta=tf.sin(w.read_value())
        )
        way = rng.randrange(4)
        if way == 0:
            tf.py_function(lambda: calls.append(w.numpy().tolist()), [], [])
        elif way == 1:
            calls.append(float(tf.reduce_sum(w.read_value())))
        elif way == 2:
            v.scatter_nd_add([[1]], [0.5])
        total = w[0] * 2.0 + v[1]
        return float(total), calls[-1:], tf.exp(total)

    return step, [w, v]


def two_loops(_):
    """Two loops of random length one after the other, each with a branch in it."""
    w = weights()

    def step(rng):
        with tf.GradientTape() as tape:
            x = X
            for _ in range(rng.randrange(4)):
                x = tf.tanh(x @ w)
                if rng.random() < 0.5:
                    x = x * 1.5
            kept = []
            for _ in range(rng.randint(1, 4)):
                x = tf.sin(x) + 0.1
                kept.append(x)
            loss = tf.reduce_mean(tf.stack(kept) ** 2)
        gradient = tape.gradient(loss, w)
        if gradient is not None:
            w.assign_sub(0.05 * gradient)
        return loss, kept[-1]

    return step, [w]


def other_types(_):
    """Branches that make values of different dtype and rank at the same place."""
    v = tf.Variable(2.0)

    def step(rng):
        x = [v * 1.0, tf.constant(3), tf.fill([2, 2], v), tf.cast(v, tf.float64)][rng.randrange(4)]
        y = x + x
        v.assign_add(tf.cast(tf.reduce_sum(y), tf.float32) * 0.001)
        return y

    return step, [v]


def persistent_tape(_):
    """Gradients of gradients, of one or the other loss."""
    w = weights()

    def step(rng):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(tf.sin(X @ w) ** 2)
                if rng.random() < 0.5:
                    loss += tf.reduce_sum(w * w * w)
            first = inner.gradient(loss, w)
            norm = tf.reduce_sum(first * first)
        second = outer.gradient(norm, w)
        w.assign_sub(0.001 * (first + second))
        return loss, norm

    return step, [w]


# What the share of co-executed iterations in the second half must be at least: what comes up
# anew in small programs is not so rare as in a long training.
PROGRAMS = {
    masked: 0.8,
    optimizer_in_branch: 0.8,
    assign_from_before: 0.8,
    nested: 0.6,
    picked: 0.5,
    early_exit: 0.8,
    break_and_continue: 0.6,
    while_on_a_tensor: 0.6,
    recursion: 0.3,
    generator: 0.6,
    failing: 0.3,
    effects_in_place: 0.6,
    assigned_in_branch: 0.8,
    written_in_branch: 0.8,
    python_in_loop: 0.6,
    skipped_python_between: 0.6,
    boundary_in_branch: 0.6,
    two_loops: 0.6,
    other_types: 0.6,
    persistent_tape: 0.8,
}
BRANCHES = set(PROGRAMS) - {masked, while_on_a_tensor, generator}
LOOPS = {while_on_a_tensor, generator, two_loops}


@pytest.mark.parametrize(
    ("turns", "seeds"), [(40, [7]), pytest.param(150, range(5), marks=pytest.mark.full)]
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program_gives_what_eager_gives(program, turns, seeds, tmp_path):
    for seed in seeds:
        how = check(program, turns, tmp_path, seed=seed)
        assert how.share(turns // 2) >= PROGRAMS[program]
        if program in BRANCHES:
            assert how.stats.branches > 0
        if program in LOOPS:
            assert how.stats.loops > 0


@pytest.mark.timeout(60)
def test_fallback_behind_an_op_in_place_that_may_take_what_was_skipped(tmp_path):
    """What is printed was the sine in other iterations; the one that falls back has none."""
    ways = [(turn % 2 == 0, False) for turn in range(10)] + [(False, True)]

    def make(printed):
        v = tf.Variable(np.float32([1, 2]))
        turns = iter(ways)

        def shift():
            v.assign_add([0.1, 0.1])

        def step(_):
            sine, new = next(turns)
            x = v * 1.0
            tf.py_function(shift, [], [])  # what comes before can not be replayed any more
            if sine:
                x = tf.sin(x)
            tf.print(x, output_stream=printed)
            if new:
                v.assign(tf.cos(v))
            return x

        return step, [v]

    how = check(make, len(ways), tmp_path)
    assert how.stats.fallback_reasons == {"new-op": 1}


@pytest.mark.timeout(60)
def test_op_in_place_changes_what_was_read_before_it(tmp_path):
    """Reads that Python does not wait for come before whatever an op in place writes."""

    def make(_):
        v, large = tf.Variable([1.0, 2.0]), tf.Variable(tf.zeros([5_000_000]))
        large.scatter_add(tf.IndexedSlices(1.0, 0))  # from now on, each read makes a copy

        def shift():
            v.assign_add([0.5, 0.25])

        def step(_):
            first = tf.reduce_max(large)
            read = v * 2.0  # the graph is busy with what comes before
            tf.py_function(shift, [], [])
            return first + read

        return step, [v]

    how = check(make, 40, tmp_path)
    assert how.share(20) == 1


def made_in_branches(_):
    """Variables that some iterations make in the step, none, one or two of them."""
    v = tf.Variable(1.0)

    def step(rng):
        y = v * X[0, 0]
        if rng.random() < 0.4:
            made = tf.Variable(y)
            made.assign_add(1.0)
            y = made * 2.0
        if rng.random() < 0.3:
            y += tf.reduce_sum(tf.Variable([1.0, 2.0]) * v)
        v.assign_sub(0.01 * y)
        return y

    return step, [v]


def test_variables_made_in_a_branch_are_one_graph_with_none(tmp_path):
    how = check(made_in_branches, 60, tmp_path)
    assert how.share(30) >= 0.9
    assert how.stats.graphs <= 8


def test_threads_that_share_a_step_keep_each_its_own_variable():
    """A variable of the way not taken is not written: the other thread is changing it."""

    def body(v, x):
        y = tf.reduce_sum(v * x)
        v.assign_sub(0.01 * tf.tanh(v) * y)
        return y + tf.reduce_sum(v)

    def run(step, v):
        numbers = np.random.default_rng(3)
        return [float(step(v, tf.constant(numbers.normal(size=4), tf.float32))) for _ in range(30)]

    def variable(number):
        return tf.Variable(tf.fill([4], float(number)))

    expected = [run(body, variable(number)) for number in (1, 2)]
    coexecuted = 0
    for _ in range(8):
        step = terra.function(body)
        found = {}

        def in_thread(number, step=step, found=found):
            found[number] = run(step, variable(number))

        threads = [threading.Thread(target=in_thread, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[1], found[2]] == expected
        coexecuted += step.stats().coexecuted
    assert coexecuted > 100  # of 480; a variable that another thread was seen to use stays eager
