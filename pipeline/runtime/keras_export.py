"""The whole model in Keras's own files, written by rank 0.

A `Sequential` that the user passed is written as it is. A list becomes a functional model of the
same layers; a callable that is no layer becomes a `Lambda`, which only a file of weights can hold.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras

from pipeline.errors import UsageError
from pipeline.runtime.model import Item, Model
from pipeline.runtime.structure import Spec

_ENDINGS = (".keras", ".weights.h5")


def check_path(path: Any) -> None:
    """Refuses names that Keras would not take.

    Raises:
        UsageError: if the name has another ending.
    """
    if not str(path).endswith(_ENDINGS):
        raise UsageError(f"the name of an exported model ends with {' or '.join(_ENDINGS)}: {path}")


def write(path: Any, model: Model, source: Any, spec: Spec) -> str | None:
    """Writes the model, whose layers all hold their weights, in one step.

    Args:
        path: the file.
        model: the whole one.
        source: what the user passed as the model.
        spec: of its input.

    Returns:
        Why it cannot be written, or None.
    """
    weights_only = str(path).endswith(_ENDINGS[1])
    target = Path(path)
    unfinished = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        whole = as_keras(model, source, spec, weights_only)
        target.parent.mkdir(parents=True, exist_ok=True)
        if weights_only:
            whole.save_weights(unfinished)
        else:
            whole.save(unfinished)
        unfinished.replace(target)
    except UsageError as error:
        return str(error)
    except Exception as error:  # Keras raises many kinds; the other ranks wait for the answer
        return f"the model cannot be exported to {path}: {type(error).__name__}: {error}"
    finally:
        unfinished.unlink(missing_ok=True)
    return None


def as_keras(model: Model, source: Any, spec: Spec, weights_only: bool) -> keras.Model:
    """The model as Keras has it.

    Raises:
        UsageError: if it cannot be one.
    """
    if isinstance(source, keras.Sequential) and source.built:
        return source
    inputs = spec.pack(
        [
            keras.Input(shape[1:], dtype=dtype)
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        ]
    )
    flow = inputs
    for item in model.items:
        flow = _as_layer(item, weights_only)(flow)
    return keras.Model(inputs, flow)


def _as_layer(item: Item, weights_only: bool) -> keras.Layer:
    if item.is_keras:
        return item.layer
    what = f"entry {item.index} of the model, {item.name}, is not a layer of Keras 3"
    if not weights_only:
        raise UsageError(
            f"{what}, and a .keras file holds only such; make it one, or export to .weights.h5"
        )
    if not item.dependencies and item.variables(True) + item.variables(False):
        raise UsageError(f"{what}, but has weights; make it one")
    return keras.layers.Lambda(item.layer)
