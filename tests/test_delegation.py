"""Delegated library calls: they are skipped where nothing has changed, and nowhere else.

Each test runs the same program twice, eagerly and as a step, from equal state; eager is the truth.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import terra_tf as terra
from terra_tf.runners.retreat import Retreat

STEPS = 8
WARM = 5  # steps after which everything that can be delegated is


@pytest.fixture(autouse=True)
def never_retreats(monkeypatch):
    """The step may not decide by the clock that it stays eager."""
    monkeypatch.setattr(Retreat, "stay_eager", lambda self: False)


def data(step: int) -> tuple[tf.Tensor, tf.Tensor]:
    rng = np.random.default_rng(step)
    x = tf.constant(rng.normal(size=(6, 5)), tf.float32)
    return x, tf.constant(rng.integers(0, 3, 6))


class Program:
    """A training step with a model, a loss, a metric and an optimizer of its own."""

    def __init__(self, layers=None, optimizer=None):
        keras.utils.set_random_seed(7)
        self.model = keras.Sequential(layers() if layers else default_layers())
        self.model.build((None, 5))
        self.optimizer = optimizer() if optimizer else keras.optimizers.Adam(0.05)
        self.optimizer.build(self.model.trainable_variables)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.metric = keras.metrics.SparseCategoricalAccuracy()
        self.training = True

    def step(self, x, y):
        with tf.GradientTape() as tape:
            logits = self.model(x, training=self.training)
            loss = self.loss(y, logits)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.metric.update_state(y, logits)
        return loss

    def state(self) -> list[np.ndarray]:
        variables = self.model.variables + self.optimizer.variables + self.metric.variables
        return [np.asarray(v) for v in variables]


def default_layers() -> list[keras.Layer]:
    return [
        keras.layers.Dense(8, activation="relu"),
        keras.layers.LayerNormalization(),
        keras.layers.Dropout(0.3, seed=3),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(3),
    ]


def outcome(step, x, y):
    try:
        return step(x, y)
    except Exception as error:
        return error


def same(expected, found) -> bool:
    if isinstance(expected, Exception) or isinstance(found, Exception):
        return type(expected) is type(found)
    return np.array_equal(np.asarray(expected), np.asarray(found), equal_nan=True)


class Pair:
    """The same program twice: eager and as a step."""

    def __init__(self, make):
        self.eager, self.ours = make(), make()
        self.stepped = terra.function(self.ours.step)
        self.count = 0

    def run(self, steps: int = 1) -> None:
        """Runs some steps of both and compares what they return and leave."""
        for _ in range(steps):
            x, y = data(self.count)
            tf.random.set_seed(self.count)
            expected = outcome(self.eager.step, x, y)
            tf.random.set_seed(self.count)
            found = outcome(self.stepped, x, y)
            assert same(expected, found), (self.count, expected, found)
            self.count += 1
        for one, other in zip(self.eager.state(), self.ours.state(), strict=True):
            np.testing.assert_array_equal(one, other)

    def change(self, change) -> None:
        """Makes the same change to both, and runs on."""
        change(self.eager)
        change(self.ours)
        self.run(2)

    @property
    def delegated(self) -> int:
        return self.stepped.stats().delegated_calls


@pytest.fixture
def pair():
    pair = Pair(Program)
    pair.run(WARM)
    return pair


def delegated_in(pair: Pair, steps: int = 1) -> int:
    before = pair.delegated
    pair.run(steps)
    return pair.delegated - before


class Distributed(Program):
    """The step as Keras's `fit` runs it: by a strategy, which AutoGraph leaves alone."""

    def step(self, x, y):
        plain = super().step

        @tf.autograph.experimental.do_not_convert
        def run():
            return tf.distribute.get_strategy().run(plain, args=(x, y))

        return run()


def test_the_calls_of_a_step_that_a_strategy_runs_are_delegated():
    pair = Pair(Distributed)
    pair.run(WARM)
    assert delegated_in(pair, STEPS) == 5 * STEPS


def test_a_model_that_holds_its_own_step_is_delegated(pair):
    """What Terra counts in a step is no state of the model's."""
    pair.ours.model.own_step = pair.stepped
    pair.run(WARM)
    assert delegated_in(pair) == 5


def test_the_calls_of_a_keras_step_are_delegated(pair):
    # model, loss, gradient, optimizer, metric
    assert delegated_in(pair, STEPS) == 5 * STEPS
    assert pair.stepped.stats().fallen_back == 0


