"""A script in plain eager mode whose loops tell of their turns, so that their steps can be timed.

This is the eager half of `terra bench`: nothing is watched or co-executed. Each candidate loop
tells the observers of its turns, under the name that it would have under Terra, up to a limit:
which of the loops are iterations only the other half finds out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import CodeType
from typing import Any

from terra_tf.dropin import importing, models, rewriting
from terra_tf.dropin.loops import Site, site_of
from terra_tf.report import observers

_MOST_TURNS = 20_000  # told by one loop


class Teller:
    """Takes a Site's place in the code of a program."""

    def __init__(self, site: Site):
        self._name = site.name
        self._left = _MOST_TURNS

    def __call__(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Tells of the turns of a `for` over `iterator`."""
        return iterator if self._left <= 0 else map(self._tell, iterator)

    def _tell(self, item: Any) -> Any:
        if self._left > 0:
            self._left -= 1
            observers.notify(self._name, observers.TURN)
        return item

    def turns(self) -> Iterator[tuple[()]]:
        """For a `while`; endless."""
        return itertools.repeat(())

    def begin(self) -> None:
        """A turn of a `while` begins."""
        self._tell(None)

    def leave(self, value: Any = None) -> Any:
        """The loop is left."""
        return value


def teller_of(*where: Any) -> Teller:
    """The teller of a loop; see `loops.site_of`."""
    return Teller(site_of(*where))


def prepare(path: str) -> None:
    """Sees to what a script will import."""
    importing.after_import(models.CALLBACKS)
    importing.watch_project(importing.Project(path), _rewrite_module)


def rewrite_script(source: bytes, file: str, _: CodeType) -> CodeType | None:
    """The script's code, with tellers."""
    rewritten = rewriting.rewrite(source, file, make_site=teller_of)
    return None if rewritten is None else rewritten[0]


def _rewrite_module(_: str, source: bytes, file: str) -> CodeType | None:
    rewritten = rewriting.rewrite(source, file, make_site=teller_of)
    return None if rewritten is None else rewritten[0]
