"""Random numbers: repeated where a pass is repeated, new for each step, micro-batch and item."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline import tensorflow_internals
from pipeline.runtime.body import StageBody
from pipeline.runtime.model import Model
from pipeline.runtime.random_numbers import building_numbers
from pipeline.runtime.structure import spec_of

X = tf.ones([16, 8])
GENERATOR = tf.random.Generator.from_seed(1)
INNER = tf.function(lambda x: tf.nn.dropout(x, 0.5))


def loop(x):
    """Draws in every turn of a loop, in a graph a loop of the graph's."""
    return tf.while_loop(
        lambda i, y: i < 3,
        lambda i, y: (i + 1, tf.concat([y, tf.random.normal([1, 8])], 0)),
        [0, x],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, 8])],
    )[1]


def legacy_dropout():
    import tf_keras

    return tf_keras.layers.Dropout(0.5, seed=4)


# Each makes a callable that draws random numbers.
DRAWING = {
    "tf.nn.dropout": lambda: lambda x: tf.nn.dropout(x, 0.5),
    "tf.random.uniform": lambda: lambda x: x * tf.random.uniform(tf.shape(x), dtype=x.dtype),
    "integers": lambda: lambda x: x * tf.cast(
        tf.random.uniform(tf.shape(x), 0, 1000, tf.int32), x.dtype),
    "tf.random.normal": lambda: lambda x: x + tf.random.normal(tf.shape(x), seed=3),
    "truncated": lambda: lambda x: x + tf.random.truncated_normal(tf.shape(x)),
    "shuffle": lambda: lambda x: tf.random.shuffle(tf.reshape(tf.range(128.0), [16, 8])),
    "categorical": lambda: lambda x: tf.cast(tf.random.categorical(x, 9), tf.float32),
    "gamma": lambda: lambda x: tf.random.gamma([3], x),
    "poisson": lambda: lambda x: tf.random.poisson([3], x * 30.0),
    "generator": lambda: lambda x: x + GENERATOR.normal(tf.shape(x)),
    "binomial": lambda: lambda x: GENERATOR.binomial([16], 1000.0, 0.5, tf.float32),
    "image": lambda: lambda x: tf.image.random_brightness(x, 0.5),
    "inner function": lambda: lambda x: INNER(x),
    "loop": lambda: loop,
    "keras.random": lambda: lambda x: keras.random.dropout(x, 0.5),
    "keras layer": lambda: keras.layers.Dropout(0.5),
    "tf_keras layer": legacy_dropout,
    "tf.Module": lambda: Noise(),
}  # fmt: skip


class Noise(tf.Module):
    def __call__(self, x):
        return x + tf.random.normal(tf.shape(x))


def make_body(layers, seed=0):
    model = Model(layers, seed)
    model.build(0, len(model), [spec_of(X)])
    return StageBody(model, model.items, spec_of(X), None)


def draw(body, step=0, microbatch=0, traced=True):
    """What the stage makes of ones."""
    seeds = tf.constant(body.random.values(step, microbatch))

    def run(seeds):
        return body.run([X], body.read_weights(), seeds, True).outputs[0]

    return (tf.function(run, autograph=False) if traced else run)(seeds).numpy()


@pytest.mark.parametrize("name", DRAWING)
def test_what_is_drawn_depends_on_seed_item_step_and_microbatch(name):
    make = DRAWING[name]
    first = draw(make_body([make()]))
    body = make_body([make()])
    tf.random.normal([5])  # whatever else the program draws makes no difference
    np.testing.assert_array_equal(draw(body), first)
    np.testing.assert_array_equal(draw(body), first)
    others = [
        draw(body, step=1),
        draw(body, microbatch=1),
        draw(make_body([make()], seed=1)),
        draw(make_body([keras.layers.Identity(), make()])),
    ]
    assert not any(np.array_equal(first, other) for other in others)
    assert len({other.tobytes() for other in others}) == len(others)


