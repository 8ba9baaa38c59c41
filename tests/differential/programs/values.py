"""Kinds of values: dtypes, strings, ragged and sparse tensors, arrays, tables, queues."""

import tensorflow as tf

from ..table import program
from ..training import regression


@program()
def value_strings(terra):
    """String tensors: split, join, compare, to numbers and back."""

    @terra.function
    def step(turn, x):
        text = tf.strings.join(["step", tf.strings.as_string(turn), "ends"], " ")
        words = tf.strings.split(text)
        number = tf.strings.to_number(words[1])
        print(text.numpy().decode(), len(words))
        return text, words, tf.strings.length(words), number + x[0, 0], words == "ends"

    for turn, (x, _) in enumerate(regression(terra.iterations)):
        yield step(turn, x)


@program()
def value_integers_and_booleans(terra):
    """int8 to uint64, bitwise operations, booleans, casts that wrap, argsort."""
    counts = tf.Variable(tf.zeros([4], tf.int64))

    @terra.function
    def step(x):
        small = tf.cast(x * 50.0, tf.int8)
        mask = tf.math.logical_xor(x > 0, x > 1)
        counts.assign_add(tf.reduce_sum(tf.cast(mask, tf.int64), axis=0))
        return [
            *(small, mask, tf.reduce_any(mask, axis=1), tf.argsort(x, axis=0)),
            tf.bitwise.bitwise_and(tf.cast(small, tf.uint8), tf.constant(15, tf.uint8)),
            tf.cast(tf.abs(small), tf.uint64) * tf.constant(2**40, tf.uint64),
            tf.cast(small, tf.int16) // tf.constant(7, tf.int16),
        ]

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield counts


@program()
def value_float_types(terra):
    """float64, float16, bfloat16, complex numbers and a Fourier transform, NaN and infinity."""
    weights = tf.Variable(tf.ones([4], tf.float64))

    @terra.function
    def step(x):
        wide = tf.cast(x, tf.float64)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.math.softplus(tf.linalg.matvec(wide, weights)))
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        spectrum = tf.signal.fft(tf.complex(x, -x))
        return [
            *(loss, tf.cast(x, tf.float16) * 3, tf.cast(x, tf.bfloat16) / 3, spectrum),
            *(tf.abs(spectrum), tf.math.conj(spectrum), tf.math.log(x), 1.0 / (x - x)),
        ]

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield weights


@program(coexecuted=2, fallbacks=(0, None))
def value_ragged(terra):
    """Ragged tensors passed in, computed with, returned."""

    @terra.function
    def step(ragged):
        doubled = ragged * 2.0
        longer = tf.concat([doubled, tf.ones([ragged.nrows(), 1])], axis=1)
        return longer, tf.reduce_sum(ragged, axis=1), ragged.to_tensor(), ragged.row_lengths()

    for turn in range(terra.iterations):
        rows = [[1.0] * (1 + turn % 3), [], [float(turn)] * (1 + turn % 2)]
        yield step(tf.ragged.constant(rows, dtype=tf.float32))


@program(coexecuted=4, fallbacks=(0, None))
def value_sparse(terra):
    """Sparse tensors made in the step, multiplied, reordered, returned."""
    weights = tf.Variable(tf.random.normal([4, 2]))

    @terra.function
    def step(x):
        sparse = tf.sparse.from_dense(tf.nn.relu(x))
        with tf.GradientTape() as tape:
            outputs = tf.sparse.sparse_dense_matmul(sparse, weights)
            loss = tf.reduce_sum(outputs**2)
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        return tf.sparse.transpose(sparse), outputs, tf.sparse.reduce_sum(sparse, axis=1)

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield weights


@program()
def value_tensor_array(terra):
    """A TensorArray written in a Python loop, stacked, gathered, with gradients."""
    weights = tf.Variable(tf.random.normal([4, 1]))

    @terra.function
    def step(x):
        with tf.GradientTape() as tape:
            array = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
            for index in range(4):
                array = array.write(index, x[index] * weights[index, 0])
            loss = tf.reduce_sum(array.stack() ** 2) + tf.reduce_sum(array.gather([0, 2]))
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        return loss, array.read(1), array.size()

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield weights


@program()
def value_lookup_tables(terra):
    """A static table and one that the step inserts into and removes from."""
    static = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64)), -1
    )
    counts = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, default_value=0)

    @terra.function
    def step(words):
        ids = static.lookup(words)
        counts.insert(ids, counts.lookup(ids) + 1)
        counts.remove(tf.constant([-1], tf.int64))
        return ids, counts.lookup(tf.constant([-1, 1, 2], tf.int64)), counts.size()

    for turn in range(terra.iterations):
        yield step(tf.constant(["a", "b", "c"] if turn % 2 else ["b", "a", "z"]))
    yield [tf.sort(part) for part in counts.export()]


@program()
def value_queues(terra):
    """A FIFO queue and a priority queue that the step puts into and takes from."""
    queue = tf.queue.FIFOQueue(50, [tf.float32], shapes=[[4]])
    urgent = tf.queue.PriorityQueue(50, [tf.string], shapes=[[]])
    queue.enqueue(tf.zeros([4]))

    @terra.function
    def step(turn, x):
        queue.enqueue(tf.reduce_sum(x, axis=0))
        urgent.enqueue([tf.constant(10 - turn % 3, tf.int64), tf.strings.as_string(turn)])
        oldest = queue.dequeue()
        urgent.enqueue([tf.constant(1, tf.int64), tf.constant("first")])
        return oldest, urgent.dequeue(), urgent.size(), queue.size()

    for turn in range(terra.iterations):
        yield step(turn, tf.fill([2, 4], float(turn)))
    yield queue.size(), urgent.size()


@program(keras="both")
def value_linear_algebra(terra):
    """Decompositions and solvers, in the forward pass and through gradients."""
    matrix = tf.Variable(tf.eye(4) + 0.1 * tf.random.normal([4, 4]))

    @terra.function
    def step(x):
        with tf.GradientTape() as tape:
            positive = tf.matmul(matrix, matrix, transpose_b=True) + tf.eye(4)
            factor = tf.linalg.cholesky(positive)
            solution = tf.linalg.cholesky_solve(factor, tf.transpose(x))
            loss = tf.reduce_sum(solution**2) + tf.linalg.logdet(positive)
        matrix.assign_sub(0.01 * tape.gradient(loss, matrix))
        return loss, tf.linalg.svd(x, compute_uv=False), tf.linalg.inv(positive)

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield matrix


@program()
def value_images(terra):
    """Image ops: resize, crop, colour, gradients through a resize."""

    @terra.function
    def step(images):
        with tf.GradientTape() as tape:
            tape.watch(images)
            small = tf.image.resize(images, [4, 4])
            loss = tf.reduce_sum(tf.image.adjust_brightness(small, 0.1) ** 2)
        return loss, tape.gradient(loss, images), tf.image.central_crop(images, 0.5)

    pixels = tf.random.uniform([terra.iterations, 2, 6, 6, 3])
    for turn in range(terra.iterations):
        yield step(pixels[turn])


@program()
def value_device_and_name_scopes(terra):
    """Ops under tf.device and tf.name_scope, and the names and devices that can be seen."""
    names = []

    @terra.function
    def step(x):
        with tf.device("CPU:0"), tf.name_scope("outer") as scope:
            names.append(scope)
            total = tf.reduce_sum(x)
        with tf.device(None):
            return total * 2.0, total.device

    for x, _ in regression(terra.iterations):
        yield step(x)
    yield names
