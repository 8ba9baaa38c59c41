"""The time limits of the tests: each kind's limit, and a watchdog behind pytest-timeout.

pytest-timeout ends a test by an exception in Python. A thread that is stuck in native code while
it holds the interpreter's lock never gets there; the watchdog, a native thread, then prints where
every thread stands and ends the process.
"""

import faulthandler
import os
import signal
from collections.abc import Generator

import pytest

# Seconds for one test with this marker, if it has no limit of its own; others: see setup.cfg.
LIMITS = {"full": 1800, "horovod": 120}
# Seconds that pytest-timeout gets to end a test before the watchdog ends the run.
GRACE = 60

stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the real standard error, for the time when pytest captures it.

    A shell starts what runs in the background with Ctrl-C ignored, and so would be all programs
    that tests start.
    """
    config.stash[stderr] = os.dup(2)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each marked test the limit of its kind."""
    for item in items:
        if item.get_closest_marker("timeout"):
            continue
        for marker, limit in LIMITS.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.timeout(limit))
                break


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Watches over the test, from its set-up to its tear-down."""
    limit = seconds_for(item)
    if limit:  # 0 means no limit
        faulthandler.dump_traceback_later(limit + GRACE, exit=True, file=item.config.stash[stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb() -> None:
    """Leaves a person in the debugger alone."""
    faulthandler.cancel_dump_traceback_later()


def seconds_for(item: pytest.Item) -> float:
    """The test's limit: by its marker, the command line or setup.cfg, in this order."""
    marker = item.get_closest_marker("timeout")
    if marker:
        return marker.args[0] if marker.args else marker.kwargs["timeout"]
    option = item.config.getoption("timeout")
    return float(item.config.getini("timeout") if option is None else option)
