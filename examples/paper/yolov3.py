"""YOLOv3: finds digits on photographs; every step reads and prints its losses.

Redmon and Farhadi (2018): one network predicts boxes on three grids; the loss of each grid ignores
predictions that overlap any true box, which are found image by image in a Python loop, since each
image has another number of them. Written with `tf_keras`, the legacy Keras 2.

    python examples/paper/yolov3.py
"""

import numpy as np
import tensorflow as tf
import tf_keras as keras
from scenes import make_scenes

import terra_tf as terra

BATCH = 2
SIZE = 96
GRIDS = (3, 6, 12)
SIDES = ((64.0, 48.0), (32.0, 24.0), (20.0, 16.0))  # of each grid's anchors, in pixels
CLASSES = 10


def conv(x, filters, size=3, stride=1):
    x = keras.layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
    return keras.layers.LeakyReLU(0.1)(keras.layers.BatchNormalization()(x))


def residual(x, filters):
    return keras.layers.Add()([x, conv(conv(x, filters // 2, 1), filters)])


def make_model():
    x = inputs = keras.Input((SIZE, SIZE, 3))
    x = conv(conv(x, 8), 16, stride=2)
    x = residual(conv(x, 24, stride=2), 24)
    fine = x = residual(conv(x, 32, stride=2), 32)
    middle = x = residual(conv(x, 48, stride=2), 48)
    x = residual(conv(x, 64, stride=2), 64)
    outputs = []
    for filters, skipped in ((48, middle), (32, fine), (24, None)):
        x = conv(x, filters, 1)
        predicted = keras.layers.Conv2D(2 * (5 + CLASSES), 1)(conv(x, filters))
        cells = predicted.shape[1]
        outputs.append(keras.layers.Reshape((cells, cells, 2, 5 + CLASSES))(predicted))
        if skipped is not None:
            x = keras.layers.Concatenate()([keras.layers.UpSampling2D(2)(x), skipped])
    return keras.Model(inputs, outputs)


def corners(centres, sizes):
    return tf.concat([centres - sizes / 2, centres + sizes / 2], axis=-1)


def overlaps(boxes, others):
    """Intersection over union of boxes [..., 4] with each of the others [n, 4]."""
    boxes = boxes[..., tf.newaxis, :]
    shared = tf.minimum(boxes[..., 2:], others[:, 2:]) - tf.maximum(boxes[..., :2], others[:, :2])
    shared = tf.reduce_prod(tf.maximum(shared, 0.0), axis=-1)
    area, other_area = (tf.reduce_prod(b[..., 2:] - b[..., :2], axis=-1) for b in (boxes, others))
    return shared / (area + other_area - shared + 1e-9)


def grid_loss(truth, output, cells, sides):
    """Losses of the box centres and sizes, of objectness and of classes on one grid."""
    ticks = tf.range(cells, dtype=tf.float32)
    grid = tf.stack(tf.meshgrid(ticks, ticks, indexing="ij"), axis=-1)[:, :, tf.newaxis]
    anchors = tf.constant(sides)[:, tf.newaxis] / SIZE
    centres = (tf.sigmoid(output[..., :2]) + grid) / cells
    sizes = tf.exp(tf.clip_by_value(output[..., 2:4], -4.0, 4.0)) * anchors
    there = truth[..., 4]
    ignored = []
    for i in range(len(truth)):
        boxes = tf.boolean_mask(truth[i, ..., :4], there[i] > 0)
        boxes = corners(boxes[:, :2], boxes[:, 2:])
        if len(boxes) == 0:
            ignored.append(tf.zeros_like(there[i]))
            continue
        best = tf.reduce_max(overlaps(corners(centres[i], sizes[i]), boxes), axis=-1)
        ignored.append(tf.cast(best > 0.5, tf.float32))
    weight = there * (2.0 - truth[..., 2] * truth[..., 3])
    centre_loss = tf.reduce_sum(weight[..., tf.newaxis] * (truth[..., :2] - centres) ** 2) * cells
    size_loss = tf.reduce_sum(
        weight[..., tf.newaxis] * (tf.sqrt(truth[..., 2:4]) - tf.sqrt(sizes)) ** 2
    )
    objectness = tf.nn.sigmoid_cross_entropy_with_logits(there, output[..., 4])
    counted = there + (1.0 - there) * (1.0 - tf.stack(ignored))
    class_losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(truth[..., 5], tf.int32), output[..., 5:]
    )
    return (
        centre_loss,
        size_loss,
        tf.reduce_sum(counted * objectness),
        tf.reduce_sum(there * class_losses),
    )


def encode(objects):
    """For each grid: [BATCH, cells, cells, 2, 6] of centre, size, presence and class."""
    truths = [np.zeros((BATCH, cells, cells, 2, 6), np.float32) for cells in GRIDS]
    for image, found in enumerate(objects):
        for top, left, bottom, right, digit in found:
            side = bottom - top
            distance = np.abs(np.array(SIDES) - side)
            grid, anchor = np.unravel_index(distance.argmin(), distance.shape)
            centre = np.array([top + bottom, left + right]) / (2 * SIZE)
            row, column = (centre * GRIDS[grid]).astype(int)
            box = (*centre, side / SIZE, side / SIZE, 1.0, digit)
            truths[grid][image, row, column, anchor] = box
    return tuple(map(tf.constant, truths))


def load_batches():
    images, objects = make_scenes(40 * BATCH, SIZE, most=4, seed=12)
    return [
        (tf.constant(images[first : first + BATCH]), encode(objects[first : first + BATCH]))
        for first in range(0, len(images), BATCH)
    ]


def build():
    model = make_model()
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    steps = 0

    def train_step(images, truths):
        nonlocal steps
        with tf.GradientTape() as tape:
            outputs = model(images, training=True)
            losses = [grid_loss(*each) for each in zip(truths, outputs, GRIDS, SIDES, strict=True)]
            parts = [tf.add_n(part) / BATCH for part in zip(*losses, strict=True)]
            loss = tf.add_n(parts)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        steps += 1
        centre, size, there, classes = (float(part) for part in parts)
        print(
            f"step {steps:3d}  loss {float(loss):8.4f}  centre {centre:.4f}  size {size:.4f}  "
            f"object {there:.4f}  class {classes:.4f}"
        )
        return loss

    return train_step, load_batches(), lambda: model.variables + optimizer.variables


def main():
    keras.utils.set_random_seed(1)
    train_step, batches, _ = build()
    train_step = terra.function(train_step)
    for step in range(300):
        train_step(*batches[step % len(batches)])


if __name__ == "__main__":
    main()
