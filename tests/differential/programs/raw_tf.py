"""Training steps of plain TensorFlow: variables, ops, `GradientTape`, updates by hand."""

import tensorflow as tf

from ..table import program
from ..training import Mlp, classification, descend, mean_squared_error, regression


@program()
def raw_mlp_assign_sub(terra):
    """An MLP of plain variables, updated with assign_sub."""
    net = Mlp(4, 16, 16, 1)

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, net(x))
        variables = net.trainable_variables
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield net


@program()
def raw_momentum(terra):
    """Momentum written with variables in a dictionary by `ref()`."""
    net = Mlp(4, 8, 1)
    velocities = {v.ref(): tf.Variable(tf.zeros_like(v)) for v in net.trainable_variables}

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, net(x))
        variables = net.trainable_variables
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            velocity = velocities[variable.ref()]
            velocity.assign(0.9 * velocity - 0.05 * gradient)
            variable.assign_add(velocity)
        return loss

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield net, list(velocities.values())


@program()
def raw_adam_kernels(terra):
    """Adam through the fused kernel of tf.raw_ops, with powers of beta kept in variables."""
    net = Mlp(4, 8, 3)
    slots = [(tf.Variable(tf.zeros_like(v)), tf.Variable(tf.zeros_like(v))) for v in net.variables]
    powers = tf.Variable(0.9), tf.Variable(0.999)

    @terra.function
    def train_step(x, labels):
        with tf.GradientTape() as tape:
            logits = net(x)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        for variable, gradient, (m, v) in zip(
            net.variables, tape.gradient(loss, net.variables), slots, strict=True
        ):
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=powers[0],
                beta2_power=powers[1],
                lr=0.01,
                beta1=0.9,
                beta2=0.999,
                epsilon=1e-7,
                grad=gradient,
            )
        powers[0].assign(powers[0] * 0.9)
        powers[1].assign(powers[1] * 0.999)
        return {"loss": loss, "logits": logits}

    for x, labels in classification(terra.iterations):
        yield train_step(x, labels)
    yield net, slots, powers


@program()
def raw_clipping_and_weight_decay(terra):
    """Gradients clipped by their global norm, an L2 penalty, accuracy returned."""
    net = Mlp(4, 8, 3)

    @terra.function
    def train_step(x, labels):
        with tf.GradientTape() as tape:
            logits = net(x)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            penalty = tf.add_n([tf.nn.l2_loss(weights) for weights in net.weights])
            loss = tf.reduce_mean(losses) + 1e-3 * penalty
        gradients = tape.gradient(loss, net.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
        descend(net.trainable_variables, gradients, 0.3)
        hits = tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), labels)
        return loss, norm, tf.reduce_mean(tf.cast(hits, tf.float32))

    for x, labels in classification(terra.iterations):
        yield train_step(x, labels)
    yield net


