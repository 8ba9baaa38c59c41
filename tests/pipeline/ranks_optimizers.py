"""Programs for four ranks: every optimizer on two stages and two replicas, against one process.

Run by `test_optimizers.py`. What differs is in units of each tensor's largest magnitude.
"""

import sys

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
import tf_keras
from ranks_common import case, crossentropy, data, difference, gpt, main, make, mlp, tokens

STEPS = 4
SCHEDULE = keras.optimizers.schedules.PolynomialDecay(0.05, 3, 0.01)


def weights_of(layers):
    """All trainable variables, each once, in the model's order."""
    found = {}
    for layer in layers:
        for variable in getattr(layer, "trainable_variables", ()):
            found.setdefault(id(variable), variable)
    return list(found.values())


def truth(layers, optimizer, batches, loss=crossentropy):
    """Losses and weights of one eager process."""
    weights = weights_of(layers)
    raw = [weight.value for weight in weights]
    takes = weights if isinstance(optimizer, keras.optimizers.Optimizer) else raw
    scaler = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if hasattr(optimizer, "build"):  # not the legacy ones of tf_keras
        optimizer.build(takes)
    losses = []
    for x, y in batches:
        with tf.GradientTape() as tape:
            out = x
            for layer in layers:
                out = layer(out)
            value = loss(y, out)
            scaled = optimizer.scale_loss(value) if scaler else value
        gradients = tape.gradient(scaled, raw)
        optimizer.apply_gradients(zip(gradients, takes, strict=True))
        losses.append(float(value))
    return losses, [np.asarray(weight) for weight in weights]


def compare(make_model, make_optimizer, batches, **options):
    """How a pipeline differs from one process, by the losses and by each weight."""
    expected = truth(make_model(), make_optimizer(), batches, options.get("loss", crossentropy))
    options = {"num_stages": 2, "num_microbatches": 3, "schedule": "1f1b", **options}
    replica = hvd.rank() // options["num_stages"]
    count = len(batches[0][1]) * options["num_stages"] // hvd.size()
    mine = slice(replica * count, (replica + 1) * count)
    pipe = make(make_model(), make_optimizer(), **options)
    losses = [pipe.train_step(x[mine], y[mine]) for x, y in batches]
    gathered = pipe.gather_weights()
    pipe.close()
    if hvd.rank() != 0:
        return {}
    found = list(gathered.values())
    assert len(found) == len(expected[1])
    return {
        "loss": difference(losses, expected[0]),
        "weights": max(map(difference, found, expected[1])),
    }


ADAPTIVE = {
    "Adadelta": {"learning_rate": 1.0},
    "Adafactor": {"learning_rate": 0.01},
    "Adagrad": {"learning_rate": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {},
    "Ftrl": {"learning_rate": 0.1},
    "Lion": {"learning_rate": 0.001},
    "Nadam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"learning_rate": SCHEDULE, "momentum": 0.9, "nesterov": True},
}


def of_keras():
    found = {
        name: lambda name=name, more=more: getattr(keras.optimizers, name)(**more)
        for name, more in ADAPTIVE.items()
    }
    found["Lamb"] = lambda: keras.optimizers.Lamb(0.01)
    found["Muon"] = lambda: keras.optimizers.Muon(0.01, exclude_embeddings=False)
    found["ScheduleFreeAdamW"] = lambda: keras.optimizers.ScheduleFreeAdamW(0.01)
    found["averaging"] = lambda: keras.optimizers.Adam(
        use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    )
    found["clipping"] = lambda: keras.optimizers.Adam(clipvalue=0.01)
    found["accumulating"] = lambda: keras.optimizers.Adam(gradient_accumulation_steps=2)
    found["global clipping"] = lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1)
    return found


def of_tf_keras():
    schedule = tf_keras.optimizers.schedules.PolynomialDecay(0.05, 3, 0.01)
    found = {}
    for name, more in ADAPTIVE.items():
        more = {k: schedule if v is SCHEDULE else v for k, v in more.items()}
        found[name] = lambda name=name, more=more: getattr(tf_keras.optimizers, name)(**more)
        if hasattr(tf_keras.optimizers.legacy, name):
            more.pop("weight_decay", None)
            found[f"legacy {name}"] = lambda name=name, more=more: getattr(
                tf_keras.optimizers.legacy, name
            )(**more)
    found["global clipping"] = lambda: tf_keras.optimizers.SGD(0.5, global_clipnorm=0.1)
    found["norm clipping"] = lambda: tf_keras.optimizers.Adam(clipnorm=0.01)
    found["averaging"] = lambda: tf_keras.optimizers.Adam(
        use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    )
    return found


def all_of(optimizers):
    result = {}
    for name, make_optimizer in optimizers.items():
        found = compare(lambda: mlp(depth=4), make_optimizer, data(STEPS, 12))
        for key, value in found.items():
            result[f"{name}: {key}"] = value
    return result


@case
def optimizers_of_keras():
    return all_of(of_keras())


@case
def optimizers_of_tf_keras():
    return all_of(of_tf_keras())


@case
def optimizers_sample():
    keras_ones, legacy = of_keras(), of_tf_keras()
    sample = {"Muon": keras_ones["Muon"]}
    sample |= {name: legacy[name] for name in ("legacy Adam", "Nadam")}
    return all_of(sample)


@case
def tied_weights_on_two_replicas():
    result = {}
    for name, make_optimizer in {
        "adam": lambda: keras.optimizers.Adam(1e-2),
        "clipped": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05, momentum=0.9),
        "norm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.02),
    }.items():
        for key, value in compare(lambda: gpt(rate=0.0), make_optimizer, tokens(STEPS)).items():
            result[f"{name}: {key}"] = value
    return result


@case
def loss_scale_with_clipping_on_two_replicas():
    def model():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(16, "tanh", dtype="mixed_float16") for _ in range(3)]
        layers.append(keras.layers.Dense(3, dtype="float32"))
        out = np.zeros((1, 8), "float32")
        for layer in layers:
            out = layer(out)
        return layers

    def optimizer():
        inner = keras.optimizers.SGD(0.1, global_clipnorm=0.05)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=128.0)

    return compare(model, optimizer, data(STEPS, 12))


if __name__ == "__main__":
    main(sys.argv[1:])
