"""The parts of the runtime that need no ranks: cuts, plans, the ledger, the optimizer, batches."""

import itertools
import random
import threading
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from pipeline import schedules, tensorflow_internals
from pipeline.communication.collectives import Collectives
from pipeline.errors import CheckpointError, ModelError, UsageError
from pipeline.runtime.batches import check_batch, sizes_of, split
from pipeline.runtime.body import StageBody
from pipeline.runtime.checkpoint import Reader
from pipeline.runtime.eager_stage import CoexecutedStage, EagerStage
from pipeline.runtime.ledger import Ledger
from pipeline.runtime.metrics import Metrics
from pipeline.runtime.model import Model, raw
from pipeline.runtime.optimizer import Updater, check_optimizer
from pipeline.runtime.partition import balanced_cuts, check_cuts, measure_costs, uniform_cuts
from pipeline.runtime.settings import check_settings, make_schedule, recompute_flags
from pipeline.runtime.stage import FunctionStage, MicroBatch
from pipeline.runtime.structure import decode, encode, spec_of
from pipeline.runtime.timeline import side_by_side

# --- partition -----------------------------------------------------------------------------------


def test_balanced_cuts_are_the_best_there_are():
    numbers = np.random.default_rng(0)
    for count, parts in itertools.product(range(2, 9), range(1, 5)):
        if parts > count:
            continue
        costs = numbers.uniform(0, 10, count)

        def largest(cuts, costs=costs, count=count):
            ends = [0, *cuts, count]
            return max(costs[a:b].sum() for a, b in zip(ends, ends[1:], strict=False))

        best = min(map(largest, itertools.combinations(range(1, count), parts - 1)))
        cuts = balanced_cuts(costs, parts)
        assert largest(cuts) == pytest.approx(best)
        assert check_cuts(cuts, count, parts) == cuts


def test_uniform_cuts_place_every_layer_once():
    assert uniform_cuts(10, 4) == [3, 6, 8]
    assert uniform_cuts(4, 4) == [1, 2, 3]
    assert uniform_cuts(5, 1) == []


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ([1, 2], "need 3 cut indices"),
        ([2, 2, 3], "virtual stage 1 the layers 2 to 1"),
        ([1, 2, 6], "virtual stage 3"),
        ([0, 2, 3], "virtual stage 0"),
        ([3, 2, 4], "virtual stage 1"),
    ],
)
def test_wrong_cuts_are_refused_by_name(cuts, message):
    with pytest.raises(ModelError, match=message):
        check_cuts(cuts, 6, 4)
    with pytest.raises(TypeError):
        check_cuts([1.5, 2, 3], 6, 4)


def test_costs_are_measured_without_building_the_model():
    layers = [keras.layers.Dense(4), keras.layers.ReLU(), keras.layers.Dense(40)]
    model = Model(layers, 0)
    costs = measure_costs(model, np.zeros((2, 3), "float32"), by_time=False)
    assert costs == [1 + 16, 1, 1 + 200]
    assert not layers[0].built and not layers[2].built
    times = measure_costs(model, np.zeros((2, 3), "float32"), by_time=True)
    assert all(seconds > 0 for seconds in times)


# --- stages --------------------------------------------------------------------------------------


def make_stage(layers, x, kind=FunctionStage, loss=None, **options):
    model = Model(layers, 0)
    specs = model.build(0, len(model), [spec_of(x)])
    body = StageBody(model, model.items, specs[0], loss)
    accumulators = [tf.Variable(tf.zeros_like(raw(weight))) for weight in body.weights]
    return kind(body, accumulators, sends_back=True, **options), accumulators


def passes(stage, accumulators, x, gradient, splits):
    """Outputs, input gradients and weight gradients of one micro-batch."""
    data = MicroBatch(None, None, tf.constant(stage.body.random.values(0, 0)))
    with tensorflow_internals.exact_graphs():
        made = stage.forward([x], data)
        assert all(accumulator.numpy().any() == 0 for accumulator in accumulators)
        gradients, passed_on = stage.backward(
            made.plan, made.stash, [gradient], tf.constant(1.0, tf.float64)
        )
        if splits:
            assert all(accumulator.numpy().any() == 0 for accumulator in accumulators)
            stage.weight(made.plan, passed_on)
    return made, [*made.outputs, *gradients, *map(tf.convert_to_tensor, accumulators)]


def block():
    keras.utils.set_random_seed(1)
    return [
        keras.layers.Dense(12, "gelu"),
        keras.layers.LayerNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.LSTM(6, return_sequences=True),
        keras.layers.Dense(5),
    ]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("splits", [False, True])
