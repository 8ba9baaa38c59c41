"""Refuses what Horovod does silently wrong with Keras 3.

`hvd.DistributedOptimizer` around a Keras 3 optimizer looks like an optimizer that averages
gradients over the ranks and does not: Keras 3 never calls the methods that it overrides, so that
every rank trains by itself. `PartialDistributedOptimizer` is the same, and `hvd.load_model` gives a
model whose optimizer Keras 3 has loaded as a plain one. With Terra, such a call is an error that
says what to do instead.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

REFUSED = """\
Horovod's {name} does not reduce the gradients of a Keras 3 optimizer ({kind}): each \
rank would train by itself, without any error. Reduce them before the optimizer gets them:

    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = loss_fn(y, model(x, training=True))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

and start all ranks alike:

    hvd.broadcast_variables([v.value for v in model.variables + optimizer.variables], root_rank=0)
 (The legacy Keras 2, TF_USE_LEGACY_KERAS=1, works as it is.)\
"""


class SilentlyWrongError(TypeError):
    """Horovod would go on without an error and compute something else than was asked for."""


def _guard(module: ModuleType) -> None:
    for name in ("DistributedOptimizer", "PartialDistributedOptimizer"):
        _replace(module, name, _refuse_argument)
    if module.__name__ != "horovod.tensorflow":
        _replace(module, "load_model", _refuse_loaded)


def _replace(module: ModuleType, name: str, make: Any) -> None:
    original = getattr(module, name, None)
    if original is None or hasattr(original, "_terra_guard"):
        return
    guarded = functools.wraps(original)(make(original, name))
    guarded._terra_guard = True
    setattr(module, name, guarded)


def _refuse_argument(original: Any, name: str) -> Any:
    def distributed_optimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        _check(optimizer, name)
        return original(optimizer, *args, **kwargs)

    return distributed_optimizer


def _refuse_loaded(original: Any, name: str) -> Any:
    def load_model(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        _check(getattr(model, "optimizer", None), name)
        return model

    return load_model


def _check(optimizer: Any, name: str) -> None:
    kind = type(optimizer)
    if any(base.__module__.startswith("keras.src.optimizers") for base in kind.__mro__):
        raise SilentlyWrongError(REFUSED.format(name=name, kind=kind.__name__))


CALLBACKS = {
    "horovod.tensorflow": _guard,
    "horovod.tensorflow.keras": _guard,
    "horovod.keras": _guard,
}
"""Module of Horovod -> what to do once it is loaded."""
