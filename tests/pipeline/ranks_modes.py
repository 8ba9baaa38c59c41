"""Programs for four ranks: stage modes, terra around the loop, several pipelines, lifetimes.

Run by `test_modes.py`. What differs is in units of each tensor's largest magnitude.
"""

import random
import sys
import threading

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from ranks_common import (
    built,
    call,
    case,
    compare,
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

import terra_tf

MODES = ("function", "eager", "terra")


class Counting(keras.Layer):
    """Counts its calls in Python."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, x):
        self.calls += 1
        return x


@case
def stashes_of_eager_stages_are_kept_and_lent():
    """Python runs once a micro-batch; what is kept, lent and held is what the schedule says."""
    result = {}
    x, y = data(1, 16)[0]
    for mode in ("eager", "terra"):
        for schedule in ("1f1b", "bpipe"):
            for stash in ("keep", "recompute"):
                keras.utils.set_random_seed(3)
                counters = [Counting() for _ in range(4)]
                layers = []
                for counter in counters:
                    layers += [keras.layers.Dense(32, "tanh"), counter]
                layers[-2] = keras.layers.Dense(3)
                built(layers, x[:1])
                pipe = make(
                    layers,
                    sgd(),
                    schedule=schedule,
                    stash=stash,
                    stage_mode=mode,
                    partition=[2, 4, 6],
                )
                pipe.train_step(x, y)
                counters[pipe.stage].calls = 0
                pipe.train_step(x, y)
                calls = pipe._hub.gather(counters[pipe.stage].calls, "the test")
                rows = pipe.report().rows
                if rows:
                    result[f"{mode} {schedule} {stash}"] = {
                        "calls": calls,
                        "counts": [row.peak_stash_count for row in rows],
                        "bytes": [row.peak_stash_bytes for row in rows],
                        "lent": [row.peak_lent_bytes for row in rows],
                    }
                pipe.close()
    return result


@case
def stage_modes_equal_one_process():
    worst = {}
    for mode in MODES:
        for schedule in ("bpipe", "1f1b", "v-half"):
            truth = one_process(gpt(rate=0.0), sgd(), tokens(3))
            options = {"stage_mode": mode, "schedule": schedule, "num_microbatches": 8}
            if schedule == "v-half":
                options.update(num_stages=2, partition=[1, 3, 5], num_microbatches=4)
            pipe, losses = train(gpt(rate=0.0), sgd(), tokens(3), **options)
            for key, value in compare(pipe, losses, truth).items():
                worst[f"{mode} {key}"] = max(worst.get(f"{mode} {key}", 0.0), value)
            pipe.close()
    return worst


class Branching(keras.Layer):
    """Python that a graph cannot have: it looks at values, counts, draws and keeps lists."""

    def __init__(self, width):
        super().__init__()
        self.dense = [keras.layers.Dense(width, "tanh") for _ in range(2)]
        self.seen = []

    def build(self, shape):
        for dense in self.dense:
            dense.build(shape)

    def call(self, x):
        way = int(float(tf.reduce_sum(x)) > 0)
        self.seen.append(way)
        x = self.dense[way](x)
        for _ in range(1 + len(self.seen) % 2):
            x = x * 0.9
        if random.random() < 0.5:  # stochastic depth
            x = x + self.dense[0](x)
        return x


@case
def stages_with_branches_of_python_train():
    """The modes that can run it agree; the masks of Python are the same, too."""
    return train_with_branches(
        {"schedule": "1f1b", "stage_mode": "eager"},
        {"schedule": "bpipe", "stage_mode": "eager", "stash": "recompute"},
        {"schedule": "bpipe", "stage_mode": "terra"},
    )


@case
def stages_with_branches_of_python_train_in_every_way():
    """The same, kept, lent or repeated, and on one stage."""
    return train_with_branches(
        {"schedule": "1f1b", "stage_mode": "eager"},
        {"schedule": "bpipe", "stage_mode": "eager"},
        {"schedule": "bpipe", "stage_mode": "eager", "stash": "recompute"},
        {"schedule": "gpipe", "stage_mode": "terra"},
        {"schedule": "bpipe", "stage_mode": "terra"},
        {"schedule": "bpipe", "stage_mode": "terra", "stash": "recompute"},
        {"num_stages": 1, "schedule": "gpipe", "stage_mode": "eager"},
    )


def train_with_branches(*variants):
    def layers():
        keras.utils.set_random_seed(4)
        return [*(keras.layers.Dense(8, "tanh") for _ in range(2)), Plain(), Plain(), Plain()]

    class Plain(Branching):
        def __init__(self):
            super().__init__(8)

        def call(self, x):
            way = int(float(tf.reduce_sum(x)) > 0)
            x = self.dense[way](x) + x
            if random.random() < 0.5:
                x = x + self.dense[0](x) * np.random.uniform()
            return x

    batches = [(x, x) for x, _ in data(4, 16)]
    found = []
    for options in variants:
        pipe, losses = train(
            layers(), sgd(0.05), batches, loss=keras.losses.MeanSquaredError(), **options
        )
        found.append((losses, pipe.gather_weights()))
        pipe.close()
    if hvd.rank() != 0:
        return {}
    first = found[0]
    eager = [
        result
        for result, options in zip(found, variants, strict=True)
        if options["stage_mode"] == "eager" and "num_stages" not in options
    ]
    return {
        "loss": max(difference(losses, first[0]) for losses, _ in found),
        "weights": max(difference(w[k], first[1][k]) for _, w in found for k in w),
        "learned": found[0][0][-1] < found[0][0][0],
        "bit_equal": all(losses == first[0] for losses, _ in eager)
        and all((w[k] == first[1][k]).all() for _, w in eager for k in w),
    }


@case
def terra_around_the_training_loop():
    """`terra.function` around a step of the user's that calls `train_step`, and other work."""
    result = {}
    batches = tokens(5)
    for mode in MODES:
        truth = one_process(gpt(rate=0.0), sgd(), batches)
        pipe = make(gpt(rate=0.0), sgd(), schedule="bpipe", stage_mode=mode)
        average = tf.Variable(0.0)

        @terra_tf.function
        def step(x, y, pipe=pipe, average=average):
            loss = pipe.train_step(x, y)
            average.assign(average * 0.5 + tf.cast(loss, tf.float32) * 0.5)
            scaled = tf.sin(tf.cast(x, tf.float32)) * float(loss)
            return loss, tf.reduce_sum(scaled)

        losses = [step(tf.constant(x), tf.constant(y))[0] for x, y in batches]
        expected = 0.0
        for loss in truth[0]:
            expected = expected * 0.5 + loss * 0.5
        found = compare(pipe, [float(loss) for loss in losses], truth)
        for key, value in found.items():
            result[f"{mode} {key}"] = value
        result[f"{mode} average"] = difference(float(average), expected)
        pipe.close()
    losses = []
    pipe = make(gpt(rate=0.0), sgd(), schedule="bpipe")
    dataset = tf.data.Dataset.from_tensor_slices(
        tuple(np.stack(parts) for parts in zip(*batches, strict=True))
    )
    for x, y in terra_tf.iterate(dataset):
        losses.append(pipe.train_step(x, y))
    result["iterate loss"] = difference(losses, truth[0])
    return result


@case
def inner_functions_in_every_mode():
    """`tf.function`s inside stages: with weights, states, dropout, called before, evaluated."""

    def layers():
        keras.utils.set_random_seed(6)
        dense, norm, drop = keras.layers.Dense(8), keras.layers.BatchNormalization(), Drop()
        made = [
            keras.layers.Dense(8, "tanh"),
            Inner(dense, norm),
            tf.function(lambda x: drop(x)),
            keras.layers.Dense(3),
        ]
        return built(made, np.zeros((1, 8), "float32"))

    class Inner(keras.Layer):
        def __init__(self, dense, norm):
            super().__init__()
            self.dense, self.norm = dense, norm

        def build(self, shape):
            self.dense.build(shape)
            self.norm.build(shape)

        @tf.function
        def call(self, x, training=None):
            y = self.norm(self.dense(x), training=training)
            if tf.reduce_sum(y) > 0.5:
                y = y * 2.0
            return y

    class Drop(keras.Layer):
        def __init__(self):
            super().__init__()
            self.drop = keras.layers.Dropout(0.3, seed=3)

        def call(self, x, training=None):
            return tf.nn.dropout(x, 0.2) + self.drop(x, training=True)

    x, y = data(1, 16)[0]
    found = []
    for mode in MODES:
        for stash in ("keep", "recompute"):
            mine = layers()
            call(mine, x, False)
            pipe = make(
                mine, sgd(0.05), stage_mode=mode, stash=stash, schedule="bpipe", num_microbatches=4
            )
            losses = []
            for _ in range(3):
                losses.append(pipe.train_step(x, y))
                losses.append(pipe.evaluate(x, y))
            found.append((losses, pipe.gather_weights()))
            pipe.close()
    if hvd.rank() != 0:
        return {}
    first = found[0]
    return {
        "loss": max(difference(losses, first[0]) for losses, _ in found),
        "weights": max(
            difference(w[k], first[1][k]) for _, w in found for k in w if np.abs(w[k]).max() > 1e-6
        ),
        "changes": len(set(first[0])) == 6,
    }


@case
def several_pipelines_take_turns():
    batches = data(3, 12)
    truth = one_process(mlp(), sgd(), batches)
    other_truth = one_process(mlp(depth=5), sgd(), batches)
    one = make(mlp(), sgd(), schedule="bpipe")
    two = make(mlp(depth=5), sgd(), num_stages=2, num_microbatches=3, schedule="1f1b")
    shard = slice(0, 6) if hvd.rank() < 2 else slice(6, 12)
    losses, others = [], []
    for x, y in batches:
        losses.append(one.train_step(x, y))
        others.append(two.train_step(x[shard], y[shard]))
        one.evaluate(x, y)
    found = compare(one, losses, truth)
    for key, value in compare(two, others, other_truth).items():
        found[f"other {key}"] = value
    # After training: the outputs of the trained model, and on fewer stages.
    trained = mlp()
    out = one.predict(batches[0][0], gather=True)
    one.gather_weights()
    small = make(mlp(), sgd(), num_stages=1, num_microbatches=1)
    path = hvd.broadcast_object(f"/tmp/pipeline-modes-{threading.get_native_id()}.checkpoint", 0)
    one.save(path)
    small.restore(path)
    alone = small.predict(batches[0][0])
    found["predict on fewer"] = difference(alone, out)
    found["evaluate on fewer"] = difference(small.evaluate(*batches[0]), one.evaluate(*batches[0]))
    del trained
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
