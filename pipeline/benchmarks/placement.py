"""Placements, predicted and then measured, on two single-threaded devices of this machine.

Each network is profiled on one device, placed on two by `pipeline.planning`, its makespan predicted
and printed; only then the placed step runs, and the table says how far off the prediction was.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

DEVICES = 2


def configure() -> None:
    """Two logical CPU devices, one thread for an operation; before TensorFlow does anything."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    # One thread for each device, and one for what passes between them.
    tf.config.threading.set_inter_op_parallelism_threads(DEVICES + 1)
    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)


def inception(blocks: int = 3, width: int = 48, size: int = 32) -> Callable[..., Any]:
    """Blocks of four unequal branches that meet, as in Inception."""
    import keras
    from keras import layers

    def conv(x: Any, channels: int, kernel: int) -> Any:
        return layers.Conv2D(channels, kernel, padding="same", activation="relu")(x)

    x = inputs = keras.Input((size, size, width))
    for _ in range(blocks):
        branches = [
            conv(x, width, 1),
            conv(conv(x, width, 1), width, 3),
            conv(conv(conv(x, width // 2, 1), width, 3), width, 3),
            conv(layers.AveragePooling2D(3, 1, "same")(x), width, 1),
        ]
        x = conv(layers.Concatenate()(branches), width, 1)
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs)


def towers(depth: int = 4, width: int = 512) -> Callable[..., Any]:
    """Two towers of dense layers, as in retrieval models, joined by a product."""
    import keras
    from keras import layers

    inputs = keras.Input((width,))
    ends = []
    for factor in (1, 2):
        x = inputs
        for _ in range(depth):
            x = layers.Dense(width * factor, "relu")(x)
        ends.append(layers.Dense(width)(x))
    return keras.Model(inputs, layers.Dot(1)(ends))


def training(width: int = 512) -> tuple[Callable[..., Any], Any]:
    """A training step (loss, gradients, SGD) of a network with four branches."""
    import keras
    import tensorflow as tf
    from keras import layers

    inputs = keras.Input((width,))
    ends = [layers.Dense(width, "relu")(layers.Dense(width, "relu")(inputs)) for _ in range(4)]
    model = keras.Model(inputs, layers.Dense(10)(layers.Concatenate()(ends)))

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            error = model(x, training=True) - y
            loss = tf.reduce_mean(error * error)
        weights = [weight.value for weight in model.trainable_variables]
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.01 * gradient)
        return loss

    return step, model


def networks(scale: float) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Name → the step and its arguments."""
    import tensorflow as tf

    def inference(model: Callable[..., Any]) -> Callable[..., Any]:
        return tf.function(lambda x: model(x, training=False), autograph=False)

    def batch(size: int) -> int:
        return max(1, round(size * scale))

    random = tf.random.Generator.from_seed(0)
    step, _ = training()
    x = random.normal([batch(256), 512])
    return {
        "inception": (inference(inception()), (random.normal([batch(8), 32, 32, 48]),)),
        "two towers": (inference(towers()), (random.normal([batch(256), 512]),)),
        "training step": (tf.function(step, autograph=False), (x, random.normal([len(x), 10]))),
    }


def run(name: str, fn: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> dict[str, Any]:
    """Profiles, places, predicts, then measures one network."""
    from pipeline.planning import OpGraph, place
    from pipeline.planning.execution import execute, logical_cluster

    cluster = logical_cluster()
    graph = OpGraph.profile(fn, *args)
    placement = place(graph, cluster, seconds)
    predicted = placement.makespan
    print(f"{name}: predicted {predicted * 1e3:.2f} ms", file=sys.stderr, flush=True)
    placed = execute(placement, fn, *args)
    measured = placed.measure(*args)
    one = execute(place(graph, type(cluster)((cluster.devices[0],)), 5), fn, *args).measure(*args)
    return {
        "network": name,
        "operations": len(graph),
        "one_predicted": graph.total_seconds,
        "one_measured": one.makespan,
        "predicted": predicted,
        "measured": measured.makespan,
        "wall": measured.wall,
        "error": predicted / measured.makespan - 1,
        "speedup_predicted": placement.speedup,
        "speedup_measured": one.makespan / measured.makespan,
    }


def main(arguments: list[str]) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="tools/bench_placement", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="to search for a placement")
    parser.add_argument("--scale", type=float, default=1.0, help="of the batch sizes")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    options = parser.parse_args(arguments)
    configure()
    rows = [
        run(name, *network, options.seconds) for name, network in networks(options.scale).items()
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(
        f"{'network':15}{'ops':>5}{'one device ms':>15}{'predicted ms':>14}{'measured ms':>13}"
        f"{'error':>8}{'speed-up predicted, measured':>30}"
    )
    for row in rows:
        print(
            f"{row['network']:15}{row['operations']:>5}{row['one_measured'] * 1e3:>15.2f}"
            f"{row['predicted'] * 1e3:>14.2f}{row['measured'] * 1e3:>13.2f}{row['error']:>8.1%}"
            f"{row['speedup_predicted']:>21.2f}{row['speedup_measured']:>9.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
