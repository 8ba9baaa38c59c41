"""Runs a file as `python FILE` would.

The script is the module `__main__`, with its own `sys.argv`, its folder first in `sys.path`, and
tracebacks that begin in it. An uncaught exception, `sys.exit` and Ctrl-C end the process as they
would end the script.

This does not use `runpy`, which takes `__main__` away again when the script's last line is done,
while exit handlers and threads of the script still need it.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader

# Gets the source, the file's name and the code; gives other code to run, or None.
Rewrite = Callable[[bytes, str, types.CodeType], "types.CodeType | None"]


def run_script(script: str, arguments: Sequence[str], rewrite: Rewrite | None = None) -> None:
    """Runs a script to its end; what ends it otherwise is raised, or ends the process.

    Args:
      script: the path of the file, as the user typed it.
      arguments: the script's own arguments.
      rewrite: changes the code before it runs.

    Raises:
      SystemExit: the script ended by it, or (with code 1) by an exception that was printed.
      KeyboardInterrupt: it was interrupted; the traceback has been printed.
    """
    path = os.path.join(os.getcwd(), script)
    sys.argv[:] = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = _main_module(path)
    try:
        source = module.__loader__.get_data(path)
        code = module.__loader__.source_to_code(source, path)
        changed = None if rewrite is None else rewrite(source, path, code)
        exec(changed or code, module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        _print_as_uncaught(error, path)
        if isinstance(error, KeyboardInterrupt):
            # The interpreter ends the process by the signal; it need not print it a second time.
            sys.excepthook = lambda *_: None
            raise
        sys.exit(1)


def _main_module(path: str) -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__cached__ = None
    module.__loader__ = SourceFileLoader("__main__", path)
    module.__builtins__ = sys.modules["builtins"]
    module.__annotations__ = {}
    sys.modules["__main__"] = module
    return module


def _print_as_uncaught(error: BaseException, path: str) -> None:
    frames = _frames_of(error.__traceback__, path)
    kind, error = type(error), error.with_traceback(frames)
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, frames
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(kind, error, frames)


def _frames_of(frames: types.TracebackType | None, path: str) -> types.TracebackType | None:
    """The part of a traceback that begins in the script; None for a syntax error in it."""
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    return frames
