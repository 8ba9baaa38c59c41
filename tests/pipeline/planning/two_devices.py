"""Profiles, places and runs steps on two logical devices; prints what it found as JSON.

A program of its own, since logical devices have to be made before TensorFlow does anything.
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

from pipeline.benchmarks import placement as networks
from pipeline.planning import Cluster, OpGraph, PlacementError, PlanningError, execute, place
from pipeline.planning.execution import logical_cluster, measure_link

networks.configure()
found = {}


def same(one, other) -> bool:
    """Whether two results have the same structure and bits."""
    tf.nest.assert_same_structure(one, other)
    pairs = zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True)
    return all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)


def placed_on_both(fn, *args, max_ops=None):
    """The step on two devices, with many tensors between them."""
    graph = OpGraph.profile(fn, *args, calls=2, max_ops=max_ops)
    placement = place(graph, Cluster((devices.devices[0], devices.devices[1])), seconds=0.5)
    return graph, placement, execute(placement, fn, *args)


devices = logical_cluster(link=measure_link("/device:CPU:0", "/device:CPU:1"))
found["devices"] = [device.name for device in devices.devices]
found["latency"] = devices.local.latency

# --- inference of a network with branches --------------------------------------------------------
model = networks.inception(blocks=1, width=16, size=16)
x = tf.random.stateless_normal([4, 16, 16, 16], [1, 2])


@tf.function(autograph=False)
def infer(x):
    return {"logits": model(x, training=False), "input": x}


graph, placement, step = placed_on_both(infer, x)
profiled = graph
eager = {"logits": model(x, training=False), "input": x}
found["inference"] = {
    "close": float(tf.reduce_max(abs(step(x)["logits"] - eager["logits"]))),
    "again": same(step(x), step(x)),
    "both_used": len(set(placement.device_of.values())) == 2 and bool(placement.cut_edges()),
    "operations": len(graph),
    "positive": all(node.seconds > 0 for node in graph.nodes),
    "critical": graph.critical_seconds < graph.total_seconds,
}
convolutions = [node for node in graph.nodes if node.name.endswith("convolution")]
found["bytes"] = sorted({node.bytes for node in convolutions})
fused, _, fused_step = placed_on_both(infer, x, max_ops=30)
found["fused"] = {
    "operations": len(fused),
    "total": fused.total_seconds > 0,
    "same": same(fused_step(x), step(x)),
}
one = execute(place(graph, Cluster((devices.devices[0],)), seconds=0.5), infer, x)
found["inference"]["same_as_one_device"] = same(one(x), step(x))
measured = step.measure(x, calls=2)
found["measured"] = measured.makespan > 0 and measured.wall > 0

# --- a training step: variables, gradients, assignments ------------------------------------------
start = [np.random.default_rng(i).normal(size=(32, 32)).astype("float32") for i in range(4)]
weights = [tf.Variable(value) for value in start]
data = tf.random.stateless_normal([16, 32], [3, 4])


@tf.function(autograph=False)
def train(x):
    with tf.GradientTape() as tape:
        ends = [tf.nn.relu(x @ weight) for weight in weights]
        loss = tf.reduce_mean(tf.concat(ends, 1) ** 2)
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(0.1 * gradient)
    return loss


graph, placement, step = placed_on_both(train, data)
found["profiling_changes_nothing"] = all(
    np.array_equal(w.numpy(), v) for w, v in zip(weights, start, strict=True)
)
losses = [float(step(data)) for _ in range(3)]
after = [weight.numpy() for weight in weights]
for weight, value in zip(weights, start, strict=True):
    weight.assign(value)
expected = [float(train(data)) for _ in range(3)]
found["training"] = {
    "losses": losses == expected,
    "weights": all(
        np.allclose(a, w.numpy(), rtol=0, atol=1e-7) for a, w in zip(after, weights, strict=True)
    ),
    "bound": {node.device for node in graph.nodes if node.name.startswith("AssignSub")} == {0},
}

# --- control flow, several calls of a function, terra_tf ------------------------------------------


@tf.function
def branching(x):
    total = tf.zeros([])
    for i in tf.range(3):
        total += tf.reduce_sum(x) * tf.cast(i, tf.float32)
    if tf.reduce_sum(x) > 0:
        return total + 1.0
    return total - 1.0


_, _, step = placed_on_both(branching, data)
found["control_flow"] = same(step(data), branching(data))

import terra_tf as terra  # noqa: E402

layers = [keras.layers.Dense(16, "relu") for _ in range(3)]
for layer in layers:
    layer.build((None, 32))


@terra.function
def co_executed(x):
    return tf.add_n([layer(x) for layer in layers])


_, _, step = placed_on_both(co_executed, data)
with terra.disable():
    wanted = co_executed(data)
found["terra"] = bool(np.allclose(step(data).numpy(), wanted.numpy(), rtol=0, atol=1e-6))

# --- refusals ------------------------------------------------------------------------------------


def refused(call) -> str:
    try:
        call()
    except (PlacementError, PlanningError) as error:
        return f"{error.code}: {error}"
    return "nothing was raised"


other = place(profiled, devices, seconds=0.5)
missing = place(graph, Cluster.uniform(2), seconds=0.5)
found["refusals"] = {
    "other": refused(lambda: execute(other, train, data)),
    "missing": refused(lambda: execute(missing, train, data)),
    "arguments": refused(lambda: execute(missing, train, data, devices=found["devices"])(1.0)),
    "callable": refused(lambda: OpGraph.profile(3, x)),
}
print("FOUND" + json.dumps(found))
sys.stdout.flush()
