"""Loads the native transport and checks that it fits the TensorFlow at hand.

`core` is the extension module and `operations` holds its TensorFlow ops; both are None where they
cannot be used, and then `problem` says why and what to do.
"""

from __future__ import annotations

import importlib
import importlib.machinery
from pathlib import Path
from types import ModuleType

import tensorflow as tf

_BUILD_HINT = "build it with `pip install --no-build-isolation -e .` (or `tools/setup`)"


def _load() -> tuple[ModuleType | None, ModuleType | None, str | None]:
    folder = Path(__file__).parent
    files = [folder / f"_transport{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    library = next((file for file in files if file.exists()), None)
    if library is None:
        return None, None, f"the native transport is not built; {_BUILD_HINT}"
    try:
        # First as a library of ops: TensorFlow only notices ops that register while it loads.
        operations = tf.load_op_library(str(library))
        core = importlib.import_module("pipeline.native._transport")
    except (ImportError, tf.errors.NotFoundError) as error:
        return None, None, f"the native transport does not load ({error}); {_BUILD_HINT}"
    if core.built_for_tensorflow != tf.__version__:
        return (
            None,
            None,
            (
                f"the native transport was built for TensorFlow {core.built_for_tensorflow}, "
                f"and this is {tf.__version__}; {_BUILD_HINT} again"
            ),
        )
    return core, operations, None


core, operations, problem = _load()
