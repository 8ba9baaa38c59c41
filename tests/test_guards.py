"""What delegation's guards see: every attribute of layers and optimizers, changed between steps.

A property test. Every attribute that can be reached from a model, a loss, an optimizer or a
metric gets another value, one after the other. Where a call's State says that all is as it was,
plain eager execution of that call has to give what it gave before: the same result and the same
variables.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from terra_tf import tensorflow_internals
from terra_tf.delegation.state import StateBuilder

CALLS = ("model", "loss", "optimizer", "metric")


def dense():
    return keras.layers.Dense(
        4,
        activation="tanh",
        kernel_regularizer=keras.regularizers.L2(1e-2),
        bias_constraint=keras.constraints.MaxNorm(2.0),
    )


# Name → (layers, shape of an input, type).
MODELS: dict[str, tuple[Callable[[], list[keras.Layer]], tuple[int, ...]]] = {
    "dense": (lambda: [dense(), keras.layers.Dropout(0.3, seed=1)], (5,)),
    "normalizing": (
        lambda: [keras.layers.BatchNormalization(), keras.layers.LayerNormalization()],
        (5,),
    ),
    "convolution": (
        lambda: [keras.layers.Conv2D(3, 3, padding="same"), keras.layers.MaxPooling2D()],
        (4, 4, 2),
    ),
    "embedding": (
        lambda: [keras.layers.Embedding(9, 4, mask_zero=True), keras.layers.LSTM(3)],
        (3,),
    ),
    "attention": (lambda: [Attention(), keras.layers.Flatten()], (3, 4)),
    "activations": (
        lambda: [keras.layers.LeakyReLU(), keras.layers.ReLU(2.0), keras.layers.Softmax()],
        (5,),
    ),
    "nested": (
        lambda: [keras.Sequential([dense(), keras.layers.Rescaling(2.0)]), keras.layers.ELU()],
        (5,),
    ),
}

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.05, 10, 0.9), clipnorm=1.0
    ),
    "adamw": lambda: keras.optimizers.AdamW(0.05, use_ema=True, ema_momentum=0.5),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.05, momentum=0.5, centered=True),
}


class Attention(keras.layers.MultiHeadAttention):
    """Attention of a tensor to itself, so that a `Sequential` can hold it."""

    def __init__(self):
        super().__init__(2, 3)

    def build(self, shape):
        super().build(shape, shape)

    def compute_output_spec(self, x, training=None):
        return super().compute_output_spec(x, x)

    def call(self, x, training=None):
        return super().call(x, x, training=training)


class Program:
    """A model, a loss, a metric and an optimizer, and what each does with fixed tensors."""

    def __init__(self, model: str, optimizer: str):
        keras.utils.set_random_seed(7)
        layers, shape = MODELS[model]
        self.model = keras.Sequential([*layers(), keras.layers.Dense(3)])
        self.optimizer = OPTIMIZERS[optimizer]()
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.metric = keras.metrics.SparseCategoricalAccuracy()
        rng = np.random.default_rng(0)
        whole = model == "embedding"
        x = rng.integers(0, 9, (6, *shape)) if whole else rng.normal(size=(6, *shape))
        self.x = tf.constant(x, tf.int32 if whole else tf.float32)
        self.y = tf.constant(rng.integers(0, 3, 6))
        self.logits = tf.constant(rng.normal(size=(6, 3)), tf.float32)
        self.model(self.x)
        self.trained = list(self.model.trainable_variables)
        self.optimizer.build(self.trained)
        self.gradients = [tf.ones_like(v) * 0.1 for v in self.trained]
        parts = (self.model, self.optimizer, self.metric)
        self.variables = [v.value for part in parts for v in part.variables]
        self.start = [v.numpy() for v in self.variables]

    def call_model(self) -> Any:
        return self.model(self.x, training=True), list(self.model.losses)

    def call_loss(self) -> Any:
        return self.loss(self.y, self.logits)

    def call_optimizer(self) -> Any:
        self.optimizer.apply(self.gradients, self.trained)

    def call_metric(self) -> Any:
        self.metric.update_state(self.y, self.logits)

    def outcome(self, call: str) -> Any:
        """What a call returns and what it leaves in all variables, or the type of its error."""
        for variable, value in zip(self.variables, self.start, strict=True):
            variable.assign(value)
        tf.random.set_seed(3)
        try:
            result = getattr(self, f"call_{call}")()
        except Exception as error:
            return type(error)
        return tf.nest.map_structure(np.asarray, (result, self.variables))

    def roots(self, call: str) -> list[Any]:
        """The objects among a call's arguments, the callee with them."""
        return [getattr(self, call), *(self.trained if call == "optimizer" else ())]


