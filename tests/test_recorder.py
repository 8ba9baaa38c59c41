"""What the recorder notes of an iteration that runs eagerly."""

import gc
import inspect
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import terra_tf as terra
from terra_tf import native, tensorflow_internals
from terra_tf.configuration import settings
from terra_tf.runners.python_runner import initialise
from terra_tf.tracing.effects import Effect
from terra_tf.tracing.recorder import Ran, Recorder
from terra_tf.tracing.trace import Call, Items, Kind, Output, Outside, Python, Result

pytestmark = pytest.mark.timeout(60)

FLOAT, INT32, RESOURCE = (t.as_datatype_enum for t in (tf.float32, tf.int32, tf.resource))
LARGE = settings.constant_bytes  # elements of a float32 tensor that is more than this many bytes


@pytest.fixture(autouse=True, scope="module")
def _initialised():
    initialise()


def record(function, *arguments):
    """Calls a new step once, which records it: its trace and what it returned."""
    step = terra.function(function)
    result = step(*arguments)
    (sequence,) = step._region.runner.tracegraph.sequences
    return sequence.trace, result


def line_of(function, text):
    """(file, line) of the line of a function's source that contains a text."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = [i for i, line in enumerate(lines) if text in line]
    return function.__code__.co_filename, first + offset


def kinds(trace):
    return [external.kind for external in trace.externals]


def ops(trace):
    return [node.op for node in trace.nodes]


# ---------------------------------------------------------------- nodes


def test_a_matmul_step():
    weights = tf.Variable(tf.ones([3, 2]))

    def step(x):
        return tf.matmul(x, weights, transpose_a=False)  # the call

    trace, result = record(step, tf.ones([4, 3]))
    assert ops(trace) == ["ReadVariableOp", "MatMul"]
    read, matmul = trace.nodes
    assert read.inputs == (Outside(0),)
    assert trace.externals[0].kind is Kind.RESOURCE
    assert trace.externals[0].tensor is weights.handle
    assert (read.effect, matmul.effect) == (Effect.READ, Effect.PURE)
    assert matmul.call is Call.FAST_PATH
    assert matmul.inputs == (Outside(1), Output(0))
    assert matmul.args[:2] == (Outside(1), Output(0))
    assert matmul.args[2:6] == tuple(map(Python, ["transpose_a", False, "transpose_b", False]))
    attrs = dict(zip(matmul.attrs[::2], matmul.attrs[1::2], strict=True))
    assert attrs["T"] == FLOAT  # what the call itself does not say
    assert matmul.result is Result.SINGLE
    assert list(matmul.outputs) == [1]
    assert [(info.dtype, info.shape) for info in trace.outputs] == [
        (FLOAT, (3, 2)),
        (FLOAT, (4, 2)),
    ]
    assert matmul.location.frames[0] == (*line_of(step, "# the call"), "step")
    assert result.numpy().tolist() == [[3.0, 3.0]] * 4


def test_results_are_plain_tensors_once_the_recording_is_over():
    _, result = record(lambda: tf.ones([2]) + 1.0)
    assert not native.core.is_placeholder(result)
    assert result.numpy().tolist() == [2.0, 2.0]


def test_lists_of_inputs_and_of_outputs():
    def step(x):
        parts = tf.split(x, 3)
        return tf.concat(parts, axis=0), tf.raw_ops.TopKV2(input=x, k=2)

    trace, _ = record(step, tf.range(6.0))
    split = trace.nodes[ops(trace).index("Split")]
    concat = trace.nodes[ops(trace).index("ConcatV2")]
    assert split.result is Result.LIST and split.num_outputs == 3
    assert concat.args[0] == Items(tuple(map(Output, split.outputs)))
    assert concat.inputs[:3] == tuple(map(Output, split.outputs))
    top = trace.nodes[ops(trace).index("TopKV2")]
    assert top.num_outputs == 2
    assert trace.outputs[top.first_output + 1].dtype == INT32


def test_nested_results_are_numbered_flat():
    indices = tf.constant([[0, 0], [3, 1]], tf.int64)
    shape, axis = tf.constant([4, 2], tf.int64), tf.constant(0, tf.int64)

    def sparse(x):
        return tf.raw_ops.SparseSplit(
            split_dim=axis, indices=indices, values=x, shape=shape, num_split=2
        )

    trace, result = record(sparse, tf.constant([5.0, 7.0]))
    split = trace.nodes[-1]
    assert split.num_outputs == 6 and split.groups == (2, 2, 2)
    assert [len(part) for part in result] == [2, 2, 2]
    assert [t.numpy().tolist() for t in result.output_values] == [[5.0], [7.0]]
    assert [t.numpy().tolist() for t in result.output_indices] == [[[0, 0]], [[1, 1]]]


def test_a_call_of_a_function_stays_without_its_name():
    @tf.function
    def double(x):
        return x + x

    double(tf.ones([2]))  # traced before
    trace, _ = record(lambda x: double(x), tf.ones([2]))
    (node,) = trace.nodes
    assert node.op == ""
    assert node.effect is Effect.BARRIER


def test_a_call_that_misses_the_fast_path():
    variable = keras.Variable([1.0, 2.0])
    trace, result = record(lambda: variable.value * 2.0)
    names = ops(trace)
    assert result.numpy().tolist() == [2.0, 4.0]
    assert names[-1] == "Mul"
    assert "ReadVariableOp" in names
    missed = [node for node in trace.nodes if node.misses]
    assert all(node.num_outputs == 0 for node in missed)


def test_an_op_that_raises_is_in_place_and_recording_goes_on():
    def step(x):
        try:
            tf.raw_ops.MatMul(a=x, b=x)
        except tf.errors.InvalidArgumentError:
            return tf.negative(x)
        return x

    trace, result = record(step, tf.ones([2, 3]))
    failed, negative = trace.nodes
    assert (failed.op, failed.fails, failed.num_outputs) == ("MatMul", True, 0)
    assert failed.in_place
    assert negative.op == "Neg" and negative.inputs == (Outside(0),)
    assert result.numpy().tolist() == [[-1.0] * 3] * 2


# ---------------------------------------------------------------- values from outside


def test_python_scalars_are_numbers_with_their_converted_tensor():
    def step(x):
        return tf.raw_ops.AddV2(x=tf.raw_ops.Mul(x=x, y=2.5), y=1)

    trace, _ = record(step, tf.ones([2]))
    first, second = [e for e in trace.externals if e.kind is Kind.NUMBER]
    assert (first.value, first.dtype, first.shape) == (2.5, FLOAT, ())
    assert first.tensor.numpy() == 2.5 and first.content == np.float32(2.5).tobytes()
    assert (second.value, second.dtype) == (1, FLOAT)  # an int, where the op takes a float
    assert second.content == np.float32(1).tobytes()


def test_numpy_arrays_are_kept_as_they_were():
    array = np.array([1.0, 2.0], np.float32)

    def step(x):
        y = x * array
        array[0] = 5.0
        return y + array

    trace, result = record(step, tf.ones([2]))
    contents = [e.content for e in trace.externals if e.kind in (Kind.NUMBER, Kind.SMALL)]
    assert contents == [
        np.array([1, 2], np.float32).tobytes(),
        np.array([5, 2], np.float32).tobytes(),
    ]
    assert result.numpy().tolist() == [6.0, 4.0]


def test_lists_where_an_op_takes_a_tensor():
    trace, _ = record(lambda x: tf.reshape(x, [3, 2]), tf.ones([6]))
    (shape,) = [e for e in trace.externals if e.content]
    assert (shape.dtype, shape.shape) == (INT32, (2,))
    assert shape.content == np.array([3, 2], np.int32).tobytes()


def test_arguments_are_fed_and_small_outside_tensors_may_be_constants():
    outside = tf.constant([1.0, 2.0])
    large = tf.ones([LARGE])

    def step(x):
        return x + outside, tf.reduce_sum(large)

    trace, _ = record(step, tf.constant([3.0, 4.0]))
    assert kinds(trace)[:3] == [Kind.TENSOR, Kind.SMALL, Kind.TENSOR]
    assert trace.externals[1].content == outside.numpy().tobytes()
    # A tensor that is fed is not kept alive by the trace.
    assert trace.externals[0].tensor is None and trace.externals[2].tensor is None


def test_one_outside_tensor_that_is_used_twice_is_one_external():
    large = tf.ones([LARGE])

    def step(x):
        return tf.reduce_sum(x * large) + tf.reduce_sum(large * x)

    trace, _ = record(step, tf.ones([LARGE]))
    muls = [node for node in trace.nodes if node.op == "Mul"]
    assert muls[0].inputs == muls[1].inputs[::-1]


def test_a_tensor_passed_on_through_identity_like_sharing_is_one_output():
    def step(x):
        y = tf.exp(x)
        return tf.reduce_sum(tf.reshape(y, y.shape) + tf.stop_gradient(y))

    trace, _ = record(step, tf.ones([2]))
    (add,) = [node for node in trace.nodes if node.op == "AddV2"]
    assert all(isinstance(source, Output) for source in add.inputs)


# ---------------------------------------------------------------- variables


def test_a_variable_passed_straight_to_an_op_is_read_by_an_op_of_its_own():
    """TensorFlow would read it in C++, unseen; here it shows, and the value is the same."""
    variable = tf.Variable([[1.0, -2.0]])
    trace, result = record(lambda: tf.reduce_sum(variable))
    missed, read, total = trace.nodes
    assert missed.misses and missed.op == "Sum"
    assert (read.op, read.effect) == ("ReadVariableOp", Effect.READ)
    assert total.op == "Sum" and total.inputs[0] == Output(0)
    assert result.numpy() == -1.0


def test_tapes_see_a_variable_that_is_passed_straight_to_an_op():
    variable = tf.Variable([[1.0, -2.0]])

    def step():
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.square(variable))
        return tape.gradient(total, variable)

    _, gradient = record(step)
    assert gradient.numpy().tolist() == [[2.0, -4.0]]


def test_effects_on_variables():
    variable = tf.Variable([1.0])
    slot = tf.Variable([0.0])

    def step(x):
        variable.assign(x)
        variable.assign_add(x)
        variable.assign_sub(x)
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle, accum=slot.handle, lr=0.1, grad=x, momentum=0.9
        )
        return variable.read_value()

    trace, _ = record(step, tf.constant([2.0]))
    effects = {node.op: node.effect for node in trace.nodes if node.inputs}
    assert effects["AssignVariableOp"] is Effect.ASSIGN
    assert effects["AssignAddVariableOp"] is Effect.ASSIGN
    assert effects["AssignSubVariableOp"] is Effect.ASSIGN
    assert effects["ResourceApplyMomentum"] is Effect.WRITE
    assert effects["ReadVariableOp"] is Effect.READ
    apply = trace.nodes[ops(trace).index("ResourceApplyMomentum")]
    handles = [trace.externals[s.index].tensor for s in apply.inputs[:2]]
    assert handles[0] is variable.handle and handles[1] is slot.handle


def test_a_variable_made_in_the_step_lives_in_pythons_half():
    def step(x):
        variable = tf.Variable(x)
        variable.assign_add(x)
        return variable.read_value()

    trace, result = record(step, tf.constant([2.0]))
    for node in trace.nodes:
        if node.op in ("AssignVariableOp", "AssignAddVariableOp", "ReadVariableOp"):
            assert node.effect is Effect.LOCAL
    assert result.numpy().tolist() == [4.0]


# ---------------------------------------------------------------- in place


def test_what_cannot_be_delegated_runs_in_place():
    seen = []

    def look(x):
        seen.append(x.numpy())
        return x + 1.0

    def step(x):
        y = tf.py_function(look, [x * 2.0], tf.float32)
        noise = tf.random.uniform([2])
        tf.print("", end="")
        return y + noise

    trace, _ = record(step, tf.ones([2]))
    effects = {node.op: node.effect for node in trace.nodes}
    assert effects["EagerPyFunc"] is Effect.BARRIER
    assert effects["RandomUniform"] is Effect.LOCAL
    assert effects["PrintV2"] is Effect.LOCAL
    assert effects["AddV2"] is Effect.PURE
    assert [x.tolist() for x in seen] == [[2.0, 2.0]]
    call = trace.nodes[ops(trace).index("EagerPyFunc")]
    assert call.inputs == (Output(trace.nodes[ops(trace).index("Mul")].first_output),)
    # What the function itself does is Python's, not the step's.
    assert ops(trace).count("AddV2") == 1


def test_what_is_traced_into_a_graph_is_no_op_of_the_step():
    def step(x):
        concrete = tf.function(lambda x: tf.exp(x) * 2.0).get_concrete_function(x)
        return concrete(x)

    trace, result = record(step, tf.zeros([2]))
    assert "Exp" not in ops(trace)
    assert ops(trace) == [""]
    assert result.numpy().tolist() == [2.0, 2.0]


# ---------------------------------------------------------------- reads


def test_reads_are_noted_once_at_the_first_look_with_its_line():
    def step(x):
        total = tf.reduce_sum(x)
        doubled = x * 2.0
        if float(total) > 0:  # the look
            doubled = doubled + 1.0
        str(total)
        return doubled.numpy()  # another look

    trace, _ = record(step, tf.ones([2]))
    assert ops(trace) == ["Sum", "Mul", "AddV2"]
    assert sorted(trace.reads) == [0, 2]
    assert trace.reads[0].position == 2
    assert trace.reads[0].location.frames[0] == (*line_of(step, "# the look"), "step")
    assert trace.reads[2].position == 3
    assert trace.reads[2].location.frames[0] == (*line_of(step, "# another look"), "step")


@pytest.mark.parametrize(
    "look",
    [
        float,
        int,
        bool,
        str,
        repr,
        np.asarray,
        lambda t: t.numpy(),
        lambda t: t.numpy().item(),
        lambda t: f"{t:.3f}",
        lambda t: t == 3.0 and bool(t),
        lambda t: [0, 1, 2, 3][tf.cast(t, tf.int32)],
        lambda t: np.float32(1) + t.numpy(),
    ],
)
def test_every_way_to_look_is_a_read(look):
    plain = look(tf.reduce_sum(tf.constant([1.0, 2.0])))
    trace, seen = record(lambda x: look(tf.reduce_sum(x)), tf.constant([1.0, 2.0]))
    assert trace.reads
    assert repr(seen) == repr(plain)


def test_shapes_and_dtypes_are_no_reads():
    def step(x):
        y = x * 2.0
        return y.shape[0], y.dtype, len(y.shape), y.ndim, y.device, len(y)

    trace, seen = record(step, tf.ones([2, 3]))
    assert trace.reads == {}
    assert seen[0] == 2 and seen[3] == 2 and seen[5] == 2


def test_arguments_and_outside_tensors_are_looked_at_freely():
    outside = tf.constant(5.0)
    trace, seen = record(lambda x: (float(x), float(outside)), tf.constant(2.0))
    assert seen == (2.0, 5.0)
    assert trace.reads == {} and trace.nodes == []


# ---------------------------------------------------------------- what the program keeps


def test_kept_tensors_are_those_that_the_program_can_still_reach():
    parked = []

    def step(x):
        first = x + 1.0  # dropped
        second = first * 2.0
        parked.append(second)
        del first, second
        return tf.exp(parked[0])

    trace, result = record(step, tf.ones([2]))
    assert ops(trace) == ["AddV2", "Mul", "Exp"]
    assert trace.kept[3] == {1, 2}
    assert parked[0].numpy().tolist() == [4.0, 4.0]
    assert result.numpy().tobytes() == np.asarray(tf.exp(tf.constant([4.0, 4.0]))).tobytes()


def test_kept_tensors_are_noted_where_effects_may_become_visible():
    variable = tf.Variable(1.0)

    def step(x):
        hidden = x * 2.0
        variable.assign(hidden)
        seen = variable * 3.0
        float(seen)  # effects before it may have to be visible
        del hidden
        return seen

    trace, _ = record(step, tf.constant(2.0))
    position = trace.reads[next(iter(trace.reads))].position
    assert position == len(trace.nodes)
    outputs = {node.op: node.first_output for node in trace.nodes if node.num_outputs}
    assert outputs["Mul"] in trace.kept[position]


def test_the_recorder_keeps_no_tensor_of_the_program_alive():
    references = []

    def step(x):
        y = x + 1.0
        references.append(weakref.ref(y))
        del y
        gc.collect()
        references.append(references[0]() is None)
        return x * 2.0

    record(step, tf.ones([2]))
    assert references[1]


def test_a_new_tensor_at_the_address_of_a_dropped_one_is_another_output():
    def step(x):
        total = tf.zeros([])
        for _ in range(20):
            total = total + tf.reduce_sum(x * 2.0)  # the product is dropped each time
        return total

    trace, result = record(step, tf.ones([2]))
    products = [node for node in trace.nodes if node.op == "Mul"]
    sums = [node for node in trace.nodes if node.op == "Sum"]
    assert [s.inputs[0] for s in sums] == [Output(p.first_output) for p in products]
    assert result.numpy() == 80.0


# ---------------------------------------------------------------- gradients


def forward_ops(trace, op):
    """Ops whose gradient functions called the nodes of an op type."""
    found = [node.gradient_of for node in trace.nodes if node.op == op]
    return [None if k is None else trace.nodes[k].op for k in found]


def test_backward_ops_name_their_forward_nodes():
    def step(x):
        with tf.GradientTape() as tape:
            z = x + 1.0
            tape.watch(z)
            y = tf.exp(tf.sin(z))
        gradient = tape.gradient(y, z)
        return tf.cos(gradient)

    trace, _ = record(step, tf.constant([1.0, 2.0]))
    assert forward_ops(trace, "Cos") == ["Sin", None]
    assert forward_ops(trace, "Mul") == ["Exp", "Sin"]
    assert forward_ops(trace, "Sin") == forward_ops(trace, "Exp") == [None]


def test_each_turn_of_a_loop_has_its_own_backward_ops():
    def step(x):
        with tf.GradientTape() as tape:
            y = z = x + 1.0
            tape.watch(z)
            for _ in range(3):
                y = tf.sin(y)
        return tape.gradient(y, z)

    trace, _ = record(step, tf.constant([1.0, 2.0]))
    forward = [k for k, node in enumerate(trace.nodes) if node.op == "Sin"]
    assert [n.gradient_of for n in trace.nodes if n.op == "Cos"] == forward[::-1]


def test_the_forward_node_takes_all_that_the_tape_has():
    """One matrix is used three times; each time its partner says which of the uses it is."""
    w = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

    def step():
        x = tf.zeros([1, 2])  # small and from outside: told apart by nothing but its value
        with tf.GradientTape() as tape:
            read = tf.convert_to_tensor(w)
            y = tf.matmul(tf.ones([1, 2]), read) + tf.matmul(x, read) + tf.matmul(x + 1.0, read)
        return tape.gradient(y, w)

    trace, _ = record(step)
    matmuls = [k for k, node in enumerate(trace.nodes) if node.op == "MatMul"]
    backward = [trace.nodes[k] for k in matmuls[3:]]
    assert sorted(node.gradient_of for node in backward) == matmuls[:3]

    def partner(node):
        source = node.inputs[0]
        return trace.externals[source.index].tensor if isinstance(source, Outside) else source

    for node in backward:  # the gradient is the transposed partner times what comes in
        assert partner(node) is partner(trace.nodes[node.gradient_of]) or (
            partner(node) == partner(trace.nodes[node.gradient_of])
        )


def test_gradients_that_are_added_up_belong_to_the_one_that_came_last():
    def step(x):
        with tf.GradientTape() as tape:
            z = x + 1.0
            tape.watch(z)
            y = tf.exp(z) + tf.sin(z)
        return tape.gradient(y, z)

    trace, _ = record(step, tf.constant([1.0, 2.0]))
    (last,) = forward_ops(trace, "AddN")
    assert last in ("Exp", "Sin")


def test_gradients_of_gradients_name_the_backward_ops():
    def step(x):
        z = x + 1.0
        with tf.GradientTape() as outer:
            outer.watch(z)
            with tf.GradientTape() as inner:
                inner.watch(z)
                y = tf.sin(z)
            gradient = inner.gradient(y, z)
        return outer.gradient(gradient, z)

    trace, _ = record(step, tf.constant([1.0, 2.0]))
    assert forward_ops(trace, "Cos") == ["Sin"]
    sines = [node for node in trace.nodes if node.op == "Sin"]
    assert [None if n.gradient_of is None else trace.nodes[n.gradient_of].op for n in sines] == [
        None,
        "Cos",
    ]


def test_backward_ops_of_what_takes_outside_tensors_name_it():
    """The gradient of a sine only needs its input, which no op of the step has made."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.sin(x)
        return tape.gradient(y, x)

    trace, _ = record(step, tf.constant([1.0, 2.0]))
    assert forward_ops(trace, "Cos") == ["Sin"]


