"""What a step returns: tensors like any others, whatever is done with them, whenever, by whom.

Each check does something with what a co-executed step returned while its graph may still be
running, and with what the same step returned eagerly; both have to come to the same.
"""

import copy
import gc
import operator
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from differential.observation import differences, resolve, snapshot

import terra_tf as terra
from terra_tf.runners.retreat import Retreat

pytestmark = pytest.mark.timeout(60)

WARM_UP = 6  # calls after which a step co-executes


@pytest.fixture(autouse=True)
def _no_retreat(monkeypatch):
    """The step may not decide by the clock that it stays eager."""
    monkeypatch.setattr(Retreat, "stay_eager", lambda self: False)


class Results:
    """One of each kind of tensor that a step can return."""

    def __init__(self):
        self.weights = tf.Variable([[0.5, -1.0, 2.0], [1.5, 0.25, -3.0]])
        self.count = tf.Variable(0, dtype=tf.int64)

    def step(self, x):
        self.weights.assign_add(0.125 * x)
        self.count.assign_add(1)
        row = tf.reduce_sum(self.weights * x, axis=0)
        return {
            "matrix": tf.exp(self.weights),
            "row": row,
            "scalar": tf.reduce_max(row),
            "integer": tf.cast(tf.argmax(row), tf.int32),
            "long": self.count + 5,
            "bool": tf.reduce_any(row > 0),
            "mask": row > 0,
            "half": tf.cast(row, tf.float16),
            "brain": tf.cast(row, tf.bfloat16),
            "complex": tf.complex(row, -row),
            "empty": row[:0],
            "string": tf.strings.as_string(row),
            "argument": x,
            "variable": self.weights.read_value(),
        }


KINDS = list(Results().step(tf.ones([2, 3])))
X = tf.constant([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.25]])


def fresh(co_execute):
    """What one more call returns; under Terra, of a call that is co-executed."""
    results = Results()
    step = terra.function(results.step) if co_execute else results.step
    returned = [step(X) for _ in range(WARM_UP)][-1]
    if co_execute:
        assert step.stats().coexecuted >= 3 and not step.stats().fallen_back
    return returned


def attempt(act, *args):
    """What an act gives, or the type of what it raises."""
    try:
        return act(*args)
    except Exception as error:
        return type(error)


def compare(act, kinds):
    """Does the same with each kind of tensor of both ways; says what differs."""
    eager, terra_s = fresh(False), fresh(True)
    found = []
    for kind in kinds:
        expected = resolve(snapshot(attempt(act, eager[kind])))
        actual = resolve(snapshot(attempt(act, terra_s[kind])))
        found += [f"{kind}: {line}" for line in differences(expected, actual)]
    return found


# TensorFlow ends the process when a string is exported through DLPack.
EXPORTABLE = ["matrix", "row", "scalar", "integer", "long", "half", "empty", "argument", "variable"]

