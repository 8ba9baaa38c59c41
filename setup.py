"""Builds the native extension modules; everything else stands in setup.cfg.

There are two, Terra's core `terra_tf.native._core` and the pipeline's transport
`pipeline.native._transport`, each made of all *.cc files of its folder, compiled against the
headers of the installed TensorFlow wheel and linked to its libraries. Those headers take long to
compile, so files are compiled side by side and only where something changed; objects stay in
build/.

Where they cannot be built (no compiler, no TensorFlow), the packages are built without them, one
line says why, and at run time Terra stays eager and pipelines send over Horovod. With
TERRA_REQUIRE_NATIVE=1 in the environment that is an error instead.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# The folder of an extension's sources → the name of the extension.
EXTENSIONS = {
    ROOT / "terra_tf" / "native": "terra_tf.native._core",
    ROOT / "pipeline" / "native": "pipeline.native._transport",
}

# The core uses TensorFlow's internal C++ interfaces, which change with every minor version.
SUPPORTED_TENSORFLOW = "2.21"
# A compiler takes about 1 GB for one file, so more cores do not always mean more jobs.
MAX_JOBS = 4


class NativeBuildError(Exception):
    """The native extensions cannot be built; the message says why and what to do."""


@dataclass(frozen=True)
class TensorFlowWheel:
    """The installed TensorFlow: its folder, and its version as in `tf.__version__`."""

    folder: Path
    version: str


def find_tensorflow() -> TensorFlowWheel:
    """Finds the installed TensorFlow without importing it, which would take seconds."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or not spec.origin:
        raise NativeBuildError(
            "no TensorFlow in the environment that builds; install tensorflow or tensorflow-cpu "
            f"{SUPPORTED_TENSORFLOW} and build with pip's --no-build-isolation"
        )
    folder = Path(spec.origin).parent
    for name in ("tensorflow-cpu", "tensorflow"):
        for found in importlib.metadata.distributions(name=name, path=[str(folder.parent)]):
            if not found.version.startswith(SUPPORTED_TENSORFLOW + "."):
                raise NativeBuildError(
                    f"TensorFlow {SUPPORTED_TENSORFLOW} is needed, {name} {found.version} is there"
                )
            return TensorFlowWheel(folder, found.version)
    raise NativeBuildError(f"the version of TensorFlow in {folder} is unknown; install its wheel")


def compile_flags(tensorflow: TensorFlowWheel) -> list[str]:
    """The compiler's flags; those of `tf.sysconfig.get_compile_flags()` are among them."""
    try:
        import pybind11
    except ImportError:
        raise NativeBuildError("pybind11 is missing; pip install pybind11") from None
    python_headers = Path(sysconfig.get_paths()["include"])
    if not (python_headers / "Python.h").exists():
        raise NativeBuildError(f"Python.h is missing in {python_headers}; install python3-dev")
    # As system headers, they give no warnings and do not count as our dependencies.
    system_headers = [
        Path(pybind11.get_include()),
        tensorflow.folder / "include",
        # TensorFlow's headers include farmhash.h, which its own include path does not lead to.
        tensorflow.folder / "include/external/farmhash_archive/src",
        python_headers,
    ]
    return [
        "-std=c++17",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        # TensorFlow's libraries are built with NDEBUG; what its headers inline has to match.
        "-DNDEBUG",
        "-D_GLIBCXX_USE_CXX11_ABI=1",
        "-DEIGEN_MAX_ALIGN_BYTES=64",
        f'-DTERRA_BUILT_FOR_TF="{tensorflow.version}"',
        f"-I{ROOT}",
        *(f"-isystem{folder}" for folder in system_headers),
    ]


def link_flags(tensorflow: TensorFlowWheel, in_place: bool) -> list[str]:
    """The linker's flags. A library in site-packages finds TensorFlow beside its package."""
    libraries = {
        tensorflow.folder: ["libtensorflow_framework.so.2", "libtensorflow_cc.so.2"],
        tensorflow.folder / "python": ["lib_pywrap_tensorflow_common.so"],
    }
    flags = ["-shared"]
    for folder, names in libraries.items():
        beside = "$ORIGIN/../.." / folder.relative_to(tensorflow.folder.parent)
        flags += [f"-L{folder}", f"-Wl,-rpath,{folder if in_place else beside}"]
        flags += [f"-l:{name}" for name in names]
    return flags


def is_stale(target: Path, sources: Iterable[Path]) -> bool:
    """Whether `target` has to be made again: it or a source is missing, or a source is newer."""
    if not target.exists():
        return True
    made = target.stat().st_mtime
    return any(not source.exists() or source.stat().st_mtime >= made for source in sources)


