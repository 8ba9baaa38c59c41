"""Each touch of TensorFlow's and Keras's private API, so that a new release shows what it broke."""

import gc
import weakref
from contextlib import nullcontext

import keras
import numpy as np
import pytest
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


def test_losses_that_a_layer_and_its_parts_added():
    class Adding(keras.Layer):
        def __init__(self, part=None):
            super().__init__()
            self.part = part

        def call(self, x):
            self.add_loss(tf.reduce_sum(x))
            return x if self.part is None else self.part(x)

    layer = Adding(Adding())
    layer(tf.ones([2]))
    assert [float(loss) for loss in internals.added_losses(layer)] == [2, 2]
    internals.clear_added_losses(layer)
    assert internals.added_losses(layer) == []


def test_every_random_op_is_redirected_and_left_again():
    tf.random.set_seed(1)
    generator = tf.random.Generator.from_seed(1)
    drawing = [
        lambda: tf.random.uniform([4]),
        lambda: tf.random.uniform([4], 0, 99, tf.int32),
        lambda: tf.random.normal([4]),
        lambda: tf.random.truncated_normal([4]),
        lambda: tf.random.categorical(tf.zeros([1, 99]), 4),
        lambda: tf.random.shuffle(tf.range(99)),
        lambda: tf.random.gamma([4], 1.0),
        lambda: tf.random.poisson([4], 99.0),
        lambda: tf.nn.dropout(tf.ones([99]), 0.5),
        lambda: generator.normal([4]),
        lambda: generator.binomial([4], 99.0, 0.5),
    ]
    for draw in drawing:
        with internals.random_ops_from(lambda own: tf.constant([1, own], tf.int64)):
            first, again = draw(), draw()
        with internals.random_ops_from(lambda own: tf.constant([2, own], tf.int64)):
            other = draw()
        np.testing.assert_array_equal(first, again)
        assert (first.numpy() != other.numpy()).any()
        assert (draw().numpy() != draw().numpy()).any(), "the program's own are as before"


def test_inner_functions_are_inlined_or_copied():
    traced = []

    @tf.function
    def inner(x):
        traced.append(x)
        return x * 2.0 if tf.reduce_sum(x) > 0 else x  # needs autograph

    @tf.function(autograph=False)
    def outer(x):
        with internals.inner_functions("inline"):
            return inner(x)

    x = tf.constant([1.0])
    np.testing.assert_array_equal(outer(x), [2.0])
    types = {op.type for op in outer.get_concrete_function(x).graph.get_operations()}
    assert not {"PartitionedCall", "StatefulPartitionedCall"} & types
    inner(x)
    count = len(traced)
    with internals.inner_functions("copy"):
        inner(x)
        inner(x)
    assert len(traced) == count + 1, "the copy is traced once"
    inner(x)
    assert len(traced) == count + 1


def test_legacy_optimizers_get_their_slots():
    import tf_keras

    optimizer = tf_keras.optimizers.legacy.Adam(0.1)
    variable = tf.Variable([1.0, 2.0])
    internals.make_legacy_slots(optimizer, [variable])
    assert optimizer.get_slot(variable, "m").shape == [2]
    settings = internals.legacy_settings(optimizer)
    assert float(settings["learning_rate"]) == pytest.approx(0.1)


def test_recorded_ops_gradients_and_runs():
    x, weight = tf.constant([1.0, 2.0]), tf.Variable([3.0, 4.0])
    seen, functions = [], []

    @tf.function
    def inner(x):
        return tf.exp(x)

    with internals.recorded_ops(
        [x, weight.handle], lambda *op: seen.append(op), lambda *call: functions.append(call)
    ):
        inner(x * weight)
        with tf.init_scope():
            pass
    types = [op[0] for op in seen]
    assert types[:2] == ["ReadVariableOp", "Mul"]
    (name, outputs, inputs, backward) = functions[0]
    assert inputs[0] is seen[1][3][0]
    np.testing.assert_allclose(backward(*[tf.ones_like(t) for t in outputs])[0], np.exp([3.0, 8.0]))
    _, inputs, attrs, outputs = seen[1]
    found = internals.op_gradient("Mul", attrs, list(inputs), outputs, [tf.ones([2])], ())
    np.testing.assert_array_equal(found[0], [3.0, 4.0])
    np.testing.assert_array_equal(internals.run_op("Mul", list(inputs), attrs, 1)[0], [3.0, 8.0])
    assert len(seen) == len(types), "nothing is told afterwards"


def test_recording_leaves_tensorflow_as_it_was():
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import execute, record

    def entry_points():
        return pywrap_tfe.TFE_Py_FastPathExecute, execute.record_gradient, record.record_operation

    def recording():
        return internals.recorded_ops([], lambda *op: None, lambda *call: None)

    before = entry_points()
    with recording():
        inside = entry_points()
        with recording():
            assert entry_points() == inside
        assert entry_points() == inside
    assert not set(inside) & set(before)
    assert entry_points() == before
    with pytest.raises(KeyError), recording():
        raise KeyError
    assert entry_points() == before


def test_what_is_known_of_op_types():
    assert internals.has_gradient("MatMul") and not internals.has_gradient("Shape")
    assert not internals.has_gradient("NoSuchOp")
    assert internals.is_stateful("RandomUniform") and not internals.is_stateful("MatMul")
    assert internals.is_trainable_type(tf.float16) and not internals.is_trainable_type(tf.int32)


def test_literal_graphs_keep_every_node_and_are_left_again(tmp_path):
    from tensorflow.python.eager import context

    @tf.function
    def step(x):
        # Grappler would remove both negations.
        return tf.raw_ops.Neg(x=tf.raw_ops.Neg(x=x, name="one"), name="other")

    before = context.context().function_call_options
    with internals.literal_graphs():
        step(tf.constant(1.0))
        tf.profiler.experimental.start(
            str(tmp_path), tf.profiler.experimental.ProfilerOptions(2, 0, 0)
        )
        step(tf.constant(1.0))
        tf.profiler.experimental.stop()
    assert context.context().function_call_options is before
    (path,) = tmp_path.rglob("*.xplane.pb")
    names = {
        plane.event_metadata[event.metadata_id].name
        for plane in internals.read_trace(str(path)).planes
        for line in plane.lines
        for event in line.events
    }
    assert {"one:Neg", "other:Neg"} <= names