@pytest.mark.parametrize("name", sorted(set(DRAWING) - {"loop"}))
def test_python_draws_what_the_graph_draws(name):
    body = make_body([DRAWING[name]()])
    values = body.random.values(2, 3)
    seeds = body.random.python_seeds(values)
    found = [body.run_in_place([X], tf.constant(values), seeds, True).outputs[0] for _ in range(2)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], draw(body, 2, 3))


def test_draws_before_and_in_a_loop_differ():
    def both(x):
        return tf.concat([tf.random.normal([1, 8]), loop(x)[16:]], 0)

    rows = draw(make_body([both]))
    assert len({row.tobytes() for row in rows}) == 4


def test_items_draw_the_same_wherever_the_model_is_cut():
    layers = [lambda x: tf.nn.dropout(x, 0.5), Noise(), lambda x: tf.nn.dropout(x, 0.1)]
    whole = draw(make_body(layers))
    model = Model(layers, 0)
    flowing = X
    for item in model.items:
        body = StageBody(model, [item], spec_of(X), None)
        seeds = tf.constant(body.random.values(0, 0))
        flowing = body.run([flowing], [], seeds, True).outputs[0]
    np.testing.assert_array_equal(flowing, whole)


def test_ops_of_one_item_differ_and_so_do_turns_of_a_loop():
    both = draw(make_body([lambda x: tf.stack([tf.random.normal([50]), tf.random.normal([50])])]))
    assert (both[0] != both[1]).all()
    turns = draw(make_body([loop]))[16:]
    assert len({row.tobytes() for row in turns}) == 3


def test_numbers_are_distributed_as_before():
    def many(x):
        return tf.concat(
            [
                [tf.reduce_mean(tf.random.uniform([40000]))],
                [tf.math.reduce_std(tf.random.normal([40000]))],
                [tf.reduce_mean(tf.cast(tf.nn.dropout(tf.ones([40000]), 0.3) == 0, tf.float32))],
                [tf.reduce_mean(GENERATOR.uniform([40000]))],
                [tf.reduce_mean(tf.random.gamma([40000], 2.0))],
                [tf.reduce_mean(tf.random.poisson([40000], 3.0))],
            ],
            0,
        )

    np.testing.assert_allclose(draw(make_body([many])), [0.5, 1, 0.3, 0.5, 2, 3], rtol=0.03)


def test_the_programs_own_numbers_are_left_alone():
    tf.random.set_seed(5)
    expected = [tf.random.normal([2]).numpy() for _ in range(2)]
    tf.random.set_seed(5)
    found = [tf.random.normal([2]).numpy()]
    draw(make_body([DRAWING["tf.nn.dropout"]()]), traced=False)
    found.append(tf.random.normal([2]).numpy())
    np.testing.assert_array_equal(found, expected)
    random.seed(1)
    state = random.getstate()
    with building_numbers(3):
        random.random()
    assert random.getstate() == state


def test_weights_made_in_a_call_start_alike():
    class Lazy(tf.Module):
        weight = None

        def __call__(self, x):
            if self.weight is None:
                self.weight = tf.Variable(tf.random.normal([8]))
            return x * self.weight

    made = [Lazy(), Lazy(), Lazy()]
    make_body(made[:2])
    make_body(made[2:])
    values = [layer.weight.numpy() for layer in made]
    np.testing.assert_array_equal(values[0], values[2])
    assert (values[0] != values[1]).any()


def test_redirection_is_of_one_thread():
    import threading

    found = []
    with tensorflow_internals.random_ops_from(lambda own: tf.constant([7, own], tf.int64)):
        assert (tf.random.normal([3]).numpy() == tf.random.normal([3]).numpy()).all()
        other = threading.Thread(
            target=lambda: found.extend(tf.random.normal([3]).numpy() for _ in range(2))
        )
        other.start()
        other.join()
    assert (found[0] != found[1]).any()