def run_compiler(command: list[str], target: Path) -> None:
    """Runs `command`, which makes one file, and moves that file to `target` when it is whole."""
    unfinished = target.with_suffix(target.suffix + ".unfinished")
    # The file gets the time of the start, so that an edit made meanwhile still counts as newer.
    start = time.time()
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
    if done.stderr:
        sys.stderr.write(done.stderr)
    if done.returncode != 0:
        raise NativeBuildError(f"{command[0]} failed on {target.name}, see its messages above")
    os.utime(unfinished, (start, start))
    unfinished.replace(target)


class NativeBuild:
    """Compiles and links one extension in a folder of its own below build/, as far as needed."""

    def __init__(self, name: str, sources: list[Path], in_place: bool) -> None:
        self.name = name
        if not sys.platform.startswith("linux"):
            raise NativeBuildError("the native extensions are made for Linux only")
        self.compiler = shlex.split(os.environ.get("CXX", "g++"))
        if shutil.which(self.compiler[0]) is None:
            raise NativeBuildError(f"no C++ compiler ({self.compiler[0]}); apt-get install g++")
        tensorflow = find_tensorflow()
        self.sources = sources
        self.compile_flags = compile_flags(tensorflow)
        self.link_flags = link_flags(tensorflow, in_place)
        # Other flags, another compiler or another Python: another folder, so never a stale object.
        version = subprocess.run([*self.compiler, "--version"], capture_output=True, text=True)
        settings = [self.compiler, version.stdout, self.compile_flags]
        digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
        settings_folder = ROOT / "build" / f"native-{sys.implementation.cache_tag}-{digest}"
        self.folder = settings_folder / name
        self.library = self.folder / ("in-place.so" if in_place else "wheel.so")

    def run(self) -> Path:
        """Brings the library up to date and returns its path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stale = [source for source in self.sources if self._is_stale(source)]
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_JOBS)) as pool:
            jobs = [pool.submit(self._compile, source) for source in stale]
            try:
                for number, (source, job) in enumerate(zip(stale, jobs, strict=True), start=1):
                    job.result()
                    print(
                        f"{self.name}: {source.name} compiled ({number} of {len(stale)})",
                        flush=True,
                    )
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._link()
        return self.library

    def _object(self, source: Path) -> Path:
        return self.folder / (source.stem + ".o")

    def _is_stale(self, source: Path) -> bool:
        dependencies = self._object(source).with_suffix(".d")
        if not dependencies.exists():
            return True
        # A make rule, "object: source header header ...", its lines joined by backslashes.
        names = dependencies.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        return is_stale(self._object(source), map(Path, names))

    def _compile(self, source: Path) -> None:
        target = self._object(source)
        rule = ["-MMD", "-MT", "object", "-MF", str(target.with_suffix(".d"))]
        run_compiler(
            [*self.compiler, *self.compile_flags, *rule, "-c", str(source)],
            target,
        )

    def _link(self) -> None:
        objects = [self._object(source) for source in self.sources]
        command = [*self.compiler, *map(str, objects), *self.link_flags]
        record = self.library.with_suffix(".command")
        recorded = record.read_text() if record.exists() else ""
        if recorded == shlex.join(command) and not is_stale(self.library, objects):
            return
        run_compiler(command, self.library)
        record.write_text(shlex.join(command))


class BuildNative(build_ext):
    """The `build_ext` command, with `NativeBuild` in place of setuptools' compiler."""

    def run(self) -> None:
        """Builds the extensions, or leaves them out of the packages if that is allowed."""
        in_place = bool(self.inplace) or getattr(self, "editable_mode", False)
        self.libraries_made: dict[str, Path] = {}
        try:
            for extension in self.extensions:
                sources = [ROOT / source for source in extension.sources]
                library = NativeBuild(extension.name, sources, in_place).run()
                self.libraries_made[extension.name] = library
        except NativeBuildError as error:
            if os.environ.get("TERRA_REQUIRE_NATIVE", "0") not in ("", "0"):
                raise SystemExit(f"native core not built: {error}") from None
            print(
                "WARNING: native core not built, all will run eagerly and pipelines will send over "
                f"Horovod: {error}",
                file=sys.stderr,
            )
            for extension in self.extensions:  # what an earlier build left must not slip in
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
            self.extensions = []
        super().run()

    def build_extension(self, extension: Extension) -> None:
        """Puts the library where setuptools expects the extension module."""
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # By a rename: a running process may have the old library mapped.
        library = self.libraries_made[extension.name]
        shutil.copyfile(library, target.with_suffix(".unfinished"))
        target.with_suffix(".unfinished").replace(target)


def native_extensions() -> list[Extension]:
    """The extension modules to build: those whose sources are there."""
    extensions = []
    for folder, name in EXTENSIONS.items():
        sources = sorted(str(source.relative_to(ROOT)) for source in folder.glob("*.cc"))
        if sources:
            extensions.append(Extension(name, sources, language="c++"))
    return extensions


if __name__ == "__main__":
    setup(ext_modules=native_extensions(), cmdclass={"build_ext": BuildNative})
