"""What `fit` and `evaluate` run for each batch of an accelerated model.

Keras's own function takes a batch from the iterator, enters the distribution strategy, enters
AutoGraph's bookkeeping, calls the model's step and wraps what it gives into an Optional, which
waits for the step's end. In eager mode, without a strategy, only the batch and the step have an
effect. A `BatchFunction` does just these, and asks Keras's function wherever there is more to do.
"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from terra_tf.tensorflow_internals import batch_function_of_keras

MAKERS = {"make_train_function": "train", "make_test_function": "test"}
"""Method of a model that makes the function of a batch -> the kind of batch."""


class BatchFunction:
    """Stands in for a model's `train_function` or `test_function`."""

    def __init__(self, model: Any, kind: str, original: Any):
        """Makes the stand-in.

        Args:
          model: a Keras model; it is not kept alive.
          kind: "train" or "test".
          original: Keras's function.
        """
        self._model = weakref.ref(model)
        self._kind = kind
        self._original = original
        self._after = batch_function_of_keras(model, kind)
        self._iterator: weakref.ref[Any] | None = None  # the one that `_plain` is of
        self._plain = False

    def __call__(self, iterator: Any) -> Any:
        """Takes a batch from an iterator and runs a step with it; returns what callbacks get."""
        model = self._model()
        if self._after is None or not self._is_plain(iterator) or not _is_alone(model):
            return self._original(iterator)
        data = iterator.get_next()
        return self._after(model, getattr(model, f"{self._kind}_step")(data))

    def _is_plain(self, iterator: Any) -> bool:
        """Whether the iterator gives tensors as they are: Keras makes None of an Optional."""
        if self._iterator is None or self._iterator() is not iterator:
            self._plain = isinstance(iterator, tf.data.Iterator) and all(
                isinstance(spec, (tf.TensorSpec, tf.SparseTensorSpec, tf.RaggedTensorSpec))
                for spec in tf.nest.flatten(iterator.element_spec)
            )
            self._iterator = weakref.ref(iterator)
        return self._plain


def _is_alone(model: Any) -> bool:
    """Whether no strategy distributes the model."""
    if tf.distribute.has_strategy():
        return False
    return model.distribute_strategy is tf.distribute.get_strategy()


def shorten(model: Any, maker: str) -> None:
    """Has a model use a `BatchFunction`, if its class leaves the making of functions to Keras.

    Args:
      model: an accelerated model whose function has just been made.
      maker: the name of the method that has made it.
    """
    name = f"{MAKERS[maker]}_function"
    function = getattr(model, name)
    owner = next(kind for kind in type(model).__mro__ if maker in vars(kind))
    if (
        model.run_eagerly
        and owner.__module__.startswith(("keras.", "tf_keras."))
        and not isinstance(function, BatchFunction)
    ):
        setattr(model, name, BatchFunction(model, MAKERS[maker], function))


class Maker:
    """Stands in for a `make_..._function` of one model: makes as Keras does, then shortens."""

    def __init__(self, model: Any, name: str):
        self._model = weakref.ref(model)
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See Keras."""
        model = self._model()
        made = getattr(type(model), self._name)(model, *args, **kwargs)
        shorten(model, self._name)
        return None if made is None else getattr(model, f"{MAKERS[self._name]}_function")
