"""Programs for which co-execution does not pay soon: values decide how an iteration goes on.

Each maker returns a step without arguments, which returns a number to compare. Sizes are small, so
that 50 iterations take seconds.
"""

import numpy as np
import tensorflow as tf


def _weights(random, *shapes):
    return [tf.Variable(random.standard_normal(shape).astype(np.float32) * 0.5) for shape in shapes]


def _train(optimizer, tape, loss, weights):
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


def adaptive_ode():
    """A neural ODE: an adaptive Runge-Kutta solver that accepts or rejects each step by its error.

    Bogacki and Shampine's pair of orders 3 and 2 (1989).
    """
    random = np.random.default_rng(0)
    weights = _weights(random, (2, 32), (32,), (32, 2), (2,))
    optimizer = tf.keras.optimizers.Adam(1e-2)
    optimizer.build(weights)
    w, b, v, c = weights

    def slope(time, y):
        return tf.tanh(y @ w + b + time) @ v + c

    def solve(y, end, tolerance):
        time, width = 0.0, 0.1
        while time < end:
            width = min(width, end - time)
            k1 = slope(time, y)
            k2 = slope(time + width / 2, y + width / 2 * k1)
            k3 = slope(time + 0.75 * width, y + 0.75 * width * k2)
            ahead = y + width * (2 / 9 * k1 + 1 / 3 * k2 + 4 / 9 * k3)
            k4 = slope(time + width, ahead)
            error = width * (-5 / 72 * k1 + 1 / 12 * k2 + 1 / 9 * k3 - 1 / 8 * k4)
            ratio = float(tf.reduce_max(tf.abs(error) / (tolerance + tolerance * tf.abs(ahead))))
            if ratio <= 1:
                time, y = time + width, ahead
            width *= min(3.0, max(0.3, 0.9 * (ratio + 1e-9) ** (-1 / 3)))
        return y

    def step():
        x = (random.standard_normal((32, 2)) * random.uniform(0.3, 3)).astype(np.float32)
        with tf.GradientTape() as tape:
            y = solve(tf.constant(x), random.uniform(0.5, 2.0), 1e-3)
            loss = tf.reduce_mean((y - tf.sin(x)) ** 2)
        _train(optimizer, tape, loss, weights)
        return float(loss)

    return step


def _push(state, right):
    """A step of the cart and pole of Barto, Sutton and Anderson (1983)."""
    x, dx, angle, d_angle = state
    force = (10.0 if right else -10.0) + 0.05 * d_angle**2 * np.sin(angle)
    turn = 9.8 * np.sin(angle) - np.cos(angle) * force / 1.1
    turn /= 0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
    move = force / 1.1 - 0.05 * turn * np.cos(angle) / 1.1
    return np.array(
        [x + 0.02 * dx, dx + 0.02 * move, angle + 0.02 * d_angle, d_angle + 0.02 * turn]
    )


def whole_episodes():
    """Policy gradient over whole episodes: one look at the policy for each step of the pole."""
    random = np.random.default_rng(0)
    weights = _weights(random, (4, 32), (32,), (32, 2), (2,))
    optimizer = tf.keras.optimizers.Adam(1e-2)
    optimizer.build(weights)
    w, b, v, c = weights

    def step():
        state, chosen = random.uniform(-0.05, 0.05, 4), []
        with tf.GradientTape() as tape:
            while abs(state[2]) < 0.21 and len(chosen) < 100:
                x = tf.constant(state[None].astype(np.float32))
                logits = tf.nn.relu(x @ w + b) @ v + c
                action = int(random.random() < float(tf.nn.softmax(logits)[0, 1]))
                chosen.append(tf.nn.log_softmax(logits)[0, action])
                state = _push(state, action)
            reward = np.arange(len(chosen), 0, -1).astype(np.float32)
            loss = -tf.reduce_sum(tf.stack(chosen) * (reward - reward.mean()))
        _train(optimizer, tape, loss, weights)
        return len(chosen)

    return step


def random_expressions():
    """A random expression each time, of random depth, built by recursion."""
    random = np.random.default_rng(0)
    v, w = _weights(random, (8, 8), (8,))
    leaves = [tf.tanh, tf.sigmoid, tf.nn.relu, tf.sin, tf.nn.softplus]
    leaves += [lambda x: x * v[0], lambda x: tf.linalg.matvec(v, x), lambda x: x + w]

    def build(x, depth):
        if depth == 0:
            return x
        kind = random.integers(len(leaves) + 3)
        if kind >= len(leaves):
            return build(x, depth - 1) + build(x * 0.5, depth - 1)
        return build(leaves[kind](x), depth - 1)

    def step():
        x = tf.constant(random.standard_normal(8).astype(np.float32))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(build(x, 8) ** 2)
        for variable, gradient in zip((v, w), tape.gradient(loss, (v, w)), strict=True):
            if gradient is not None:
                variable.assign_sub(1e-4 * tf.convert_to_tensor(gradient))
        return float(loss)

    return step


def looks_at_everything():
    """A value is looked at after every few ops, always at the same places."""
    random = np.random.default_rng(0)
    (v,) = _weights(random, (8, 8))

    def step():
        x = tf.constant(random.standard_normal((8, 8)).astype(np.float32))
        for _ in range(40):
            x = tf.tanh(x @ v)
            x = x + 1.0 if float(x[0, 0]) > 0 else x - 1.0
        return float(tf.reduce_sum(x))

    return step


def tree_search():
    """A best-first search that expands states by a network's values, read at every node."""
    random = np.random.default_rng(0)
    w, v = _weights(random, (6, 16), (16, 3))

    def step():
        frontier, total = [(0.0, random.standard_normal(6))], 0.0
        for _ in range(random.integers(10, 40)):
            frontier.sort(key=lambda entry: -entry[0])
            _, state = frontier.pop(0)
            x = tf.constant(state[None].astype(np.float32))
            values = (tf.nn.relu(x @ w) @ v).numpy()[0]
            frontier += [
                (float(value), state * 0.9 + random.standard_normal(6) * 0.3) for value in values
            ]
            total += float(values.max())
        w.assign(w * 0.999)
        return total

    return step


PROGRAMS = {
    make.__name__: make
    for make in (
        adaptive_ode,
        whole_episodes,
        random_expressions,
        looks_at_everything,
        tree_search,
    )
}
