"""Keras models in a script under `terra run`: those that run eagerly are accelerated by themselves.

Keras makes a function of a model's `train_step` before it trains; there, a model compiled with
`run_eagerly=True` is accelerated as `terra_tf.keras.accelerate` does it.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

_MAKERS = ("make_train_function", "make_test_function", "make_predict_function")


def _watch_keras_3(module: ModuleType) -> None:
    _watch(module.TensorFlowTrainer)


def _watch_keras_2(module: ModuleType) -> None:
    _watch(module.Model)


CALLBACKS = {
    "keras.src.backend.tensorflow.trainer": _watch_keras_3,
    "tf_keras.src.engine.training": _watch_keras_2,
}
"""Module of Keras in which models learn to train -> what to do once it is loaded."""


def _watch(trainer: type) -> None:
    for name in _MAKERS:
        setattr(trainer, name, _accelerating(name, getattr(trainer, name)))


def _accelerating(name: str, make: Any) -> Any:
    @functools.wraps(make)
    def make_function(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.run_eagerly:
            from terra_tf import keras

            accelerated = keras.is_accelerated(model)
            keras.accelerate(model)
            if not accelerated and name in vars(model):
                return getattr(model, name)(*args, **kwargs)  # which comes back here
        return make(model, *args, **kwargs)

    return make_function
