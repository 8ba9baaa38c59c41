"""Music Transformer: relative attention over melodies; every step reads its metrics.

The model (Huang et al., 2018) attends with learned embeddings of distances. The step is written as
in many public programs: Keras metrics are updated and looked at in each step, and a Python list
keeps their history. A symbolic tensor cannot be turned into a Python number.

The corpus: four old tunes in all twelve keys.

    python examples/paper/music_transformer.py
"""

import keras
import numpy as np
import tensorflow as tf

import terra_tf as terra

LENGTH = 48
BATCH = 12
WIDTH = 64
HEADS = 4
NOTES = 40
TUNES = (
    # Frère Jacques, Ode to Joy, Twinkle Twinkle, Happy Birthday: steps above the lowest note.
    "5 7 9 5 5 7 9 5 9 10 12 9 10 12 12 14 12 10 9 5 12 14 12 10 9 5 5 0 5 5 0 5",
    "9 9 10 12 12 10 9 7 5 5 7 9 9 7 7 9 9 10 12 12 10 9 7 5 5 7 9 7 5 5",
    "5 5 12 12 14 14 12 10 10 9 9 7 7 5 12 12 10 10 9 9 7 12 12 10 10 9 9 7",
    "0 0 2 0 5 4 0 0 2 0 7 5 0 0 12 9 5 4 2 10 10 9 5 7 5",
)


class RelativeAttention(keras.layers.Layer):
    """Causal self-attention that knows how far apart two notes are."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output_projection = (
            keras.layers.Dense(WIDTH) for _ in range(4)
        )
        self.distances = self.add_weight(shape=(LENGTH, WIDTH // HEADS), initializer="uniform")

    def call(self, x):
        length = x.shape[1]
        query, key, value = (
            tf.transpose(tf.reshape(layer(x), [-1, length, HEADS, WIDTH // HEADS]), [0, 2, 1, 3])
            for layer in (self.query, self.key, self.value)
        )
        by_distance = tf.matmul(query, self.distances[-length:], transpose_b=True)
        scores = tf.matmul(query, key, transpose_b=True) + self.skew(by_distance)
        scores = scores / (WIDTH // HEADS) ** 0.5
        mask = 1.0 - tf.linalg.band_part(tf.ones([length, length]), -1, 0)
        weights = tf.nn.softmax(scores - 1e9 * mask)
        joined = tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3])
        return self.output_projection(tf.reshape(joined, [-1, length, WIDTH]))

    @staticmethod
    def skew(scores):
        """Turns columns that mean distances into columns that mean positions."""
        batch, heads, length, _ = scores.shape
        padded = tf.pad(scores, [[0, 0], [0, 0], [0, 0], [1, 0]])
        return tf.reshape(padded, [batch, heads, length + 1, length])[:, :, 1:]


class DecoderBlock(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm1 = keras.layers.LayerNormalization()
        self.attention = RelativeAttention()
        self.norm2 = keras.layers.LayerNormalization()
        self.inner = keras.layers.Dense(4 * WIDTH, activation="gelu")
        self.outer = keras.layers.Dense(WIDTH)
        self.dropout = keras.layers.Dropout(0.1)

    def call(self, x, training=False):
        x = x + self.dropout(self.attention(self.norm1(x)), training=training)
        return x + self.dropout(self.outer(self.inner(self.norm2(x))), training=training)


class MusicTransformer(keras.Model):
    def __init__(self, blocks):
        super().__init__()
        self.embedding = keras.layers.Embedding(NOTES, WIDTH)
        self.blocks = [DecoderBlock() for _ in range(blocks)]
        self.norm = keras.layers.LayerNormalization()
        self.head = keras.layers.Dense(NOTES)

    def call(self, notes, training=False):
        x = self.embedding(notes) * WIDTH**0.5
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(self.norm(x))


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """The schedule of the Transformer: up linearly, then down with the root."""

    def __call__(self, step):
        step = tf.cast(step + 1, tf.float32)
        return WIDTH**-0.5 * tf.minimum(step**-0.5, step * 400**-1.5)


def load_batches():
    numbers = np.random.default_rng(5)
    tunes = [np.array(tune.split(), np.int32) for tune in TUNES]
    batches = []
    for _ in range(32):
        rows = []
        for _ in range(BATCH):
            tune = tunes[numbers.integers(len(tunes))] + numbers.integers(12)
            start = numbers.integers(len(tune))
            rows.append(np.resize(np.roll(tune, -start), LENGTH + 1))
        notes = tf.constant(np.stack(rows))
        batches.append((notes[:, :-1], notes[:, 1:]))
    return batches


def build():
    model = MusicTransformer(blocks=2)
    batches = load_batches()
    model(batches[0][0])
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(WarmUp(), beta_2=0.98, epsilon=1e-9)
    optimizer.build(model.trainable_variables)
    mean_loss = keras.metrics.Mean()
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    history = []

    def train_step(notes, following):
        with tf.GradientTape() as tape:
            logits = model(notes, training=True)
            loss = loss_fn(following, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mean_loss.update_state(loss)
        accuracy.update_state(following, logits)
        history.append((float(mean_loss.result()), float(accuracy.result())))
        if len(history) % 20 == 0:
            print("mean loss {:.4f}  accuracy {:.4f}".format(*history[-1]))
            mean_loss.reset_state()
            accuracy.reset_state()
        return loss

    def variables():
        return [*model.variables, *optimizer.variables, *mean_loss.variables, *accuracy.variables]

    return train_step, batches, variables


def main():
    keras.utils.set_random_seed(1)
    train_step, batches, _ = build()
    train_step = terra.function(train_step)
    for step in range(300):
        train_step(*batches[step % len(batches)])


if __name__ == "__main__":
    main()