# ---------------------------------------------------------------- places


def test_the_place_of_a_node_ends_where_the_region_begins():
    step = terra.function(lambda x: tf.exp(x))

    def caller(x):
        return step(x)

    def other_caller(x):
        return step(x)

    caller(tf.ones([2]))
    other_caller(tf.ones([2]))
    (sequence,) = step._region.runner.tracegraph.sequences
    (node,) = sequence.trace.nodes
    assert [function for _, _, function in node.location.place] == ["<lambda>"]
    assert [function for _, _, function in node.location.frames[:2]] == ["<lambda>", "caller"]
    assert node.count == 2


def test_the_place_of_a_node_in_a_loop_ends_with_the_functions_around_it():
    loop = terra.iterate(range(2))

    def body(x):
        return tf.exp(x)

    for _ in loop:
        body(tf.ones([2]))
    (sequence,) = loop._region.runner.tracegraph.sequences
    places = {tuple(f for _, _, f in node.location.place) for node in sequence.trace.nodes}
    name = "test_the_place_of_a_node_in_a_loop_ends_with_the_functions_around_it"
    assert places == {("body", name), (name,)} or places == {("body", name)}


# ---------------------------------------------------------------- beginning and end


@pytest.mark.parametrize(
    ("op", "ran", "effect"),
    [
        ("Exp", Ran.RECORDED, Effect.PURE),
        ("Exp", Ran.NESTED, Effect.LOCAL),
        ("Exp", Ran.IN_PLACE, Effect.LOCAL),
        ("AssignVariableOp", Ran.IN_PLACE, Effect.BARRIER),
    ],
)
def test_what_did_not_run_as_usual_runs_in_place(op, ran, effect):
    variable, x = tf.Variable([1.0, 2.0]), tf.ones([2])
    recorder = Recorder()
    inputs = [x] if op == "Exp" else [variable.handle, x]
    outputs = [tf.exp(x)] if op == "Exp" else []
    attrs = ("T", FLOAT) if op == "Exp" else ("dtype", FLOAT, "validate_shape", False)
    recorder._on_op(op, tuple(inputs), attrs, outputs)
    result = outputs[0] if outputs else None
    recorder.on_call(Call.FAST_PATH, (None, op, None, *inputs), result, ran)
    (node,) = recorder.trace.nodes
    assert node.effect is effect


