"""Nests of loops: which loops were executed inside which, as nested dicts of sites.

Here the loops are decided of which no turn has spoken for itself; see `roles`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from terra_tf.dropin.roles import Role, may_be_step

if TYPE_CHECKING:
    from terra_tf.dropin.loops import Site

Nest = dict["Site", Any]  # site -> the nest inside it


def sites_of(inside: Nest) -> Iterator[Site]:
    """All sites of a nest."""
    for site, rest in inside.items():
        yield site
        yield from sites_of(rest)


def merge(nest: Nest, other: Nest) -> None:
    """Adds what was seen another time."""
    for site, inside in other.items():
        merge(nest.setdefault(site, {}), inside)


def settle(site: Site, inside: Nest, covered: bool) -> None:
    """Decides the loops of a nest that none of their turns has spoken for."""
    if site.role is Role.WATCHED and covered:
        site.decide(Role.PART, "the loop around it is one of iterations")
    elif site.role is Role.WATCHED:
        way = max(_ways_to_steps((site,), inside), key=_turns_at_its_end, default=())
        for outer in way[:-1]:
            outer.decide(Role.OUTER, "there are iterations inside its turns")
        if way:
            reason = "its turns call ops, and of its nest of loops it has the most turns"
            way[-1].decide(Role.STEP, reason)
    covered = covered or site.role is Role.STEP
    for inner, rest in inside.items():
        if site.role is not Role.WATCHED:
            settle(inner, rest, covered)


def _ways_to_steps(way: tuple[Site, ...], inside: Nest) -> Iterator[tuple[Site, ...]]:
    """The chains of undecided loops, outermost first, whose last one could be one of iterations."""
    if way[-1].role is not Role.WATCHED:
        return
    if may_be_step(way[-1].evidence):
        yield way
    for inner, rest in inside.items():
        if inner not in way:
            yield from _ways_to_steps((*way, inner), rest)


def _turns_at_its_end(way: tuple[Site, ...]) -> float:
    return way[-1].evidence.turns_per_execution