def test_pieces_of_a_stage_equal_a_gradient_tape(recompute, splits):
    numbers = np.random.default_rng(0)
    x = tf.constant(numbers.normal(size=(3, 4, 8)).astype("float32"))
    upstream = tf.constant(numbers.normal(size=(3, 4, 5)).astype("float32"))
    layers = block()
    stage, accumulators = make_stage(layers, x, recompute=recompute, splits=splits)
    made, found = passes(stage, accumulators, x, upstream, splits)
    if recompute:
        assert len(made.stash) == 2, "the input and the random states"

    seeds = tf.constant(stage.body.random.values(0, 0))
    reads = stage.body.read_weights()
    with tf.GradientTape() as tape:
        tape.watch([x, *reads])
        result = stage.body.run([x], reads, seeds, True)
    expected = tape.gradient(result.outputs, [x, *reads], [upstream])
    for a, b in zip(found, [*result.outputs, *expected], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_a_size_that_does_not_fit_is_refused_as_eager_layers_do():
    x = tf.ones([2, 5, 8])
    stage, _ = make_stage(block(), x, FunctionStage, splits=False, recompute=False)
    data = MicroBatch(None, None, tf.constant(stage.body.random.values(0, 0)))
    stage.forward([x], data)
    stage.forward([x[:, :3]], data)
    for wrong in (x[..., :7], x[:, :3, :7]):
        with pytest.raises(ValueError, match="incompatible|must be equal"):
            stage.forward([wrong], data)
    stage.forward([x[:, :4]], data)
    assert stage.num_traces == 2


def test_eager_stages_equal_compiled_ones():
    numbers = np.random.default_rng(0)
    x = tf.constant(numbers.normal(size=(3, 4, 8)).astype("float32"))
    upstream = tf.constant(numbers.normal(size=(3, 4, 5)).astype("float32"))
    results = []
    for kind, recompute in itertools.product((FunctionStage, EagerStage), (False, True)):
        stage, accumulators = make_stage(block(), x, kind, splits=False, recompute=recompute)
        results.append(passes(stage, accumulators, x, upstream, False)[1])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_copies_of_what_is_in_the_stash_are_not():
    # A dense layer multiplies a copy of its input where that has more than two dimensions.
    x = tf.zeros([2, 32, 64])
    layers = [keras.layers.Dense(64, "tanh") for _ in range(3)]
    stage, accumulators = make_stage(layers, x, recompute=False, splits=False)
    made, _ = passes(stage, accumulators, x, x, False)
    size = sum(map(tensorflow_internals.nbytes, made.stash))
    assert size <= 4 * tensorflow_internals.nbytes(x) + 200, "the input and three outputs"


def test_python_runs_once_where_the_stash_is_kept_and_twice_where_not():
    x = tf.ones([2, 3])
    for recompute, expected in ((False, 1), (True, 2)):
        calls = []

        def count(x, calls=calls):
            calls.append(x)
            return x * x

        stage, accumulators = make_stage([count], x, EagerStage, splits=False, recompute=recompute)
        calls.clear()
        made, _ = passes(stage, accumulators, x, x, False)
        assert len(calls) == expected
        assert len(made.stash) == 1


@pytest.mark.parametrize("kind", [FunctionStage, EagerStage])
@pytest.mark.parametrize("recompute", [False, True])
def test_masks_are_the_same_forward_and_backward(kind, recompute):
    x = tf.ones([64, 16])
    layers = [lambda x: tf.nn.dropout(x, 0.5)]
    stage, accumulators = make_stage(layers, x, kind, recompute=recompute, splits=False)
    _, found = passes(stage, accumulators, x, tf.ones_like(x), False)
    np.testing.assert_array_equal(found[0], found[1])


def drawing_and_branching(x):
    """Python that no graph can hold: it looks at values, and draws from Python and NumPy."""
    if float(tf.reduce_sum(x)) > 0:
        x = tf.sin(x) * 2.0
    if random.random() < 0.5:
        x = x * x
    return tf.nn.dropout(x, 0.25) * np.random.uniform()


def test_python_stages_agree_kept_repeated_lent_and_coexecuted():
    numbers = np.random.default_rng(0)
    batches = [
        tf.constant(numbers.normal(size=(4, 8), loc=0.1 * n).astype("float32"))
        for n in range(-4, 5)
    ]
    results = []
    for kind, recompute, lent in (
        (EagerStage, False, False),
        (EagerStage, True, False),
        (coexecuted, False, False),
        (coexecuted, True, False),
        (coexecuted, False, True),
    ):
        keras.utils.set_random_seed(2)
        layers = [
            keras.layers.Dense(8, "tanh"),
            drawing_and_branching,
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3),
        ]
        model = Model(layers, 0, eager=True)
        specs = model.build(0, len(model), [spec_of(batches[0])])
        body = StageBody(model, model.items, specs[0], None)
        accumulators = [tf.Variable(tf.zeros_like(raw(weight))) for weight in body.weights]
        stage = kind(body, accumulators, recompute, splits=False, sends_back=True)
        found = []
        for number, x in enumerate(batches):
            data = MicroBatch(
                None, None, tf.constant(body.random.values(0, number)), lent and number % 2 == 1
            )
            made = stage.forward([x], data)
            stash = [tf.constant(tensor.numpy()) for tensor in made.stash]
            gradients, _ = stage.backward(
                made.plan, stash, [tf.ones([4, 3])], tf.constant(1.0, tf.float64)
            )
            found += [made.outputs[0].numpy(), gradients[0].numpy()]
        found += [accumulator.numpy() for accumulator in accumulators]
        found += [np.asarray(raw(state)) for state in body.states]
        results.append(found)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def coexecuted(*arguments, **options):
    import terra_tf

    return CoexecutedStage(*arguments, **options, wrap=terra_tf.function)