ACTS = {
    "type": type,
    "isinstance": lambda t: [isinstance(t, tf.Tensor), tf.is_tensor(t), tf.is_symbolic_tensor(t)],
    "shape": lambda t: [t.shape, t.shape.rank, t.get_shape(), t.ndim, tf.rank(t)],
    "dtype": lambda t: [t.dtype, t.dtype.name],
    "device": lambda t: [t.device, t.backing_device],
    "graph": lambda t: t.graph,
    "name": lambda t: t.name,
    "op": lambda t: t.op,
    "numpy": lambda t: t.numpy(),
    "asarray": np.asarray,
    "array of a dtype": lambda t: np.array(t, dtype=np.float64),
    "array protocol": lambda t: t.__array__(),
    "memoryview": lambda t: [memoryview(t).tolist(), memoryview(t).format, memoryview(t).shape],
    # The bytes of strings are addresses.
    "bytes": lambda t: len(bytes(t)) if t.dtype == tf.string else bytes(t),
    "float": float,
    "int": int,
    "bool": bool,
    "complex number": complex,
    "index": operator.index,
    "round": round,
    "len": len,
    "list": lambda t: list(t),
    "unpack": lambda t: [*t],
    "nested list": lambda t: t.numpy().tolist(),
    "reversed": lambda t: list(reversed(list(t))),
    "item": lambda t: t[0],
    "last item": lambda t: t[..., -1:],
    "newaxis": lambda t: t[tf.newaxis],
    "contains": lambda t: 1.0 in t.numpy(),
    "str": str,
    "repr": repr,
    "format": lambda t: f"{t}",
    "format of a number": lambda t: f"{t:.3f}",
    "hash": hash,
    "equal to itself": lambda t: t == t,
    "not equal": lambda t: t != t,
    "equal to None": lambda t: [t == None, t != None],  # noqa: E711 (this is the test)
    "less": lambda t: t < 1,
    "in a list": lambda t: t in [t],
    "same ref": lambda t: [t.ref() == t.ref(), t.ref().deref() is t, len({t.ref(), t.ref()})],
    "key by ref": lambda t: {t.ref(): 5}[t.ref()],
    "experimental_ref": lambda t: t.experimental_ref().deref() is t,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy in a list": lambda t: copy.deepcopy([t, {"a": t}]),
    "copied identity": lambda t: [copy.copy(t) is t, copy.deepcopy(t) is t],
    "weak reference": lambda t: [weakref.ref(t)() is t, len(weakref.WeakValueDictionary({1: t}))],
    "attribute": lambda t: [setattr(t, "note", 7), t.note],
    "vars": lambda t: sorted(vars(t)) if hasattr(t, "__dict__") else None,
    "dlpack": lambda t: tf.experimental.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(t)),
    "dlpack of numpy": lambda t: np.from_dlpack(t),
    "dlpack device": lambda t: t.__dlpack_device__(),
    "cpu": lambda t: t.cpu(),
    "eval": lambda t: t.eval(),
    "consumers": lambda t: t.consumers(),
    "set_shape": lambda t: [t.set_shape(t.shape), t.shape],
    "set_shape wrongly": lambda t: t.set_shape([9, 9, 9, 9]),
    "add": lambda t: [t + t, t * t],
    "negative": lambda t: -t,
    "with numpy": lambda t: [np.ones(3, np.float32) * t, t * np.ones(3, np.float32)],
    "numpy functions": lambda t: [np.sum(t), np.concatenate([t, t]), np.mean(t), np.square(t)],
    "numpy comparison": lambda t: np.array_equal(t, t),
    "tf.identity": tf.identity,
    "tf.stack": lambda t: tf.stack([t, t]),
    "tf.constant of it": tf.constant,
    "convert": lambda t: tf.convert_to_tensor(t) is t,
    "convert to another dtype": lambda t: tf.convert_to_tensor(t, tf.float64),
    "tf.get_static_value": lambda t: tf.get_static_value(t),
    "make_tensor_proto": lambda t: tf.make_ndarray(tf.make_tensor_proto(t)),
    "serialize": lambda t: tf.io.parse_tensor(tf.io.serialize_tensor(t), t.dtype),
    "nest": lambda t: tf.nest.flatten({"a": [t]}),
    "variable from it": lambda t: tf.Variable(t).read_value(),
    "assigned to a variable": lambda t: tf.Variable(tf.zeros_like(t)).assign(t).read_value(),
    "tensor spec": lambda t: [str(tf.TensorSpec.from_tensor(t)), str(tf.type_spec_from_value(t))],
    "dataset": lambda t: list(tf.data.Dataset.from_tensors(t)),
    "dataset of slices": lambda t: list(tf.data.Dataset.from_tensor_slices(t).batch(2)),
    "dataset that captures it": lambda t: list(tf.data.Dataset.range(2).map(lambda _: t)),
    "function argument": lambda t: tf.function(lambda a: tf.stack([a, a]))(t),
    "function capture": lambda t: tf.function(lambda: tf.stack([t, t]))(),
    "concrete function": lambda t: tf.function(lambda a: a).get_concrete_function(t)(t),
    "numpy_function": lambda t: tf.numpy_function(lambda a: a, [t], t.dtype),
    "py_function": lambda t: tf.py_function(lambda a: a, [t], t.dtype),
    "tf.cond": lambda t: tf.cond(t, lambda: 1, lambda: 2),
    "while loop": lambda t: tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a), [0, t])[1],
    "map_fn": lambda t: tf.map_fn(lambda a: a, t),
    "range": lambda t: list(range(t)),
    "list index": lambda t: list(range(100))[t],
    "slice index": lambda t: list(range(100))[t : t + 2],
    "tensor index": lambda t: tf.range(100)[t],
    "ragged": lambda t: tf.RaggedTensor.from_tensor(t).to_list(),
    "sparse": lambda t: tf.sparse.to_dense(tf.sparse.from_dense(t)),
    "keras convert": lambda t: keras.ops.convert_to_numpy(t),
    "keras op": lambda t: keras.ops.relu(t),
    "queue": lambda t: _through_a_queue(t),
    "gradient": lambda t: _gradient(t),
}


