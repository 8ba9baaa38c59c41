"""Watched loops: what is found to be an iteration, and that results are eager's whatever it is.

Each program says in comments what its loops should be found to be. The truth for all that it prints
and shows is the same program without any loop watched.
"""

import pytest
import tensorflow as tf

import terra_tf as terra
from dropin import watched
from terra_tf.dropin import loops, roles

pytestmark = pytest.mark.timeout(100)

SETUP = """
import numpy as np
import tensorflow as tf
import keras

w = tf.Variable(tf.reshape(tf.range(12.0), [4, 3]) / 12.0)
b = tf.Variable(tf.zeros([3]))
x = tf.constant(np.linspace(-1, 1, 96 * 4).reshape(96, 4), tf.float32)
y = tf.constant(np.linspace(0, 1, 96 * 3).reshape(96, 3), tf.float32)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
shown = {}

def predict(inputs):
    return tf.tanh(tf.matmul(inputs, w) + b)

def loss_of(inputs, targets):
    return tf.reduce_mean((predict(inputs) - targets) ** 2)

def train(inputs, targets, rate=0.1):
    with tf.GradientTape() as tape:
        loss = loss_of(inputs, targets)
    for v, g in zip([w, b], tape.gradient(loss, [w, b])):
        v.assign_sub(rate * g)
    return loss
"""

