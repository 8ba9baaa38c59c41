"""SDPoint: a network that shrinks its feature maps at a random point, another one in each step.

Stochastic Downsampling (Kuen et al., 2018) draws, in plain Python, a block of the network and a
ratio: behind that block the feature maps are smaller. So the ops of a step, and all shapes behind
that point, depend on Python's random numbers. A graph traced once keeps the first draw for ever.

The network is a plain `tf.Module` with momentum written by hand.

    python examples/paper/sdpoint.py
"""

import random

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import terra_tf as terra

BATCH = 32
WIDTH = 24
BLOCKS = 5
RATIOS = (0.5, 0.75)
RATE, MOMENTUM = 0.05, 0.9


def filters(size, channels_in, channels):
    scale = (2.0 / (size * size * channels_in)) ** 0.5
    return tf.Variable(tf.random.normal([size, size, channels_in, channels], stddev=scale))


class BatchNorm(tf.Module):
    def __init__(self, channels):
        super().__init__()
        self.scale = tf.Variable(tf.ones([channels]))
        self.offset = tf.Variable(tf.zeros([channels]))

    def __call__(self, x):
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        return tf.nn.batch_normalization(x, mean, variance, self.offset, self.scale, 1e-5)


class Block(tf.Module):
    def __init__(self):
        super().__init__()
        self.filters = [filters(3, WIDTH, WIDTH) for _ in range(2)]
        self.norms = [BatchNorm(WIDTH) for _ in range(2)]

    def __call__(self, x):
        shortcut = x
        for kernel, norm in zip(self.filters, self.norms, strict=True):
            x = norm(tf.nn.conv2d(tf.nn.gelu(x), kernel, 1, "SAME"))
        return shortcut + x


class Network(tf.Module):
    def __init__(self):
        super().__init__()
        self.stem = filters(3, 1, WIDTH)
        self.blocks = [Block() for _ in range(BLOCKS)]
        self.head = tf.Variable(tf.random.normal([WIDTH, 10], stddev=WIDTH**-0.5))

    def __call__(self, x, point, ratio):
        x = tf.nn.conv2d(x, self.stem, 1, "SAME")
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == point:
                height, width = x.shape[1:3]
                x = tf.image.resize(x, [int(height * ratio), int(width * ratio)])
        return tf.matmul(tf.reduce_mean(tf.nn.gelu(x), [1, 2]), self.head)


def load_batches():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).reshape(-1, 8, 8, 1).astype("float32")
    images = images.repeat(2, axis=1).repeat(2, axis=2)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels.astype("int32")))
    return list(dataset.batch(BATCH, drop_remainder=True))


def build():
    model = Network()
    variables = model.trainable_variables
    velocities = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
    numbers = random.Random(4)

    def train_step(images, labels):
        point = numbers.randrange(-1, BLOCKS - 1)  # -1: nowhere
        ratio = numbers.choice(RATIOS)
        with tf.GradientTape() as tape:
            logits = model(images, point, ratio)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, variables)
        for variable, velocity, gradient in zip(variables, velocities, gradients, strict=True):
            velocity.assign(MOMENTUM * velocity - RATE * gradient)
            variable.assign_add(velocity)
        return loss

    return train_step, load_batches(), lambda: [*variables, *velocities]


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