def set_learning_rate(program):
    program.optimizer.learning_rate = 0.5


def freeze_a_layer(program):
    program.model.layers[0].trainable = False


def change_activation(program):
    program.model.layers[0].activation = keras.activations.tanh


def change_rate(program):
    program.model.layers[2].rate = 0.6


def evaluate_instead(program):
    program.training = False


def change_epsilon(program):
    program.optimizer.epsilon = 0.1


def clip(program):
    program.optimizer.clipnorm = 0.01


def change_reduction(program):
    program.loss.reduction = "sum"


def another_model(program):
    program.model = Program().model
    program.optimizer = Program().optimizer
    program.optimizer.build(program.model.trainable_variables)


def another_optimizer(program):
    program.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    program.optimizer.build(program.model.trainable_variables)


def patch_an_instance(program):
    layer = program.model.layers[0]
    layer.call = lambda x, training=None: 2 * type(layer).call(layer, x)


def use_a_regularizer(program):
    program.model.layers[0].activity_regularizer = keras.regularizers.L2(0.1)


@pytest.mark.parametrize(
    "change",
    [
        set_learning_rate,
        freeze_a_layer,
        change_activation,
        change_rate,
        evaluate_instead,
        change_epsilon,
        clip,
        change_reduction,
        another_model,
        another_optimizer,
        patch_an_instance,
        use_a_regularizer,
    ],
)
def test_a_change_is_seen(pair, change):
    pair.change(change)
    pair.run(2)


def test_a_patched_class_is_seen(pair, monkeypatch):
    original = keras.layers.Dense.call
    monkeypatch.setattr(
        keras.layers.Dense, "call", lambda self, x, training=None: -original(self, x)
    )
    pair.run(3)
    monkeypatch.undo()
    pair.run(3)


def test_a_patched_function_of_the_library_is_seen(pair, monkeypatch):
    from keras.src.backend import tensorflow as backend

    original = backend.nn.relu
    monkeypatch.setattr(backend.nn, "relu", lambda x: original(x) + 1)
    pair.run(3)
    monkeypatch.undo()
    pair.run(3)


