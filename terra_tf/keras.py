"""Keras models whose `fit`, `evaluate` and `predict` are co-executed.

    model.compile(optimizer="adam", loss="mse", run_eagerly=True)
    terra.keras.accelerate(model)
    model.fit(x, y, callbacks=[...])

Each `train_step`, `test_step` and `predict_step` of the model is a step; whatever Keras does around
it (callbacks, metrics, the progress bar, the history) is left to Keras. Keras 3 and the legacy
Keras 2 (`tf_keras`) work alike, and so do models with a `train_step` of their own.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import tensorflow as tf

from terra_tf import api
from terra_tf.dropin import fit
from terra_tf.report.log import topic

Model = TypeVar("Model")
_METHODS = {"train_step": "train", "test_step": "test", "predict_step": "predict"}
_log = topic("keras")

NOT_EAGER = (
    "{name} is compiled with run_eagerly=False: its fit is a tf.function already and there is "
    "nothing to accelerate. Compile it with run_eagerly=True, or leave accelerate away."
)
NO_MODEL = "terra_tf.keras.accelerate takes a Keras model, not {kind}"


def accelerate(model: Model) -> Model:
    """Makes `fit`, `evaluate`, `predict` and `train_on_batch` of a model co-execute.

        >>> import keras, numpy as np, terra_tf as terra
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
        >>> model = terra.keras.accelerate(model)
        >>> history = model.fit(np.ones([96, 4]), np.ones([96, 1]), batch_size=8, verbose=0)
        >>> model.train_step.stats().coexecuted > 0
        True

    Callbacks, metrics, progress bar and history are those of eager mode. May be called before or
    after `compile`, and again.

    Args:
      model: a `keras.Model` (Keras 3 or `tf_keras`), compiled with `run_eagerly=True` by the time
        it is trained.

    Returns:
      The same model.

    Raises:
      TypeError: `model` is no Keras model.
      ValueError: it is compiled with `run_eagerly=False`.
    """
    if not all(callable(getattr(model, name, None)) for name in (*_METHODS, "fit")):
        raise TypeError(NO_MODEL.format(kind=type(model).__name__))
    name = getattr(model, "name", type(model).__name__)
    compiled = getattr(model, "compiled", getattr(model, "_is_compiled", False))
    if compiled and not model.run_eagerly:
        raise ValueError(NOT_EAGER.format(name=name))
    if is_accelerated(model):
        return model
    for method in _METHODS:
        step = api.function(_Weak(model, method), name=f"{name}.{method}")
        # Past Keras's own bookkeeping of attributes: a step is no layer and no variable.
        object.__setattr__(model, method, step)
    for maker in fit.MAKERS:
        object.__setattr__(model, maker, fit.Maker(model, maker))
    for kind in _METHODS.values():
        setattr(model, f"{kind}_function", None)  # made before, of the plain methods
    _log.info("%s: train_step, test_step and predict_step are steps", name)
    return model


def is_accelerated(model: Any) -> bool:
    """Whether `accelerate` has been called with the model."""
    return all(isinstance(vars(model).get(name), api.Step) for name in _METHODS)


class _Weak:
    """A method of a model's class that keeps the model alive only while it runs."""

    def __init__(self, model: Any, method: str):
        self._model = weakref.ref(model)
        self._method = method
        self.__name__ = method
        self.__doc__ = getattr(type(model), method).__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        return getattr(type(model), self._method)(model, *args, **kwargs)


class CountersCallback(tf.keras.callbacks.Callback):
    """Writes Terra's counters to TensorBoard once an epoch; see `terra_tf.tensorboard.Writer`.

    model.fit(x, y, callbacks=[terra.keras.CountersCallback("logs")])
    """

    def __init__(self, log_dir: str):
        """Makes the callback.

        Args:
          log_dir: folder of the event files, as for `keras.callbacks.TensorBoard`.
        """
        super().__init__()
        self._log_dir = log_dir
        self._writer: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """See Keras."""
        from terra_tf.tensorboard import Writer

        self._writer = Writer(self._log_dir)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See Keras."""
        self._writer.write(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        """See Keras."""
        self._writer.close()