PROGRAMS = {
    "datasets": (
        """
        for epoch in range(3):  # OUTER
            for inputs, targets in data:  # STEP
                loss = train(inputs, targets)
            print(epoch, float(loss))
            total = 0.0
            for inputs, targets in data:  # STEP
                total += loss_of(inputs, targets)
            print("eval", float(total))
        shown.update(w=w, b=b, total=total)
        """,
        50,
    ),
    "range_around_a_tape": (
        """
        for step in range(40):  # STEP
            at = (step * 8) % 96
            loss = train(x[at : at + 8], y[at : at + 8], rate=0.1 / (1 + step))
            if step % 10 == 0:
                print(step, float(loss))
        shown.update(w=w, b=b)
        """,
        25,
    ),
    "while_around_a_tape": (
        """
        batches = iter(data.repeat())
        step = 0
        while step < 30:  # STEP
            inputs, targets = next(batches)
            loss = train(inputs, targets)
            step += 1
        while True:  # STEP
            loss = train(x, y)
            if float(loss) < 0.2:
                break
        shown.update(w=w, b=b, loss=loss)
        """,
        20,
    ),
    "layers_and_heads_in_a_step": (
        """
        layers = [tf.Variable(tf.eye(3) * (1 + i)) for i in range(4)]
        def evaluate(inputs):
            hidden = predict(inputs)
            for layer in layers:  # PART
                hidden = tf.tanh(tf.matmul(hidden, layer) + b)
                hidden = hidden - tf.reduce_mean(hidden) + tf.reduce_max(hidden) * 0.5 - 0.25
                hidden = hidden / (1.0 + tf.reduce_sum(hidden ** 2))
            return hidden
        for inputs, _ in data:  # STEP
            out = evaluate(inputs)
            shown["out"] = out
        """,
        8,
    ),
    "critic_and_generator": (
        """
        z = tf.Variable(tf.ones([4]))
        for step in range(14):  # STEP
            for k in range(3):  # STEP
                loss = train(x[:8] + float(k), y[:8])
            with tf.GradientTape() as tape:
                other = tf.reduce_sum(predict(x[:8] * z) ** 2)
            z.assign_sub(0.1 * tape.gradient(other, z))
            print(step, float(loss), float(other))
        shown.update(w=w, b=b, z=z)
        """,
        40,
    ),
    "accumulation": (
        """
        sums = [tf.Variable(tf.zeros_like(v)) for v in (w, b)]
        for step in range(12):  # OUTER
            for k in range(4):  # STEP
                with tf.GradientTape() as tape:
                    loss = loss_of(x[k * 8 : k * 8 + 8], y[k * 8 : k * 8 + 8])
                for total, g in zip(sums, tape.gradient(loss, [w, b])):
                    total.assign_add(g)
            for v, total in zip([w, b], sums):
                v.assign_sub(0.1 * total)
                total.assign(tf.zeros_like(total))
        shown.update(w=w, b=b)
        """,
        30,
    ),
    "maml": (
        """
        for task in range(16):  # STEP
            scale = float(1 + task % 3)
            with tf.GradientTape() as outer:
                fast = [w, b]
                for k in range(2):
                    with tf.GradientTape() as inner:
                        inner.watch(fast)
                        loss = tf.reduce_mean(tf.tanh(x[:8] @ fast[0] + fast[1]) ** 2) * scale
                    fast = [v - 0.1 * g for v, g in zip(fast, inner.gradient(loss, fast))]
                final = tf.reduce_mean((tf.tanh(x[8:16] @ fast[0] + fast[1]) - 1.0) ** 2)
            for v, g in zip([w, b], outer.gradient(final, [w, b])):
                v.assign_sub(0.1 * g)
        shown.update(w=w, b=b, final=final)
        """,
        8,
    ),
    "plain_python_around": (
        """
        def parse(text):
            total = 0
            for part in text.split():
                total += int(part)
            return total
        for i in range(200):
            parse("1 2 3")
        for inputs, targets in data.map(lambda a, c: (a * 2.0, c)):  # STEP
            loss = train(inputs, targets)
            parse("4 5")
        shown.update(w=w)
        """,
        8,
    ),
    "comprehension": (
        """
        losses = [train(inputs, targets) for inputs, targets in data.repeat(2)]  # STEP
        print([float(loss) for loss in losses])
        """,
        15,
    ),
    "keras_model": (
        """
        model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
        optimizer = keras.optimizers.Adam(0.01)
        metric = keras.metrics.MeanSquaredError()
        for epoch in range(3):  # OUTER
            for inputs, targets in data:  # STEP
                with tf.GradientTape() as tape:
                    loss = keras.losses.MeanSquaredError()(targets, model(inputs, training=True))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables))
                metric.update_state(targets, model(inputs))
            print(epoch, float(metric.result()), float(loss))
            metric.reset_state()
        shown.update({str(i): v for i, v in enumerate(model.get_weights())})
        """,
        25,
    ),
    "reinforcement": (
        """
        import random
        for episode in range(12):  # STEP
            state, states = tf.ones([1, 4]), []
            while True:  # PART
                scores = tf.nn.softmax(predict(state)).numpy()[0]
                states.append(state)
                state = tf.tanh(state + float(scores.argmax()) - 0.5)
                if len(states) == 6:
                    break
            loss = train(tf.concat(states, 0), y[:6])
        shown.update(w=w, loss=loss)
        """,
        4,
    ),
    "episodes_that_do_not_repeat": (
        """
        import random
        dice = random.Random(3)
        for episode in range(40):  # STEP
            state, states = tf.ones([1, 4]), []
            while len(states) < dice.randint(2, 40):  # STEP
                scores = tf.nn.softmax(predict(state))
                hidden = tf.nn.softmax(tf.tanh(scores * 2.0) + tf.sin(scores))
                states.append(state)
                state = tf.tanh(state + float(tf.reduce_max(hidden)) - 0.5)
                if dice.random() < 0.1:
                    state = state * 0.5 + tf.cast(len(states), tf.float32)
            inputs = tf.concat(states, 0)
            for k in range(dice.randint(1, 3)):
                inputs = tf.sin(inputs) if dice.random() < 0.5 else tf.cos(inputs) * 0.5
            loss = train(inputs, tf.ones([len(states), 3]))
        shown.update(w=w, loss=loss)
        """,
        10,
    ),
    "early_ways_out": (
        """
        def search(limit):
            for epoch in range(5):
                for i, (inputs, targets) in enumerate(data):  # STEP
                    loss = train(inputs, targets)
                    if i == limit:
                        return float(loss), epoch, loss
                    if i == 9:
                        break
                    if i % 2:
                        continue
                    shown["kept"] = loss * 2.0
        for limit in range(8):
            print(search(limit)[:2])
        shown.update(w=w, b=b)
        """,
        10,
    ),
    "prefetching_generator": (
        """
        def batches():
            for inputs, targets in data:
                yield tf.cast(inputs * 1.5, tf.float32), targets
        for epoch in range(2):  # OUTER
            for inputs, targets in batches():  # STEP
                loss = train(inputs, targets)
        shown.update(w=w, loss=loss)
        """,
        15,
    ),
    "numpy_batches": (
        """
        images, labels = x.numpy(), y.numpy()
        order = np.random.RandomState(0)
        for epoch in range(4):  # OUTER
            p = order.permutation(96)
            for at in range(0, 96, 20):  # STEP
                loss = train(images[p[at : at + 20]], labels[p[at : at + 20]])
        shown.update(w=w, loss=loss)
        """,
        8,
    ),
    "steps_of_its_own": (
        """
        import terra_tf as terra
        step = terra.function(train)
        for epoch in range(2):  # OUTER
            for inputs, targets in data:  # OUTER
                loss = step(inputs, targets)
        for inputs, targets in terra.iterate(data):  # OUTER
            loss = train(inputs, targets)
        shown.update(w=w, loss=loss)
        assert step.stats().coexecuted > 15
        """,
        20,
    ),
    "tf_function": (
        """
        fast = tf.function(train)
        @tf.function
        def total(values):
            result = tf.constant(0.0)
            for value in values:
                result += tf.reduce_sum(value) * 1.0
            i = tf.constant(0)
            while i < 3:
                i += tf.cast(tf.identity(1), tf.int32)
            return result + tf.cast(i, tf.float32)
        for inputs, targets in data.repeat(2):
            loss = fast(inputs, targets)
            shown["total"] = total(inputs)
        shown.update(w=w, loss=loss)
        """,
        0,
    ),
    "threads": (
        """
        import threading
        def work(k):
            v = tf.Variable(float(k))
            for step in range(20):  # STEP
                with tf.GradientTape() as tape:
                    loss = (v - 3.0) ** 2 + tf.reduce_sum(tf.tanh(x[:8]) * v) * 0.01
                v.assign_sub(0.1 * tape.gradient(loss, v))
            shown[str(k)] = v
        threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        """,
        10,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_eagers_and_iterations_are_found(name):
    text, coexecuted = PROGRAMS[name]
    watched.check(SETUP + _dedented(text), name, coexecuted=coexecuted)


def _dedented(text):
    import textwrap

    return textwrap.dedent(text)


FAILING = """
def go(bad):
    for step in range(40):
        loss = train(x[:8], y[:8])
        if step == bad:
            {act}
go(25)
"""


@pytest.mark.parametrize(
    "act",
    ["raise KeyError(step)", "tf.reshape(loss, [2, 2]) + 1", "tf.gather(y, 9999).numpy()"],
)
def test_an_error_in_a_turn_is_eagers(act):
    text = SETUP + FAILING.format(act=act) + "\nshown.update(w=w)\n"
    watched.check(text, "failing", coexecuted=10, catch=(Exception,))


def test_an_error_in_the_items_is_eagers():
    text = (
        SETUP
        + """
def items():
    for step in range(30):
        yield x[:8]
    raise LookupError("no more")
try:
    for inputs in items():  # STEP
        loss = train(inputs, y[:8])
except LookupError:
    shown.update(w=w, loss=loss)
    import traceback
    text = traceback.format_exc()
    print(text)
    assert "terra" not in text
for inputs in data.map(lambda a, c: tf.debugging.check_numerics(a / (0.9 - a[0, 0]), "bad")):
    loss = train(tf.gather(inputs, [0, 7]), y[:2])
for inputs in data.map(lambda a, c: tf.gather(a, tf.cast(a[0, :2] * 9.0, tf.int32))):
    loss = train(inputs, y[:2])
"""
    )
    watched.check(text, "items", coexecuted=15, catch=(tf.errors.InvalidArgumentError,))


def test_what_has_no_tensorflow_is_left_alone():
    text = """
    def foo(i): return i
    for k in range(20):  # WATCHED
        for i in range(5):  # SILENT
            foo(i)
    for i in range(1000):
        foo(i)
    """
    watched.check(text, "silent")


def test_logging_says_each_decision_once(caplog):
    with caplog.at_level("INFO", "terra_tf.loops"):
        text = "for step in range(20):\n    loss = train(x[:8], y[:8])\n"
        watched.run(SETUP + text, "logged", watch=True)
    lines = [r.getMessage() for r in caplog.records if "logged.py" in r.getMessage()]
    assert len(lines) == 1
    assert "`for step in range(20)`: iterations, because its turns record a tape" in lines[0]


def test_a_wrong_guess_is_only_slower(monkeypatch):
    """Whatever loops are taken for steps, results are eager's."""

    def always(own, fetched, around_steps):
        return roles.Role.STEP, "it is said so"

    monkeypatch.setattr(loops, "judge_turn", always)
    for name in ("critic_and_generator", "datasets", "maml", "early_ways_out", "reinforcement"):
        text = SETUP + _dedented(PROGRAMS[name][0])
        plain = watched.run(text, name, watch=False)
        wrong = watched.run(text, name, watch=True)
        assert wrong.output == plain.output
        for key, value in plain.values.items():
            assert (wrong.values[key] == value).all(), (name, key)


def test_disabled_programs_are_plain(monkeypatch):
    monkeypatch.setattr(terra.settings, "disabled", True)
    text = SETUP + "for step in range(20):\n    loss = train(x[:8], y[:8])\nshown['w'] = w\n"
    assert watched.check(text, "disabled").stats.traced == 0
