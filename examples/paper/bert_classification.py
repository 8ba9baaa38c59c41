"""BERT for classification: which package of Python's library is a docstring from?

A small BERT encoder (Devlin et al., 2018) reads sentences of any length; a batch holds sentences of
about one length and is as long as its longest one. Every step hands its predictions to
scikit-learn, as programs that watch a score do. A library that computes with NumPy arrays cannot be
given symbolic tensors.

    python examples/paper/bert_classification.py
"""

import ast
import collections
import os
import re
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.metrics import accuracy_score

import terra_tf as terra

PACKAGES = ("asyncio", "email", "unittest", "xml")
BATCH = 12
LONGEST = 48
WORDS = 1500
WIDTH = 64
HEADS = 4
PAD, UNKNOWN, CLS, SEP = range(4)


class EncoderBlock(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.1)
        self.norm1 = keras.layers.LayerNormalization(epsilon=1e-12)
        self.inner = keras.layers.Dense(4 * WIDTH, activation="gelu")
        self.outer = keras.layers.Dense(WIDTH)
        self.dropout = keras.layers.Dropout(0.1)
        self.norm2 = keras.layers.LayerNormalization(epsilon=1e-12)

    def call(self, x, mask, training=False):
        attended = self.attention(x, x, attention_mask=mask, training=training)
        x = self.norm1(x + self.dropout(attended, training=training))
        inner = self.outer(self.inner(x))
        return self.norm2(x + self.dropout(inner, training=training))


class BertClassifier(keras.Model):
    def __init__(self, blocks):
        super().__init__()
        self.words = keras.layers.Embedding(WORDS, WIDTH)
        self.positions = keras.layers.Embedding(LONGEST, WIDTH)
        self.norm = keras.layers.LayerNormalization(epsilon=1e-12)
        self.blocks = [EncoderBlock() for _ in range(blocks)]
        self.pooler = keras.layers.Dense(WIDTH, activation="tanh")
        self.head = keras.layers.Dense(len(PACKAGES))

    def call(self, ids, training=False):
        x = self.norm(self.words(ids) + self.positions(tf.range(tf.shape(ids)[1])))
        mask = (ids != PAD)[:, tf.newaxis, :]
        for block in self.blocks:
            x = block(x, mask, training=training)
        return self.head(self.pooler(x[:, 0]))


def load_sentences():
    """Docstrings of some packages as lists of words, with the number of the package."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    library = Path(os.__file__).parent
    for label, package in enumerate(PACKAGES):
        for file in sorted((library / package).glob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                text = ast.get_docstring(node) if isinstance(node, documented) else None
                words = re.findall(r"\w+|[^\w\s]", (text or "").lower())
                if len(words) > 4:
                    yield words[: LONGEST - 2], label


def load_batches():
    sentences = list(load_sentences())
    counts = collections.Counter(word for words, _ in sentences for word in words)
    known = {word: 4 + i for i, (word, _) in enumerate(counts.most_common(WORDS - 4))}
    numbers = np.random.default_rng(6)
    chosen = [sentences[i] for i in numbers.choice(len(sentences), 40 * BATCH, replace=False)]
    chosen.sort(key=lambda sentence: len(sentence[0]))  # so that little is padded
    batches = []
    for first in numbers.permutation(range(0, len(chosen), BATCH)):
        batch = chosen[first : first + BATCH]
        rows = [[CLS, *(known.get(word, UNKNOWN) for word in words), SEP] for words, _ in batch]
        longest = max(map(len, rows))
        ids = np.array([row + [PAD] * (longest - len(row)) for row in rows], np.int32)
        labels = np.array([label for _, label in batch], np.int32)
        batches.append((tf.constant(ids), tf.constant(labels)))
    return batches


def build():
    model = BertClassifier(blocks=2)
    batches = load_batches()
    model(batches[0][0])
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.AdamW(5e-4, weight_decay=0.01)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    optimizer.build(model.trainable_variables)
    scores = collections.deque(maxlen=20)
    steps = 0

    def train_step(ids, labels):
        nonlocal steps
        with tf.GradientTape() as tape:
            logits = model(ids, training=True)
            loss = loss_fn(labels, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        predictions = tf.argmax(logits, axis=1)
        scores.append(accuracy_score(labels.numpy(), predictions.numpy()))
        steps += 1
        if steps % 20 == 0:
            print(f"step {steps:3d}  accuracy {np.mean(scores):.3f}")
        return loss

    return train_step, batches, lambda: model.variables + optimizer.variables


def main():
    keras.utils.set_random_seed(1)
    train_step, batches, _ = build()
    train_step = terra.function(train_step)
    for step in range(300):
        train_step(*batches[step % len(batches)])


if __name__ == "__main__":
    main()
