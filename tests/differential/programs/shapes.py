"""Shapes that vary: batches, sequence lengths, results whose size depends on values."""

import tensorflow as tf

from ..table import program
from ..training import Mlp, descend, mean_squared_error, regression


def train_step_of(net):
    """A step of gradient descent on the mean squared error."""

    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_squared_error(y, net(x))
        descend(net.trainable_variables, tape.gradient(loss, net.trainable_variables), 0.1)
        return loss

    return train_step


@program(coexecuted=6, fallbacks=(0, 3))
def shape_last_batch_smaller(terra):
    """Three epochs of a dataset whose last batch is small."""
    net = Mlp(4, 6, 1)
    train_step = terra.function(train_step_of(net))
    ((x, y),) = regression(1, size=26)
    for _ in range(terra.iterations // 4):
        for inputs, targets in tf.data.Dataset.from_tensor_slices((x, y)).batch(8):
            yield train_step(inputs, targets)
    yield net


@program(coexecuted=4, fallbacks=(0, 4))
def shape_alternating_batches(terra):
    """Batch sizes 8 and 5 in turn, then a third one."""
    net = Mlp(4, 6, 1)
    train_step = terra.function(train_step_of(net))
    for step, (x, y) in enumerate(regression(terra.iterations)):
        size = (8, 5)[step % 2] if step < 9 else 3
        yield train_step(x[:size], y[:size])
    yield net


@program(coexecuted=0, fallbacks=(0, 4))
def shape_sequence_lengths(terra):
    """Padded batches of texts: another length in nearly every step, one matrix product."""
    table, weights = tf.Variable(tf.random.normal([20, 4])), tf.Variable(tf.ones([4, 1]))

    @terra.function
    def train_step(ids):
        with tf.GradientTape() as tape:
            vectors = tf.gather(table, ids)
            mask = tf.cast(ids > 0, tf.float32)[..., None]
            pooled = tf.reduce_sum(vectors * mask, axis=1) / tf.reduce_sum(mask, axis=1)
            loss = tf.reduce_mean((pooled @ weights - 1.0) ** 2)
        gradients = tape.gradient(loss, [table, weights])
        table.assign_sub(0.1 * tf.convert_to_tensor(gradients[0]))
        weights.assign_sub(0.1 * gradients[1])
        return loss, mask

    for length in [3, 7, 5, 4, 9, 6, 3, 8, 11, 2, 5, 10][: terra.iterations]:
        yield train_step(tf.random.uniform([2, length], 1, 20, tf.int32))
    yield table, weights


@program(coexecuted=4, fallbacks=(0, 4))
def shape_from_values(terra):
    """unique, where, boolean_mask, range of a value: sizes that only the run knows."""

    @terra.function
    def step(x):
        rounded = tf.cast(tf.round(x[:, 0] * 2.0), tf.int32)
        values, positions, counts = tf.unique_with_counts(rounded)
        chosen = tf.boolean_mask(x, x[:, 1] > 0)
        places = tf.where(x > 1.0)
        steps = tf.range(tf.size(values))
        segments = tf.math.unsorted_segment_sum(x, positions, tf.size(values))
        return values, counts, chosen, places, steps, segments, tf.reduce_sum(chosen)

    for x, _ in regression(terra.iterations):
        yield step(x)


@program(coexecuted=4, fallbacks=(0, 4))
def shape_empty(terra):
    """A mask that now and then keeps nothing: empty tensors, sums and gradients of them."""
    weights = tf.Variable(tf.ones([4, 1]))

    @terra.function
    def step(x, limit):
        kept = tf.boolean_mask(x, x[:, 0] > limit)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kept @ weights)
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        return kept, tf.reduce_mean(kept), loss

    for turn, (x, _) in enumerate(regression(terra.iterations)):
        yield step(x, tf.constant(9.0 if turn % 3 == 2 else 0.0))
    yield weights


@program(coexecuted=0, fallbacks=(0, None))
def shape_read_in_python(terra):
    """Python reads the batch size, divides by it, and makes a matrix of that size."""

    @terra.function
    def step(x):
        size = x.shape[0]
        weights = tf.eye(size) / size
        return tf.matmul(weights, x), len(x), tf.reshape(x, [size // 2, -1])

    for turn, (x, _) in enumerate(regression(terra.iterations)):
        yield step(x[: (8, 6, 8, 4)[turn % 4]])


@program(coexecuted=1, fallbacks=(0, 4))
def shape_read_in_tensorflow(terra):
    """tf.shape in the computation: reshape, tile and broadcast by it."""

    @terra.function
    def step(x):
        shape = tf.shape(x)
        flat = tf.reshape(x, [shape[0] * shape[1]])
        tiled = tf.tile(flat[:, None], [1, shape[0]])
        return tf.reduce_sum(tiled, axis=0), tf.broadcast_to(flat[:1], [shape[1], 2])

    for turn, (x, _) in enumerate(regression(terra.iterations)):
        yield step(x[: 3 + turn % 5])


@program(coexecuted=0, fallbacks=(0, None))
def shape_ranks_and_dtypes(terra):
    """One function for inputs of several ranks and dtypes."""
    inputs = [tf.ones([3]), tf.ones([2, 3]), tf.range(4), tf.constant(2.0), tf.ones([1, 2, 3])]
    step = terra.function(lambda x: (x + x, tf.reduce_max(x), x.dtype.name, len(x.shape)))
    for turn in range(terra.iterations):
        yield step(inputs[turn % len(inputs)])


@program(coexecuted=0, fallbacks=(0, None))
def shape_detection_boxes(terra):
    """Non-maximum suppression and a loop in Python over the boxes that are left."""

    @terra.function
    def step(boxes, scores):
        kept = tf.image.non_max_suppression(boxes, scores, 5, iou_threshold=0.3)
        areas = []
        for box in tf.gather(boxes, kept):
            areas.append((box[2] - box[0]) * (box[3] - box[1]))
        return kept, areas, len(areas), tf.add_n(areas)

    for _ in range(terra.iterations):
        corners = tf.random.uniform([6, 2])
        boxes = tf.concat([corners, corners + tf.random.uniform([6, 2])], axis=1)
        yield step(boxes, tf.random.uniform([6]))
