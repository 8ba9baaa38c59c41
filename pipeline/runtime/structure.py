"""Nested structures of tensors, flat: what flows between layers and between stages.

A structure is a tensor or a tuple, list or dictionary of structures. Its *skeleton* has the
positions of the flat tensors in their place and can be written as JSON, so that ranks can tell each
other what flows over a boundary. A Keras mask that is attached to a tensor travels along, after
the tensors themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from pipeline import tensorflow_internals


class Spec(NamedTuple):
    """What a boundary carries: the skeleton of the structure, and each tensor's shape and type.

    Attributes:
        skeleton: JSON of `encode`.
        shapes: of the flat tensors; None where a dimension may vary.
        dtypes: names of the flat tensors' types.
        masks: for each flat tensor the shape of its Keras mask, or None.
    """

    skeleton: Any
    shapes: list[list[int | None]]
    dtypes: list[str]
    masks: list[list[int | None] | None]

    def tensor_specs(self) -> list[tf.TensorSpec]:
        """The flat tensors, then the masks, as TensorFlow has them."""
        tensors = zip(self.shapes, self.dtypes, strict=True)
        masks = [tf.TensorSpec(shape, tf.bool) for shape in self.masks if shape is not None]
        return [*(tf.TensorSpec(shape, dtype) for shape, dtype in tensors), *masks]

    def pack(self, flat: list[Any]) -> Any:
        """The structure of these flat tensors, with the masks after them attached."""
        masks = iter(flat[len(self.dtypes) :])
        for tensor, shape in zip(flat, self.masks, strict=False):
            if shape is not None:
                tensorflow_internals.set_keras_mask(tensor, next(masks))
        return decode(self.skeleton, flat)

    def describe(self) -> str:
        """The structure as a person reads it, for example `float32[None, 8]`."""
        parts = [f"{d}{s}" for d, s in zip(self.dtypes, self.shapes, strict=True)]
        return str(decode(self.skeleton, parts)).replace("'", "")


def flatten(structure: Any) -> list[Any]:
    """The flat parts, dictionaries in the order of their sorted keys."""
    return tf.nest.flatten(structure)


def flatten_with_masks(structure: Any) -> list[Any]:
    """The flat tensors, then the Keras masks of those that have one; see `Spec.pack`."""
    flat = flatten(structure)
    masks = [tensorflow_internals.keras_mask(tensor) for tensor in flat]
    return [*flat, *(tf.convert_to_tensor(mask) for mask in masks if mask is not None)]


def spec_of(structure: Any) -> Spec:
    """The spec of a structure of tensors, its first dimension free."""
    flat = flatten(structure)
    for part in flat:
        if not isinstance(part, tf.Tensor):
            raise TypeError(
                f"a layer returned {type(part).__name__} {part!r}; what flows between layers must "
                "be dense tensors in tuples, lists and dictionaries"
            )
    shapes = []
    for part in flat:
        if part.shape.rank is None:
            raise ValueError(f"the number of dimensions of {part} is unknown")
        shapes.append([None, *part.shape.as_list()[1:]] if part.shape.rank else [])
    count = iter(range(len(flat)))
    skeleton = encode(tf.nest.map_structure(lambda _: next(count), structure))
    masks = [tensorflow_internals.keras_mask(part) for part in flat]
    mask_shapes = [None if mask is None else [None, *mask.shape.as_list()[1:]] for mask in masks]
    return Spec(skeleton, shapes, [part.dtype.name for part in flat], mask_shapes)


def encode(structure: Any) -> Any:
    """A structure of numbers as JSON: containers by name, numbers as they are."""
    if isinstance(structure, dict):
        return {"dict": [[key, encode(value)] for key, value in structure.items()]}
    if isinstance(structure, (list, tuple)):
        if hasattr(structure, "_fields"):
            raise TypeError(
                f"a {type(structure).__name__} cannot flow between stages; use a tuple or a dict"
            )
        name = "list" if isinstance(structure, list) else "tuple"
        return {name: [encode(value) for value in structure]}
    return structure


def decode(skeleton: Any, flat: list[Any]) -> Any:
    """The inverse of `encode`, each number replaced by that flat part."""
    if not isinstance(skeleton, dict):
        return flat[skeleton]
    if "dict" in skeleton:
        return {key: decode(value, flat) for key, value in skeleton["dict"]}
    if "list" in skeleton:
        return [decode(value, flat) for value in skeleton["list"]]
    return tuple(decode(value, flat) for value in skeleton["tuple"])
