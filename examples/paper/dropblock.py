"""DropBlock: a small residual network whose regularisation grows while it trains.

DropBlock (Ghiasi, Lin and Le, 2018) zeroes square blocks of the feature maps. How many is the
attribute `drop_prob` of its layers, a plain Python number that a schedule raises in every step.
A graph traced once keeps the number that it saw first.

    python examples/paper/dropblock.py
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import terra_tf as terra

BATCH = 32
BLOCK = 3


class DropBlock(keras.layers.Layer):
    """Zeroes blocks of BLOCK x BLOCK units and scales up what is left."""

    def __init__(self):
        super().__init__()
        self.drop_prob = 0.0  # the schedule changes it
        self.seeds = keras.random.SeedGenerator()

    def call(self, x, training=False):
        if not training or self.drop_prob == 0.0:
            return x
        _, height, width, _ = x.shape
        centres = (height - BLOCK + 1) * (width - BLOCK + 1)
        gamma = self.drop_prob / BLOCK**2 * (height * width) / centres
        noise = keras.random.uniform(x.shape, seed=self.seeds)
        centres_dropped = tf.cast(noise < gamma, x.dtype)
        dropped = tf.nn.max_pool2d(centres_dropped, BLOCK, strides=1, padding="SAME")
        kept = 1.0 - dropped
        return x * kept * (tf.cast(tf.size(kept), x.dtype) / tf.reduce_sum(kept))


class ResidualBlock(keras.layers.Layer):
    def __init__(self, filters, stride=1):
        super().__init__()
        layers = keras.layers
        self.conv1 = layers.Conv2D(filters, 3, strides=stride, padding="same", use_bias=False)
        self.norm1 = layers.BatchNormalization()
        self.conv2 = layers.Conv2D(filters, 3, padding="same", use_bias=False)
        self.norm2 = layers.BatchNormalization()
        self.shortcut = layers.Conv2D(filters, 1, strides=stride) if stride > 1 else None
        self.drop_block = DropBlock()

    def call(self, x, training=False):
        shortcut = x if self.shortcut is None else self.shortcut(x)
        x = tf.nn.gelu(self.norm1(self.conv1(x), training=training))
        x = self.norm2(self.conv2(x), training=training)
        return tf.nn.gelu(self.drop_block(x + shortcut, training=training))


class LinearSchedule:
    """Raises `drop_prob` of some layers from 0 to `stop` over so many steps."""

    def __init__(self, layers, stop, steps):
        self.layers = layers
        self.stop = stop
        self.steps = steps
        self.steps_done = 0

    def step(self):
        self.steps_done += 1
        for layer in self.layers:
            layer.drop_prob = self.stop * min(self.steps_done / self.steps, 1.0)


def load_batches():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).reshape(-1, 8, 8, 1).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((images, labels.astype("int32")))
    return list(dataset.batch(BATCH, drop_remainder=True))


def build():
    blocks = [ResidualBlock(24), ResidualBlock(24), ResidualBlock(48, stride=2), ResidualBlock(48)]
    stem = keras.layers.Conv2D(24, 3, padding="same")
    pooling = keras.layers.GlobalAveragePooling2D()
    model = keras.Sequential([keras.Input((8, 8, 1)), stem, *blocks, pooling])
    model.add(keras.layers.Dense(10))
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
    optimizer.build(model.trainable_variables)
    schedule = LinearSchedule([block.drop_block for block in blocks], stop=0.2, steps=100)

    def train_step(images, labels):
        schedule.step()
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
