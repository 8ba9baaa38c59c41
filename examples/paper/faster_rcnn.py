"""Faster R-CNN: finds digits on photographs, with NumPy and Python loops in the middle of the step.

Ren et al. (2015): a region proposal network scores anchors; its best proposals are filtered by
non-maximum suppression, compared with the true boxes, sampled, cut out of the feature map and
classified. As in many public programs, boxes are matched and sampled in NumPy, image by image in a
Python loop, and how many proposals are left differs from step to step. Symbolic tensors cannot be
turned into NumPy arrays.

    python examples/paper/faster_rcnn.py
"""

import keras
import numpy as np
import tensorflow as tf
from scenes import make_scenes

import terra_tf as terra

BATCH = 2
SIZE = 96
STRIDE = 8
CELLS = SIZE // STRIDE
SIDES = (16, 24, 32)  # of anchors, in pixels
CLASSES = 11  # ten digits, and 10 for nothing
NOTHING = 10
PROPOSALS = 24
ANCHORS_SAMPLED, REGIONS_SAMPLED = 32, 12


def make_anchors():
    """Boxes (top, left, bottom, right) in pixels, one a cell and side."""
    centres = (np.arange(CELLS) + 0.5) * STRIDE
    rows, columns, sides = np.meshgrid(centres, centres, SIDES, indexing="ij")
    boxes = [rows - sides / 2, columns - sides / 2, rows + sides / 2, columns + sides / 2]
    return np.stack([part.ravel() for part in boxes], axis=1).astype(np.float32)


def overlaps(boxes, others):
    """Intersection over union of each box with each of the others."""
    top_left = np.maximum(boxes[:, np.newaxis, :2], others[np.newaxis, :, :2])
    bottom_right = np.minimum(boxes[:, np.newaxis, 2:], others[np.newaxis, :, 2:])
    shared = np.prod(np.maximum(bottom_right - top_left, 0.0), axis=2)
    areas, other_areas = (np.prod(b[:, 2:] - b[:, :2], axis=1) for b in (boxes, others))
    return shared / (areas[:, np.newaxis] + other_areas[np.newaxis] - shared + 1e-9)


def encode(boxes, targets):
    """Shifts and stretches that make targets of boxes."""
    sizes, target_sizes = (b[:, 2:] - b[:, :2] for b in (boxes, targets))
    shifts = (targets[:, :2] + target_sizes / 2 - boxes[:, :2] - sizes / 2) / sizes
    return np.concatenate([shifts, np.log(target_sizes / sizes)], axis=1).astype(np.float32)


def decode(boxes, deltas):
    sizes = boxes[:, 2:] - boxes[:, :2]
    centres = boxes[:, :2] + sizes / 2 + deltas[:, :2] * sizes
    sizes = sizes * tf.exp(tf.clip_by_value(deltas[:, 2:], -2.0, 2.0))
    return tf.concat([centres - sizes / 2, centres + sizes / 2], axis=1)


def smooth_l1(targets, predictions):
    distance = tf.abs(targets - predictions)
    return tf.reduce_sum(tf.where(distance < 1.0, 0.5 * distance**2, distance - 0.5))


class FasterRCNN(keras.Model):
    def __init__(self):
        super().__init__()
        layers = keras.layers
        self.backbone = keras.Sequential(
            [
                layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
                layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
                layers.Conv2D(48, 3, strides=2, padding="same", activation="relu"),
                layers.Conv2D(48, 3, padding="same", activation="relu"),
            ]
        )
        self.rpn = layers.Conv2D(48, 3, padding="same", activation="relu")
        self.rpn_scores = layers.Conv2D(len(SIDES), 1)
        self.rpn_deltas = layers.Conv2D(4 * len(SIDES), 1)
        self.head = keras.Sequential([layers.Flatten(), layers.Dense(64, activation="relu")])
        self.classes = layers.Dense(CLASSES)
        self.deltas = layers.Dense(4)

    def propose(self, images):
        features = self.backbone(images)
        x = self.rpn(features)
        scores = tf.reshape(self.rpn_scores(x), [BATCH, -1])
        return features, scores, tf.reshape(self.rpn_deltas(x), [BATCH, -1, 4])

    def classify(self, features, boxes, numbers):
        """Cuts boxes out of the images of these numbers; returns logits and deltas of boxes."""
        x = self.head(align(features, boxes / SIZE, numbers, 5))
        return self.classes(x), self.deltas(x)


def align(features, boxes, numbers, size):
    """Cuts boxes out of images and samples `size` by `size` points of each, bilinearly.

    This is what `tf.image.crop_and_resize` computes. Its gradient, however, adds in whatever order
    its threads come, so that even plain eager training with it never repeats itself.
    """
    _, height, width, channels = features.shape
    top, left, bottom, right = tf.unstack(tf.clip_by_value(boxes, 0.0, 1.0)[..., None], axis=1)
    steps = tf.linspace(0.0, 1.0, size)
    y = (top + (bottom - top) * steps)[:, :, None] * (height - 1)
    x = (left + (right - left) * steps)[:, None, :] * (width - 1)
    above, before = tf.floor(y), tf.floor(x)
    pixels = tf.reshape(features, [-1, channels])

    def corner(rows, columns):
        rows = tf.cast(tf.minimum(rows, height - 1.0), tf.int32)
        columns = tf.cast(tf.minimum(columns, width - 1.0), tf.int32)
        return tf.gather(pixels, (numbers[:, None, None] * height + rows) * width + columns)

    down, along = (y - above)[..., None], (x - before)[..., None]
    upper = corner(above, before) * (1.0 - along) + corner(above, before + 1.0) * along
    lower = corner(above + 1.0, before) * (1.0 - along) + corner(above + 1.0, before + 1.0) * along
    return upper * (1.0 - down) + lower * down


