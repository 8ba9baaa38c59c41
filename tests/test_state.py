"""The State of what a call depends on, against a plain description of the same objects.

Random objects, lists, dictionaries and sets are changed, changed back and replaced. The State must
not hold where a description taken anew, value by value, is not the one from before, and must hold
once everything is back where it was.
"""

import gc
import random

import pytest

from terra_tf.delegation.state import StateBuilder


class Thing:
    """An object with attributes."""


class Named(Thing):
    """Of another class."""


def plain(rng):
    return rng.choice([0, 1, 1.0, True, None, "a", "b" * 3, -0.0, 0.0, (1, "x"), b"z"])


def make(rng, depth, kind=None):
    """A random structure; things, functions and classes are compared by identity."""
    if depth == 0:
        return plain(rng)
    below = [make(rng, depth - 1) for _ in range(rng.randrange(4))]
    match kind or rng.choice(["thing", "thing", "list", "dict", "set", "plain", "function"]):
        case "thing":
            thing = Thing()
            for i, value in enumerate(below):
                setattr(thing, f"attribute_{i}", value)
            return thing
        case "list":
            return below
        case "dict":
            return {f"key_{i}": value for i, value in enumerate(below)}
        case "set":
            return {rng.choice([i, f"s{i}", Thing()]) for i in range(rng.choice([0, 1, 2, 20]))}
        case "function":
            return lambda: below
        case _:
            return plain(rng)


def description(x, named=None):
    """What matters of a structure: identity of things, contents of containers, plain values.

    Args:
      x: the structure.
      named: id -> number of things that have been described.
    """
    named = {} if named is None else named
    if isinstance(x, (set, frozenset)):
        return "set", frozenset(i if isinstance(i, (int, str)) else ("it", id(i)) for i in x)
    if isinstance(x, (list, dict)):
        items = x.items() if isinstance(x, dict) else enumerate(x)
        return type(x).__name__, tuple((key, description(value, named)) for key, value in items)
    if isinstance(x, Thing):
        if id(x) in named:
            return "it", id(x)
        named[id(x)] = len(named)
        attributes = tuple((key, description(value, named)) for key, value in vars(x).items())
        return type(x).__name__, id(x), attributes
    if callable(x):
        return "it", id(x)
    return type(x).__name__, repr(x)


def containers(x, found=None):
    """All that can be changed in a structure."""
    found = {} if found is None else found
    if id(x) in found or not isinstance(x, (Thing, list, dict, set)):
        return found
    found[id(x)] = x
    inside = vars(x).values() if isinstance(x, Thing) else x.values() if isinstance(x, dict) else x
    for value in list(inside):
        containers(value, found)
    return found


def change(x, rng):
    """Changes one thing in place; returns what changes it back."""
    if isinstance(x, Thing):
        if rng.random() < 0.2:
            x.__class__ = Named
            return lambda: setattr(x, "__class__", Thing)
        x = vars(x)
    new = make(rng, rng.randrange(2))
    if isinstance(x, set):
        before = set(x)
        if x and rng.random() < 0.7:
            x.discard(rng.choice(sorted(x, key=str)))
        x.add(rng.choice([Thing(), rng.randrange(30), f"s{rng.randrange(30)}"]))

        def undo():
            x.clear()
            x.update(before)

        return undo
    keys = list(x) if isinstance(x, dict) else list(range(len(x)))
    before = x.copy()
    if keys and rng.random() < 0.7:
        x[rng.choice(keys)] = new
    elif isinstance(x, dict):
        x[f"new_{rng.randrange(3)}"] = new
    elif rng.random() < 0.5:
        x.insert(rng.randrange(len(x) + 1), new)
    else:
        x.reverse()

    def undo():
        if isinstance(x, dict):
            x.clear()
            x.update(before)
        else:
            x[:] = before

    return undo


@pytest.mark.parametrize("seed", range(40))
def test_state_holds_only_while_nothing_differs(seed):
    rng = random.Random(seed)
    root = make(rng, 4, "thing")
    builder = StateBuilder()
    builder.add([root])
    state = builder.state
    expected = description(root)
    del builder  # it keeps alive whatever it has seen
    if rng.random() < 0.5:
        assert state.holds()
    for turn in range(150):
        targets = list(containers(root).values())
        undo = change(rng.choice(targets), rng)
        gc.collect(0)
        assert not state.holds() or description(root) == expected, (seed, turn)
        undo()
        assert state.holds(), (seed, turn)
        assert description(root) == expected


def test_an_object_in_the_place_of_another_is_told_from_it():
    """Memory is given again to the next object of the same size."""
    for kind in (list, set):
        holder = Thing()
        holder.items = kind([lambda: 1])
        builder = StateBuilder()
        builder.add([holder])
        state = builder.state
        del builder
        assert state.holds()
        again = 0
        for _ in range(100):
            before = id(next(iter(holder.items)))
            holder.items.clear()
            (holder.items.append if kind is list else holder.items.add)(lambda: 1)
            again += id(next(iter(holder.items))) == before
            assert not state.holds()
        assert again > 0


def test_what_is_added_later_is_watched_too():
    first, second = Thing(), Thing()
    builder = StateBuilder()
    builder.add([first])
    assert builder.state.holds()
    builder.add([second])
    assert builder.state.holds()
    second.value = 1
    assert not builder.state.holds()