@program()
def raw_attention(terra):
    """Causal self-attention with einsum, softmax, layer normalisation and gelu."""
    size, heads = 8, 2
    wide = [size, heads, size // heads]
    query, key, value = (tf.Variable(tf.random.normal(wide, stddev=0.3)) for _ in range(3))
    out = tf.Variable(tf.random.normal([heads, size // heads, size], stddev=0.3))
    scale, shift = tf.Variable(tf.ones([size])), tf.Variable(tf.zeros([size]))
    variables = [query, key, value, out, scale, shift]
    mask = tf.linalg.band_part(tf.ones([5, 5]), -1, 0)

    def attend(x):
        q, k, v = (tf.einsum("btd,dhe->bhte", x, w) for w in (query, key, value))
        scores = tf.einsum("bhte,bhse->bhts", q, k) / tf.sqrt(float(size // heads))
        weights = tf.nn.softmax(scores - 1e9 * (1.0 - mask))
        x += tf.einsum("bhte,hed->btd", tf.einsum("bhts,bhse->bhte", weights, v), out)
        mean, variance = tf.nn.moments(x, axes=[-1], keepdims=True)
        return tf.nn.gelu((x - mean) * tf.math.rsqrt(variance + 1e-5) * scale + shift)

    @terra.function
    def train_step(x):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(tf.roll(x, -1, axis=1), attend(x))
        descend(variables, tape.gradient(loss, variables), 0.1)
        return loss

    inputs = tf.random.normal([terra.iterations, 3, 5, size])
    for turn in range(terra.iterations):
        yield train_step(inputs[turn])
    yield variables


@program()
def raw_rnn_unrolled(terra):
    """A recurrent cell that Python unrolls over five time steps, truncated gradients."""
    recurrent = tf.Variable(tf.random.normal([6, 6], stddev=0.4))
    inward = tf.Variable(tf.random.normal([2, 6], stddev=0.4))
    outward = tf.Variable(tf.random.normal([6, 1], stddev=0.4))
    variables = [recurrent, inward, outward]

    @terra.function
    def train_step(sequence, target):
        with tf.GradientTape() as tape:
            state = tf.zeros([4, 6])
            for x in tf.unstack(sequence, axis=1):
                state = tf.tanh(x @ inward + state @ recurrent)
            loss = mean_squared_error(target, state @ outward)
        descend(variables, tape.gradient(loss, variables), 0.2)
        return loss, state

    sequences = tf.random.normal([terra.iterations, 4, 5, 2])
    for turn in range(terra.iterations):
        yield train_step(sequences[turn], tf.reduce_sum(sequences[turn], axis=[1, 2])[:, None])
    yield variables


@program(tolerance=1e-5)
def raw_convolution(terra):
    """A convolution with its gradient, pooling and a fused batch normalisation."""
    kernel = tf.Variable(tf.random.normal([3, 3, 1, 4], stddev=0.3))
    scale, offset = tf.Variable(tf.ones([4])), tf.Variable(tf.zeros([4]))
    variables = [kernel, scale, offset]

    @terra.function
    def train_step(images):
        with tf.GradientTape() as tape:
            x = tf.nn.conv2d(images, kernel, strides=1, padding="SAME")
            x, mean, variance = tf.compat.v1.nn.fused_batch_norm(x, scale, offset)
            pooled = tf.nn.max_pool2d(tf.nn.relu(x), ksize=2, strides=2, padding="VALID")
            loss = tf.reduce_mean(tf.abs(pooled - 1.0))
        descend(variables, tape.gradient(loss, variables), 0.1)
        return loss, mean, variance

    images = tf.random.normal([terra.iterations, 4, 8, 8, 1])
    for turn in range(terra.iterations):
        yield train_step(images[turn])
    yield variables


@program(iterations=24, coexecuted=16)
def raw_train_and_evaluate(terra):
    """Two functions that share variables, called in turn."""
    net = Mlp(4, 8, 1)
    best = tf.Variable(float("inf"))

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, net(x))
        variables = net.trainable_variables
        descend(variables, tape.gradient(loss, variables), 0.1)

    @terra.function
    def evaluate(x, y):
        best.assign(tf.minimum(best, mean_squared_error(y, net(x))))
        return best.read_value()

    held_out = regression(1, size=16, seed=2)[0]
    for x, y in regression(terra.iterations // 2):
        yield train_step(x, y)
        yield evaluate(*held_out)
    yield net, best


@program()
def raw_forward_only(terra):
    """Inference: no tape, no variable written, predictions collected on the Python side."""
    net = Mlp(4, 8, 3)
    predict = terra.function(lambda x: tf.argmax(tf.nn.softmax(net(x)), axis=-1))
    predictions = [predict(x) for x, _ in classification(terra.iterations)]
    yield predictions
    yield tf.concat(predictions, axis=0)


@program()
def raw_scatter_updates(terra):
    """A table of counts and an average per class, kept with sparse and sliced writes."""
    counts = tf.Variable(tf.zeros([3], tf.int32))
    centres = tf.Variable(tf.zeros([3, 4]))
    latest = tf.Variable(tf.zeros([8, 4]))

    @terra.function
    def update(x, labels):
        counts.scatter_add(tf.IndexedSlices(tf.ones_like(labels), labels))
        centres.scatter_nd_add(labels[:, None], 0.1 * (x - tf.gather(centres, labels)))
        latest[2:4].assign(x[2:4])
        latest[0].assign(tf.reduce_mean(latest, axis=0))
        return tf.gather(counts, labels), latest.read_value()

    for x, labels in classification(terra.iterations):
        yield update(x, labels)
    yield counts, centres, latest
