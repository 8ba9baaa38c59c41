"""The user's model as a list of items: layers, blocks and callables, and what each one holds.

All ranks have the same list. An item is built only where it is placed, seeded by its index in the
list; so is an item whose variables an item there shares (tied weights), since whoever reads a
weight needs it. A variable's key, the index of the first item that holds it and its number there,
is the same on every rank and names it in messages and checkpoints.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from pipeline import tensorflow_internals
from pipeline.errors import ModelError
from pipeline.runtime.random_numbers import building_numbers, derived_seed
from pipeline.runtime.structure import Spec, spec_of

Key = tuple[int, int]
"""A variable's global name: the first item that holds it, and its number among that one's."""


class Item:
    """One entry of the model's list.

    Attributes:
        index: its place in the list.
        layer: the user's object.
        dependencies: the other items' indices whose layers this one uses (tied weights).
    """

    def __init__(self, index: int, layer: Any) -> None:
        if not callable(layer):
            raise TypeError(
                f"entry {index} of the model is {layer!r}; entries are Keras layers or callables"
            )
        if inspect.isclass(layer):
            raise TypeError(
                f"entry {index} of the model is the class {layer.__name__}; make an object of it"
            )
        if isinstance(layer, keras.layers.InputLayer):
            raise TypeError(
                f"entry {index} of the model is an InputLayer; leave it out, since the first batch "
                "says what the input is"
            )
        self.index = index
        self.layer = layer
        self.dependencies: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What the user calls it."""
        name = getattr(self.layer, "name", None) or getattr(self.layer, "__name__", None)
        return name if isinstance(name, str) else type(self.layer).__name__

    @property
    def is_keras(self) -> bool:
        """Whether it is a layer of Keras 3."""
        return isinstance(self.layer, keras.Layer)

    @functools.cached_property
    def parts(self) -> list[Any]:
        """The layers, modules and variables in it; a callable's are what it closes over."""
        return list(_holders(self.layer))

    def keras_layers(self) -> list[keras.Layer]:
        """All layers of Keras 3 in it."""
        layers = []
        for part in self.parts:
            if isinstance(part, keras.Layer):
                layers += tensorflow_internals.sublayers(part)
        return list({id(layer): layer for layer in layers}.values())

    @property
    def is_built(self) -> bool:
        """Whether its variables exist."""
        return all(part.built for part in self.parts if hasattr(part, "built") and callable(part))

    def variables(self, trainable: bool) -> list[Any]:
        """Its trainable variables, or the others but for the states of random numbers.

        Those of layers of Keras 3 are `keras.Variable`s, others `tf.Variable`s.
        """
        found: list[Any] = []
        for part in self.parts:
            if isinstance(part, (keras.Variable, tf.Variable)):
                found += [part] if part.trainable == trainable else []
            elif isinstance(part, keras.Layer):
                # Not `variables`: those also hold seeds and the states of metrics.
                found += part.trainable_weights if trainable else part.non_trainable_weights
            else:
                found += part.trainable_variables if trainable else part.non_trainable_variables
        return list({id(variable): variable for variable in found}.values())

    def call(self, inputs: Any, training: bool) -> Any:
        """Its output; `training` is passed on to whoever takes it."""
        if self.is_keras or self._takes_training:
            return self.layer(inputs, training=training)
        return self.layer(inputs)

    @functools.cached_property
    def _takes_training(self) -> bool:
        function = getattr(self.layer, "call", self.layer)
        try:
            return "training" in inspect.signature(function).parameters
        except (TypeError, ValueError):
            return False

    def build(self, spec: Spec, seed: int, eagerly: bool = False) -> Spec:
        """Makes its variables, unless they exist, and returns the spec of its output.

        Args:
            spec: of its input.
            seed: the pipeline's; with the item's index it determines all initial values.
            eagerly: whether to run it on zeros, since it may not be fit for a graph.
        """
        if not self.is_built:
            self._seed_initializers(seed)
        with building_numbers(derived_seed("build", seed, self.index)):
            return _output_of_zeros(self, spec) if eagerly else output_spec(self, spec)

    def _seed_initializers(self, seed: int) -> None:
        """Gives initializers that the user left without a seed one that all ranks agree on."""
        number = 0
        for layer in self.keras_layers():
            for name in sorted(vars(layer)):
                initializer = vars(layer)[name]
                if not isinstance(initializer, keras.initializers.Initializer):
                    continue
                unseeded = tensorflow_internals.initializer_seed(initializer) is None
                if unseeded and isinstance(getattr(initializer, "seed", None), int):
                    initializer.seed = derived_seed("initial", seed, self.index, number)
                number += 1


def output_spec(item: Item, spec: Spec) -> Spec:
    """What the item returns for such an input, traced without computing anything."""
    outputs: list[Spec] = []

    def trace(*flat: tf.Tensor) -> None:
        outputs.append(spec_of(item.call(spec.pack(list(flat)), training=True)))

    with tensorflow_internals.inner_functions("inline"):
        tf.function(trace, autograph=False).get_concrete_function(*spec.tensor_specs())
    return outputs[-1]


