"""Programs for four ranks with odd shapes, structures and types, against one process.

Run by `test_shapes.py`. The truth is one process that works micro-batch by micro-batch, eagerly.
What differs is in units of each tensor's largest magnitude.
"""

import sys

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from ranks_common import (
    built,
    case,
    compare,
    crossentropy,
    data,
    difference,
    gpt,
    main,
    mlp,
    one_process,
    sgd,
    tokens,
    train,
)

SCHEDULES = ("gpipe", "1f1b", "interleaved", "bpipe", "v-half")


def worst_of(results):
    """The largest of each number."""
    worst = {}
    for found in results:
        for name, value in found.items():
            worst[name] = max(worst.get(name, 0.0), value)
    return worst


def check(layers, batches, optimizer=sgd, loss=crossentropy, microbatches=1, **options):
    truth = one_process(layers(), optimizer(), batches, loss, microbatches)
    if microbatches > 1:
        options["num_microbatches"] = microbatches
    pipe, losses = train(layers(), optimizer(), batches, loss=loss, **options)
    found = compare(pipe, losses, truth)
    pipe.close()
    return found


@case
def micro_batches_fewer_than_stages_and_ragged():
    """M from 1 to beyond p, batches that m does not divide."""
    results = []
    batches = [batch for count in (7, 13) for batch in data(1, count)]
    truth = one_process(mlp(), sgd(), batches)
    for schedule in SCHEDULES:
        for m in (1, 2, 3, 5, 7):
            pipe, losses = train(mlp(), sgd(), batches, schedule=schedule, num_microbatches=m)
            found = compare(pipe, losses, truth)
            pipe.close()
            if found and max(found.values()) > 3e-6:
                raise AssertionError(f"{schedule}, m={m}: {found}")
            results.append(found)
    return worst_of(results)


@case
def batch_and_length_change_between_steps():
    batches = [
        tokens(1, samples, length)[0]
        for samples, length in ((8, 5), (9, 5), (4, 7), (12, 3), (8, 5), (5, 9))
    ]
    results = []
    for options in (
        {"schedule": "bpipe"},
        {"schedule": "v-half"},
        {"schedule": "bpipe", "stage_mode": "eager"},
        {"schedule": "bpipe", "stash": "recompute"},
    ):
        truth = one_process(gpt(rate=0.0), sgd(), batches)
        options = {"num_microbatches": 4, **options}
        pipe, losses = train(gpt(rate=0.0), sgd(), batches, **options)
        found = compare(pipe, losses, truth)
        pipe.close()
        results.append({"loss": found.get("loss", 0.0), "weights": found.get("weights", 0.0)})
    return worst_of(results)


@case
def stages_without_weights():
    def layers():
        return built(
            [
                keras.layers.Rescaling(0.5),
                keras.layers.Dense(16, "tanh"),
                lambda x: x * 2.0,
                keras.layers.Dense(3),
            ],
            np.zeros((1, 8), "float32"),
        )

    def seeded():
        keras.utils.set_random_seed(2)
        return layers()

    results = [check(seeded, data(), schedule=s, partition="uniform") for s in ("bpipe", "gpipe")]
    results.append(check(seeded, data(), schedule="bpipe", stage_mode="eager"))
    # No stage but the first has weights; the loss is float all the same.
    mine = slice(0, 11) if hvd.rank() < 2 else slice(11, 22)
    truth = one_process(seeded(), sgd(), data())
    pipe, losses = train(
        seeded(), sgd(), [(x[mine], y[mine]) for x, y in data()], num_stages=2, partition=[2]
    )
    results.append(compare(pipe, losses, truth))
    return worst_of(results)


class Tuple(keras.Layer):
    """Tuples with lists and dictionaries in them, an integer part, and a part nobody uses."""

    def __init__(self, width):
        super().__init__()
        self.dense = keras.layers.Dense(width, "tanh")

    def call(self, inputs):
        x, (skip, index), rest = inputs
        return (self.dense(x), [skip + x, index], {"unused": x * 3.0, "flag": rest["flag"]})


@case
def nested_structures_and_skip_connections():
    return train_nested({"schedule": "bpipe"}, {"schedule": "bpipe", "transport": "horovod"})


@case
def nested_structures_in_every_way():
    return train_nested(
        {"schedule": "bpipe", "stash": "recompute"},
        {"schedule": "bpipe", "stage_mode": "eager"},
        # Two replicas do the same.
        {"schedule": "v-half", "partition": [1, 2, 4], "num_stages": 2},
    )