class Sampler:
    """Chooses what to train on, in NumPy."""

    def __init__(self, anchors):
        self.anchors = anchors
        self.numbers = np.random.default_rng(10)

    def choose(self, indices, most):
        if len(indices) <= most:
            return indices
        return np.sort(self.numbers.choice(indices, most, replace=False))

    def anchors_for(self, truth):
        """Indices of anchors, the positive ones first, how many these are, and their deltas."""
        iou = overlaps(self.anchors, truth[:, :4])
        best = iou.max(axis=1)
        positive = best > 0.5
        positive[iou.argmax(axis=0)] = True  # every object has an anchor
        chosen = self.choose(np.flatnonzero(positive), ANCHORS_SAMPLED // 2)
        others = self.choose(
            np.flatnonzero(~positive & (best < 0.3)), ANCHORS_SAMPLED - len(chosen)
        )
        deltas = encode(self.anchors[chosen], truth[iou[chosen].argmax(axis=1), :4])
        return np.concatenate([chosen, others]), len(chosen), deltas

    def regions_for(self, proposals, truth):
        """Boxes to classify, the positive ones first, their labels and the positives' deltas."""
        proposals = np.concatenate([proposals, truth[:, :4]])
        iou = overlaps(proposals, truth[:, :4])
        positive = self.choose(np.flatnonzero(iou.max(axis=1) > 0.5), REGIONS_SAMPLED // 2)
        others = np.flatnonzero(iou.max(axis=1) <= 0.5)
        others = self.choose(others, REGIONS_SAMPLED - len(positive))
        matched = truth[iou[positive].argmax(axis=1)]
        labels = np.concatenate([matched[:, 4], np.full(len(others), NOTHING)]).astype(np.int32)
        deltas = encode(proposals[positive], matched[:, :4])
        return np.concatenate([proposals[positive], proposals[others]]), labels, deltas


def load_batches():
    images, objects = make_scenes(40 * BATCH, SIZE, most=3, seed=11)
    truths = [np.array(found, np.float32) for found in objects]
    return [
        (tf.constant(images[first : first + BATCH]), truths[first : first + BATCH])
        for first in range(0, len(images), BATCH)
    ]


def build():
    model = FasterRCNN()
    batches = load_batches()
    features, *_ = model.propose(batches[0][0])
    model.classify(features, tf.zeros([1, 4]), tf.zeros([1], tf.int32))
    variables = model.trainable_variables
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(variables)
    anchors = make_anchors()
    sampler = Sampler(anchors)

    def rpn_loss(scores, deltas, truth):
        chosen, positives, targets = sampler.anchors_for(truth)
        labels = (np.arange(len(chosen)) < positives).astype(np.float32)
        logits = tf.gather(scores, chosen)
        losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
        distance = smooth_l1(targets, tf.gather(deltas, chosen[:positives]))
        return tf.reduce_mean(losses) + distance / len(chosen)

    def propose(scores, deltas):
        """The best boxes of one image as a NumPy array; their number varies."""
        boxes = tf.clip_by_value(decode(anchors, deltas), 0.0, float(SIZE))
        kept = tf.image.non_max_suppression(boxes, scores, PROPOSALS, iou_threshold=0.7)
        boxes = tf.gather(boxes, kept).numpy()
        return boxes[np.all(boxes[:, 2:] - boxes[:, :2] > 4.0, axis=1)]

    def head_loss(features, proposals, truths):
        sampled = [sampler.regions_for(*pair) for pair in zip(proposals, truths, strict=True)]
        regions, labels, targets = zip(*sampled, strict=True)
        numbers = np.repeat(np.arange(BATCH, dtype=np.int32), [len(boxes) for boxes in regions])
        logits, deltas = model.classify(features, np.concatenate(regions), numbers)
        labels = np.concatenate(labels)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        positive = tf.gather(deltas, np.flatnonzero(labels != NOTHING))
        distance = smooth_l1(np.concatenate(targets), positive)
        return tf.reduce_mean(losses) + distance / len(labels)

    def train_step(images, truths):
        with tf.GradientTape() as tape:
            features, scores, deltas = model.propose(images)
            loss = 0.0
            proposals = []
            for number, truth in enumerate(truths):
                loss += rpn_loss(scores[number], deltas[number], truth) / BATCH
                with tape.stop_recording():
                    proposals.append(propose(scores[number], deltas[number]))
            loss += head_loss(features, proposals, truths)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return train_step, batches, lambda: model.variables + optimizer.variables


def main():
    keras.utils.set_random_seed(1)
    train_step, batches, _ = build()
    train_step = terra.function(train_step)
    for step in range(300):
        loss = train_step(*batches[step % len(batches)])
        if step % 20 == 0:
            print(f"step {step:3d}  loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
