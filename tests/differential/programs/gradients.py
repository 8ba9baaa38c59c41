"""Gradients: every way to use a tape, custom gradients, higher orders, forward mode."""

import tensorflow as tf

from ..table import program
from ..training import Mlp, classification, descend, mean_squared_error, regression, sentences


@program()
def gradient_persistent_tape(terra):
    """One persistent tape, two losses, two gradient calls."""
    net = Mlp(4, 6, 2)

    @terra.function
    def train_step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            outputs = net(x)
            losses = mean_squared_error(y, outputs[:, :1]), tf.reduce_mean(tf.abs(outputs[:, 1:]))
        variables = net.trainable_variables
        for loss in losses:
            descend(variables, tape.gradient(loss, variables))
        del tape
        return losses

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield net


@program()
def gradient_nested_tapes(terra):
    """A Hessian-vector product by two nested tapes."""
    weights = tf.Variable(tf.random.normal([4, 1]))
    direction = tf.random.normal([4, 1])

    @terra.function
    def step(x, y):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(tf.exp(0.1 * (x @ weights - y) ** 2))
            gradient = inner.gradient(loss, weights)
            projected = tf.reduce_sum(gradient * direction)
        product = outer.gradient(projected, weights)
        weights.assign_sub(0.1 * gradient + 0.01 * product)
        return loss, product

    for x, y in regression(terra.iterations):
        yield step(x, y)
    yield weights


@program()
def gradient_penalty(terra):
    """The penalty of a Wasserstein GAN: the norm of an input's gradient is in the loss."""
    critic = Mlp(4, 6, 1)

    @terra.function
    def train_step(real):
        mixed = real + tf.random.uniform([8, 1]) * 0.5
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(mixed)
                scores = critic(mixed)
            slopes = tf.norm(inner.gradient(scores, mixed), axis=1)
            loss = tf.reduce_mean(critic(real)) + 10.0 * tf.reduce_mean((slopes - 1.0) ** 2)
        gradients = tape.gradient(loss, critic.trainable_variables)
        # The last bias has no part in a slope, but it has one in the scores.
        descend(critic.trainable_variables, gradients, 0.01)
        return loss, slopes

    for x, _ in regression(terra.iterations):
        yield train_step(x)
    yield critic


@program()
def gradient_watch_and_stop_recording(terra):
    """Watched tensors, stop_recording, reset, stop_gradient, watched_variables."""
    weights = tf.Variable(tf.random.normal([4, 1]), name="weights")
    scale = tf.Variable(1.5, name="scale")

    @terra.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            hidden = x @ weights * scale
            with tape.stop_recording():
                size = tf.reduce_max(tf.abs(hidden))
            loss = tf.reduce_mean(hidden**2) / size + tf.reduce_sum(tf.stop_gradient(hidden))
        watched = sorted(variable.name for variable in tape.watched_variables())
        gradients = tape.gradient(loss, {"x": x, "w": weights, "none": size})
        with tf.GradientTape(watch_accessed_variables=False) as other:
            other.watch(scale)
            loss = weights[0, 0] * scale
            other.reset()
            other.watch(weights)
            loss = weights[0, 0] * scale
        weights.assign_sub(0.1 * gradients["w"])
        return gradients, watched, other.gradient(loss, [weights, scale])

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield weights


@program()
def gradient_of_an_input(terra):
    """An adversarial example: the sign of the input's gradient, then a step on both."""
    net = Mlp(4, 6, 3)

    @terra.function
    def train_step(x, labels):
        def loss_of(inputs):
            logits = net(inputs)
            return tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            )

        with tf.GradientTape() as tape:
            tape.watch(x)
            clean = loss_of(x)
        attacked = x + 0.1 * tf.sign(tape.gradient(clean, x))
        with tf.GradientTape() as tape:
            loss = loss_of(x) + loss_of(attacked)
        variables = net.trainable_variables
        descend(variables, tape.gradient(loss, variables))
        return clean, loss, attacked

    for x, labels in classification(terra.iterations):
        yield train_step(x, labels)
    yield net


@program()
def gradient_maml(terra):
    """Meta-learning: two inner updates by tensors, the outer gradient through both."""
    weights, bias = tf.Variable(tf.random.normal([4, 1])), tf.Variable(tf.zeros([1]))

    @terra.function
    def meta_step(x, y):
        with tf.GradientTape() as outer:
            fast = [weights.read_value(), bias.read_value()]
            for _ in range(2):
                with tf.GradientTape() as inner:
                    inner.watch(fast)
                    loss = mean_squared_error(y[:4], x[:4] @ fast[0] + fast[1])
                fast = [v - 0.1 * g for v, g in zip(fast, inner.gradient(loss, fast), strict=True)]
            loss = mean_squared_error(y[4:], x[4:] @ fast[0] + fast[1])
        descend([weights, bias], outer.gradient(loss, [weights, bias]))
        return loss

    for x, y in regression(terra.iterations):
        yield meta_step(x, y)
    yield weights, bias