def train_nested(*variants):
    def layers():
        keras.utils.set_random_seed(8)

        def begin(inputs):
            flag = tf.cast(inputs["index"] > 3, tf.bool)
            return (
                inputs["x"],
                [inputs["x"], inputs["index"]],
                {"unused": inputs["x"], "flag": flag},
            )

        def end(parts):
            x, (skip, index), rest = parts
            picked = tf.gather(skip, index[:, 0], axis=1, batch_dims=1)[:, None]
            return x[:, :3] + picked * tf.cast(rest["flag"], x.dtype)

        return built([begin, Tuple(8), Tuple(8), Tuple(8), Tuple(8), end], inputs(1)[0])

    def inputs(count):
        random = np.random.default_rng(count)
        x = {
            "x": random.normal(size=(count, 8)).astype("float32"),
            "index": random.integers(0, 8, (count, 1)),
        }
        return x, random.integers(0, 3, count)

    batches = [inputs(12), inputs(11)]
    return worst_of([check(layers, batches, **options) for options in variants])


class Down(keras.Layer):
    """Halves the length and keeps what it was given for the way up."""

    def __init__(self, width):
        super().__init__()
        self.convolution = keras.layers.Conv1D(width, 3, strides=2, padding="same")

    def call(self, inputs):
        x, skips = inputs
        return keras.ops.tanh(self.convolution(x)), [*skips, x]


class Up(keras.Layer):
    """Doubles the length and takes what was kept last."""

    def __init__(self, width):
        super().__init__()
        self.convolution = keras.layers.Conv1D(width, 3, padding="same")

    def call(self, inputs):
        x, (*others, skip) = inputs
        x = keras.ops.concatenate([keras.ops.repeat(x, 2, axis=1), skip], -1)
        return keras.ops.tanh(self.convolution(x)), others


@case
def skips_that_become_more_and_fewer():
    """A U-net with a functional model among its layers, and a loss of the user's own."""

    def layers():
        keras.utils.set_random_seed(12)
        inputs = keras.Input((None, 8))
        gate = keras.layers.Dense(8, "sigmoid")(inputs)
        gated = keras.Model(inputs, keras.layers.Multiply()([inputs, gate]))
        return built(
            [
                keras.layers.Dense(8),
                gated,
                lambda x: (x, []),
                Down(12),
                Down(16),
                Up(12),
                Up(8),
                lambda parts: parts[0],
                keras.layers.Dense(4),
            ],
            np.zeros((1, 8, 8), "float32"),
        )

    def loss(y, p):
        error = tf.abs(y - p)
        return tf.reduce_mean(tf.where(error < 1, 0.5 * error**2, error - 0.5))

    random = np.random.default_rng(5)
    batches = [
        (
            random.normal(size=(samples, 8, 8)).astype("float32"),
            random.normal(size=(samples, 8, 4)).astype("float32"),
        )
        for samples in (16, 18)
    ]
    return worst_of(
        [
            check(layers, batches, loss=loss, num_microbatches=4, **options)
            for options in (
                {"schedule": "bpipe"},
                {"schedule": "1f1b", "stash": "recompute"},
                {"schedule": "v-half", "num_stages": 2},
            )
        ]
    )


@case
def boundaries_of_half_precision():
    def layers(policy):
        keras.utils.set_random_seed(3)
        dense = [keras.layers.Dense(16, "tanh", dtype=policy) for _ in range(6)]
        return built([*dense, keras.layers.Dense(3, dtype="float32")], np.zeros((1, 8), "float32"))

    result = {}
    for policy in ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16"):
        for name, options in (
            ("keep", {"schedule": "bpipe"}),
            ("eager", {"schedule": "bpipe", "stage_mode": "eager"}),
            ("horovod", {"schedule": "1f1b", "transport": "horovod", "num_microbatches": 4}),
        ):
            m = options.pop("num_microbatches", 8)
            found = check(
                lambda policy=policy: layers(policy),
                data(2),
                lambda: sgd(0.01),
                microbatches=m,
                **options,
            )
            for key, value in found.items():
                result[f"{policy} {name} {key}"] = value
    return result


