"""A small GPT as a list of layers, the model of the benchmarks and examples."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


class Embedding(keras.Layer):
    """Tokens and positions to vectors.

    Args:
        vocabulary: the number of tokens.
        length: the longest sequence.
        width: of the vectors.
    """

    def __init__(self, vocabulary: int, length: int, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.tokens = keras.layers.Embedding(vocabulary, width)
        self.positions = keras.layers.Embedding(length, width)

    def build(self, shape: Any) -> None:
        """Makes both tables."""
        self.tokens.build()
        self.positions.build()

    def call(self, tokens: Any) -> Any:
        """Token indices [batch, length] to vectors [batch, length, width]."""
        return self.tokens(tokens) + self.positions(ops.arange(ops.shape(tokens)[1]))


class Block(keras.Layer):
    """A transformer block: causal attention and a perceptron, each after a normalisation.

    Args:
        width: of the vectors.
        heads: the number of attention heads.
        dropout: the share that dropout drops.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.first_norm = keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads, dropout=dropout)
        self.second_norm = keras.layers.LayerNormalization()
        self.widen = keras.layers.Dense(4 * width, "gelu")
        self.narrow = keras.layers.Dense(width)
        self.dropout = keras.layers.Dropout(dropout)

    def call(self, x: Any, training: bool | None = None) -> Any:
        """Vectors [batch, length, width] to the same shape."""
        h = self.first_norm(x)
        h = self.attention(h, h, use_causal_mask=True, training=training)
        x = x + self.dropout(h, training=training)
        h = self.narrow(self.widen(self.second_norm(x)))
        return x + self.dropout(h, training=training)


class Head(keras.Layer):
    """Vectors to logits, by a table of its own or by the embedding's (tied weights).

    Args:
        vocabulary: the number of tokens.
        embedding: whose table of tokens to use; None for an own one.
    """

    def __init__(self, vocabulary: int, embedding: Embedding | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.norm = keras.layers.LayerNormalization()
        self.embedding = embedding
        self.dense = keras.layers.Dense(vocabulary) if embedding is None else None

    def call(self, x: Any) -> Any:
        """Vectors [batch, length, width] to logits [batch, length, vocabulary]."""
        x = self.norm(x)
        if self.embedding is None:
            return self.dense(x)
        return ops.matmul(x, ops.transpose(self.embedding.tokens.embeddings))


def gpt(
    vocabulary: int,
    length: int,
    width: int,
    blocks: int,
    heads: int = 4,
    dropout: float = 0.0,
    tied: bool = False,
) -> list[keras.Layer]:
    """The whole model: an embedding, blocks and a head.

    Args:
        vocabulary: the number of tokens.
        length: the longest sequence.
        width: of the vectors.
        blocks: the number of transformer blocks.
        heads: the number of attention heads of each.
        dropout: the share that dropout drops.
        tied: whether the head uses the embedding's table.
    """
    embedding = Embedding(vocabulary, length, width)
    return [
        embedding,
        *(Block(width, heads, dropout) for _ in range(blocks)),
        Head(vocabulary, embedding if tied else None),
    ]


def cuts(blocks: int, parts: int) -> list[int]:
    """Cuts with as many blocks in each part, the embedding in the first and the head in the last.

    Args:
        blocks: the number of blocks.
        parts: the number of stages (times chunks).
    """
    return [1 + blocks * part // parts for part in range(1, parts)]
