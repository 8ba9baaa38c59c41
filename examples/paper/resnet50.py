"""ResNet-50: fifty layers deep, so 161 trained variables and thousands of ops in a step.

All the bottleneck blocks of He et al. (2015), narrow enough for two cores, on pieces of the two
photographs that come with scikit-learn: of which photograph, and of which part, is a piece?

    python examples/paper/resnet50.py
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_sample_images

import terra_tf as terra

BATCH = 8
SIZE = 32
WIDTH = 8  # of the first stage; 64 in the paper
STAGES = (3, 4, 6, 3)
CLASSES = 8


def conv_norm(x, filters, size, stride=1, activation="relu", scale="ones"):
    layers = keras.layers
    x = layers.Conv2D(filters, size, strides=stride, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9, gamma_initializer=scale)(x)
    return layers.Activation(activation)(x) if activation else x


def bottleneck(x, filters, stride):
    shortcut = x
    if stride > 1 or x.shape[-1] != 4 * filters:
        shortcut = conv_norm(x, 4 * filters, 1, stride, activation=None)
    x = conv_norm(x, filters, 1, stride)
    x = conv_norm(x, filters, 3)
    # Each block begins as its shortcut, so that fifty layers train from the start.
    x = conv_norm(x, 4 * filters, 1, activation=None, scale="zeros")
    return keras.layers.Activation("relu")(keras.layers.Add()([x, shortcut]))


def make_model():
    inputs = keras.Input((SIZE, SIZE, 3))
    x = conv_norm(inputs, WIDTH, 3)
    for stage, blocks in enumerate(STAGES):
        for block in range(blocks):
            x = bottleneck(x, WIDTH * 2**stage, stride=2 if block == 0 and stage else 1)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(x))


def load_batches():
    """Random pieces; the label is the photograph and the quarter, from left to right."""
    photographs = [photograph / 127.5 - 1.0 for photograph in load_sample_images().images]
    numbers = np.random.default_rng(9)
    batches = []
    for _ in range(40):
        labels = numbers.integers(CLASSES, size=BATCH)
        pieces = []
        for label in labels:
            photograph = photographs[label % 2]
            height, width, _ = photograph.shape
            top = numbers.integers(height - SIZE)
            left = label // 2 * (width // 4) + numbers.integers(width // 4 - SIZE)
            pieces.append(photograph[top : top + SIZE, left : left + SIZE])
        images = tf.constant(np.stack(pieces), tf.float32)
        batches.append((images, tf.constant(labels, tf.int32)))
    return batches


def build():
    model = make_model()
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def train_step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_fn(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return train_step, load_batches(), lambda: model.variables + optimizer.variables


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
