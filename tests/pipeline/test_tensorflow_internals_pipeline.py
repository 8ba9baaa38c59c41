"""Each touch of TensorFlow's and Keras's private API, so that a new release shows what it broke."""

import gc
import weakref
from contextlib import nullcontext

import keras
import numpy as np
import tensorflow as tf

from pipeline import tensorflow_internals as internals


def test_sublayers_and_seed_generators():
    dropout = keras.layers.Dropout(0.5, seed=7)
    block = keras.Sequential([keras.layers.Dense(2), dropout])
    assert dropout in internals.sublayers(block)
    (generator,) = internals.seed_generators(dropout)
    assert internals.own_seed(generator) == 7
    assert tuple(generator.state.shape) == (2,)
    (unseeded,) = internals.seed_generators(keras.layers.Dropout(0.5))
    assert internals.own_seed(unseeded) is None


def test_global_seed_state_is_what_unseeded_calls_draw_from():
    state = internals.global_seed_state()
    before = np.asarray(state)
    keras.random.normal((2,))
    assert not np.array_equal(before, np.asarray(state))


def test_initializer_seed():
    assert internals.initializer_seed(keras.initializers.GlorotUniform()) is None
    assert internals.initializer_seed(keras.initializers.GlorotUniform(seed=3)) == 3
    assert internals.initializer_seed(keras.initializers.Zeros()) is None


def test_keras_masks():
    embedding = keras.layers.Embedding(4, 2, mask_zero=True)
    out = embedding(np.array([[0, 1]]))
    np.testing.assert_array_equal(internals.keras_mask(out), [[False, True]])
    other = tf.identity(out)
    assert internals.keras_mask(other) is None
    internals.set_keras_mask(other, tf.constant([[True, True]]))
    assert internals.keras_mask(other) is not None


def test_capture_makes_an_outer_tensor_one_of_the_function():
    outer = tf.constant([1.0, 2.0])

    @tf.function
    def double():
        inner = internals.capture(outer)
        assert not isinstance(inner, type(outer))
        return inner * 2.0

    np.testing.assert_array_equal(double(), [2.0, 4.0])


def test_exact_graphs_are_left_again():
    from tensorflow.python.eager import context

    before = context.context().function_call_options
    with internals.exact_graphs():
        assert context.context().function_call_options is not before
    assert context.context().function_call_options is before


def test_exact_graphs_compute_every_op_as_it_stands():
    # Grappler would replace a product with 0.1 twice by one with 0.01, which rounds otherwise.
    x = tf.constant(np.random.default_rng(0).normal(size=1000).astype("float32"))

    @tf.function
    def scaled(x):
        return (x * 0.1) * 0.1

    with internals.exact_graphs():
        np.testing.assert_array_equal(scaled(x), (x * 0.1) * 0.1)


def test_nbytes():
    assert internals.nbytes(tf.zeros([3, 5], tf.float16)) == 30
    assert internals.nbytes(tf.constant(1.0)) == 4


def test_view_of_a_variable_shares_its_value():
    variable = tf.Variable([1.0, 2.0], name="dense/kernel")
    view = internals.as_keras_variable(variable)
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([view])
    optimizer.apply_gradients([(tf.constant([1.0, 1.0]), view)])
    np.testing.assert_array_equal(variable, [0.0, 1.0])


def test_direct_updates_are_the_same_and_leave_no_graph():
    def train(direct):
        variable = keras.Variable(np.ones((3, 2), "float32"))
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1, clipnorm=0.5))
        optimizer.build([variable])

        @tf.function(autograph=False)
        def update():
            gradient = tf.reshape(tf.range(6.0), (3, 2))
            with internals.direct_updates(optimizer) if direct else nullcontext():
                optimizer.apply_gradients([(gradient, variable)])

        for _ in range(3):
            update()
        assert "_backend_update_step" not in vars(optimizer.inner_optimizer)
        return variable.numpy(), weakref.ref(update.get_concrete_function().graph)

    plain, _ = train(direct=False)
    direct, graph = train(direct=True)
    np.testing.assert_array_equal(direct, plain)
    gc.collect()
    assert graph() is None
