"""GPT-2: a small language model of Python's own source text; the loss is read every tenth step.

A plain `tf.Module` after Radford et al. (2019): pre-norm blocks, gelu, an embedding that is also
the output layer, AdamW written by hand, gradients clipped by their global norm.

    python examples/paper/gpt2.py
"""

import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import terra_tf as terra

LENGTH = 64
BATCH = 8
WIDTH = 64
HEADS = 4
BLOCKS = 3
CHARACTERS = 128
RATE, BETA1, BETA2, EPSILON, DECAY = 1e-3, 0.9, 0.95, 1e-8, 0.01
READ_EVERY = 10


def normal(*shape, scale=0.02):
    return tf.Variable(tf.random.normal(shape, stddev=scale))


class LayerNorm(tf.Module):
    def __init__(self):
        super().__init__()
        self.gain = tf.Variable(tf.ones([WIDTH]))
        self.bias = tf.Variable(tf.zeros([WIDTH]))

    def __call__(self, x):
        mean = tf.reduce_mean(x, axis=-1, keepdims=True)
        variance = tf.reduce_mean(tf.square(x - mean), axis=-1, keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-5) * self.gain + self.bias


class Projection(tf.Module):
    def __init__(self, size, size_out):
        super().__init__()
        self.weight = normal(size, size_out)
        self.bias = tf.Variable(tf.zeros([size_out]))

    def __call__(self, x):
        return tf.einsum("btc,cd->btd", x, self.weight) + self.bias


class Block(tf.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(), LayerNorm()
        self.qkv = Projection(WIDTH, 3 * WIDTH)
        self.project = Projection(WIDTH, WIDTH)
        self.inner = Projection(WIDTH, 4 * WIDTH)
        self.outer = Projection(4 * WIDTH, WIDTH)

    def attend(self, x):
        length = x.shape[1]
        query, key, value = (
            tf.transpose(tf.reshape(part, [-1, length, HEADS, WIDTH // HEADS]), [0, 2, 1, 3])
            for part in tf.split(self.qkv(x), 3, axis=-1)
        )
        scores = tf.matmul(query, key, transpose_b=True) / (WIDTH // HEADS) ** 0.5
        seen = tf.linalg.band_part(tf.ones([length, length]), -1, 0)
        scores = scores * seen - 1e10 * (1.0 - seen)
        joined = tf.transpose(tf.matmul(tf.nn.softmax(scores), value), [0, 2, 1, 3])
        return self.project(tf.reshape(joined, [-1, length, WIDTH]))

    def __call__(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.outer(tf.nn.gelu(self.inner(self.norm2(x)), approximate=True))


class GPT2(tf.Module):
    def __init__(self):
        super().__init__()
        self.characters = normal(CHARACTERS, WIDTH)
        self.positions = normal(LENGTH, WIDTH, scale=0.01)
        self.blocks = [Block() for _ in range(BLOCKS)]
        self.norm = LayerNorm()

    def __call__(self, text):
        x = tf.gather(self.characters, text) + self.positions[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return tf.einsum("btc,vc->btv", self.norm(x), self.characters)


class AdamW(tf.Module):
    def __init__(self, variables):
        super().__init__()
        self.trained = variables
        self.steps = tf.Variable(0.0, trainable=False)
        self.first = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
        self.second = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]

    def apply(self, gradients):
        self.steps.assign_add(1.0)
        scale = tf.sqrt(1.0 - BETA2**self.steps) / (1.0 - BETA1**self.steps)
        for variable, first, second, gradient in zip(
            self.trained, self.first, self.second, gradients, strict=True
        ):
            gradient = tf.convert_to_tensor(gradient)
            first.assign(BETA1 * first + (1.0 - BETA1) * gradient)
            second.assign(BETA2 * second + (1.0 - BETA2) * tf.square(gradient))
            update = scale * first / (tf.sqrt(second) + EPSILON)
            if len(variable.shape) > 1:
                update += DECAY * variable
            variable.assign_sub(RATE * update)


def load_batches():
    text = (Path(os.__file__).parent / "argparse.py").read_bytes()
    text = np.frombuffer(text, np.uint8).astype(np.int32)
    text = text[text < CHARACTERS]
    starts = np.random.default_rng(8).integers(len(text) - LENGTH - 1, size=(64, BATCH))
    batches = []
    for row in starts:
        pieces = tf.constant(np.stack([text[start : start + LENGTH + 1] for start in row]))
        batches.append((pieces[:, :-1], pieces[:, 1:]))
    return batches


def build():
    model = GPT2()
    variables = model.trainable_variables
    optimizer = AdamW(variables)

    def train_step(text, following):
        with tf.GradientTape() as tape:
            logits = model(text)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(following, logits)
            loss = tf.reduce_mean(losses)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 1.0)
        optimizer.apply(gradients)
        return loss

    return train_step, load_batches(), lambda: [*model.variables, *optimizer.variables]


def main():
    keras.utils.set_random_seed(1)
    train_step, batches, _ = build()
    train_step = terra.function(train_step)
    for step in range(300):
        loss = train_step(*batches[step % len(batches)])
        if step % READ_EVERY == 0:
            print(f"step {step:3d}  loss {loss.numpy():.4f}")


if __name__ == "__main__":
    main()
