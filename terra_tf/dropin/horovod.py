"""Refuses what Horovod does silently wrong with Keras 3.

`hvd.DistributedOptimizer` around a Keras 3 optimizer looks like an optimizer that averages
gradients over the ranks and does not: Keras 3 never calls the methods that it overrides, so that
every rank trains by itself. With Terra, such a call is an error that says what to do instead.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

REFUSED = """\
Horovod's DistributedOptimizer does not reduce the gradients of a Keras 3 optimizer ({kind}): each \
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
    original = getattr(module, "DistributedOptimizer", None)
    if original is None or hasattr(original, "_terra_guard"):
        return

    @functools.wraps(original)
    def distributed_optimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_keras_3(type(optimizer)):
            raise SilentlyWrongError(REFUSED.format(kind=type(optimizer).__name__))
        return original(optimizer, *args, **kwargs)

    distributed_optimizer._terra_guard = True
    module.DistributedOptimizer = distributed_optimizer


def _is_keras_3(kind: type) -> bool:
    return any(base.__module__.startswith("keras.src.optimizers") for base in kind.__mro__)


CALLBACKS = {
    "horovod.tensorflow": _guard,
    "horovod.tensorflow.keras": _guard,
    "horovod.keras": _guard,
}
"""Module of Horovod -> what to do once it is loaded."""