def _through_a_queue(tensor):
    queue = tf.queue.FIFOQueue(2, [tensor.dtype])
    queue.enqueue(tensor)
    return queue.dequeue()


def _gradient(tensor):
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        loss = tf.reduce_sum(tensor * tensor)
    return tape.gradient(loss, tensor)


@pytest.mark.parametrize("act", ACTS)
def test_a_returned_tensor_is_like_any_other(act):
    assert compare(ACTS[act], EXPORTABLE if "dlpack" in act else KINDS) == []


def test_a_step_returns_a_mapping_with_tensors_of_eagers_types():
    eager, co_executed = fresh(False), fresh(True)
    assert list(co_executed) == list(eager)
    assert {k: type(v) for k, v in co_executed.items()} == {k: type(v) for k, v in eager.items()}
    assert co_executed["argument"] is X


# ---------------------------------------------------------------- without a wait


class Slow:
    """A step whose graph takes seconds for some values, with shapes that are known."""

    def __init__(self):
        self.step = terra.function(self._step)
        for _ in range(WARM_UP):
            self.step(tf.constant([2, 2]))
        terra.sync()

    def _step(self, size):
        x = tf.fill(size, 0.5)
        for _ in range(25):
            x = tf.raw_ops.Mul(x=tf.raw_ops.MatMul(a=x, b=x), y=0.0)
        total = tf.ensure_shape(tf.raw_ops.Sum(input=x, axis=[0, 1]), [])
        return total + tf.constant([1.0, 2.0])


def test_shape_dtype_and_device_do_not_wait():
    slow = Slow()
    result = slow.step(tf.constant([1200, 1200]))
    reads = slow.step.stats().fetches
    assert result.shape == [2] and result.shape.rank == 1 and result.ndim == 1
    assert result.dtype == tf.float32
    assert isinstance(result, tf.Tensor)
    assert result.device == X.device and result.backing_device == X.backing_device
    assert result.ref() == result.ref() and weakref.ref(result)() is result
    assert tf.TensorSpec.from_tensor(result) == tf.TensorSpec([2])
    assert len(result) == 2
    assert _unfinished()  # nothing of the above has waited for the graph
    assert slow.step.stats().fetches == reads
    assert result.numpy().tolist() == [1.0, 2.0]


def _unfinished():
    """Whether the graph of the latest iteration still runs."""
    from terra_tf.runners import in_flight

    return any(not iteration.walk.finished for iteration in in_flight._iterations)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("first", ["numpy", "terra"])
def test_arrays_of_a_tensor_stay_when_the_tensor_goes(first):
    """`np.asarray` may share memory with a tensor; it must keep it alive."""
    result = fresh(True)["matrix"]
    array, view, taken = np.asarray(result), memoryview(result), result.numpy()
    capsule = tf.experimental.dlpack.to_dlpack(result)
    expected = fresh(False)["matrix"].numpy()
    del result
    if first == "terra":
        for _ in range(5):
            fresh(True)
    gc.collect()
    for _ in range(20):
        np.ones_like(array)
        tf.fill([2, 3], 7.0)
    assert np.array_equal(array, expected)
    assert np.array_equal(np.array(view), expected)
    assert np.array_equal(taken, expected)
    assert np.array_equal(tf.experimental.dlpack.from_dlpack(capsule), expected)


