"""Keras `fit`, `evaluate`, `predict` co-executed: everything that they show is eager's.

The truth is the same model with `run_eagerly=True` and without Terra.
"""

import contextlib
import importlib
import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import terra_tf as terra
from dropin.scripts import execute, python, terra_run, write
from terra_tf.runners.retreat import Retreat

pytestmark = pytest.mark.timeout(240)
HERE = Path(__file__).resolve().parent


def fitted(how, **environment):
    done = execute(
        sys.executable, HERE / "fitting.py", how, folder=HERE, seconds=200, **environment
    )
    assert done.code == 0, done.errors
    return json.loads(done.output.splitlines()[-1])


@pytest.mark.parametrize("legacy", ["0", "1"], ids=["keras-3", "keras-2"])
def test_all_that_fit_shows_is_eagers(legacy):
    eager = fitted("eager", TF_USE_LEGACY_KERAS=legacy)
    accelerated = fitted("accelerated", TF_USE_LEGACY_KERAS=legacy)
    for name, (shown, coexecuted) in eager.items():
        assert coexecuted == 0
        for what, value in shown.items():
            assert accelerated[name][0][what] == value, (name, what)
        assert accelerated[name][1] > 20, name
    assert len(eager["plain"][0]["events"]) > 20
    assert len(eager["plain"][0]["bar"]) == 2
    assert all("loss: " in line for line in eager["plain"][0]["bar"])


def test_command_line_needs_no_accelerate(tmp_path):
    script = write(
        tmp_path,
        script="""
        import os, sys
        os.environ.setdefault("KERAS_BACKEND", "tensorflow")
        import keras, numpy as np
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        x = np.random.RandomState(0).rand(96, 3).astype("float32")
        for round in range(2):
            history = model.fit(x, x.sum(1), epochs=2, batch_size=8, verbose=0)
            print(history.history, model.evaluate(x, x.sum(1), verbose=0))
        if "--stats" in sys.argv:
            import terra_tf
            print(terra_tf.stats().coexecuted > 30, type(model.train_step).__name__)
        """,
    )
    expected, found = (run(script, folder=tmp_path) for run in (python, terra_run))
    assert found == expected
    with_stats = terra_run(script, "--stats", folder=tmp_path)
    assert with_stats.output == expected.output + "True Step\n"


def test_models_in_graph_mode_are_refused_and_left_alone():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="compiled with run_eagerly=False"):
        terra.keras.accelerate(model)
    with pytest.raises(TypeError, match="takes a Keras model, not int"):
        terra.keras.accelerate(3)
    assert "train_step" not in vars(model)


def test_accelerated_before_compile_and_compiled_anew():
    model = terra.keras.accelerate(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    x = np.ones([64, 3], "float32")
    for eagerly in (True, False, True):
        model.compile("sgd", "mse", run_eagerly=eagerly)
        before = model.train_step.stats().coexecuted
        model.fit(x, x[:, :1], batch_size=4, verbose=0)
        assert (model.train_step.stats().coexecuted > before + 8) is eagerly


def test_models_can_still_be_cloned_saved_and_freed(tmp_path):
    import gc
    import weakref

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    terra.keras.accelerate(model)
    x = np.ones([32, 3], "float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    clone = keras.models.clone_model(model)
    assert not terra.keras.is_accelerated(clone)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_counters_callback_writes_scalars(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    terra.keras.accelerate(model)
    x = np.ones([32, 3], "float32")
    callback = terra.keras.CountersCallback(str(tmp_path))
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[callback])
    tags = [
        value.tag
        for file in tmp_path.glob("*")
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    ]
    assert tags.count("terra/coexecuted_share") == 2


def _delegated_per_step(step, run, steps):
    """How many library calls a step skips once it has been learned."""
    run()
    before = step.stats()
    run()
    after = step.stats()
    assert after.coexecuted - before.coexecuted == steps
    return (after.delegated_calls - before.delegated_calls) / steps


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_fit_skips_what_a_loop_of_ones_own_skips(library, monkeypatch):
    """The truth is the same `train_step` in a loop without Keras's `fit` around it."""
    monkeypatch.setattr(Retreat, "stay_eager", lambda self: False)
    lib = importlib.import_module(library)
    layers = [lib.layers.Dense(4, "relu"), lib.layers.BatchNormalization(), lib.layers.Dense(1)]
    model = lib.Sequential([lib.Input((3,)), *layers])
    model.compile(lib.optimizers.Adam(), "mse", metrics=["mae"], run_eagerly=True)
    x = np.random.RandomState(0).rand(96, 3).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(8)
    own = terra.function(model.train_step)

    def loop():
        for batch in data:
            own(batch)

    expected = _delegated_per_step(own, loop, 12)
    assert expected >= 3
    terra.keras.accelerate(model)

    def fit():
        model.fit(data, verbose=0, shuffle=False)

    assert _delegated_per_step(model.train_step, fit, 12) == expected


class Numbers(keras.Model):
    """Steps that give Python numbers, which Keras hands to callbacks as tensors."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"loss": tf.reduce_mean(self(x)), "size": int(x.shape[0]), "half": 0.5}


class Types(keras.callbacks.Callback):
    """Notes what callbacks get."""

    def on_train_begin(self, logs=None):
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append([(name, type(value), float(value)) for name, value in logs.items()])


@pytest.mark.parametrize("per_execution", [1, 3])
@pytest.mark.parametrize("distributed", [False, True])
def test_callbacks_get_what_eager_gives(per_execution, distributed):
    x = np.arange(90, dtype="float32").reshape(30, 3)
    shown = []
    for accelerated in (False, True):
        keras.utils.set_random_seed(2)
        device = tf.distribute.OneDeviceStrategy("/cpu:0")
        with device.scope() if distributed else contextlib.nullcontext():
            model = Numbers()
            model.compile("sgd", run_eagerly=True, steps_per_execution=per_execution)
        if accelerated:
            terra.keras.accelerate(model)
        types = Types()
        history = model.fit(x, batch_size=4, epochs=2, verbose=0, callbacks=[types])
        shown.append((types.found, history.history))
    assert shown[0] == shown[1]


def test_a_maker_of_the_models_own_is_left_alone():
    """Who overrides how Keras makes its functions gets just that."""
    made = []

    class Own(keras.Sequential):
        def make_train_function(self, force=False):
            def train_function(iterator):
                made.append(len(next(iterator)[0]))
                return {"loss": tf.constant(1.0)}

            self.train_function = train_function
            return train_function

    model = Own([keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    terra.keras.accelerate(model)
    x = np.ones([12, 2], "float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    assert made == [4, 4, 4]
