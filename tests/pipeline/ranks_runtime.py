"""Programs for four ranks, each compared on rank 0 with one process that trains eagerly.

Run by `test_runtime.py`, one launch for all; writes for each case what differed, in units of each
tensor's largest magnitude. A case is a function that returns a dictionary of numbers.
"""

import os
import sys

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from ranks_common import (
    built,
    call,
    case,
    compare,
    crossentropy,
    data,
    difference,
    gpt,
    main,
    make,
    mlp,
    one_process,
    sgd,
    tokens,
    train,
)

# --- schedules and stash policies ----------------------------------------------------------------


@case
def schedules_equal_one_process():
    batches = data()
    truth = one_process(mlp(), sgd(), batches)
    worst = {"loss": 0.0, "weights": 0.0}
    first, equal = None, True
    for schedule in ("gpipe", "1f1b", "bpipe", "interleaved", "v-half"):
        for stash in ("keep", "recompute"):
            pipe, losses = train(mlp(), sgd(), batches, schedule=schedule, stash=stash)
            found = compare(pipe, losses, truth)
            weights = pipe.gather_weights()
            pipe.close()
            if hvd.rank() == 0:
                worst = {name: max(worst[name], found[name]) for name in worst}
                if schedule in ("gpipe", "1f1b", "bpipe"):
                    first = first or (losses, weights)
                    equal &= losses == first[0]
                    equal &= all((weights[k] == first[1][k]).all() for k in weights)
    return {**worst, "bit_equal": equal}


@case
def dropout_agrees_between_schedules_and_partitions():
    batches = tokens()
    found = []
    for options in (
        {"schedule": "1f1b"},
        {"schedule": "bpipe"},
        {"schedule": "bpipe", "stash": ["recompute", "keep", "recompute", "keep"]},
        {"schedule": "gpipe", "stash": "recompute"},
        {"num_stages": 2, "schedule": "1f1b"},
        {"num_stages": 1, "schedule": "gpipe"},
        {"stage_mode": "eager", "schedule": "bpipe"},
    ):
        pipe, losses = train(gpt(), sgd(), batches, **options)
        found.append((losses, pipe.gather_weights()))
        pipe.close()
    if hvd.rank() != 0:
        return {}

    def same(a, b):
        return a[0] == b[0] and all((a[1][k] == b[1][k]).all() for k in a[1])

    result = {"bit_equal": all(same(found[0], other) for other in found[1:4])}
    result["loss"] = max(difference(other[0], found[0][0]) for other in found)
    return result


@case
def dropout_masks_differ_between_steps_and_microbatches():
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1, use_bias=False),
        *(keras.layers.Identity() for _ in range(2)),
    ]
    layers[1].build((None, 64))
    layers[1].set_weights([np.ones((64, 1), "float32")])
    x = np.ones((8, 64), "float32")
    pipe = make(
        layers, keras.optimizers.SGD(0.0), loss=lambda y, p: tf.reduce_mean(p), partition=[1, 2, 3]
    )
    losses = [pipe.train_step(x, x) for _ in range(3)]
    return {"different": len(set(losses)) == 3}


@case
def batch_norm_equals_microbatches_in_one_process():
    def layers():
        keras.utils.set_random_seed(7)
        return built(
            [
                keras.layers.Conv2D(4, 3, padding="same"),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
                keras.layers.Conv2D(4, 3),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ],
            np.zeros((1, 6, 6, 2), "float32"),
        )

    random = np.random.default_rng(2)
    batches = [
        (random.normal(size=(16, 6, 6, 2)).astype("float32"), random.integers(0, 3, 16))
        for _ in range(2)
    ]
    reference = layers()
    truth = one_process(reference, sgd(0.01), batches, microbatches=4)
    states = [np.asarray(v) for layer in reference for v in layer.non_trainable_variables]
    worst = {"loss": 0.0, "weights": 0.0, "states": 0.0}
    for stash in ("keep", "recompute"):
        mine = layers()
        pipe, losses = train(
            mine, sgd(0.01), batches, num_microbatches=4, schedule="bpipe", stash=stash
        )
        found = compare(pipe, losses, truth)
        if hvd.rank() == 0:
            got = [np.asarray(v) for layer in mine for v in layer.non_trainable_variables]
            found["states"] = max(difference(a, b) for a, b in zip(got, states, strict=True))
            worst = {name: max(worst[name], found[name]) for name in worst}
        pipe.close()
    return worst


