"""Ways to call a step: signatures, methods, closures, partials, nested values in and out."""

import collections
import dataclasses
import functools

import tensorflow as tf

from ..table import program
from ..training import regression

Output = collections.namedtuple("Output", ["loss", "extra"])


@dataclasses.dataclass
class Batch:
    inputs: tf.Tensor
    name: str


@program()
def call_keywords_and_defaults(terra):
    """Positional, keyword-only and default arguments, *args and **kwargs."""

    def compute(x, /, scale=2.0, *more, shift, **options):
        total = x * scale + shift
        for tensor in more:
            total += tensor
        return total, sorted(options)

    step, other_step = terra.function(compute, name="keywords"), terra.function(compute)
    x = tf.constant([1.0, 2.0])
    for turn in range(terra.iterations):
        yield step(x, shift=float(turn))
        yield other_step(x, 3.0, x, x, shift=1.0, note="n", flag=None)


@program()
def call_returns_nested(terra):
    """Dictionaries, named tuples, data classes, None, strings and tensors returned together."""

    @terra.function
    def step(turn, x):
        loss = tf.reduce_mean(x)
        return {
            "output": Output(loss, [x[0], None, turn]),
            "batch": Batch(x * 2.0, f"batch {turn}"),
            "empty": ((), [], {}),
            "same": x,
        }

    for turn, (x, _) in enumerate(regression(terra.iterations)):
        result = step(turn, x)
        yield result, result["same"] is x


@program()
def call_returns_nothing(terra):
    """A step that returns None and works through variables only."""
    total = tf.Variable(tf.zeros([4]))

    @terra.function
    def step(x):
        total.assign_add(tf.reduce_sum(x, axis=0))

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield total


@program(coexecuted=4, fallbacks=(0, None))
def call_methods(terra):
    """A decorated method, a class method and a static one, on two instances."""

    class Counter(tf.Module):
        made = 0

        def __init__(self):
            super().__init__()
            self.total = tf.Variable(0.0)

        @terra.function
        def add(self, x):
            self.total.assign_add(tf.reduce_sum(x))
            return self.total.read_value()

        @classmethod
        def count(cls, x):
            cls.made += 1
            return tf.reduce_max(x)

        @staticmethod
        def double(x):
            return x * 2.0

    counters = Counter(), Counter()
    count, double = terra.function(Counter.count), terra.function(Counter.double)
    for x, _ in regression(terra.iterations):
        yield counters[0].add(x), counters[1].add(-x), count(x), double(x)
    yield counters, Counter.made


@program()
def call_partials_and_closures(terra):
    """A functools.partial, a lambda, a closure over a variable, an object with __call__."""
    offset = tf.Variable(1.0)

    def scaled(factor, x):
        offset.assign_add(0.5)
        return x * factor + offset

    class Halved:
        def __call__(self, x):
            return x / 2.0

    steps = [
        terra.function(functools.partial(scaled, 3.0)),
        terra.function(lambda x: x - offset),
        terra.function(Halved()),
    ]
    for x, _ in regression(terra.iterations):
        yield [step(x) for step in steps]
    yield offset


@program()
def call_nested_functions(terra):
    """A decorated function that calls decorated functions: they belong to the outermost."""
    weights = tf.Variable(tf.ones([4, 1]))

    @terra.function
    def forward(x):
        return x @ weights

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((forward(x) - y) ** 2)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield forward(x), weights


@program()
def call_variables_as_arguments(terra):
    """Variables, models and Python objects passed as arguments, returned as they are."""
    variables = [tf.Variable(tf.ones([4])), tf.Variable(tf.zeros([4]))]

    @terra.function
    def step(source, target, x):
        target.assign(target + source * tf.reduce_mean(x, axis=0))
        return target

    for x, _ in regression(terra.iterations):
        yield step(variables[0], variables[1], x) is variables[1]
    yield variables


@program(coexecuted=4, fallbacks=(0, None))
def call_other_variables_each_time(terra):
    """One step function for two models in turn: the same code, other variables."""
    models = [[tf.Variable(tf.random.normal([4, 1]))] for _ in range(2)]

    @terra.function
    def train_step(variables, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ variables[0] - y) ** 2)
        variables[0].assign_sub(0.1 * tape.gradient(loss, variables[0]))
        return loss

    for turn, (x, y) in enumerate(regression(terra.iterations)):
        yield train_step(models[turn % 2], x, y)
    yield models


@program(coexecuted=4)
def call_step_redefined(terra):
    """The step is defined anew half way, as in a notebook cell that runs again."""
    weights = tf.Variable(tf.ones([4, 1]))
    for factor in (1.0, 2.0):

        @terra.function
        def step(x, factor=factor):
            weights.assign_sub(0.01 * factor * tf.ones([4, 1]))
            return tf.reduce_sum(x @ weights) * factor

        for x, _ in regression(terra.iterations // 2):
            yield step(x)
    yield weights


@program()
def call_result_as_next_argument(terra):
    """State that goes round: what a step returns is what the next one gets."""

    @terra.function
    def step(position, velocity):
        velocity = velocity - 0.1 * position
        return position + 0.1 * velocity, velocity

    state = tf.constant([1.0, 2.0]), tf.zeros([2])
    for _ in range(terra.iterations):
        state = step(*state)
    yield state


@program()
def call_results_used_outside(terra):
    """Returned tensors in eager ops, in NumPy, in a `tf.function`, in a dataset, as keys."""
    step = terra.function(lambda x: (tf.reduce_sum(x, axis=1), tf.cast(x > 0, tf.int64)))
    squared = tf.function(lambda x: x * x)
    by_reference = {}
    for x, _ in regression(terra.iterations):
        sums, signs = step(x)
        by_reference[sums.ref()] = len(by_reference)
        yield squared(sums), sums.numpy()[::2], tf.cumsum(signs), sums + 1.0
        yield list(tf.data.Dataset.from_tensor_slices(signs).batch(3))
    yield list(by_reference.values()), [tensor.deref() for tensor in by_reference]
