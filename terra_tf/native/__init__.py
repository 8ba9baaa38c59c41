"""Loads the native core and checks that it fits the TensorFlow at hand.

`core` is the extension module, or None where it cannot be used; then `problem` says why and what to
do, and `terra_tf` runs everything in plain eager mode. `initialise` is called at the first region
and not at import, because it fixes TensorFlow's device and thread configuration.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from types import ModuleType

import tensorflow as tf

from terra_tf import tensorflow_internals

core: ModuleType | None = None
problem: str | None = None
_lock = threading.Lock()
_initialised = False
_BUILD_HINT = "build it with `pip install --no-build-isolation -e .` (or `tools/setup`)"


def _load() -> tuple[ModuleType | None, str | None]:
    try:
        module = importlib.import_module("terra_tf.native._core")
    except ImportError as error:
        return None, f"the native core does not load ({error}); {_BUILD_HINT}"
    if module.built_for_tensorflow != tf.__version__:
        return None, (
            f"the native core was built for TensorFlow {module.built_for_tensorflow}, "
            f"and this is {tf.__version__}; {_BUILD_HINT} again"
        )
    return module, None


core, problem = _load()


def initialise(recover: Callable[[int], None]) -> None:
    """Registers the placeholder device and installs the hooks; once per process.

    Args:
      recover: called with an iteration's number (or -1 for all) when a graph failed after Python
        had left the iteration.

    Where TensorFlow's objects do not look as the core expects, nothing is changed, `core` becomes
    None and `problem` says so.
    """
    global _initialised, core, problem
    with _lock:
        if _initialised:
            return
        capsule = tensorflow_internals.context_capsule()
        if core.find_handle_offset(tf.constant(0.0)) < 0:
            core = None
            problem = f"the native core does not know this layout of EagerTensor; {_BUILD_HINT}"
            return
        device, info, name = core.register_parts(
            capsule, tensorflow_internals.FastPathMiss, tf.Variable, recover
        )
        tensorflow_internals.register_device(device, name, info)
        for kind, entry_point in enumerate(tensorflow_internals.ENTRY_POINTS):
            original = tensorflow_internals.entry_point(entry_point)
            tensorflow_internals.replace_entry_point(entry_point, core.Hook(kind, original))
        tensorflow_internals.install_gradient_watch()
        tensorflow_internals.install_tensor_views(core.is_placeholder, core.look)
        _initialised = True