@case
def adam_and_float64():
    batches = data(dtype="float64")
    keras.config.set_floatx("float64")
    try:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
        truth = one_process(mlp("float64"), sgd(), batches, loss)
        pipe, losses = train(mlp("float64"), sgd(), batches, schedule="bpipe", loss=loss)
        result = {f"{k}_float64": v for k, v in compare(pipe, losses, truth).items()}
    finally:
        keras.config.set_floatx("float32")
    batches = data()
    truth = one_process(mlp(), keras.optimizers.AdamW(1e-2), batches)
    pipe, losses = train(mlp(), keras.optimizers.AdamW(1e-2), batches)
    return {**result, **{f"{k}_adam": v for k, v in compare(pipe, losses, truth).items()}}


# --- replicas, tied weights, structures ----------------------------------------------------------


@case
def replicas_and_tied_weights():
    batches = tokens()
    truth = one_process(gpt(rate=0.0), sgd(), batches)
    mine = slice(0, 8) if hvd.rank() < 2 else slice(8, 16)
    shards = [(x[mine], y[mine]) for x, y in batches]
    options = {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b"}
    pipe, losses = train(gpt(rate=0.0), sgd(), shards, **options)
    result = compare(pipe, losses, truth)
    pipe, losses = train(gpt(rate=0.0), sgd(), batches, schedule="bpipe")
    return {**result, **{f"{k}_4": v for k, v in compare(pipe, losses, truth).items()}}


@case
def uneven_replicas():
    batches = data(samples=20)
    truth = one_process(mlp(), sgd(), batches)
    mine = slice(0, 6) if hvd.rank() < 2 else slice(6, 20)
    shards = [(x[mine], y[mine]) for x, y in batches]
    worst = {"loss": 0.0, "weights": 0.0}
    for schedule in ("1f1b", "interleaved", "v-half"):
        options = {"num_stages": 2, "num_microbatches": 4, "schedule": schedule}
        pipe, losses = train(mlp(), sgd(), shards, **options)
        found = compare(pipe, losses, truth)
        worst = {name: max(worst[name], found.get(name, 0.0)) for name in worst}
        pipe.close()
    return worst


@case
def unbuilt_layers_start_alike():
    batches = tokens(steps=2)
    found = []
    for options in ({"schedule": "bpipe"}, {"num_stages": 2}, {"num_stages": 1}):
        keras.utils.set_random_seed(hvd.rank())  # what users forget must not matter
        layers = gpt(build=False, rate=0.0)
        pipe, losses = train(layers, sgd(), batches, **options)
        found.append((losses, pipe.gather_weights()))
    if hvd.rank() != 0:
        return {}
    return {
        "loss": max(difference(other[0], found[0][0]) for other in found),
        "weights": max(difference(o[1][k], found[0][1][k]) for o in found for k in o[1]),
    }


class Split(keras.Layer):
    """Dictionary in, dictionary out: an integer part and a skip connection travel along."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(8)

    def call(self, inputs):
        return {"x": self.dense(inputs["x"]), "skip": inputs["x"], "index": inputs["index"]}


class Join(keras.Layer):
    """Uses the skip connection of three stages before, and not all of its weights."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.unused = keras.layers.Dense(3)

    def build(self, shape):
        self.dense.build((None, 8))
        self.unused.build((None, 8))

    def call(self, inputs):
        picked = keras.ops.take_along_axis(inputs["skip"], inputs["index"], axis=1)
        return self.dense(inputs["x"]) + picked


@case
def dictionaries_skips_and_unused_weights():
    def layers(cut):
        keras.utils.set_random_seed(4)

        def pass_on(parts):
            return {**parts, "x": keras.ops.tanh(parts["x"])}

        def stop(parts):
            return {**parts, "x": keras.ops.stop_gradient(parts["x"])}

        return built([Split(), pass_on, stop if cut else pass_on, Join()], inputs(1)[0])

    def inputs(count):
        random = np.random.default_rng(9)
        x = {
            "x": random.normal(size=(count, 8)).astype("float32"),
            "index": random.integers(0, 8, (count, 1)),
        }
        return x, random.integers(0, 3, count)

    batches = [inputs(12)] * 3
    result = {}
    # An optimizer that moves weights without gradients by nothing, and, where the gradient is
    # missing inside one stage, one that would let them decay.
    for name, optimizer, cut in (
        ("stopped", lambda: sgd(), True),
        ("decay", lambda: keras.optimizers.SGD(0.1, weight_decay=0.1), False),
    ):
        truth = one_process(layers(cut), optimizer(), batches)
        pipe, losses = train(layers(cut), optimizer(), batches, schedule="bpipe")
        for key, value in compare(pipe, losses, truth).items():
            result[f"{key}_{name}"] = value
        pipe.close()
    return result


# --- losses, weights, clipping, precision ---------------------------------------------------------


@case
def layer_losses_and_sample_weights():
    class Active(keras.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(keras.ops.square(x)))
            return x

    def layers():
        found = mlp(kernel_regularizer="l2")
        found.insert(3, Active())
        return built(found, np.zeros((1, 8), "float32"))

    random = np.random.default_rng(6)
    batches = [(x, y, random.uniform(size=len(y)).astype("float32")) for x, y in data()]
    truth = one_process(layers(), sgd(), batches)
    pipe, losses = train(layers(), sgd(), batches)
    result = compare(pipe, losses, truth)
    mine = slice(0, 11) if hvd.rank() < 2 else slice(11, 22)
    shards = [tuple(part[mine] for part in batch) for batch in batches]
    pipe, losses = train(layers(), sgd(), shards, num_stages=2)
    return {**result, **{f"{k}_dp": v for k, v in compare(pipe, losses, truth).items()}}


@case
def clipping():
    result = {}
    batches = data()
    for name, options in {
        "norm": {"clipnorm": 0.05},
        "value": {"clipvalue": 0.002},
        "global": {"global_clipnorm": 0.1},
    }.items():
        truth = one_process(mlp(), sgd(**options), batches)
        pipe, losses = train(mlp(), sgd(**options), batches)
        for key, value in compare(pipe, losses, truth).items():
            result[f"{key}_{name}"] = value
        pipe.close()
    return result


@case
def learning_rate_schedule_and_accumulation():
    def optimizer():
        return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5))

    batches = data(steps=4)
    doubled = [
        (np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]]))
        for a, b in zip(batches[::2], batches[1::2], strict=True)
    ]
    truth = one_process(mlp(), optimizer(), doubled)
    pipe, losses = train(mlp(), optimizer(), batches, accumulate=2)
    means = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    return compare(pipe, means, truth)


