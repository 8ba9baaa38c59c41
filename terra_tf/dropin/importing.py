"""What happens when the script imports something.

Modules of the user's project are compiled with their loops watched, like the script itself: all
that lies below the script's folder, the current folder, or the folder around them that holds the
project (`.git`, `pyproject.toml`, `setup.cfg` or `setup.py`), but for installed packages. What
Python caches of a module stays what the module is without Terra.

Libraries that need care (Keras, Horovod) get it right after they have been loaded.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

_PROJECT_FILES = (".git", "pyproject.toml", "setup.cfg", "setup.py")
_INSTALLED = ("site-packages", "dist-packages")
_NEVER = frozenset(("tensorflow", "keras", "tf_keras", "horovod", "terra_tf", "pipeline"))

# Gets a module's name, its source and file; gives other code to run, or None.
Rewrite = Callable[[str, bytes, str], "CodeType | None"]


class Project:
    """Which files are the user's own."""

    def __init__(self, script: str):
        """The project of a script.

        Args:
          script: the path of the script.
        """
        folders = {os.path.dirname(os.path.realpath(script)), os.path.realpath(os.getcwd())}
        folders |= {around for folder in folders if (around := _project_around(folder))}
        self._folders = tuple(folder.rstrip(os.sep) + os.sep for folder in folders)
        python = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")]
        self._installed = tuple(os.path.realpath(path) + os.sep for path in python)

    def holds(self, folders: Iterable[str]) -> bool:
        """Whether any of some folders belongs to the project."""
        return any(os.path.join(folder, "_") in self for folder in folders)

    def __contains__(self, file: str) -> bool:
        file = os.path.realpath(file)
        if not file.startswith(self._folders) or file.startswith(self._installed):
            return False
        return not any(f"{os.sep}{name}{os.sep}" in file for name in _INSTALLED)


def _project_around(folder: str) -> str | None:
    home = os.path.realpath(os.path.expanduser("~"))
    while folder not in (home, os.path.dirname(folder)):
        if any(os.path.exists(os.path.join(folder, name)) for name in _PROJECT_FILES):
            return folder
        folder = os.path.dirname(folder)
    return None


class ProjectModules(MetaPathFinder):
    """Finds the project's modules as Python does, and has their code changed."""

    def __init__(self, project: Project, rewrite: Rewrite, also: Iterable[str] = ()):
        """Makes the finder.

        Args:
          project: which files count.
          rewrite: changes a module's code.
          also: names of modules that count wherever they are.
        """
        self._project = project
        self._rewrite = rewrite
        self._also = frozenset(also)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname.partition(".")[0] in _NEVER and fullname not in self._also:
            return None
        if path is not None and fullname not in self._also and not self._project.holds(path):
            return None  # a part of an installed package
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or spec.origin is None:
            return None
        if fullname not in self._also and spec.origin not in self._project:
            return None
        spec.loader = _Rewritten(fullname, spec.origin, self._rewrite)
        return spec


class _Rewritten(SourceFileLoader):
    def __init__(self, fullname: str, path: str, rewrite: Rewrite):
        super().__init__(fullname, path)
        self._rewrite = rewrite

    def get_code(self, fullname: str) -> CodeType | None:
        """The changed code; what is cached on disk is the code as it was written."""
        code = super().get_code(fullname)
        return self._rewrite(fullname, self.get_data(self.path), self.path) or code


class _AfterImport(MetaPathFinder):
    """Calls something after a module has been loaded."""

    def __init__(self, callbacks: dict[str, Callable[[ModuleType], None]]):
        self._callbacks = callbacks
        self._finding = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname not in self._callbacks or self._finding:
            return None
        self._finding = True
        try:
            spec = next(
                (
                    found
                    for finder in sys.meta_path
                    if (found := finder.find_spec(fullname, path, target)) is not None
                ),
                None,
            )
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Told(spec.loader, self._callbacks[fullname])
        return spec


class _Told(Loader):
    """A module's own loader, and what to call when it is done."""

    def __init__(self, loader: Any, callback: Callable[[ModuleType], None]):
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See `importlib.abc.Loader`."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        module.__loader__ = module.__spec__.loader = self._loader  # what the module is to know
        self._loader.exec_module(module)
        self._callback(module)


def after_import(callbacks: dict[str, Callable[[ModuleType], None]]) -> None:
    """Has functions called with modules once they are loaded; at once for those that are.

    Args:
      callbacks: full name of a module -> what to call.
    """
    waiting = {}
    for name, callback in callbacks.items():
        if name in sys.modules:
            callback(sys.modules[name])
        else:
            waiting[name] = callback
    if waiting:
        sys.meta_path.insert(0, _AfterImport(waiting))


def watch_project(project: Project, rewrite: Rewrite, also: Iterable[str] = ()) -> None:
    """Has the project's modules changed when they are imported; see `ProjectModules`."""
    finder = ProjectModules(project, rewrite, also)
    at = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(at, finder)
