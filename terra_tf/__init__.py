"""Terra for TensorFlow 2: your eager training loop, at graph speed.

    import terra_tf as terra

    @terra.function
    def train_step(x, y): ...          # any eager code

    for x, y in terra.iterate(data):   # or: the loop body is the step
        ...

See `terra_tf.api` for everything public.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from terra_tf.configuration import settings as _settings
from terra_tf.dropin import horovod as _horovod
from terra_tf.dropin import importing as _importing

if TYPE_CHECKING:
    from terra_tf import keras, tensorboard
    from terra_tf.api import Step, disable, explain, function, iterate, stats, sync, timeline
    from terra_tf.configuration import settings
    from terra_tf.errors import NewTraceError, TerraError
    from terra_tf.report.counters import Stats

# Loaded on first use, so that `import terra_tf` neither waits for TensorFlow nor configures it.
_HOMES = {
    "Step": "terra_tf.api",
    "disable": "terra_tf.api",
    "explain": "terra_tf.api",
    "function": "terra_tf.api",
    "iterate": "terra_tf.api",
    "stats": "terra_tf.api",
    "sync": "terra_tf.api",
    "timeline": "terra_tf.api",
    "NewTraceError": "terra_tf.errors",
    "TerraError": "terra_tf.errors",
    "Stats": "terra_tf.report.counters",
    "settings": "terra_tf.configuration",
}

_MODULES = ("keras", "tensorboard")

__all__ = [
    "NewTraceError",
    "Stats",
    "Step",
    "TerraError",
    "disable",
    "explain",
    "function",
    "iterate",
    "keras",
    "settings",
    "stats",
    "sync",
    "tensorboard",
    "timeline",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"terra_tf.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'terra_tf' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})


if not _settings.disabled:
    _importing.after_import(_horovod.CALLBACKS)