def test_random_numbers_that_cannot_be_repeated_are_refused():
    x = tf.ones([64, 16])
    own = np.random.default_rng(0)
    layers = [lambda x: x * own.normal()]
    stage, accumulators = make_stage(layers, x, EagerStage, splits=False, recompute=True)
    with pytest.raises(ModelError, match="draws random numbers"):
        passes(stage, accumulators, x, tf.ones_like(x), False)
    stage, accumulators = make_stage(layers, x, EagerStage, splits=False, recompute=False)
    passes(stage, accumulators, x, tf.ones_like(x), False)


@pytest.mark.parametrize("kind", [FunctionStage, EagerStage])
def test_what_a_module_assigns_is_assigned_once(kind):
    class Counting(tf.Module):
        def __init__(self):
            super().__init__()
            self.calls = tf.Variable(0, trainable=False)

        def __call__(self, x):
            self.calls.assign_add(1)
            return 2.0 * x

    module = Counting()
    x = tf.ones([2, 3])
    stage, accumulators = make_stage([module], x, kind, splits=False, recompute=True)
    passes(stage, accumulators, x, x, False)
    assert int(module.calls) == 1


def test_weights_and_views_are_in_no_stash():
    x = tf.zeros([2, 16])
    layers = [keras.layers.Dense(512), keras.layers.Reshape((2, 256)), keras.layers.Dense(4)]
    stage, accumulators = make_stage(layers, x, recompute=False, splits=False)
    made, _ = passes(stage, accumulators, x, tf.zeros([2, 2, 4]), False)
    size = sum(map(tensorflow_internals.nbytes, made.stash))
    assert size < 4 * (2 * 16 + 2 * 512 + 40), "the inputs of both products and little else"


def test_random_states_depend_on_seed_item_step_and_microbatch_alone():
    def states(seed, layers, step, microbatch):
        model = Model(layers, seed)
        body = StageBody(model, model.items, spec_of(tf.zeros([1, 2])), None)
        return body.random.values(step, microbatch)

    def dropout(**options):
        return keras.layers.Dropout(0.1, **options)

    first = states(0, [dropout()], 1, 2)
    assert np.array_equal(first, states(0, [dropout()], 1, 2))
    others = [
        states(1, [dropout()], 1, 2),
        states(0, [dropout(seed=3)], 1, 2),
        states(0, [dropout()], 2, 2),
        states(0, [dropout()], 1, 3),
    ]
    assert all((first[0] != other[0]).any() for other in others)
    pair = states(0, [dropout(), dropout()], 1, 2)
    assert (pair[0] == first[0]).all() and (pair[3] != pair[0]).any()


# --- the ledger ----------------------------------------------------------------------------------


def test_ledger_counts_stashes_on_their_way_at_both_ends():
    ledger = Ledger()
    first = ledger.make(100, begin=10)
    second = ledger.make(100, begin=20)
    first.departure = SimpleNamespace(done=True, finished=40)
    ledger.arrive(SimpleNamespace(done=True, started=30, bytes=60), lent=True)
    second.end = 45
    peak = ledger.peak()
    assert (peak.count, peak.bytes, peak.lent_bytes) == (3, 260, 60)


def test_ledger_gives_back_before_it_takes():
    ledger = Ledger()
    for begin in range(0, 50, 10):
        ledger.make(7, begin).end = begin + 10
    assert ledger.peak().count == 1


