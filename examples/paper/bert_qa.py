"""BERT for question answering: where in a text is the answer?

The text is a docstring of Python's library. The question is one of its sentences with some words
missing; the answer is the place of these words in the text. Lengths vary from batch to batch: a
batch is as long as its longest text. Written with `tf_keras`, the legacy Keras 2, as many published
BERT programs are.

    python examples/paper/bert_qa.py
"""

import ast
import collections
import os
import re
from pathlib import Path

import numpy as np
import tensorflow as tf
import tf_keras as keras

import terra_tf as terra

PACKAGES = ("asyncio", "email", "json", "logging", "unittest", "xml")
BATCH = 8
LONGEST = 80
WORDS = 2000
WIDTH = 64
HEADS = 4
PAD, UNKNOWN, CLS, SEP, MASK = range(5)


class EncoderBlock(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        self.norm1 = keras.layers.LayerNormalization(epsilon=1e-12)
        self.inner = keras.layers.Dense(4 * WIDTH, activation="gelu")
        self.outer = keras.layers.Dense(WIDTH)
        self.norm2 = keras.layers.LayerNormalization(epsilon=1e-12)

    def call(self, x, mask):
        x = self.norm1(x + self.attention(x, x, attention_mask=mask))
        return self.norm2(x + self.outer(self.inner(x)))


class BertForQuestions(keras.Model):
    def __init__(self, blocks):
        super().__init__()
        self.words = keras.layers.Embedding(WORDS, WIDTH)
        self.parts = keras.layers.Embedding(2, WIDTH)
        self.positions = keras.layers.Embedding(LONGEST, WIDTH)
        self.norm = keras.layers.LayerNormalization(epsilon=1e-12)
        self.blocks = [EncoderBlock() for _ in range(blocks)]
        self.spans = keras.layers.Dense(2)

    def call(self, ids, parts):
        positions = self.positions(tf.range(tf.shape(ids)[1]))
        x = self.norm(self.words(ids) + self.parts(parts) + positions)
        present = ids != PAD
        for block in self.blocks:
            x = block(x, present[:, tf.newaxis, :])
        start, end = tf.unstack(self.spans(x), axis=2)
        outside = tf.where(present, 0.0, -1e9)
        return start + outside, end + outside


def load_texts():
    """Docstrings as lists of sentences, which are lists of words."""
    library = Path(os.__file__).parent
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for package in PACKAGES:
        for file in sorted((library / package).glob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                text = ast.get_docstring(node) if isinstance(node, documented) else None
                sentences = [re.findall(r"\w+", s.lower()) for s in (text or "").split(".")]
                sentences = [words for words in sentences if len(words) > 3]
                if len(sentences) > 1 and sum(map(len, sentences)) < LONGEST // 2:
                    yield sentences


def make_example(sentences, known, numbers):
    """Token ids, the part of each token (0 question, 1 text), start and end of the answer."""
    chosen = numbers.integers(len(sentences))
    question = sentences[chosen]
    size = numbers.integers(1, 3)
    first = numbers.integers(len(question) - size + 1)
    asked = [*question[:first], None, *question[first + size :]]
    text = [word for sentence in sentences for word in sentence]
    before = sum(len(sentence) for sentence in sentences[:chosen])
    ids = [MASK if word is None else known.get(word, UNKNOWN) for word in asked]
    ids = [CLS, *ids, SEP]
    start = len(ids) + before + first
    parts = [0] * len(ids) + [1] * (len(text) + 1)
    return [*ids, *(known.get(word, UNKNOWN) for word in text), SEP], parts, start, start + size - 1


def load_batches():
    texts = list(load_texts())
    counts = collections.Counter(word for text in texts for words in text for word in words)
    known = {word: 5 + i for i, (word, _) in enumerate(counts.most_common(WORDS - 5))}
    numbers = np.random.default_rng(7)
    batches = []
    for _ in range(30):
        chosen = numbers.choice(len(texts), BATCH, replace=False)
        examples = [make_example(texts[i], known, numbers) for i in chosen]
        longest = max(len(ids) for ids, *_ in examples)
        ids = [row + [PAD] * (longest - len(row)) for row, *_ in examples]
        parts = [row + [0] * (longest - len(row)) for _, row, *_ in examples]
        ends = [(start, end) for *_, start, end in examples]
        batches.append(tuple(tf.constant(part, tf.int32) for part in (ids, parts, ends)))
    return batches


def build():
    model = BertForQuestions(blocks=2)
    batches = load_batches()
    model(*batches[0][:2])
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    def train_step(ids, parts, ends):
        with tf.GradientTape() as tape:
            start, end = model(ids, parts)
            start_losses = tf.nn.sparse_softmax_cross_entropy_with_logits(ends[:, 0], start)
            end_losses = tf.nn.sparse_softmax_cross_entropy_with_logits(ends[:, 1], end)
            loss = tf.reduce_mean(start_losses + end_losses) / 2
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
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