class Counting(keras.layers.Layer):
    """A layer of the user's, whose Python has to run every time."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(5)
        self.calls = []

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        self.calls.append(len(self.calls))
        return self.dense(x) * (1.0 if len(self.calls) % 2 else 0.5)


def test_the_python_of_a_users_layer_runs_every_time():
    pair = Pair(lambda: Program(lambda: [Counting(), *default_layers()]))
    pair.run(STEPS)
    eager, ours = (program.model.layers[0].calls for program in (pair.eager, pair.ours))
    assert ours == eager
    assert pair.delegated > 0  # the library's layers beside it


def test_users_functions_inside_of_library_layers_run_every_time():
    calls = []

    def activation(x):
        calls.append(1)
        return tf.nn.relu(x)

    pair = Pair(lambda: Program(lambda: [keras.layers.Dense(8, activation=activation)]))
    before = len(calls)  # building calls it, too
    pair.run(STEPS)
    assert len(calls) - before == 2 * STEPS


@pytest.mark.parametrize(
    "optimizer", ["SGD", "RMSprop", "AdamW", "Adagrad", "Nadam", "Ftrl", "Lion"]
)
def test_optimizers(optimizer):
    pair = Pair(lambda: Program(optimizer=lambda: getattr(keras.optimizers, optimizer)(0.01)))
    pair.run(STEPS)
    assert delegated_in(pair) == 5


def test_a_profiler_sees_library_code(pair):
    seen = set()
    sys.setprofile(lambda frame, event, argument: seen.add(frame.f_code.co_name))
    try:
        x, y = data(0)
        pair.stepped(x, y)
    finally:
        sys.setprofile(None)
    assert "apply_gradients" in seen and "call" in seen


def test_tapes_that_go_other_ways(pair):
    class Tapes(Program):
        persistent = True
        watching = True

        def step(self, x, y):
            with tf.GradientTape(persistent=self.persistent) as outer:
                outer.watch(x)
                with tf.GradientTape(watch_accessed_variables=self.watching) as inner:
                    inner.watch(x)
                    loss = self.loss(y, self.model(x, training=False))
                slope = inner.gradient(loss, x)
                penalty = tf.reduce_sum(slope**2)
            variables = self.model.trainable_variables
            gradients = outer.gradient(penalty, variables)
            self.optimizer.apply_gradients(
                (g, v) for g, v in zip(gradients, variables, strict=True) if g is not None
            )
            return loss + penalty

    pair = Pair(Tapes)
    pair.run(STEPS)

    def not_persistent(program):
        program.persistent = False

    def not_watching(program):
        program.watching = False

    pair.change(not_persistent)
    pair.change(not_watching)
    pair.run(2)


def test_embeddings_give_indexed_slices():
    class Words(Program):
        def __init__(self):
            super().__init__(lambda: [keras.layers.Dense(3)])
            self.table = keras.layers.Embedding(10, 5)
            self.table.build(None)
            self.optimizer = keras.optimizers.Adam(0.1)
            self.optimizer.build(self.table.trainable_variables + self.model.trainable_variables)

        def step(self, x, y):
            with tf.GradientTape() as tape:
                words = tf.cast(tf.abs(x[:, 0]) * 3, tf.int32)
                loss = self.loss(y, self.model(self.table(words)))
            variables = self.table.trainable_variables + self.model.trainable_variables
            gradients = tape.gradient(loss, variables)
            assert isinstance(gradients[0], tf.IndexedSlices)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

    pair = Pair(Words)
    pair.run(STEPS)
    assert pair.delegated > 0


def test_masks_travel_with_tensors():
    class Masked(Program):
        def __init__(self):
            super().__init__(lambda: [keras.layers.Dense(3)])
            self.mask = keras.layers.Masking()
            self.rnn = keras.layers.SimpleRNN(5)
            self.rnn.build((None, 5, 1))

        def step(self, x, y):
            x = tf.where(x > 0, x, 0)[..., None]
            return self.loss(y, self.model(self.rnn(self.mask(x))))

    pair = Pair(Masked)
    pair.run(STEPS)


def test_varying_batches_are_delegated_once_each_was_seen():
    class Batches(Program):
        calls = 0

        def run(self, step, x, y):
            size = 2 + self.calls % 3
            self.calls += 1
            return step(x[:size], y[:size])

    eager, ours = Batches(), Batches()
    stepped = terra.function(ours.step)

    def run(count):
        for number in range(count):
            x, y = data(number)
            expected = eager.run(eager.step, x, y)
            np.testing.assert_array_equal(expected, ours.run(stepped, x, y))

    run(24)
    before = stepped.stats().delegated_calls
    run(6)
    assert stepped.stats().delegated_calls - before == 5 * 6
    for one, other in zip(eager.state(), ours.state(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_arguments_that_cannot_be_described_are_passed_on():
    class Arrays(Program):
        def step(self, x, y):
            self.metric.update_state(y.numpy(), self.model(x, training=False))
            return self.metric.result()

    pair = Pair(Arrays)
    pair.run(STEPS)


def test_a_small_tensor_from_outside_is_not_taken_for_the_one_from_before():
    """Graphs have small tensors that never change as constants."""
    multiply = keras.layers.Multiply()
    scale = [tf.constant([2.0, 3.0])]

    def step(x):
        return multiply([tf.sin(x), scale[0]])

    co_executed = terra.function(step)
    for turn in range(12):
        if turn == 8:
            assert co_executed.stats().delegated_calls > 0
            scale[0] = tf.constant([5.0, 7.0])
        x = tf.constant([float(turn), 2.0])
        assert np.array_equal(co_executed(x), step(x)), turn


def test_each_of_many_sizes_is_learned_the_first_time_it_comes():
    """Sentences of a dozen lengths, through a table and a layer, and the gradient of that."""
    table = tf.Variable(tf.random.stateless_normal([50, 8], [1, 2]))
    layer = keras.layers.Dense(8)
    layer.build((None, None, 8))
    optimizer = keras.optimizers.SGD(0.01)
    batches = [tf.zeros([2, length], tf.int32) for length in range(3, 15)]

    def step(tokens):
        with tf.GradientTape() as tape:
            places = tf.nn.embedding_lookup(table, tf.range(tf.shape(tokens)[1]))
            x = layer(tf.nn.embedding_lookup(table, tokens) + places)
            loss = tf.reduce_mean(x * x)
        weights = [table, *layer.trainable_variables]
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    coexecuted = terra.function(step)
    for tokens in [*batches[:3], *batches]:
        coexecuted(tokens)
    delegated = []
    for tokens in batches:
        before = coexecuted.stats()
        coexecuted(tokens)
        after = coexecuted.stats()
        assert after.coexecuted == before.coexecuted + 1
        delegated.append(after.delegated_calls - before.delegated_calls)
    assert delegated == [max(delegated)] * len(batches)
    assert delegated[0] > 0