def test_a_weak_reference_dies_with_its_tensor():
    for co_execute in (False, True):
        returned = fresh(co_execute)
        terra.sync()
        references = {kind: weakref.ref(tensor) for kind, tensor in returned.items()}
        gone = []
        weakref.finalize(returned["row"], gone.append, "row")
        returned.clear()
        gc.collect()
        assert [kind for kind, reference in references.items() if reference() is not None] == [
            "argument"
        ]
        assert gone == ["row"]


def test_a_dlpack_capsule_is_imported_by_numpy_and_comes_back():
    result = fresh(True)["row"]
    array = np.from_dlpack(result)
    again = tf.experimental.dlpack.from_dlpack(array.copy().__dlpack__())
    assert again.numpy().tolist() == fresh(False)["row"].numpy().tolist()


# ---------------------------------------------------------------- after the step is gone


def test_tensors_outlive_their_step():
    expected = fresh(False)
    returned = fresh(True)  # the step is gone already
    gc.collect()
    assert differences(resolve(snapshot(expected)), resolve(snapshot(returned))) == []


def test_unread_tensors_outlive_their_step_while_other_steps_run():
    def make():
        total = tf.Variable(0.0)

        @terra.function
        def step(x):
            total.assign_add(tf.reduce_sum(x))
            return total * 2.0, tf.nn.relu(x) + total

        for _ in range(WARM_UP):
            step(X)
        return [step(X) for _ in range(5)]

    kept = [make() for _ in range(8)]
    gc.collect()
    sum_of_x = float(tf.reduce_sum(X))
    for results in reversed(kept):
        for turn, (double, matrix) in reversed(list(enumerate(results))):
            total = np.float32(sum_of_x * (WARM_UP + turn + 1))
            assert float(double) == total * 2
            assert np.array_equal(matrix, np.maximum(X, 0) + total)


# ---------------------------------------------------------------- many, in any order


@pytest.mark.parametrize("lead", [0, 1, 4])
def test_many_unread_results_are_read_in_reverse_order(monkeypatch, lead):
    monkeypatch.setattr(terra.settings, "lead", lead)

    def run(accelerate):
        total = tf.Variable(tf.zeros([3]))

        @accelerate
        def step(x):
            total.assign_add(x)
            total.assign(total * 1.01)
            return total * 1.0, tf.reduce_sum(tf.sin(total))

        return [step(tf.constant([1.0, 2.0, float(i)])) for i in range(200)]

    expected = [(row.numpy(), sine.numpy()) for row, sine in run(lambda fn: fn)]
    actual = run(terra.function)
    order = list(reversed(range(200)))
    for number in order:
        row, sine = actual[number]
        assert sine.numpy() == expected[number][1], number
        assert np.array_equal(row.numpy(), expected[number][0]), number


@pytest.mark.parametrize("lead", [0, 1, 4])
def test_results_of_many_iterations_mix_as_inputs_of_the_next(monkeypatch, lead):
    monkeypatch.setattr(terra.settings, "lead", lead)

    def run(accelerate):
        numbers = np.random.RandomState(3)
        total = tf.Variable(0.0)

        @accelerate
        def step(a, b, parked):
            total.assign_add(tf.reduce_mean(a * b))
            fresh_one = tf.tanh(a + 0.5 * b) + 0.01 * total + parked[0] - parked[1]
            return fresh_one, {"both": (a - b, tf.tanh(b))}

        pool = [tf.constant(numbers.normal(size=[4]).astype(np.float32)) for _ in range(4)]
        for _ in range(60):
            a, b, c, d = (pool[i] for i in numbers.randint(len(pool), size=4))
            first, rest = step(a, b, [c, d])
            pool += [first, *rest["both"]]
            if numbers.rand() < 0.3:
                del pool[numbers.randint(len(pool))]
            if numbers.rand() < 0.1:
                pool[0].numpy()
        return [*pool, total.read_value()]

    assert (
        differences(resolve(snapshot(run(lambda f: f))), resolve(snapshot(run(terra.function))))
        == []
    )


