"""Branches and loops that Python decides: several op sequences, right at least by fallback."""

import random

import keras as keras3
import tensorflow as tf

from ..table import program
from ..training import Mlp, descend, mean_squared_error, regression


@program(coexecuted=0, fallbacks=(0, None))
def branch_by_coin(terra):
    """A coin decides in the middle of the step, with a common head and tail."""
    weights = tf.Variable(tf.random.normal([4, 1]))

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            outputs = x @ weights
            if random.random() < 0.5:
                outputs = tf.tanh(outputs) * 2.0
            loss = mean_squared_error(y, outputs)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield weights


@program(coexecuted=0, fallbacks=(0, None))
def branch_by_tensor(terra):
    """`if` on a tensor's value: two updates of different variables."""
    up, down = tf.Variable(0.0), tf.Variable([0.0, 0.0])

    @terra.function
    def step(x):
        mean = tf.reduce_mean(x)
        if mean > 0:
            up.assign_add(mean)
            return up * 2.0
        down.assign_sub([1.0, 0.5])
        return tf.reduce_sum(down)

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield up, down


@program(coexecuted=0, fallbacks=(0, None))
def branch_stochastic_depth(terra):
    """Residual layers, each skipped by a coin; layers that were skipped get no gradient."""
    layers = [tf.Variable(tf.random.normal([4, 4]) * 0.5) for _ in range(4)]
    optimizer = keras3.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(layers)

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            for weights in layers:
                if random.random() < 0.5:
                    x = x + tf.nn.relu(x @ weights)
            loss = mean_squared_error(y, tf.reduce_sum(x, axis=1, keepdims=True))
        gradients = tape.gradient(loss, layers)
        pairs = [(g, v) for g, v in zip(gradients, layers, strict=True) if g is not None]
        if pairs:
            optimizer.apply_gradients(pairs)
        return loss, [g is None for g in gradients]

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield layers


@program(coexecuted=4, fallbacks=(0, 3))
def branch_switches_once(terra):
    """Another loss from the eighth step on: the op sequence changes once."""
    net, calls = Mlp(4, 6, 1), 0

    @terra.function
    def train_step(x, y):
        nonlocal calls
        calls += 1
        with tf.GradientTape() as tape:
            if calls < 8:
                loss = mean_squared_error(y, net(x))
            else:
                loss = tf.reduce_mean(tf.math.log(tf.cosh(y - net(x))))
        descend(net.trainable_variables, tape.gradient(loss, net.trainable_variables), 0.1)
        return loss

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield net


@program(coexecuted=0, fallbacks=(0, None))
def branch_every_third_step(terra):
    """Extra work every third step: the critic of a GAN, a log, a schedule."""
    main, other = tf.Variable(tf.ones([4, 1])), tf.Variable(tf.ones([4, 1]))
    calls = 0

    @terra.function
    def train_step(x, y):
        nonlocal calls
        calls += 1
        loss = mean_squared_error(y, x @ main)
        if calls % 3 == 0:
            other.assign_add(0.1 * main)
            print("synchronised", calls, f"{tf.reduce_sum(other):.5f}")
        main.assign_sub(0.01 * tf.reduce_mean(x, axis=0)[:, None])
        return loss

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield main, other


@program(coexecuted=0, fallbacks=(0, None))
def branch_many_paths(terra):
    """Six coins in a row: more paths than graphs are kept."""
    total = tf.Variable(tf.zeros([4]))
    ops = [tf.tanh, tf.sin, tf.square, tf.abs, tf.exp, tf.sigmoid]

    @terra.function
    def step(x):
        for op in ops:
            if random.random() < 0.5:
                x = op(x) * 0.5
        total.assign_add(tf.reduce_mean(x, axis=0))
        return total.read_value()

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield total


@program(coexecuted=0, fallbacks=(0, None))
def branch_early_return(terra):
    """A return in the middle, before the update, when the loss is small enough."""
    weights = tf.Variable(tf.random.normal([4, 1]))

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ weights)
        if loss.numpy() < 0.5:
            return None
        weights.assign_sub(0.2 * tape.gradient(loss, weights))
        return loss

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield weights


@program(coexecuted=0, fallbacks=(0, None))
def select_from_a_list(terra):
    """A random index picks an expert out of a list: the same ops, another variable."""
    experts = [tf.Variable(tf.random.normal([4, 1])) for _ in range(3)]

    @terra.function
    def train_step(x, y):
        expert = experts[random.randrange(3)]
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, x @ expert)
        expert.assign_sub(0.1 * tape.gradient(loss, expert))
        return loss

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield experts


@program(coexecuted=0, fallbacks=(0, None))
def select_of_tensors(terra):
    """A random index picks between tensors of the same step: the same ops, other producers."""

    @terra.function
    def step(x):
        views = [x * 2.0, tf.reverse(x, axis=[0]), tf.sort(x, axis=0)]
        random.shuffle(views)
        return views[0] - views[1], tf.reduce_sum(views[random.randrange(3)])

    for x, _ in regression(terra.iterations):
        yield step(x)


