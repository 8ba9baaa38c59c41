"""Each private touch of TensorFlow by itself, so that a new release shows which one it broke.

One test for each function of `terra_tf.tensorflow_internals`, then the assumptions of the native
core about tensors, tapes and conversions. The truth is TensorFlow's public API.
"""

import contextlib
import importlib
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop

import terra_tf as terra
from terra_tf import native
from terra_tf import tensorflow_internals as internals
from terra_tf.runners.python_runner import initialise
from terra_tf.tracing.recorder import Recorder

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True, scope="module")
def _initialised():
    initialise()


def text(op):
    """An op's name; TensorFlow gives some as bytes."""
    return op if isinstance(op, str) else op.decode()


@contextlib.contextmanager
def op_callbacks():
    """What TensorFlow tells of the ops in the block: (type, inputs, attributes, outputs)."""
    seen = []

    def callback(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        seen.append((text(op_type), inputs, attrs, outputs))

    internals.add_op_callback(callback)
    try:
        yield seen
    finally:
        internals.remove_op_callback(callback)


@contextlib.contextmanager
def recording():
    """Tensors made in the block are placeholders until its end."""
    recorder = Recorder()
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.abandon()
        native.core.leave()


# ---------------------------------------------------------------- entry points


@pytest.mark.parametrize("name", internals.ENTRY_POINTS)
def test_entry_point_is_replaced_once_by_a_hook_over_tensorflows_own(name):
    hook = internals.entry_point(name)
    assert type(hook) is native.core.Hook
    # TensorFlow's own function, not a hook over a hook.
    assert type(hook.original).__name__ == "builtin_function_or_method"
    assert hook.original.__name__ == name
    initialise()
    native.initialise(lambda _: None)
    assert internals.entry_point(name) is hook is getattr(pywrap_tfe, name)


def test_wrappers_of_ops_call_the_entry_points_by_their_current_names(monkeypatch):
    called = []
    for name in internals.ENTRY_POINTS:
        original = internals.entry_point(name)

        def entry(*args, name=name, original=original):
            called.append((name, args[1 if name == "TFE_Py_FastPathExecute" else 2]))
            return original(*args)

        monkeypatch.setattr(pywrap_tfe, name, entry)

    @tf.function
    def double(x):
        return x + x

    result = double(tf.negative(tf.constant(3.0)))
    assert result.numpy() == -6.0
    names = [(name, text(op)) for name, op in called]
    assert ("TFE_Py_FastPathExecute", "Neg") in names
    assert any(name != "TFE_Py_FastPathExecute" and "double" in op for name, op in names)


def test_fast_path_miss_sends_an_op_to_its_slow_path(monkeypatch):
    slow = []
    execute = internals.entry_point("TFE_Py_Execute")

    def miss(*args):
        raise internals.FastPathMiss

    def noted(*args):
        slow.append(args)
        return execute(*args)

    monkeypatch.setattr(pywrap_tfe, "TFE_Py_FastPathExecute", miss)
    monkeypatch.setattr(pywrap_tfe, "TFE_Py_Execute", noted)
    x = tf.constant([1.5, -2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * 3.0
    assert y.numpy().tolist() == [4.5, -6.0]
    assert tape.gradient(y, x).numpy().tolist() == [3.0, 3.0]
    _, _, op, inputs, attrs, outputs = slow[0]
    assert text(op) == "Mul"
    assert [type(t) for t in inputs] == [internals.EagerTensor] * 2
    assert attrs[0] == "T" and outputs == 1


def test_fast_path_itself_raises_the_miss():
    fast = internals.entry_point("TFE_Py_FastPathExecute").original
    context = internals.context_capsule()
    with pytest.raises(internals.FastPathMiss):
        fast(context, "Neg", None, object())


def test_calls_with_positional_arguments_in_the_expected_order(monkeypatch):
    seen = []
    original = internals.entry_point("TFE_Py_FastPathExecute")

    def entry(*args, **keywords):
        seen.append((args, keywords))
        return original(*args, **keywords)

    monkeypatch.setattr(pywrap_tfe, "TFE_Py_FastPathExecute", entry)
    a = tf.ones([2, 3])
    tf.raw_ops.MatMul(a=a, b=a, transpose_b=True)
    (args, keywords) = seen[-1]
    _, op, name, *rest = args
    assert (op, name, keywords) == ("MatMul", None, {})
    assert rest[0] is a and rest[1] is a
    assert rest[2:6] == ["transpose_a", False, "transpose_b", True]


# ---------------------------------------------------------------- context, device


def test_context_capsule_holds_the_eager_context():
    capsule = internals.context_capsule()
    assert type(capsule).__name__ == "PyCapsule"
    assert internals.context_capsule() is capsule


def test_executing_eagerly_is_false_while_a_function_is_traced():
    seen = []

    @tf.function
    def traced():
        seen.append(internals.executing_eagerly())
        with tf.init_scope():
            seen.append(internals.executing_eagerly())

    traced()
    assert internals.executing_eagerly() is True
    assert seen == [False, True]


def test_tensors_of_the_registered_device_say_that_they_are_on_the_cpu():
    plain = tf.constant(1.0) + 1.0
    with recording():
        placeholder = tf.constant(1.0) + 1.0
        assert native.core.is_placeholder(placeholder)
        assert placeholder.device == plain.device
        assert placeholder.backing_device == plain.backing_device
        assert native.core.is_placeholder(placeholder)  # none of it needed the value


def test_dlpack_shows_the_value_of_a_placeholder():
    with recording():
        placeholder = tf.constant([1.0, 2.0]) + 1.0
        assert native.core.is_placeholder(placeholder)
        capsule = tf.experimental.dlpack.to_dlpack(placeholder)
    assert tf.experimental.dlpack.from_dlpack(capsule).numpy().tolist() == [2.0, 3.0]


# ---------------------------------------------------------------- op callbacks


def test_op_callbacks_tell_complete_attributes_and_converted_inputs():
    a = tf.ones([2, 3])
    with op_callbacks() as seen:
        product = tf.matmul(a, [[1.0], [2.0], [3.0]], transpose_a=False)
        shifted = product * 2.0
    ops = {op: rest for op, *rest in seen}
    inputs, attrs, outputs = ops["MatMul"]
    named = dict(zip(attrs[::2], attrs[1::2], strict=True))
    assert {"transpose_a": False, "transpose_b": False, "T": 1}.items() <= named.items()
    assert all(type(x) is internals.EagerTensor for x in inputs)
    assert inputs[0] is a and outputs[0] is product
    inputs, attrs, outputs = ops["Mul"]
    assert inputs[0] is product and inputs[1].numpy() == 2.0  # the Python number, converted
    assert dict(zip(attrs[::2], attrs[1::2], strict=True))["T"] == 1
    assert outputs[0] is shifted


def test_op_callbacks_belong_to_one_thread_and_end():
    with op_callbacks() as seen:
        thread = threading.Thread(target=lambda: tf.negative(tf.constant(1.0)))
        thread.start()
        thread.join()
        assert seen == []
        tf.negative(tf.constant(1.0))
        count = len(seen)
        assert count > 0
    tf.negative(tf.constant(1.0))
    assert len(seen) == count


def test_op_callbacks_mark_what_is_traced_into_a_graph():
    graphs = []

    def callback(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        graphs.append(graph)

    x = tf.constant(2.0)
    internals.add_op_callback(callback)
    try:
        tf.function(lambda x: x * x).get_concrete_function(x)
    finally:
        internals.remove_op_callback(callback)
    assert graphs and None not in graphs


# ---------------------------------------------------------------- op definitions, raw execution


def test_op_def_knows_ops_and_not_functions():
    definition = internals.op_def("MatMul")
    assert [arg.name for arg in definition.input_arg] == ["a", "b"]
    assert not definition.is_stateful
    assert internals.op_def("AssignVariableOp").is_stateful
    concrete = tf.function(lambda: tf.constant(1.0)).get_concrete_function()
    assert internals.op_def(text(concrete.name)) is None


def test_list_inputs_tells_which_arguments_are_lists():
    assert internals.list_inputs("MatMul") == (False, False)
    assert internals.list_inputs("ConcatV2") == (True, False)
    assert internals.list_inputs("IdentityN") == (True,)


def test_dtype_and_shape_equal_the_public_ones():
    for tensor in (tf.ones([2, 3]), tf.constant("text"), tf.zeros([0], tf.int64), tf.constant(1j)):
        expected = tensor.dtype.as_datatype_enum, tuple(tensor.shape)
        assert internals.dtype_and_shape(tensor) == expected


X = np.arange(-5, 7, dtype=np.float32).reshape(3, 4)

RAW = {
    "one output": lambda x: tf.matmul(x, x, transpose_b=True),
    "several outputs": lambda x: tf.split(x, 2, axis=1),
    "a list as input": lambda x: tf.concat([x, x], axis=0),
    "many attributes": lambda x: x[1:, ::2],
    "a dtype as attribute": lambda x: tf.cast(x, tf.int32),
    "a shape as attribute": lambda x: tf.raw_ops.Squeeze(input=x[None], axis=[0]),
    "a string as attribute": lambda x: tf.raw_ops.LeftShift(
        x=tf.cast(x, tf.int32), y=tf.ones([3, 4], tf.int32)
    ),
    "an optional attribute left out": lambda x: tf.raw_ops.ArgMax(input=x, dimension=1),
    "two results": lambda x: tf.raw_ops.TopKV2(input=x, k=2),
    "a softmax": lambda x: tf.nn.log_softmax(x),
    "a convolution": lambda x: tf.nn.conv2d(
        tf.reshape(x, [1, 3, 4, 1]), tf.ones([2, 2, 1, 1]), strides=1, padding="SAME"
    ),
}


def execute_raw(*op):
    call, arguments = internals.raw_call(*op)
    return call(*arguments)


@pytest.mark.parametrize("case", RAW)
def test_raw_call_equals_the_public_op(case):
    x = tf.constant(X)
    with op_callbacks() as seen:
        RAW[case](x)
    assert seen
    for op, inputs, attrs, outputs in seen:
        if op == "_EagerConst":
            continue
        again = execute_raw(op, inputs, attrs, len(outputs))
        assert [t.dtype for t in again] == [t.dtype for t in outputs]
        assert [t.numpy().tobytes() for t in again] == [t.numpy().tobytes() for t in outputs]


def test_raw_call_takes_none_for_an_attributes_default():
    (result,) = execute_raw(
        "MatMul", [tf.ones([2, 2])] * 2, ("transpose_a", None, "T", tf.float32), 1
    )
    assert result.numpy().tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_raw_call_is_unseen_by_tapes_and_callbacks():
    x = tf.constant(3.0)
    with op_callbacks() as seen, tf.GradientTape() as tape:
        tape.watch(x)
        (y,) = execute_raw("Square", [x], ("T", 1), 1)
    assert y.numpy() == 9.0
    assert seen == []
    assert tape.gradient(y, x) is None


def test_status_error_is_the_public_exception():
    with pytest.raises(tf.errors.InvalidArgumentError) as public:
        tf.raw_ops.MatMul(a=tf.ones([2, 3]), b=tf.ones([2, 3]))
    with pytest.raises(Exception) as raw:  # its class is private
        execute_raw("MatMul", [tf.ones([2, 3])] * 2, ("T", 1), 1)
    error = internals.status_error(raw.value)
    assert type(error) is tf.errors.InvalidArgumentError
    assert "Matrix size-incompatible" in error.message
    assert error.message in public.value.message or "size-incompatible" in public.value.message


def test_status_error_leaves_other_exceptions_alone():
    error = KeyError("x")
    assert internals.status_error(error) is error


# ---------------------------------------------------------------- graphs


def test_create_graph_op_adds_ops_that_compute_what_eager_computes():
    x = tf.constant(X)
    with op_callbacks() as seen:
        eager = tf.reduce_sum(tf.matmul(x, x, transpose_b=True), axis=1, keepdims=True)
    graph = tf.Graph()
    with graph.as_default():
        made = {}
        for op, inputs, attrs, outputs in seen:
            if op == "_EagerConst":
                continue
            given = [made.get(id(t)) for t in inputs]
            for i, t in enumerate(inputs):
                if given[i] is None:
                    given[i] = tf.constant(t.numpy())
            named = dict(zip(attrs[::2], attrs[1::2], strict=True))
            operation = internals.create_graph_op(graph, op, given, {**named, "unknown": 1})
            assert operation.type == op
            made.update(zip(map(id, outputs), operation.outputs, strict=True))
    with tf.compat.v1.Session(graph=graph) as session:
        assert session.run(made[id(eager)]).tobytes() == eager.numpy().tobytes()


def test_create_graph_op_takes_none_for_an_attributes_default():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.ones([2, 2])
        operation = internals.create_graph_op(
            graph, "MatMul", [x, x], {"T": tf.float32, "transpose_a": None, "transpose_b": True}
        )
    assert operation.get_attr("transpose_a") is False
    assert operation.get_attr("transpose_b") is True


def test_add_control_inputs_orders_ops_that_exist():
    with tf.Graph().as_default() as graph:
        first, second = tf.no_op("first"), tf.no_op("second")
        internals.add_control_inputs(graph, second, [first])
    assert list(second.control_inputs) == [first]
    assert list(first.control_inputs) == []


def test_capture_makes_an_outside_handle_an_argument():
    variable = tf.Variable([1.0, 2.0])
    inside = []

    def body():
        graph = tf.compat.v1.get_default_graph()
        inside.append(internals.capture(graph, variable.handle))
        assert internals.capture(graph, variable.handle) is inside[0]
        return tf.raw_ops.ReadVariableOp(resource=inside[0], dtype=tf.float32)

    concrete = tf.function(body).get_concrete_function()
    assert inside[0].op.type == "Placeholder"
    assert concrete.graph.external_captures[0] is variable.handle
    variable.assign([3.0, 4.0])
    assert concrete().numpy().tolist() == [3.0, 4.0]


def test_generated_function_runs_captures_and_keeps_its_order():
    variable = tf.Variable(1.0)

    def build(graph, number):
        handle = internals.capture(graph, variable.handle)
        value = tf.cast(number, tf.float32)
        add = internals.create_graph_op(
            graph, "AssignAddVariableOp", [handle, value], {"dtype": tf.float32}
        )
        # Without automatic control dependencies only what is returned and what it needs is run.
        internals.create_graph_op(
            graph, "AssignAddVariableOp", [handle, tf.constant(100.0)], {"dtype": tf.float32}
        )
        with graph.control_dependencies([add]):
            return [tf.no_op()]

    function = internals.GeneratedFunction("made", tf.TensorSpec([], tf.int64), build)
    assert len(function.captures) == 1 and function.captures[0] is variable.handle
    assert "made" in function.name
    assert isinstance(function.concrete.graph.as_graph_def(), tf.compat.v1.GraphDef)
    assert "arg_0" in str(function.concrete)
    # As the GraphRunner calls it: by name, with the captures after the argument.
    inputs = [tf.constant(5, tf.int64), *function.captures]
    attrs = ("config_proto", internals.function_config(True))
    assert execute_raw(function.name, inputs, attrs, 0) == []
    assert variable.numpy() == 6.0
    function.concrete(tf.constant(4, tf.int64))
    assert variable.numpy() == 10.0


def test_function_config_turns_off_what_changes_results():
    exact = config_pb2.ConfigProto.FromString(internals.function_config(True))
    rewrite = exact.graph_options.rewrite_options
    off = type(rewrite).OFF
    assert rewrite.arithmetic_optimization == off
    assert rewrite.constant_folding == off
    assert rewrite.remapping == off
    fast = config_pb2.ConfigProto.FromString(internals.function_config(False))
    assert fast.graph_options.rewrite_options.remapping != off


# ---------------------------------------------------------------- gradients in progress


@contextlib.contextmanager
def gradients_seen():
    """(op, forward op in progress, its inputs and outputs) for each op in the block."""
    seen = []

    def callback(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        forward = internals.gradient_in_progress()
        seen.append((text(op_type), *(forward or (None, None, None))))

    internals.add_op_callback(callback)
    try:
        yield seen
    finally:
        internals.remove_op_callback(callback)


def test_gradient_in_progress_is_the_forward_op_with_its_tensors():
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.exp(x)
        z = tf.sin(y)
    with gradients_seen() as seen:
        gradient = tape.gradient(z, x)
        tf.cos(gradient)
    (cosine,) = [entry for entry in seen if entry[0] == "Cos" and entry[1] == "Sin"]
    assert cosine[2][0] is y  # the input of tf.sin, whose output its gradient does not need
    products = [entry[1] for entry in seen if entry[0] == "Mul"]
    assert products == ["Sin", "Exp"]
    (outputs,) = [entry[3] for entry in seen if entry[:2] == ("Mul", "Exp")]
    assert outputs[0] is y
    assert seen[-1][:2] == ("Cos", None)  # no gradient is in progress any more
    assert internals.gradient_in_progress() is None


def test_gradient_finished_is_told_once():
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.sin(x) + tf.exp(x)  # two gradients of x, which the tape adds
    internals.gradient_finished()
    finished = []

    def callback(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if internals.gradient_in_progress() is None and text(op_type) == "AddN":
            finished.append((internals.gradient_finished(), internals.gradient_finished()))

    internals.add_op_callback(callback)
    try:
        tape.gradient(y, x)
    finally:
        internals.remove_op_callback(callback)
    (((op, _, _), again),) = finished
    assert op in ("Sin", "Exp")
    assert again is None


def test_a_gradient_function_that_raises_is_not_in_progress_any_more():
    x = tf.ones([3, 2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        q, _ = tf.linalg.qr(x, full_matrices=True)
    with pytest.raises(NotImplementedError):
        tape.gradient(q, x)
    assert internals.gradient_in_progress() is None
    assert internals.gradient_finished()[0] == "Qr"


def test_gradients_of_another_thread_are_not_seen():
    x = tf.constant(X)
    elsewhere = []

    def callback(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        thread = threading.Thread(target=lambda: elsewhere.append(internals.gradient_in_progress()))
        thread.start()
        thread.join()

    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.sin(x)
    internals.add_op_callback(callback)
    try:
        tape.gradient(y, x)
    finally:
        internals.remove_op_callback(callback)
    assert elsewhere and set(elsewhere) == {None}


def test_gradients_are_the_same_with_the_watch_and_without(request):
    """The watch passes all on: second derivatives, functions, indexed slices, no gradient."""
    request.addfinalizer(internals.install_gradient_watch)

    def without_watch():
        pywrap_tfe.TFE_Py_RegisterGradientFunction(backprop._gradient_function)

    results = []
    for install in (without_watch, internals.install_gradient_watch):
        install()
        x = tf.Variable(X)
        with tf.GradientTape(persistent=True) as outer:
            with tf.GradientTape() as inner:
                y = tf.reduce_sum(tf.function(tf.sin)(x) * tf.exp(x)) + tf.reduce_sum(
                    tf.gather(x, [0, 0])
                )
            first = tf.convert_to_tensor(inner.gradient(y, x))
        second = outer.gradient(first, x)
        results.append([t.numpy().tolist() for t in (first, tf.convert_to_tensor(second))])
        assert outer.gradient(first, tf.Variable(1.0)) is None
    assert results[0] == results[1]


# ---------------------------------------------------------------- the native core


def test_native_core_was_built_for_this_tensorflow():
    assert native.problem is None
    assert native.core.built_for_tensorflow == tf.__version__


def test_offset_of_the_handle_is_the_same_for_every_eager_tensor():
    tensors = [
        tf.constant(1.0),
        tf.ones([3, 4], tf.float64),
        tf.constant("text"),
        tf.Variable(1.0).handle,
        tf.ones([2]) + 1.0,
        tf.constant(1j),
    ]
    assert {type(t) for t in tensors} == {internals.EagerTensor}
    offsets = {native.core.find_handle_offset(t) for t in tensors}
    assert len(offsets) == 1
    (offset,) = offsets
    assert 0 < offset < internals.EagerTensor.__basicsize__


def test_exchanged_handle_keeps_identity_and_attributes_of_the_tensor():
    with recording():
        tensor = tf.constant([1.0, 2.0]) * 2.0
        tensor.note = "mine"
        assert native.core.is_placeholder(tensor)
        number = id(tensor)
        assert (tensor.dtype, tensor.shape) == (tf.float32, [2])
        native.core.materialise(tensor)
        assert not native.core.is_placeholder(tensor)
    assert id(tensor) == number and tensor.note == "mine"
    assert tensor.numpy().tolist() == [2.0, 4.0]


def negative_behind_the_hooks(tensor):
    execute = internals.entry_point("TFE_Py_Execute").original
    (result,) = execute(internals.context_capsule(), None, "Neg", [tensor], ("T", 1), 1)
    return result.numpy().tolist()


def test_a_placeholder_is_read_from_c_plus_plus_and_from_python():
    reads = {
        "numpy": lambda t: t.numpy().tolist(),
        "asarray": lambda t: np.asarray(t).tolist(),
        "float": lambda t: float(t[0]),
        "iteration": lambda t: [float(x) for x in t],
        "format": lambda t: str(t),
        "memoryview": lambda t: np.array(memoryview(t)).tolist(),
        "a kernel behind the hooks": negative_behind_the_hooks,
    }
    plain = tf.constant([1.5, 2.5]) * 2.0
    for name, read in reads.items():
        with recording():
            placeholder = tf.constant([1.5, 2.5]) * 2.0
            assert native.core.is_placeholder(placeholder)
            assert read(placeholder) == read(plain), name


def test_plain_values_are_no_placeholders():
    for value in (tf.constant(1.0), 1.0, None, np.ones(2), tf.Variable(1.0)):
        assert not native.core.is_placeholder(value)


def test_tapes_and_conversions_of_the_native_core():
    """TFE_Py_RecordGradient and ConvertToEagerTensor, in iterations that match natively."""

    @terra.function
    def step(x, factor):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.square(x) * factor  # a Python number that differs from call to call
        return y, tape.gradient(y, x)

    for turn in range(6):
        y, gradient = step(tf.constant([3.0, -1.0]), 0.5 + turn)
        assert y.numpy().tolist() == [9.0 * (0.5 + turn), 0.5 + turn]
        assert gradient.numpy().tolist() == [6.0 * (0.5 + turn), -2.0 * (0.5 + turn)]
    assert step.stats().coexecuted == 4
    assert step.stats().fallback_reasons == {}


def test_tapes_and_gradient_functions_are_counted_in_eager_mode_only():
    terra.function(lambda: tf.constant(1.0))()  # installs the watch
    x = tf.Variable(2.0)

    def work():
        with tf.GradientTape() as tape:
            y = x * x + tf.sin(x)
        return tape.gradient(y, x)

    tapes, gradients = internals.tape_activity()
    work()
    assert internals.tape_activity()[0] > tapes
    assert internals.tape_activity()[1] >= gradients + 3
    gradients = internals.tape_activity()[1]
    tf.function(work)()
    assert internals.tape_activity()[1] == gradients


def test_an_active_tape_is_seen_on_its_own_thread():
    seen = []
    assert not internals.tape_is_active()
    with tf.GradientTape() as tape:
        assert internals.tape_is_active()
        with tape.stop_recording():
            pass
        thread = threading.Thread(target=lambda: seen.append(internals.tape_is_active()))
        thread.start()
        thread.join()
    assert seen == [False]
    with tf.autodiff.ForwardAccumulator(tf.constant(1.0), tf.constant(1.0)):
        assert internals.tape_is_active()
    assert not internals.tape_is_active()


@pytest.mark.timeout(200)
def test_context_is_ready_after_the_first_op_and_not_before():
    program = (
        "import tensorflow as tf; from terra_tf import tensorflow_internals as i;"
        "before = i.context_is_ready(); tf.config.threading.set_inter_op_parallelism_threads(2);"
        "tf.constant(1.0); print(before, i.context_is_ready())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False True\n", done.stderr


def test_handles_of_variables_are_told_from_others():
    iterator = iter(tf.data.Dataset.range(2))
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    for variable in (tf.Variable(1.0), tf.Variable("text"), tf.random.Generator.from_seed(1).state):
        assert internals.is_variable_handle(variable.handle)
    for other in (iterator._iterator_resource, table.resource_handle, tf.constant(1.0)):
        assert not internals.is_variable_handle(other)


def test_ids_of_tensors_ascend():
    before = internals.next_id()
    first = tf.Variable(1.0).handle
    between = internals.next_id()
    second = tf.constant(1.0)
    ids = [before, internals.tensor_id(first), between, internals.tensor_id(second)]
    assert ids == sorted(set(ids))


def test_xla_kernels_are_those_that_xla_compiles():
    kernels = internals.xla_kernels()
    assert {"MatMul", "Exp", "AddV2"} <= kernels
    assert kernels.isdisjoint({"AsString", "TerraFeed", "TerraGate"})


def test_marked_ops_carry_what_auto_clustering_looks_for():
    with tf.Graph().as_default():
        operation = tf.exp(tf.constant(1.0)).op
    internals.mark_for_xla(operation, "span3")
    assert operation.get_attr("_XlaCompile") is True
    assert operation.get_attr("_XlaScope") == b"span3"


def test_rewritten_ops_are_those_that_grappler_leaves():
    def build(graph, iteration):
        x = tf.cast(iteration, tf.float32)
        y = tf.identity(tf.identity(x + (tf.constant(2.0) * tf.constant(3.0))))
        return [tf.raw_ops.Print(input=y, data=[y]).op]

    function = internals.GeneratedFunction("f", tf.TensorSpec([], tf.int64), build)
    kept = internals.rewritten_ops(function.concrete, internals.function_config(exact=True))
    folded = internals.rewritten_ops(function.concrete, internals.function_config(exact=False))
    assert "Mul" in kept and "Mul" not in folded


# --- delegated calls ---


def test_functions_that_change_tapes_are_there():
    hooked = []
    internals.install_tape_hooks(lambda number, original: hooked.append(number) or original)
    assert sorted(set(hooked)) == list(range(11))


def test_functions_around_ops_call_what_is_in_a_cell():
    found = list(internals.op_functions())
    names = {name for name, _ in found}
    assert {"matmul", "reduce_sum", "__add__", "__getitem__", "relu6", "stack"} <= names
    assert len({id(cell) for _, cell in found}) == len(found) > 300
    cells = [cell for name, cell in found if name == "matmul"]
    originals = [cell.cell_contents for cell in cells]
    try:
        for cell in cells:
            cell.cell_contents = lambda *_, **__: "called"
        assert tf.matmul(1, 2) == tf.linalg.matmul(1, 2) == "called"
    finally:
        for cell, original in zip(cells, originals, strict=True):
            cell.cell_contents = original


def test_modules_that_ops_are_made_of_are_there():
    modules = internals.modules_of_ops()
    assert any("matmul" in module for module in modules)
    assert all("__name__" in module for module in modules)


def test_a_tape_and_what_gradient_does_to_it():
    x = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = x * x
        assert internals.tape_attributes(tape)["_recording"]
        assert internals.tape_of(tape) is not None
        internals.gradient_begins(tape)
        assert not internals.tape_attributes(tape)["_recording"]
    internals.gradient_ends(tape)
    assert internals.tape_of(tape) is None
    assert tape.watched_variables() == (x,)
    with pytest.raises(RuntimeError):  # as after a gradient
        tape.gradient(y, x)


def test_what_assign_gives_can_be_made_again():
    variable = tf.Variable(1.0)
    given = variable.assign_add(1.0)
    assert internals.handle_of_lazy_read(given) is variable.handle
    assert internals.handle_of_lazy_read(variable) is None
    again = internals.lazy_read(variable)
    assert type(again) is type(given) and again.handle is variable.handle


def test_methods_of_plain_variables_are_their_own():
    variable = tf.Variable(1.0)
    assert type(variable) is internals.PlainVariable
    assert all(name in vars(internals.PlainVariable) for name in internals.VARIABLE_FUNCTIONS)
    with tf.GradientTape() as tape:
        view = internals.unread(variable)
    given = variable.assign_add(1.0)
    assert tape.watched_variables() == ()
    assert type(view) is type(given) and vars(view).keys() == vars(given).keys()
    assert view.handle is variable.handle and float(view) == 2.0


def test_looks_go_through_one_function():
    native.initialise(lambda _: None)
    seen = []

    def watch(frame, event, _):
        if event == "call" and frame.f_code is internals.read_code():
            seen.append(frame.f_locals["tensor"])

    x = tf.constant(1)
    sys.setprofile(watch)
    try:
        int(x)
    finally:
        sys.setprofile(None)
    assert [tensor is x for tensor in seen] == [True]


def test_what_a_thread_keeps_names_its_device():
    (state,) = internals.thread_state()
    with tf.device("CPU:0"):
        inside = state.device_name
    assert inside != state.device_name


def test_objects_of_the_libraries_are_sorted():
    layer = keras.layers.Dense(2)
    assert internals.is_immutable(tf.DType) and internals.is_immutable(type(layer._tracker))
    assert internals.is_immutable(keras.KerasTensor)
    assert internals.is_immutable(keras.initializers.Zeros)
    assert internals.has_no_more_than_items(type(layer._losses))
    assert not internals.has_no_more_than_items(list)
    assert not internals.is_immutable(keras.layers.Dense)
    assert internals.is_bookkeeping(layer, "_tracker")
    assert not internals.is_bookkeeping(layer, "units")
    assert internals.only_names_things("name_scope_stack")
    assert not internals.only_names_things("current_call_ctx")


def test_what_keras_makes_for_each_call_is_known():
    seen = []

    class Looking(keras.Layer):
        def call(self, x):
            seen.append(internals.call_context_keys(self._get_call_context()))
            return x

    Looking()(tf.ones([1]))
    assert seen[0] is not None and "entry_layer" in seen[0]
    legacy = {"layer": None, "inputs": None, "build_graph": False, "call_context_args": {}}
    assert internals.call_context_keys(legacy) == ("layer", "build_graph", "call_context_args")
    assert internals.call_context_keys({}) is None


def test_what_autograph_makes_for_each_call_is_known():
    seen = []

    @tf.autograph.experimental.do_not_convert
    def looks():
        seen.append(tf.__internal__.autograph.control_status_ctx())

    looks()
    looks()
    assert seen[0] is not seen[1]
    assert all(map(internals.is_made_anew, seen))
    assert not internals.is_made_anew([])


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_what_keras_does_after_an_eager_step(library):
    lib = importlib.import_module(library)
    model = lib.Sequential([lib.Input((2,)), lib.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    after = internals.batch_function_of_keras(model, "train")
    outputs = after(model, {"loss": tf.constant(1.0), "size": 3.0})
    assert list(map(float, outputs.values())) == [1.0, 3.0]
    assert tf.is_tensor(outputs["size"]) is (library == "keras")
    if library == "tf_keras":
        internals.batch_function_of_keras(model, "test")(model, {})
        assert int(model._train_counter) == int(model._test_counter) == 1
    model.compile("sgd", "mse", run_eagerly=True, steps_per_execution=2)
    assert internals.batch_function_of_keras(model, "train") is None


def test_functions_of_keras_2_that_may_be_delegated():
    importlib.import_module("tf_keras")
    found = {(kind.__name__, name) for kind, name, _ in internals.library_functions("tf_keras")}
    assert {
        ("Layer", "__call__"),
        ("LossesContainer", "__call__"),
        ("MetricsContainer", "update_state"),
    } <= found


def test_functions_of_keras_that_may_be_delegated():
    found = {(kind.__name__, name) for kind, name, _ in internals.library_functions("keras")}
    assert {
        ("Layer", "__call__"),
        ("Loss", "__call__"),
        ("Mean", "update_state"),
        ("Mean", "result"),
        ("BaseOptimizer", "apply_gradients"),
        ("BaseOptimizer", "apply"),
    } <= found