@case
def legacy_optimizer():
    import tf_keras

    batches = data()
    truth = one_process(mlp(), keras.optimizers.Adam(1e-2, epsilon=1e-7), batches)
    pipe, losses = train(mlp(), tf_keras.optimizers.Adam(1e-2, epsilon=1e-7), batches)
    return compare(pipe, losses, truth)


@case
def mixed_precision_with_loss_scale():
    def layers():
        keras.utils.set_random_seed(3)
        dense = [keras.layers.Dense(16, "tanh", dtype="mixed_float16") for _ in range(5)]
        # The last stage has no weights: it learns the loss scale from the others.
        return built(
            [
                *dense,
                keras.layers.Dense(3, dtype="mixed_float16"),
                keras.layers.Activation("linear", dtype="float32"),
                keras.layers.Activation("linear", dtype="float32"),
            ],
            np.zeros((1, 8), "float32"),
        )

    def scaled(scale):
        return keras.optimizers.LossScaleOptimizer(sgd(0.01), initial_scale=scale)

    batches = data(steps=4)
    truth = one_process(layers(), sgd(0.01), batches)
    pipe, losses = train(layers(), scaled(256.0), batches)
    result = compare(pipe, losses, truth)
    # A scale that overflows: steps are skipped everywhere until it fits.
    optimizer = scaled(2.0**20)
    pipe, losses = train(layers(), optimizer, batches[:1] * 12)
    scales = pipe._hub.gather(float(optimizer.dynamic_scale) if optimizer.built else None, "test")
    result["scales_agree"] = len({s for s in scales if s is not None}) == 1
    result["scale_fell"] = scales[0] < 2.0**20
    result["then_learned"] = losses[-1] < losses[0]
    return result


# --- partitions, modes, transports ---------------------------------------------------------------


@case
def partitions_and_modes():
    batches = data()
    truth = one_process(mlp(), sgd(), batches)
    worst = {"loss": 0.0, "weights": 0.0}
    for options in (
        {"partition": "parameters"},
        {"partition": "time"},
        {"partition": [1, 2, 7]},
        {"stage_mode": "eager", "schedule": "v-half"},
        {"stage_mode": "terra"},
        {"transport": "tcp"},
        {"transport": "horovod", "num_microbatches": 5},
        {"num_microbatches": 1},
        {"num_microbatches": 2, "schedule": "1f1b"},
    ):
        pipe, losses = train(mlp(), sgd(), batches, **options)
        found = compare(pipe, losses, truth)
        pipe.close()
        if hvd.rank() == 0:
            if max(found.values()) > 3e-6:
                raise AssertionError(f"{options}: {found}")
            worst = {name: max(worst[name], found[name]) for name in worst}
    return worst


