"""What no graph can hold runs where eager runs it, and the iteration still co-executes."""

import pathlib
import sys
import tempfile
import threading

import keras as keras3
import numpy as np
import tensorflow as tf

from ..table import program
from ..training import mean_squared_error, regression, training_step


@program()
def in_place_py_function(terra):
    """tf.py_function with a gradient and with a Python effect."""
    weights, calls = tf.Variable(tf.ones([4, 1])), []

    def penalty(values):
        calls.append(values.shape.as_list())
        return tf.reduce_sum(values**3)

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            extra = tf.py_function(penalty, [weights], tf.float32)
            loss = mean_squared_error(y, x @ weights) + 0.01 * extra
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield weights, calls


@program()
def in_place_numpy_function(terra):
    """tf.numpy_function with two outputs, in the middle of the step."""

    def sort_and_count(values):
        return np.sort(values, axis=0), np.int64((values > 0).sum())

    @terra.function
    def step(x):
        doubled = x * 2.0
        ordered, positive = tf.numpy_function(sort_and_count, [doubled], [tf.float32, tf.int64])
        return tf.reduce_mean(ordered[0]) + tf.cast(positive, tf.float32), positive

    for x, _ in regression(terra.iterations):
        yield step(x)


@program()
def in_place_tf_print(terra):
    """tf.print to standard output between Python's own prints, and to a file."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log")

        @terra.function
        def step(turn, x):
            total = tf.reduce_sum(x)
            print("python first", turn)
            tf.print("then TensorFlow", total, x[0], output_stream=sys.stdout, summarize=2)
            print("python last")
            tf.print(turn, total, output_stream=f"file://{log}")
            return total * 2.0

        for turn, (x, _) in enumerate(regression(terra.iterations)):
            yield step(turn, x)
        yield log.read_text()


@program()
def in_place_summaries(terra):
    """Summaries written in the step; the event file is read back."""
    with tempfile.TemporaryDirectory() as folder:
        writer = tf.summary.create_file_writer(folder)

        @terra.function
        def step(turn, x):
            loss = tf.reduce_mean(x**2)
            with writer.as_default(step=turn):
                tf.summary.write("loss", loss)
                tf.summary.write("inputs", x[0])
            return loss

        for turn, (x, _) in enumerate(regression(terra.iterations)):
            yield step(turn, x)
        writer.close()
        (file,) = pathlib.Path(folder).iterdir()
        events = []
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                events.append((event.step, value.tag, tf.make_ndarray(value.tensor)))
        yield events


@program()
def in_place_variables_made_in_step(terra):
    """Variables made in the step: a scratch one each time, kept ones in the first step."""
    kept = []

    @terra.function
    def step(x):
        if not kept:
            kept.append(tf.Variable(tf.zeros([4])))
        scratch = tf.Variable(tf.reduce_sum(x, axis=0))
        scratch.assign_add(tf.ones([4]))
        kept[0].assign_add(scratch)
        return scratch * 2.0, scratch

    for x, _ in regression(terra.iterations):
        doubled, scratch = step(x)
        yield doubled, scratch.numpy()
    yield kept


@program()
def in_place_inner_tf_function(terra):
    """Calls of a `tf.function` with variables and side effects, with gradients through it."""
    weights, count = tf.Variable(tf.ones([4, 1])), tf.Variable(0)

    @tf.function
    def forward(x):
        count.assign_add(1)
        return tf.tanh(x @ weights)

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, forward(x))
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss, count.read_value()

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield weights, count


@program()
def in_place_tf_function_made_in_step(terra):
    """A `tf.function` that is made anew in every step, over a closure that changes."""
    calls = 0

    @terra.function
    def step(x):
        nonlocal calls
        calls += 1
        scale = tf.function(lambda v: v * calls + 1.0)
        return tf.reduce_sum(scale(x))

    for x, _ in regression(terra.iterations):
        yield step(x)


@program()
def in_place_dataset_made_in_step(terra):
    """A dataset made and iterated inside the step."""

    @terra.function
    def step(turn):
        total = tf.zeros([2])
        for row in tf.data.Dataset.range(4).map(lambda n: n * turn).batch(2):
            total += tf.cast(row, tf.float32)
        return total

    for turn in range(terra.iterations):
        yield step(turn)


@program()
def in_place_dataset_of_tensors_of_the_step(terra):
    """A dataset whose source and whose mapped function hold tensors that the step computed."""

    @terra.function
    def step(x):
        rows, scale = tf.reduce_sum(x, axis=1), tf.reduce_max(x)
        dataset = tf.data.Dataset.from_tensor_slices(rows).map(lambda row: row * scale)
        return [row + 1.0 for row in dataset.take(2)]

    for x, _ in regression(terra.iterations):
        yield step(x)


@program()
def in_place_closure_over_a_tensor(terra):
    """A `tf.function` made in the step that captures a tensor of the step."""

    @terra.function
    def step(x):
        hidden = tf.tanh(x)
        doubled = tf.function(lambda: hidden * 2.0)
        return tf.reduce_sum(doubled() + hidden)

    for x, _ in regression(terra.iterations):
        yield step(x)


@program()
def in_place_iterator_consumed_in_step(terra):
    """An iterator of a dataset that the step takes two elements from; the caller takes one."""
    numbers = iter(tf.data.Dataset.range(1000).shuffle(50, seed=3).batch(3))
    weights = tf.Variable(tf.zeros([3]))

    @terra.function
    def step():
        first, second = next(numbers), numbers.get_next()
        weights.assign_add(tf.cast(first - second, tf.float32))
        return first, tf.reduce_sum(second)

    for _ in range(terra.iterations):
        yield step(), next(numbers)
    yield weights


@program()
def in_place_disable_block(terra):
    """A block of plain eager code in the middle of the step."""
    weights = tf.Variable(tf.ones([4, 1]))

    @terra.function
    def step(x):
        outputs = x @ weights
        with terra.disable():
            centred = outputs - tf.reduce_mean(outputs)
            weights.assign_sub(0.01 * tf.ones([4, 1]))
            print("inside", f"{tf.reduce_max(centred):.5f}")
        return tf.reduce_sum(centred * weights[0])

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield weights


@program(coexecuted=4, fallbacks=(0, None))
def in_place_model_made_in_step(terra):
    """A small Keras model and its optimizer made, trained and thrown away in every step."""

    @terra.function
    def step(x, y):
        model = keras3.Sequential([keras3.Input([4]), keras3.layers.Dense(1)])
        optimizer = keras3.optimizers.SGD(0.1)
        losses = [training_step(model, mean_squared_error, optimizer)(x, y) for _ in range(2)]
        return losses, model.get_weights()

    for x, y in regression(terra.iterations):
        yield step(x, y)


@program(coexecuted=4, fallbacks=(0, None))
def in_place_vectorized_map(terra):
    """tf.vectorized_map, which makes a function of a new name at every call."""
    weights = tf.Variable(tf.random.normal([4, 4]))

    @terra.function
    def step(x):
        rows = tf.vectorized_map(lambda row: tf.linalg.matvec(weights, row) + row, x)
        weights.assign_sub(0.01 * tf.matmul(rows, x, transpose_a=True))
        return rows

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield weights


@program(coexecuted=6, fallbacks=(0, 1))
def in_place_file_ops(terra):
    """tf.io writes a file in the step and reads it again."""
    with tempfile.TemporaryDirectory() as folder:

        @terra.function
        def step(turn, x):
            name = str(pathlib.Path(folder, f"file{turn % 3}"))
            before = tf.io.read_file(name) if tf.io.gfile.exists(name) else tf.constant("new")
            tf.io.write_file(name, tf.strings.as_string(tf.reduce_sum(x), precision=6))
            return before, tf.io.read_file(name)

        for turn, (x, _) in enumerate(regression(terra.iterations)):
            yield step(turn, x)


@program(coexecuted=0)  # a variable that other threads use keeps its steps eager
def in_place_thread_of_the_user(terra):
    """The step starts a thread that updates a shared variable, and waits for it."""
    shared = tf.Variable(tf.zeros([4]))

    @terra.function
    def step(x):
        shared.assign_add(tf.ones([4]))
        thread = threading.Thread(target=lambda: shared.assign(shared * 2.0))
        thread.start()
        thread.join()
        return shared + tf.reduce_mean(x, axis=0)

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield shared


@program(coexecuted=0, fallbacks=(0, None))
def in_place_thread_takes_the_variable_itself(terra):
    """The step's thread calls an op that reads the variable inside TensorFlow."""
    shared, seen = tf.Variable(tf.zeros([4])), []

    @terra.function
    def step(x):
        shared.assign_add(tf.ones([4]))
        thread = threading.Thread(target=lambda: seen.append(float(tf.reduce_sum(shared))))
        thread.start()
        thread.join()
        return shared + tf.reduce_mean(x, axis=0)

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield shared, seen


