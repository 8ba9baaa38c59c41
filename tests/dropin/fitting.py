"""Trains Keras models by `fit`, eagerly and accelerated; `test_keras` compares what both show.

    python fitting.py eager|accelerated     prints all that there is to compare, as JSON

Runs with either Keras: `TF_USE_LEGACY_KERAS=1` chooses the legacy one.
"""

import contextlib
import io
import json
import re
import sys

import numpy as np
import tensorflow as tf

keras = tf.keras
X = np.random.RandomState(0).rand(120, 6).astype("float32")
Y = (X.sum(1) > 3).astype("int32")


def plain():
    return keras.Sequential(
        [
            keras.layers.Dense(8, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(2),
        ]
    )


class Custom(keras.Model):
    """Has steps of its own, with Python state and a branch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)
        self.seen = []

    def call(self, inputs, training=False):
        return self.second(self.first(inputs))

    def train_step(self, data):
        x, y = data[:2]
        self.seen.append(int(x.shape[0]))
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            if len(self.seen) % 3 == 0:
                outputs = outputs + tf.reduce_mean(x)
            per_item = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
            loss = tf.reduce_mean(per_item)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "doubled": loss * 2.0}

    def test_step(self, data):
        x, y = data[:2]
        outputs = self(x)
        return {
            "right": tf.reduce_mean(
                tf.cast(
                    tf.argmax(outputs, 1, output_type=tf.int32) == tf.cast(y[:, 0], tf.int32),
                    tf.float32,
                )
            )
        }


class Recorder(keras.callbacks.Callback):
    """Notes every call, with logs and a weight that it looks at between steps."""

    def __init__(self):
        super().__init__()
        self.events = []

    def on_train_batch_end(self, batch, logs=None):
        weight = float(np.sum(self.model.get_weights()[0]))
        self.events.append(
            ["batch", batch, sorted(logs), [float(v) for v in logs.values()], weight]
        )

    def on_epoch_end(self, epoch, logs=None):
        self.events.append(["epoch", epoch, {name: float(value) for name, value in logs.items()}])
        self.model.optimizer.learning_rate.assign(0.01 / (1 + epoch))

    def on_test_end(self, logs=None):
        self.events.append(["test"])


def train(make, accelerated, **compiled):
    import terra_tf as terra

    keras.utils.set_random_seed(3)
    model = make()
    model.compile(optimizer=keras.optimizers.Adam(0.01), run_eagerly=True, **compiled)
    if accelerated:
        assert terra.keras.accelerate(model) is model
    recorder, printed = Recorder(), io.StringIO()
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=2)
    with contextlib.redirect_stdout(printed):
        data = {"x": X, "y": Y[:, None], "batch_size": 16}
        history = model.fit(
            **data, epochs=4, verbose=2, validation_split=0.2, callbacks=[recorder, stop]
        )
        evaluated = model.evaluate(X, Y[:, None], verbose=0, return_dict=True)
        predicted = model.predict(X[:37], verbose=0)
        trained = model.train_on_batch(X[:16], Y[:16, None])
        with contextlib.suppress(NotImplementedError):
            model.save_weights("/dev/shm/terra-fitting.weights.h5")
    bar = io.StringIO()
    with contextlib.redirect_stdout(bar):
        model.fit(**data, epochs=2, verbose=1)  # Keras 2 numbers no single epoch
    terra.sync()
    coexecuted = terra.stats().coexecuted
    terra.stats().reset()
    return {
        "history": history.history,
        "events": recorder.events,
        "evaluated": {name: float(value) for name, value in evaluated.items()},
        "predicted": np.asarray(predicted).astype(float).sum(0).tolist(),
        "trained": np.asarray(trained, dtype=float).tolist() if np.ndim(trained) else repr(trained),
        "weights": [float(np.sum(w)) for w in model.get_weights()],
        "slots": [float(np.sum(v.numpy())) for v in _variables(model.optimizer)],
        "seen": getattr(model, "seen", None),
        "printed": _without_times(printed.getvalue()),
        "bar": _finished_bars(bar.getvalue()),
    }, coexecuted


def _without_times(text):
    return re.sub(r"\d+[mu]?s\b(/\w+)?", "", text)


def _finished_bars(text):
    """What a progress bar shows last in each epoch; how often it is drawn depends on the clock."""
    epochs = re.split(r"Epoch \d+/\d+", text)[1:]
    shown = [re.split(r"[\r\x08\n]+", _without_times(epoch).strip())[-1] for epoch in epochs]
    return [re.sub(r"\x1b\[[\d;]*m|\s+", " ", line) for line in shown]


def _variables(optimizer):
    return optimizer.variables() if callable(optimizer.variables) else optimizer.variables


def main(accelerated):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    shown = {}
    shown["plain"] = train(plain, accelerated, loss=loss, metrics=["accuracy"])
    shown["custom"] = train(Custom, accelerated)
    return shown


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1] == "accelerated"), default=float))