@case
def odd_shapes_are_not_traced_again():
    pipe = make(gpt(rate=0.1), sgd(), schedule="bpipe", num_microbatches=4)
    random = np.random.default_rng(3)
    traces = []
    for samples, length in ((8, 5), (9, 5), (16, 7), (11, 6), (8, 5), (4, 9), (8, 7)):
        x = random.integers(0, 11, (samples, length))
        pipe.train_step(x, x)
        traces.append(pipe.num_traces)
    return {"traces": traces}


# --- evaluation, prediction, metrics, state ------------------------------------------------------


@case
def evaluate_predict_metrics():
    batches = data(steps=1)
    x, y = batches[0]
    reference = mlp()
    expected = call(reference, x, False)
    layers = mlp()
    metrics = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    pipe = make(layers, sgd(), metrics=metrics)
    found = pipe.evaluate(x, y)
    accuracy = pipe.metric_results()["accuracy"]
    everywhere = pipe.predict(x, gather=True)
    here = pipe.predict(x)
    true_accuracy = float(np.mean(np.argmax(expected, 1) == y))
    small = pipe.evaluate(x[:3], y[:3])
    pipe.train_step(x, y)
    return {
        "loss": difference(found, float(crossentropy(y, expected))),
        "small": difference(small, float(crossentropy(y[:3], expected[:3]))),
        "outputs": difference(everywhere, expected),
        "only_last": here is None,
        "accuracy": abs(accuracy - true_accuracy),
        "training_accuracy": abs(pipe.metric_results()["accuracy"] - true_accuracy),
    }


@case
def errors_leave_the_pipeline_usable():
    pipe = make(mlp(), sgd())
    x, y = data(steps=1)[0]
    messages = []
    for bad in ((x[:5], y[:5]), (x, y[:-1])):
        try:
            pipe.train_step(*bad)
        except ValueError as error:
            messages.append(str(error))
    loss = pipe.train_step(x, y)
    split = make(mlp(), sgd(), num_stages=2, num_microbatches=4)
    try:
        split.train_step(*((x[:3], y[:3]) if hvd.rank() < 2 else (x, y)))
    except ValueError as error:
        messages.append(str(error))
    return {"errors": len(messages), "loss": loss, "other_replica": split.train_step(x, y)}


@case
def ledger_counts_what_bpipe_promises():
    batches = data(steps=1)
    counts = {}
    for schedule in ("1f1b", "bpipe"):
        pipe, _ = train(mlp(), sgd(), batches, schedule=schedule)
        report = pipe.report()
        if hvd.rank() == 0:
            counts[schedule] = [row.peak_stash_count for row in report.rows]
            counts[f"{schedule}_lent"] = [row.peak_lent_bytes for row in report.rows]
            counts["table"] = str(report).count("shared-memory")
    return counts


@case
def checkpoints():
    folder = hvd.broadcast_object(os.environ["PIPELINE_TEST_RESULTS"] + ".checkpoint", 0)
    batches = tokens(steps=4)
    adam = keras.optimizers.Adam
    whole, losses = train(gpt(), adam(1e-2), batches, schedule="bpipe")
    first, _ = train(gpt(), adam(1e-2), batches[:2], schedule="bpipe")
    first.save(folder)
    resumed = make(gpt(build=False), adam(1e-2), schedule="bpipe")
    resumed.restore(folder)
    again = [resumed.train_step(*batch) for batch in batches[2:]]
    outputs = [first.predict(batches[0][0], gather=True)]
    for stages in (2, 1):
        other = make(gpt(build=False), adam(1e-2), num_stages=stages)
        other.restore(folder)
        outputs.append(other.predict(batches[0][0], gather=True))
    end = whole.gather_weights(), resumed.gather_weights()
    if hvd.rank() != 0:
        return {}
    return {
        "resumed_bit_equal": again == losses[2:]
        and all((end[0][k] == end[1][k]).all() for k in end[0]),
        "outputs": max(difference(other, outputs[0]) for other in outputs[1:]),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