# --- settings, batches, structures ---------------------------------------------------------------


def test_settings_are_checked():
    assert recompute_flags("recompute", 2) == [True, True]
    assert recompute_flags(["keep", "recompute"], 2) == [False, True]
    for wrong in (["keep"], "forget", ["keep", "what"]):
        with pytest.raises(ValueError):
            recompute_flags(wrong, 2)
    assert make_schedule("interleaved", 2, 4, 3).num_chunks == 3
    with pytest.raises(UsageError, match="no schedule 'pipe'"):
        make_schedule("pipe", 2, 4, 2)
    with pytest.raises(UsageError, match="8 micro-batches, the pipeline 4"):
        make_schedule(schedules.bpipe(4, 8), 4, 4, 2)
    with pytest.raises(TypeError):
        make_schedule(3, 4, 4, 2)
    good = {
        "partition": "time",
        "stage_mode": "eager",
        "accumulate": 2,
        "timeout": np.float32(3),
        "seed": np.int64(1),
    }
    check_settings(**good)
    for name, wrong, kind in (
        ("partition", "best", ValueError),
        ("partition", None, TypeError),
        ("stage_mode", "fast", ValueError),
        ("accumulate", 0, ValueError),
        ("timeout", float("inf"), ValueError),
        ("timeout", float("nan"), ValueError),
        ("timeout", "1", TypeError),
        ("seed", 1.5, TypeError),
    ):
        with pytest.raises(kind, match=name):
            check_settings(**{**good, name: wrong})
    with pytest.raises(TypeError, match="stash"):
        recompute_flags(None, 2)
    for wrong in ("accuracy", None, ["accuracy"]):
        with pytest.raises(TypeError, match="metric"):
            Metrics(wrong)
    broken = schedules.Schedule.parse("0: F0 SEND_F0>1\n1: RECV_F0<0 F0 B0")
    with pytest.raises(schedules.ScheduleError):
        make_schedule(broken, 2, 1, 2)


def test_lists_that_are_no_model_are_refused():
    inputs = keras.Input((3,))
    functional = keras.Model(inputs, keras.layers.Flatten()(inputs))
    for wrong, message in (
        (None, "a list of layers"),
        ([keras.layers.Flatten], "entry 0 of the model is the class Flatten"),
        ([keras.layers.InputLayer((3,)), keras.layers.Flatten()], "entry 0 .* InputLayer"),
        (["dense"], "entry 0 of the model is 'dense'"),
        (functional, "need not follow each other"),
    ):
        with pytest.raises(TypeError, match=message):
            Model(wrong, 0)
    with pytest.raises(TypeError, match="is not an optimizer of Keras"):
        check_optimizer(keras.optimizers.SGD)


def test_horovods_optimizer_is_refused():
    hvd = pytest.importorskip("horovod.tensorflow.keras")
    # Where `terra_tf` was imported, too, Horovod's optimizer itself refuses.
    with pytest.raises(
        TypeError, match="pass the plain optimizer|DistributedOptimizer does not reduce"
    ):
        check_optimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with pytest.raises(TypeError, match="not an optimizer"):
        check_optimizer("adam")
    check_optimizer(keras.optimizers.SGD(0.1))


@pytest.mark.parametrize(
    "sgd", [keras.optimizers.SGD, tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD]
)
def test_clipping_by_the_norm_of_all_leaves_the_optimizer_as_it_was(sgd):
    optimizer = sgd(1.0, global_clipnorm=0.5)
    weight = keras.Variable(np.zeros(2, "float32"))
    for step in (1, 2):  # the second one by another pipeline of the same weights
        updater = Updater(optimizer, [weight], [True], [], [0], Collectives("", 1.0, None))
        updater.accumulator_of(weight).assign([3.0, 4.0])
        # Other ranks' gradients make the norm 10; it is clipped to 0.5.
        updater.apply([True], 1.0, squares=100.0)
        np.testing.assert_allclose(weight.numpy(), np.multiply(step, [-0.15, -0.2]), rtol=1e-6)
        assert optimizer.global_clipnorm == 0.5


def test_batches_are_split_evenly_and_completely():
    for count, parts in itertools.product(range(1, 20), range(1, 8)):
        sizes = sizes_of(count, parts)
        assert sum(sizes) == count and len(sizes) == parts and max(sizes) - min(sizes) <= 1
    batch = {"a": np.arange(5), "b": np.ones((5, 2))}
    pieces = split(batch, [3, 2])
    assert [len(piece["a"]) for piece in pieces] == [3, 2]
    np.testing.assert_array_equal(np.concatenate([p["a"] for p in pieces]), batch["a"])