@program()
def in_place_thread_beside_the_steps(terra):
    """A thread of the user's that runs eager code of its own while the steps are running."""
    own, weights = tf.Variable(tf.ones([4])), tf.Variable(tf.ones([4, 1]))

    def work():
        for turn in range(100):
            own.assign(tf.cos(own) * (1.0 + turn % 3))

    @terra.function
    def step(x):
        weights.assign_sub(0.01 * tf.reduce_mean(x, axis=0)[:, None])
        return tf.reduce_sum(x @ weights)

    thread = threading.Thread(target=work)
    thread.start()
    for x, _ in regression(terra.iterations):
        yield step(x)
    thread.join()
    yield own, weights


@program()
def in_place_dataset_with_a_variable(terra):
    """Datasets made in the step whose functions read a variable that the step writes."""
    total = tf.Variable(1.0)

    @terra.function
    def step(x):
        total.assign_add(x)
        scaled = tf.data.Dataset.range(4).map(lambda k: tf.cast(k, tf.float32) * total)
        reduced = scaled.reduce(tf.constant(0.0), lambda a, b: a + b * total)
        total.assign_sub(0.01 * reduced)
        return reduced, [float(value) for value in scaled.batch(2).unbatch()], total + 1.0

    for turn in range(terra.iterations):
        yield step(tf.constant(0.1 * turn))


@program()
def in_place_variable_made_in_a_block(terra):
    """A variable that each step makes in plain eager mode, and then uses outside of the block."""
    total = tf.Variable(0.0)

    @terra.function
    def step(x):
        with terra.disable():
            made = tf.Variable(x * 2.0)
        made.assign_add(total)
        with tf.GradientTape() as tape:
            y = made * made + total
        total.assign_add(0.01 * tape.gradient(y, made))
        return y, made.read_value(), total + made

    for turn in range(terra.iterations):
        yield step(tf.constant(0.1 * turn)), total