@program(coexecuted=0, fallbacks=(0, None))
def loop_of_varying_length(terra):
    """A recurrent loop whose length is a Python number that varies."""
    weights = tf.Variable(tf.random.normal([4, 4]) * 0.5)

    @terra.function
    def train_step(x, length):
        with tf.GradientTape() as tape:
            state = tf.zeros([8, 4])
            for _ in range(length):
                state = tf.tanh(state @ weights + x)
            loss = tf.reduce_mean(state**2)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss

    for x, _ in regression(terra.iterations):
        yield train_step(x, random.randint(1, 4))
    yield weights


@program(coexecuted=0, fallbacks=(0, None))
def loop_until_converged(terra):
    """`while` on a tensor: Newton's iteration until the change is small, with a break."""

    @terra.function
    def step(value):
        guess, turns = tf.ones_like(value), 0
        while True:
            better = 0.5 * (guess + value / guess)
            turns += 1
            if tf.reduce_max(tf.abs(better - guess)) < 1e-4 or turns > 9:
                break
            guess = better
        return better, turns

    for turn in range(terra.iterations):
        yield step(tf.constant([1.0 + turn, 2.0]))


@program(coexecuted=0, fallbacks=(0, None))
def loop_over_episode(terra):
    """Reinforcement learning in small: an episode of random length, then one update."""
    policy = tf.Variable(tf.random.normal([2, 2]))

    @terra.function
    def episode():
        state, logits, actions = tf.constant([[1.0, 0.0]]), [], []
        with tf.GradientTape() as tape:
            while len(actions) < 6:
                logits.append(tf.matmul(state, policy))
                action = int(tf.random.categorical(logits[-1], 1)[0, 0])
                actions.append(action)
                state = tf.reverse(state, [1]) + 0.1 * action
                if random.random() < 0.3:
                    break
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=actions, logits=tf.concat(logits, axis=0)
            )
            loss = tf.reduce_mean(losses) * float(sum(actions) + 1)
        policy.assign_sub(0.1 * tape.gradient(loss, policy))
        return loss, actions

    for _ in range(terra.iterations):
        yield episode()
    yield policy


@program(coexecuted=0, fallbacks=(0, None))
def beam_search(terra):
    """A search in Python over scores of the model: sorting, comparison, finished hypotheses."""
    table = tf.Variable(tf.random.normal([5, 5]))

    @terra.function
    def search(start):
        beams = [([start], 0.0)]
        for _ in range(3):
            grown = [beam for beam in beams if beam[0][-1] == 0]
            for tokens, score in beams:
                if tokens[-1] == 0:
                    continue
                logs = tf.nn.log_softmax(table[tokens[-1]])
                best, ids = tf.math.top_k(logs, 2)
                grown += [
                    (tokens + [int(i)], score + float(b)) for b, i in zip(best, ids, strict=True)
                ]
            beams = sorted(grown, key=lambda beam: -beam[1])[:2]
        table.assign_add(0.01 * tf.one_hot([beams[0][0][-1]] * 5, 5))
        return beams

    for turn in range(terra.iterations):
        yield search(turn % 5)
    yield table


@program(coexecuted=0, fallbacks=(0, None))
def eager_tf_control_flow(terra):
    """tf.cond, tf.while_loop, tf.switch_case, tf.case run eagerly: they read predicates."""
    total = tf.Variable(0.0)

    @terra.function
    def step(x):
        mean = tf.reduce_mean(x)
        value = tf.cond(mean > 0, lambda: total.assign_add(mean), lambda: total.assign_sub(1.0))
        turns, power = tf.while_loop(
            lambda i, _: i < 3, lambda i, v: (i + 1, v * 1.5), (tf.constant(0), mean)
        )
        picked = tf.switch_case(turns - 2, [lambda: mean, lambda: mean * 2.0])
        return value, power, tf.case([(mean > 9.0, lambda: mean)], default=lambda: picked)

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield total


@program(coexecuted=4, fallbacks=(0, None))
def eager_map_fn_and_scan(terra):
    """map_fn, scan and foldl run eagerly, with gradients through them."""
    weights = tf.Variable(tf.random.normal([4]))

    @terra.function
    def step(x):
        with tf.GradientTape() as tape:
            rows = tf.map_fn(lambda row: tf.tensordot(row, weights, 1), x)
            sums = tf.scan(lambda before, row: 0.5 * before + row, rows)
            loss = tf.foldl(lambda before, value: before + value**2, sums, tf.constant(0.0))
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        return loss, sums

    for x, _ in regression(terra.iterations, size=3):
        yield step(x)
    yield weights


@program(iterations=40, coexecuted=26, fallbacks=(0, 4), keras="both")
def loop_over_a_state_that_is_reset(terra):
    """Truncated gradients through a cell whose state is now and then set to zero, lengths vary."""
    cell = tf.keras.layers.LSTMCell(4)
    cell.build((None, 3))
    state = [tf.zeros([2, 4]), tf.zeros([2, 4])]

    @terra.function
    def step(x):
        nonlocal state
        with tf.GradientTape() as tape:
            loss = 0.0
            for k in range(x.shape[1]):
                output, state = cell(x[:, k], state)
                loss += tf.reduce_mean((output - 1.0) ** 2)
        gradients = tape.gradient(loss, cell.trainable_variables)
        for variable, gradient in zip(cell.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        if random.random() < 0.25:
            state = [tf.zeros([2, 4]), tf.zeros([2, 4])]
        return loss

    for turn in range(terra.iterations):
        yield step(tf.random.stateless_normal([2, 2 + turn % 3, 3], [1, turn])), state