def _output_of_zeros(item: Item, spec: Spec) -> Spec:
    """What the item returns for one sample of zeros, as Python; its states stay as they are."""
    zeros = [
        tf.zeros([1 if size is None else size for size in part.shape], part.dtype)
        for part in spec.tensor_specs()
    ]
    states = [raw(variable) for variable in item.variables(False)] if item.is_built else []
    before = [tf.identity(state) for state in states]
    try:
        # Not as in training, so that an item which is built here starts with its initial states.
        return spec_of(item.call(spec.pack(zeros), training=False))
    finally:
        for state, value in zip(states, before, strict=True):
            state.assign(value)


def _is_holder(thing: Any) -> bool:
    return isinstance(thing, (keras.Layer, keras.Variable, tf.Variable, tf.Module)) or (
        callable(thing) and hasattr(thing, "trainable_variables")
    )


def _holders(thing: Any, depth: int = 0) -> Iterator[Any]:
    """What holds variables in a layer, module or callable, looked for as far as Python shows it."""
    if isinstance(thing, tf.types.experimental.PolymorphicFunction):
        thing = thing.python_function
    if isinstance(thing, tf.types.experimental.ConcreteFunction) or depth > 4:
        return
    if _is_holder(thing):
        yield thing
        return
    if isinstance(thing, functools.partial):
        inside = [thing.func, *thing.args, *thing.keywords.values()]
    elif inspect.ismethod(thing):
        inside = [thing.__self__, thing.__func__]
    elif inspect.isfunction(thing):
        captured = inspect.getclosurevars(thing)
        inside = [*captured.nonlocals.values(), *captured.globals.values()]
        inside += [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
    elif isinstance(thing, (list, tuple)):
        inside = list(thing)
    elif isinstance(thing, dict):
        inside = list(thing.values())
    elif callable(thing) and hasattr(thing, "__dict__") and not isinstance(thing, type):
        inside = list(vars(thing).values())
    else:
        inside = []
    for part in inside:
        yield from _holders(part, depth + 1)


class Model:
    """The list of items, and how their variables are called.

    Args:
        layers: the user's list, or a `Sequential`.
        seed: the pipeline's seed.
        eager: whether items run as Python, and so need not be fit for a graph.

    Raises:
        TypeError: if it is no list, or an entry is not callable.
        ValueError: if there is none.
    """

    def __init__(self, layers: Any, seed: int, eager: bool = False) -> None:
        if isinstance(layers, keras.Model) and not isinstance(layers, keras.Sequential):
            raise TypeError(
                f"the model is a {type(layers).__name__}, whose layers need not follow each other; "
                "pass a list of layers and blocks or a Sequential"
            )
        if not isinstance(layers, Iterable) and not hasattr(layers, "layers"):
            raise TypeError(f"the model must be a list of layers or a Sequential, not {layers!r}")
        entries = layers.layers if hasattr(layers, "layers") else list(layers)
        if not entries:
            raise ValueError("the model has no layers")
        self.seed = seed
        self.eager = eager
        self.items = [Item(index, layer) for index, layer in enumerate(entries)]
        self._find_dependencies()

    def __len__(self) -> int:
        return len(self.items)

    def _find_dependencies(self) -> None:
        # `id` of a layer, module or variable → the first item that has it.
        first: dict[int, int] = {}
        for item in self.items:
            held = [item.layer, *item.parts, *item.keras_layers()]
            owners = {first.setdefault(id(thing), item.index) for thing in held}
            item.dependencies = tuple(sorted(owners - {item.index}))

    def build(self, begin: int, end: int, specs: list[Spec]) -> list[Spec]:
        """Builds the items from `begin` to before `end`, and what they depend on.

        Args:
            begin: the first item's index.
            end: the index after the last.
            specs: of the inputs of all items up to `begin`, inclusively; more are taken as right.

        Returns:
            The same list, extended to the input of item `end`.
        """
        specs = list(specs)
        for item in self.items[begin:end]:
            for other in item.dependencies:
                if other < begin and not self.items[other].is_built:
                    self.items[other].build(specs[other], self.seed, self.eager)
            try:
                after = item.build(specs[item.index], self.seed, self.eager)
                specs[item.index + 1 :] = [after, *specs[item.index + 2 :]]
            except Exception as error:
                raise ModelError(
                    f"entry {item.index} of the model, {item.name}, cannot be built for the input "
                    f"{specs[item.index].describe()}: {error}"
                ) from error
        return specs

    def keys(self) -> dict[int, Key]:
        """For each variable that exists here, by its `id`, its key."""
        keys: dict[int, Key] = {}
        for item in self.items:
            if item.is_built:
                variables = item.variables(True) + item.variables(False)
                for number, variable in enumerate(variables):
                    keys.setdefault(id(variable), (item.index, number))
        return keys

    def variables_of(self, items: Iterable[Item], trainable: bool) -> list[Any]:
        """The items' variables, each once, in the order of the list."""
        found: dict[int, Any] = {}
        for item in items:
            for variable in item.variables(trainable):
                found.setdefault(id(variable), variable)
        return list(found.values())


def raw(variable: Any) -> tf.Variable:
    """The `tf.Variable` behind a variable of Keras 3; other variables are returned as they are."""
    return variable.value if isinstance(variable, keras.Variable) else variable
