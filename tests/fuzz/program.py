"""From source text to a verdict: runs one fuzzed program eagerly and co-executed."""

import contextlib
import importlib.util
import linecache
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from differential import harness
from differential.table import Builder, Program

_EAGER_SECONDS = 3.0  # of processor time; programs take a tenth of it


def check(source: str, candidate: str = "terra") -> harness.Verdict:
    """Runs a program eagerly and with a candidate of `harness`, from equal state.

    Args:
        source: The text, as `generator.generate` makes it.
        candidate: A key of `harness.CANDIDATES`.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            module = _load(source, Path(folder, "fuzzed.py"))
            build, settings = module.program, module.SETTINGS
        except Exception as error:
            problem = f"{harness.FAILS_BY_ITSELF}:\n{error!r}"
            return harness.Verdict("fuzzed", [problem], None, 0.0, 0.0)
        # The text says what inputs there are; how many iterations co-execute proves nothing.
        row = Program("fuzzed", _limited(build), 0, 0, 0, None, 0.0, "3")
        read = "each" if settings["read_each"] else "late"
        with _settings(settings):
            return harness.check(row, candidate, read=read, prove=False)


def _limited(build: Builder) -> Builder:
    """A program that fails by itself where it runs for too long in eager mode.

    A cut of the minimiser may take the end of a loop away; that is no hang of Terra's. The timer
    counts processor time: no load disturbs it, and the test runner has its own.
    """

    def limited(candidate: harness.Candidate) -> Iterator[Any]:
        eager = isinstance(candidate, harness.Eager)
        before = signal.signal(signal.SIGVTALRM, _stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, _EAGER_SECONDS if eager else 0.0)
        try:
            yield from build(candidate)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, before)

    return limited


def _stop(*_: object) -> None:
    raise TimeoutError(f"the program has run for {_EAGER_SECONDS:.0f} s in eager mode")


def _load(source: str, path: Path) -> Any:
    """The text as a module with a file, since errors and Terra's reports name lines of it."""
    linecache.checkcache()  # the last program's file is gone
    path.write_text(source)
    specification = importlib.util.spec_from_file_location("fuzzed", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _settings(settings: dict[str, Any]) -> Iterator[None]:
    """Sets Terra's settings for one program, and lets no clock decide that it stays eager."""
    from terra_tf import settings as terra_settings
    from terra_tf.runners.retreat import Retreat

    names = [name for name in settings if hasattr(terra_settings, name)]
    before = {name: getattr(terra_settings, name) for name in names}
    stay_eager = Retreat.stay_eager
    try:
        for name in names:
            setattr(terra_settings, name, settings[name])
        Retreat.stay_eager = lambda self: False
        yield
    finally:
        for name, value in before.items():
            setattr(terra_settings, name, value)
        Retreat.stay_eager = stay_eager