@program()
def gradient_custom(terra):
    """custom_gradient with Python effects in the forward and the backward body."""
    weights, calls = tf.Variable(tf.random.normal([4, 1])), []

    @tf.custom_gradient
    def clipped_backward(x):
        calls.append("forward")

        def gradient(upstream):
            calls.append("backward")
            print("backward", len(calls))
            return tf.clip_by_value(upstream, -0.05, 0.05)

        return tf.identity(x), gradient

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((clipped_backward(x @ weights) - y) ** 2)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss, len(calls)

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield weights, calls


@program()
def gradient_custom_with_variables(terra):
    """custom_gradient over variables, as gradient checkpointing uses it, and recompute_grad."""
    weights = tf.Variable(tf.random.normal([4, 4]) * 0.5)
    forward = tf.recompute_grad(lambda x: tf.tanh(x @ weights))

    @terra.function
    def train_step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(forward(forward(x)) ** 2)
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        return loss

    for x, _ in regression(terra.iterations):
        yield train_step(x)
    yield weights


@program(coexecuted=4, fallbacks=(0, None))
def gradient_jacobian(terra):
    """Calls of jacobian and batch_jacobian, vectorised and not; their functions have new names."""
    weights = tf.Variable(tf.random.normal([4, 3]))

    @terra.function
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            outputs = tf.tanh(x @ weights)
            mean = tf.reduce_mean(outputs, axis=0)
        by_weights = tape.jacobian(mean, weights)
        by_inputs = tape.batch_jacobian(outputs, x)
        plain = tape.jacobian(mean, weights, experimental_use_pfor=False)
        weights.assign_sub(0.1 * tf.reduce_sum(by_weights, axis=0))
        return by_weights, by_inputs, plain

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield weights


@program(coexecuted=4, fallbacks=(0, None))
def gradient_forward_accumulator(terra):
    """Forward-mode derivatives, alone and over a tape."""
    weights = tf.Variable(tf.random.normal([4, 1]))
    direction = tf.ones([4, 1])

    @terra.function
    def step(x, y):
        with tf.autodiff.ForwardAccumulator(weights, direction) as accumulator:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.sigmoid(x @ weights - y))
            gradient = tape.gradient(loss, weights)
        weights.assign_sub(gradient)
        return accumulator.jvp(loss), accumulator.jvp(gradient)

    for x, y in regression(terra.iterations):
        yield step(x, y)
    yield weights


@program()
def gradient_unconnected(terra):
    """UnconnectedGradients.ZERO and NONE, output_gradients, integer and unwatched sources."""
    used, unused = tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])

    @terra.function
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            outputs = used * x
        zeros = tape.gradient(
            outputs, [used, unused], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        nones = tape.gradient(outputs, [used, unused, x])
        weighted = tape.gradient(outputs, used, output_gradients=[1.0, -1.0])
        used.assign_sub(0.1 * weighted)
        return zeros, nones, weighted

    for turn in range(terra.iterations):
        yield step(tf.constant([float(turn), 1.0]))
    yield used, unused


@program()
def gradient_indexed_slices(terra):
    """Embedding gradients as IndexedSlices: returned, clipped, scattered by hand."""
    table, weights = tf.Variable(tf.random.normal([20, 4])), tf.Variable(tf.ones([4, 1]))

    @terra.function
    def train_step(ids, labels):
        with tf.GradientTape() as tape:
            vectors = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), axis=1)
            loss = mean_squared_error(labels, vectors @ weights)
        gradients = tape.gradient(loss, [table, weights])
        (sparse, dense), norm = tf.clip_by_global_norm(gradients, 0.1)
        table.scatter_sub(sparse)
        weights.assign_sub(dense)
        return loss, norm, sparse, tf.convert_to_tensor(gradients[0])

    for ids, labels in sentences(terra.iterations):
        yield train_step(ids, labels)
    yield table, weights


@program()
def gradient_tape_around_the_call(terra):
    """The tape is opened by the caller, who asks it for gradients of the step's results."""
    weights = tf.Variable(tf.random.normal([4, 1]))
    forward = terra.function(lambda x: (tf.tanh(x @ weights), tf.reduce_sum(weights**2)))
    for x, y in regression(terra.iterations):
        with tf.GradientTape() as tape:
            outputs, penalty = forward(x)
            loss = mean_squared_error(y, outputs) + 0.01 * penalty
        gradient = tape.gradient(loss, weights)
        weights.assign_sub(0.1 * gradient)
        yield loss, gradient
    yield weights


@program()
def gradient_of_fed_constants(terra):
    """Slices, reductions and concatenations, whose gradients read Python-made constants."""
    weights = tf.Variable(tf.random.normal([4, 4]))

    @terra.function
    def step(x):
        with tf.GradientTape() as tape:
            hidden = x @ weights
            parts = tf.split(hidden, 2, axis=1)
            joined = tf.concat([parts[1], parts[0][:, ::-1]], axis=1)
            padded = tf.pad(joined[2:, 1:3], [[0, 1], [1, 0]])
            tiled = tf.tile(tf.reduce_mean(padded, axis=0, keepdims=True), [3, 1])
            loss = tf.reduce_sum(tf.reduce_logsumexp(tiled, axis=-1)) + tf.reduce_prod(
                hidden[0, :2]
            )
        weights.assign_sub(0.05 * tape.gradient(loss, weights))
        return loss

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield weights
