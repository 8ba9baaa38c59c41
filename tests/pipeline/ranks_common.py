"""What the programs for several ranks share: the truth of one process, models, data, cases.

A program registers cases, functions that return what they found, and hands over to `main`; see
`ranks_runtime.py`.
"""

import json
import os
import time
import traceback

import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402

import pipeline  # noqa: E402

TIMEOUT = 30.0
CASES = {}
crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def case(function):
    CASES[function.__name__] = function
    return function


# --- the truth: one process, eager ---------------------------------------------------------------


def call(layers, x, training):
    for layer in layers:
        options = {"training": training} if isinstance(layer, keras.Layer) else {}
        x = layer(x, **options)
    return x


def variables(layers):
    found = {}
    for layer in layers:
        for variable in getattr(layer, "trainable_variables", ()):
            found.setdefault(id(variable), variable)
    return list(found.values())


def one_process(layers, optimizer, batches, loss=crossentropy, microbatches=1, prepare=None):
    """Losses and weights after training, with the gradients of micro-batches added up."""
    weights = variables(layers)
    losses = []
    for x, y, *weight in batches:
        count = len(y)
        total, gradients = 0.0, None
        for part in np.array_split(np.arange(count), microbatches):
            begin, end = part[0], part[-1] + 1
            for layer in layers:
                if isinstance(layer, keras.Layer):
                    layer._clear_losses()
            part_of_x = tf.nest.map_structure(lambda a, b=begin, e=end: a[b:e], x)
            with tf.GradientTape() as tape:
                out = call(layers, part_of_x, True)
                extra = [w[begin:end] for w in weight]
                value = loss(y[begin:end], out, *extra)
                for layer in layers:
                    if isinstance(layer, keras.Layer):
                        value += sum(layer.losses)
                value = value * ((end - begin) / count)
            found = tape.gradient(value, [w.value for w in weights])
            found = [None if g is None else tf.convert_to_tensor(g) for g in found]
            total += float(value)
            gradients = (
                found
                if gradients is None
                else [a if a is None else a + b for a, b in zip(gradients, found, strict=True)]
            )
        if prepare is not None:
            gradients = prepare(gradients)
        optimizer.apply_gradients(
            [(g, w) for g, w in zip(gradients, weights, strict=True) if g is not None]
        )
        losses.append(total)
    return losses, [np.asarray(w) for w in weights]


def difference(found, truth):
    """The largest difference in units of the truth's largest magnitude."""
    found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    return float(
        np.abs(found - truth).max(initial=0.0) / max(np.abs(truth).max(initial=0.0), 1e-30)
    )


def compare(pipe, losses, truth):
    """What a trained pipeline differs by from `one_process`' result."""
    gathered = pipe.gather_weights()
    if hvd.rank() != 0:
        return {}
    true_losses, true_weights = truth
    by_shape = list(gathered.values())
    result = {"loss": difference(losses, true_losses), "weights": 0.0}
    for weight in true_weights:
        # Non-trainable values are among the gathered ones: look for the closest of the same shape.
        same = [difference(value, weight) for value in by_shape if value.shape == weight.shape]
        result["weights"] = max(result["weights"], min(same))
    return result


def make(layers, optimizer, **options):
    settings = {
        "loss": crossentropy,
        "num_stages": 4,
        "num_microbatches": 8,
        "timeout": TIMEOUT,
        **options,
    }
    return pipeline.Pipeline(layers, optimizer=optimizer, **settings)


def train(layers, optimizer, batches, **options):
    pipe = make(layers, optimizer, **options)
    losses = [pipe.train_step(*batch) for batch in batches]
    return pipe, losses


# --- models and data -----------------------------------------------------------------------------


def built(layers, example):
    call(layers, example, False)
    return layers


def mlp(dtype="float32", depth=8, **options):
    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Dense(16, activation="tanh", dtype=dtype, **options) for _ in range(depth - 1)
    ]
    layers.append(keras.layers.Dense(3, dtype=dtype))
    return built(layers, np.zeros((1, 8), dtype))


def data(steps=3, samples=22, dtype="float32"):
    random = np.random.default_rng(0)
    return [
        (random.normal(size=(samples, 8)).astype(dtype), random.integers(0, 3, samples))
        for _ in range(steps)
    ]


class Block(keras.Layer):
    """A transformer block with dropout."""

    def __init__(self, width, rate=0.1, **options):
        super().__init__(**options)
        # Without biases: that of the keys has the gradient zero, so one would compare noise.
        self.attention = keras.layers.MultiHeadAttention(
            2, width // 2, dropout=rate, use_bias=False
        )
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.dense = [keras.layers.Dense(2 * width, "gelu"), keras.layers.Dense(width)]
        self.dropout = keras.layers.Dropout(rate)

    def call(self, x, training=None):
        h = self.norms[0](x)
        x = x + self.attention(h, h, use_causal_mask=True, training=training)
        h = self.dense[1](self.dense[0](self.norms[1](x)))
        return x + self.dropout(h, training=training)


def gpt(blocks=4, rate=0.1, build=True):
    keras.utils.set_random_seed(5)
    embedding = keras.layers.Embedding(11, 8, name="tokens")
    layers = [embedding, *(Block(8, rate) for _ in range(blocks))]
    layers.append(lambda x: keras.ops.matmul(x, keras.ops.transpose(embedding.embeddings)))
    return built(layers, np.zeros((1, 5), "int32")) if build else layers


def tokens(steps=3, samples=16, length=5):
    random = np.random.default_rng(1)
    return [
        (random.integers(0, 11, (samples, length)), random.integers(0, 11, (samples, length)))
        for _ in range(steps)
    ]


def sgd(rate=0.1, **options):
    return keras.optimizers.SGD(rate, momentum=0.9, **options)


def main(names):
    hvd.init()
    results = {}
    for name in names or CASES:
        begin = time.monotonic()
        try:
            results[name] = CASES[name]()
        except BaseException:
            results[name] = {"error": traceback.format_exc()}
            print(f"{name} on rank {hvd.rank()}:\n{traceback.format_exc()}", flush=True)
            if hvd.rank() == 0:
                break
            raise
        finally:
            if hvd.rank() == 0:
                print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
                with open(os.environ["PIPELINE_TEST_RESULTS"], "w") as file:
                    json.dump(results, file)
    hvd.allreduce(tf.zeros(1), name="end")