@case
def labels_and_masks_of_the_last_stage():
    """Targets are a dictionary of integers and a boolean mask; x has a mask of its own."""

    def loss(y, predictions):
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(y["label"], predictions)
        weight = tf.cast(y["mask"], each.dtype)
        # The mean over samples: each sample's own masked mean.
        return tf.reduce_mean(tf.reduce_sum(each * weight, 1) / tf.reduce_sum(weight, 1))

    def batches():
        random = np.random.default_rng(4)
        made = []
        for _ in range(2):
            mask = random.integers(0, 2, (10, 6)).astype(bool)
            mask[:, 0] = True
            y = {"label": random.integers(0, 11, (10, 6)), "mask": mask}
            made.append((random.integers(0, 11, (10, 6)), y))
        return made

    def run(**options):
        layers, batch = gpt(rate=0.0), batches()
        weights = [w for layer in layers for w in getattr(layer, "trainable_variables", ())]
        optimizer, losses = sgd(), []
        for x, y in batch:
            with tf.GradientTape() as tape:
                out = x
                for layer in layers:
                    out = layer(out)
                value = loss(y, out)
            found = tape.gradient(value, [w.value for w in weights])
            optimizer.apply_gradients(zip(found, weights, strict=True))
            losses.append(float(value))
        truth = losses, [np.asarray(w) for w in weights]
        pipe, found = train(gpt(rate=0.0), sgd(), batch, loss=loss, num_microbatches=5, **options)
        return compare(pipe, found, truth)

    return worst_of(
        [run(schedule="bpipe"), run(schedule="v-half", num_stages=2, partition=[1, 3, 4])]
    )


@case
def masks_of_keras_travel():
    def layers():
        keras.utils.set_random_seed(6)
        return built(
            [
                keras.layers.Embedding(9, 6, mask_zero=True),
                keras.layers.LSTM(6, return_sequences=True),
                keras.layers.LSTM(5),
                keras.layers.Dense(3),
            ],
            np.ones((1, 7), "int32"),
        )

    random = np.random.default_rng(3)
    x = random.integers(1, 9, (12, 7))
    for row in range(12):
        x[row, random.integers(2, 8) :] = 0
    batches = [(x, random.integers(0, 3, 12))] * 2
    return worst_of(
        [
            check(layers, batches, schedule="bpipe", num_microbatches=6, stash=s, stage_mode=mode)
            for s, mode in (("keep", "function"), ("recompute", "function"), ("keep", "eager"))
        ]
    )


@case
def batch_norm_and_dropout_agree_between_policies():
    """The same bits whether stashes are kept, recomputed, lent; the same in other cuts."""

    def layers():
        keras.utils.set_random_seed(7)
        made = []
        for _ in range(4):
            made += [
                # With a bias before it, a batch norm would make gradients of nothing but noise.
                keras.layers.Dense(8, use_bias=False),
                keras.layers.BatchNormalization(momentum=0.8),
                lambda x: tf.nn.dropout(tf.tanh(x), 0.2),
                keras.layers.Dropout(0.2),
            ]
        return built([*made, keras.layers.Dense(3)], np.zeros((1, 8), "float32"))

    batches = data(2, 24)
    found = []
    exact = [
        {"schedule": "1f1b"},
        {"schedule": "bpipe"},
        {"schedule": "gpipe", "stash": "recompute"},
        {"schedule": "bpipe", "stash": ["keep", "recompute", "keep", "recompute"]},
    ]
    others = [
        {"schedule": "1f1b", "num_stages": 2},
        {"schedule": "interleaved"},
        {"schedule": "v-half"},
        {"schedule": "bpipe", "stage_mode": "eager"},
        {"schedule": "bpipe", "stage_mode": "eager", "stash": "recompute"},
        {"schedule": "bpipe", "stage_mode": "terra"},
    ]
    for options in exact + others:
        mine = batches
        if options.get("num_stages") == 2:
            # Both replicas do the same, so that masks, which replicas share, agree.
            mine = batches
        pipe, losses = train(layers(), sgd(0.05), mine, partition=partition(options), **options)
        found.append((losses, pipe.gather_weights()))
        pipe.close()
    if hvd.rank() != 0:
        return {}
    first = found[0]
    result = {
        "bit_equal": all(
            losses == first[0] and all((w[k] == first[1][k]).all() for k in w)
            for losses, w in found[: len(exact)]
        )
    }
    for options, (losses, weights) in zip(others, found[len(exact) :], strict=True):
        name = " ".join(f"{v}" for v in options.values())
        result[f"{name} loss"] = difference(losses, first[0])
        result[f"{name} weights"] = max(difference(weights[k], first[1][k]) for k in weights)
    return result


def partition(options):
    if options["schedule"] in ("interleaved", "v-half"):
        return [2, 4, 6, 9, 11, 13, 15]
    return [8] if options.get("num_stages") == 2 else [4, 8, 12]


if __name__ == "__main__":
    main(sys.argv[1:])