def test_batches_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match="3 samples and cannot be split into 4"):
        check_batch(np.zeros((3, 2)), {}, 4)
    with pytest.raises(ValueError, match="y has 4"):
        check_batch(np.zeros((3, 2)), {"y": np.zeros(4)}, 1)
    with pytest.raises(ValueError, match="0 samples"):
        check_batch(np.zeros((0, 2)), {}, 1)
    with pytest.raises(ValueError, match="y is None"):
        check_batch(np.zeros((3, 2)), {"y": None, "sample_weight": None}, 1)
    with pytest.raises(ValueError, match="first dimension"):
        check_batch(np.float32(1), {}, 1)
    assert check_batch(np.zeros((3, 2)), {"sample_weight": None}, 3) == 3


def test_structures_come_back_from_json():
    structure = {"b": (1, [2, {"x": 3}]), "a": 0}
    count = iter(range(9))
    numbered = tf.nest.map_structure(lambda _: next(count), structure)
    flat = tf.nest.flatten(structure)
    assert decode(encode(numbered), flat) == structure
    with pytest.raises(TypeError, match="dense tensors"):
        spec_of({"text": "no tensor"})


def test_keras_masks_travel_with_their_tensors():
    embedding = keras.layers.Embedding(9, 4, mask_zero=True)
    lstm = keras.layers.LSTM(3)
    x = np.array([[1, 2, 0, 0], [3, 0, 0, 0]])
    expected = lstm(embedding(x))
    model = Model([embedding, lstm], 0)
    specs = model.build(0, 2, [spec_of(tf.constant(x))])
    first = StageBody(model, model.items[:1], specs[0], None)
    seeds = tf.zeros([9, 2], tf.uint32)
    made = first.run([tf.constant(x)], first.read_weights(), seeds, False)
    assert [t.dtype for t in made.outputs] == [tf.float32, tf.bool]
    second = StageBody(model, model.items[1:], specs[1], None)
    sent = [tf.identity(tensor) for tensor in made.outputs]
    found = second.run(sent, second.read_weights(), seeds, False)
    np.testing.assert_allclose(found.outputs[0], expected, rtol=1e-6)


def test_layers_that_cannot_be_built_are_named():
    model = Model([keras.layers.Dense(3), keras.layers.Reshape((7,))], 0)
    with pytest.raises(ModelError, match="entry 1 of the model, reshape.*float32"):
        model.build(0, 2, [spec_of(tf.zeros([1, 4]))])
    with pytest.raises(TypeError, match="entry 1"):
        Model([keras.layers.Dense(3), 4], 0)
    inputs = keras.Input((3,))
    with pytest.raises(TypeError, match="a Functional"):
        Model(keras.Model(inputs, keras.layers.Dense(3)(inputs)), 0)


def test_dependencies_are_found_in_layers_and_closures():
    embedding = keras.layers.Embedding(5, 4)
    shared = keras.layers.Dense(4)

    class Head(keras.Layer):
        def __init__(self):
            super().__init__()
            self.table = embedding

    model = Model(
        [
            embedding,
            keras.Sequential([shared]),
            keras.Sequential([shared, keras.layers.ReLU()]),
            lambda x: x @ tf.transpose(embedding.embeddings),
            Head(),
        ],
        0,
    )
    assert [item.dependencies for item in model.items] == [(), (), (1,), (0,), (0,)]


def test_weights_of_functions_are_found():
    dense = keras.layers.Dense(3)
    function = tf.function(lambda x: dense(x))
    function(tf.zeros([1, 2]))  # traced before
    model = Model([function, keras.layers.ReLU()], 0)
    assert [item.variables(True) for item in model.items] == [dense.trainable_variables, []]


def test_schedules_of_replicas_stand_side_by_side():
    both = side_by_side(schedules.bpipe(4, 8), 2)
    assert both.num_stages == 8
    assert {a.peer for line in both.actions[4:] for a in line if a.peer is not None} == {4, 5, 6, 7}


# --- checkpoints ---------------------------------------------------------------------------------


def test_files_that_are_no_checkpoints_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        Reader(tmp_path / "nothing")
    (tmp_path / "text").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        Reader(tmp_path / "text")
    np.savez(tmp_path / "arrays.npz", a=np.ones(3))
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        Reader(tmp_path / "arrays.npz")


def test_no_thread_of_ours_is_left():
    assert not [t for t in threading.enumerate() if t.name.startswith("pipeline")]