def test_a_chain_of_unread_results_is_as_long_as_one_likes():
    @terra.function
    def step(x):
        return x + 1.0

    value = tf.constant(0.0)
    for _ in range(2000):
        value = step(value)
    assert float(value) == 2000.0


def test_results_go_to_another_step_and_to_eager_code():
    @terra.function
    def one(x):
        return tf.matmul(x, x, transpose_b=True)

    @terra.function
    def two(x):
        return tf.reduce_sum(x, axis=0) + 1.0

    def all_of_it(first, second):
        found = []
        for turn in range(10):
            product = first(X * float(turn))
            found.append(second(product) * product[0])
        return found

    expected = all_of_it(lambda x: one.__wrapped__(x), lambda x: two.__wrapped__(x))
    assert differences(resolve(snapshot(expected)), resolve(snapshot(all_of_it(one, two)))) == []


# ---------------------------------------------------------------- other threads


@pytest.mark.parametrize("act", ["numpy", "float", "op", "function", "pickle", "dataset"])
def test_other_threads_use_the_results(act):
    acts = {
        "numpy": lambda t: t.numpy(),
        "float": lambda t: float(tf.reduce_sum(t)),
        "op": lambda t: tf.exp(t) + t,
        "function": tf.function(lambda t: tf.reduce_sum(t) * 2.0),
        "pickle": lambda t: pickle.loads(pickle.dumps(t)),
        "dataset": lambda t: list(tf.data.Dataset.from_tensors(t)),
    }

    def run(accelerate):
        total = tf.Variable(tf.zeros([3]))

        @accelerate
        def step(x):
            total.assign_add(x)
            return tf.sqrt(total)

        with ThreadPoolExecutor(4) as pool:
            futures = [
                pool.submit(acts[act], step(tf.constant([1.0, 2.0, float(i)]))) for i in range(60)
            ]
            return [future.result(30) for future in futures]

    assert (
        differences(resolve(snapshot(run(lambda f: f))), resolve(snapshot(run(terra.function))))
        == []
    )


def test_a_thread_outlives_the_one_that_ran_the_step():
    """The results of a step are read after the thread that ran it has ended."""
    kept = []

    def work():
        total = tf.Variable(0.0)

        @terra.function
        def step(x):
            total.assign_add(x)
            return total * 2.0

        kept.extend(step(tf.constant(1.0)) for _ in range(WARM_UP + 4))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert [float(value) for value in kept] == [2.0 * (i + 1) for i in range(WARM_UP + 4)]


# ---------------------------------------------------------------- Keras


def test_keras_takes_results_as_inputs():
    """`fit`, `evaluate`, `predict` and `train_on_batch` with what a step returned."""

    def run(accelerate):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")

        @accelerate
        def features(x):
            x = tf.concat([x, x * x], axis=0)
            return x / tf.norm(x), tf.reduce_sum(x, axis=1, keepdims=True)

        found = []
        for turn in range(WARM_UP):
            features(X * float(turn + 1))
        inputs, targets = features(X)
        found.append(model.fit(inputs, targets, epochs=2, verbose=0).history["loss"])
        inputs, targets = features(X * 2.0)
        found.append(model.evaluate(inputs, targets, verbose=0))
        found.append(model.predict(features(X * 3.0)[0], verbose=0))
        found.append(model.train_on_batch(*features(X * 4.0)))
        found.append(model(features(X * 5.0)[0]))
        return found, model.get_weights()

    expected = resolve(snapshot(run(lambda f: f)))
    assert differences(expected, resolve(snapshot(run(terra.function)))) == []