def test_an_abandoned_recording_leaves_plain_tensors_and_no_hooks():
    recorder = Recorder()
    recorder.start()
    kept = tf.ones([2]) * 3.0
    assert native.core.is_placeholder(kept)
    recorder.abandon()
    native.core.leave()
    assert not native.core.is_placeholder(kept)
    assert kept.numpy().tolist() == [3.0, 3.0]
    count = len(recorder.trace.nodes)
    tf.exp(kept)
    assert len(recorder.trace.nodes) == count
    assert not native.core.inside()


def test_a_recording_that_goes_on_from_a_prefix_numbers_on():
    first, y = record(lambda x: x * 2.0, tf.ones([2]))
    recorder = Recorder((), first)
    recorder.adopt_output(y, 0)
    recorder.start()
    try:
        tf.exp(y)
        trace = recorder.finish()
    finally:
        native.core.leave()
    assert ops(trace) == ["Mul", "Exp"]
    assert trace.nodes[1].inputs == (Output(0),)
    assert trace.nodes[1].first_output == 1


def test_ops_of_the_recorder_itself_are_not_recorded():
    """Asking TensorFlow for a value's bytes runs code of TensorFlow's that calls ops."""
    trace, _ = record(lambda x: x + [1.0, 2.0], tf.ones([2]))
    assert ops(trace) == ["AddV2"]
    assert tensorflow_internals.executing_eagerly()


# ---------------------------------------------------------------- ops in place that use variables


def test_a_dataset_whose_function_uses_a_variable_comes_after_its_writes():
    total = tf.Variable(2.0)

    def step():
        total.assign_add(1.0)
        dataset = tf.data.Dataset.range(3).map(lambda k: tf.cast(k, tf.float32) * total)
        return dataset.reduce(tf.constant(0.0), lambda a, b: a + b * total)

    trace, result = record(step)
    assert float(result) == 27.0
    effects = {node.op: node.effect for node in trace.nodes}
    assert effects["MapDataset"] is effects["ReduceDataset"] is Effect.BARRIER
    assert effects["RangeDataset"] is Effect.LOCAL
