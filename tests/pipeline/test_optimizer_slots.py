"""What an optimizer keeps: saved from one and put into another, training goes on bit-equal."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from pipeline.communication.collectives import Collectives
from pipeline.runtime.model import raw
from pipeline.runtime.optimizer import Updater

NAMES = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lamb",
    "Lion",
    "Muon",
    "Nadam",
    "RMSprop",
    "SGD",
    "ScheduleFreeAdamW",
)
HOMES = {
    "keras": keras.optimizers,
    "tf_keras": tf_keras.optimizers,
    "legacy": tf_keras.optimizers.legacy,
}
OPTIONS = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}}
# They count in Python, have a state for all weights, or wrap another optimizer.
SAMPLE = {("tf_keras", "Nadam"), ("legacy", "Nadam"), ("keras", "Muon"), ("keras", "scaled")}


class Counting(keras.optimizers.SGD):
    """One of a user, which counts in Python from the beginning."""

    def __init__(self):
        super().__init__(0.1)
        self.updates = 0

    def apply(self, gradients, variables):
        self.updates += 1
        return super().apply([g * float(self.updates) for g in gradients], variables)


def optimizers():
    for home, module in HOMES.items():
        for name in NAMES:
            if hasattr(module, name):
                yield home, name, lambda m=module, n=name: getattr(m, n)(**OPTIONS.get(n, {}))
    scaled = keras.optimizers.LossScaleOptimizer
    yield "keras", "scaled", lambda: scaled(keras.optimizers.Adam(), dynamic_growth_steps=2)
    yield "keras", "averaged", lambda: keras.optimizers.Adam(use_ema=True)
    yield "keras", "counting", Counting


def parameters():
    for home, name, make in optimizers():
        marks = [] if (home, name) in SAMPLE or name == "counting" else [pytest.mark.full]
        yield pytest.param(make, id=f"{home}-{name}", marks=marks)


def updater_of(make):
    weights = [keras.Variable(np.ones((3, 4), "float32")), keras.Variable(np.ones(4, "float32"))]
    updater = Updater(make(), weights, [True] * 2, [], [0] * 2, Collectives("", 1.0, None))
    return updater, weights


def train(updater, weights, steps):
    for step in steps:
        random = np.random.default_rng(step)
        for weight in weights:
            updater.accumulator_of(weight).assign(random.normal(size=weight.shape))
        updater.apply([True] * 2, 1.0)
    return [weight.numpy() for weight in weights]


def kept(updater, weights):
    """All that a checkpoint has, by name."""
    found = dict(updater.slots.shared())
    for number, weight in enumerate(weights):
        found[f"weight {number}"] = weight
        found |= {f"{n} {number}": v for n, v in updater.slots.of_weight(weight).items()}
    return found


@pytest.mark.parametrize("make", list(parameters()))
def test_training_goes_on_bit_equal(make):
    whole = train(*updater_of(make), range(5))
    first, again = updater_of(make), updater_of(make)
    train(*first, range(3))
    saved, target = kept(*first), kept(*again)
    assert set(saved) == set(target)
    for name, value in saved.items():
        raw(target[name]).assign(tf.convert_to_tensor(raw(value)).numpy())
    for found, expected in zip(train(*again, range(3, 5)), whole, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_learning_rate_that_a_program_sets_is_kept():
    for make in (
        lambda: keras.optimizers.SGD(0.1),
        lambda: tf_keras.optimizers.SGD(0.1),
        lambda: tf_keras.optimizers.legacy.SGD(0.1),
    ):
        (first, weights), (again, others) = updater_of(make), updater_of(make)
        first.optimizer.learning_rate = 0.5
        saved, target = kept(first, weights), kept(again, others)
        for name, value in saved.items():
            raw(target[name]).assign(tf.convert_to_tensor(raw(value)).numpy())
        assert float(tf.convert_to_tensor(again.optimizer.learning_rate)) == 0.5