# --- what can be changed ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """An attribute or item that is reached from a program, and how."""

    path: tuple[str | int, ...]

    def owner(self, program: Program) -> Any:
        found = program
        for part in self.path[:-1]:
            found = inside(found)[part]
        return found

    def get(self, program: Program) -> Any:
        return inside(self.owner(program))[self.path[-1]]

    def set(self, program: Program, value: Any) -> None:
        owner, part = self.owner(program), self.path[-1]
        if isinstance(owner, (list, dict)):
            owner[part] = value
        else:
            # As most programs do; properties of Keras refuse what cannot be set.
            object.__setattr__(owner, part, value)

    def __str__(self) -> str:
        return ".".join(map(str, self.path))


def inside(thing: Any) -> dict[Any, Any]:
    if isinstance(thing, dict):
        return thing
    if isinstance(thing, list):
        return dict(enumerate(thing))
    return getattr(thing, "__dict__", {})


def is_walked(thing: Any) -> bool:
    if isinstance(thing, (list, dict)):
        return True
    if callable_alone(thing) or type(thing).__name__ in MADE_ONCE:
        return False
    return type(thing).__module__.split(".")[0] in ("keras", __name__)


# What a model's graph of layers was made of, which Keras has no way to change.
MADE_ONCE = ("Node", "SymbolicArguments", "KerasTensor")


def callable_alone(thing: Any) -> bool:
    return isinstance(thing, type) or type(thing).__name__ in ("function", "method")


def places(program: Program) -> Iterator[Place]:
    """Everything that can be reached, each object once."""
    seen: set[int] = set()
    waiting: list[tuple[tuple[Any, ...], Any]] = [
        ((name,), getattr(program, name)) for name in ("model", "loss", "metric", "optimizer")
    ]
    while waiting:
        path, thing = waiting.pop()
        if id(thing) in seen or len(path) > 7:
            continue
        seen.add(id(thing))
        for part, value in inside(thing).items():
            yield Place((*path, part))
            if is_walked(value):
                waiting.append(((*path, part), value))


def others(value: Any) -> list[Any]:
    """Values that could stand where `value` does."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1]
        case float():
            return [value * 0.5 + 0.125]
        case str():
            return [{"same": "valid", "channels_last": "channels_first"}.get(value, value + "_")]
        case None:
            return [0.25]
        case tuple() if value and all(isinstance(v, int) for v in value):
            return [tuple(v + 1 for v in value)]
        case list() if value:
            return [value[:-1]]
        case keras.DTypePolicy():
            return [keras.DTypePolicy("float64")]
    if callable_alone(value) and not isinstance(value, type):
        return [keras.activations.gelu]
    return []


def watched(program: Program, call: str) -> StateBuilder:
    builder = StateBuilder()
    builder.add((*tensorflow_internals.thread_state(), *program.roots(call)))
    return builder


def check(model: str, optimizer: str, sample: float) -> None:
    program = Program(model, optimizer)
    for call in CALLS:
        program.outcome(call)
    truth = {call: program.outcome(call) for call in CALLS}
    states = {call: watched(program, call) for call in CALLS}
    for call, state in states.items():
        assert program.outcome(call) is not None and state.state.holds(), state.difference()
    every = [
        (place, which)
        for place in places(program)
        for which in range(len(others(place.get(program))))
    ]
    chosen = random.Random(f"{model} {optimizer}").sample(every, round(len(every) * sample))
    unseen = []
    for place, which in chosen:
        old = place.get(program)
        other = others(old)[which]
        for call in CALLS:
            if not states[call].state.holds():  # a call with another value has left something
                states[call] = watched(program, call)
            place.set(program, other)
            try:
                if states[call].state.holds() and not same(program.outcome(call), truth[call]):
                    unseen.append(f"{call} does not see that {place} ({old!r}) became {other!r}")
            finally:
                place.set(program, old)
    assert not unseen, "\n".join(unseen)


def same(found: Any, expected: Any) -> bool:
    try:
        np.testing.assert_equal(found, expected)
    except AssertionError:
        return False
    return True


PAIRS = [(model, "sgd") for model in MODELS]
PAIRS += [("dense", optimizer) for optimizer in OPTIMIZERS if optimizer != "sgd"]


@pytest.mark.parametrize(("model", "optimizer"), PAIRS)
def test_a_changed_attribute_is_seen(model, optimizer):
    check(model, optimizer, 0.03)


class Holder:
    """Something with an attribute."""


def test_of_the_layer_around_a_call_only_what_calls_inside_ask_for_matters():
    layer, holder = keras.layers.Dense(2), Holder()
    # As `tf_keras` keeps it while `layer` is called; `frozen` says whether it is trainable.
    context = {"layer": layer, "inputs": None, "build_graph": False, "training": True}
    holder.state = context
    builder = StateBuilder()
    builder.add([holder])
    layer.units = 3
    assert builder.state.holds(), builder.difference()
    holder.state = dict(context, inputs=1)
    assert builder.state.holds(), builder.difference()
    layer.trainable = False
    assert not builder.state.holds()
    layer.trainable = True
    assert builder.state.holds()
    holder.state = dict(context, layer=keras.layers.Dense(2))
    assert not builder.state.holds()


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("model", "optimizer"), PAIRS)
def test_every_changed_attribute_is_seen(model, optimizer):
    check(model, optimizer, 1.0)
