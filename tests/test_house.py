"""The house: names at the top, pinned packages, flags of the native build, set-up, Horovod."""

import configparser
import re
import runpy
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = """
    setup.cfg setup.py pyproject.toml MANIFEST.in README.md LICENSE .gitignore
    terra_tf pipeline tests examples tools .ci
"""


def run(*command: str | Path, seconds: float = 60) -> str:
    """Runs a command at the top of the project and returns what it printed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        timeout=seconds,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    assert config.read(ROOT / "setup.cfg")
    return config


def constraints() -> list[Requirement]:
    lines = (ROOT / "tools" / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def asked_for() -> list[Requirement]:
    """All that setup.cfg and the build system ask for."""
    config = setup_cfg()
    texts = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    names = [Requirement(line) for text in texts for line in text.split("\n") if line]
    build = re.search(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    return names + [Requirement(quoted) for quoted in re.findall(r'"(.*?)"', build[1])]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a git checkout knows its files")
def test_top_level_holds_only_the_allowed_names():
    # What is not tracked yet counts too, unless .gitignore names it.
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    assert {file.split("/")[0] for file in files} <= set(TOP_LEVEL.split())


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_constraints_pin_each_package_once(python):
    pins = {}
    for pin in constraints():
        assert [clause.operator for clause in pin.specifier] == ["=="], f"not an exact pin: {pin}"
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    assert {name: found for name, found in pins.items() if len(found) != 1} == {}
    for wanted in asked_for():
        pin = pins[canonicalize_name(wanted.name)][0]
        (clause,) = pin.specifier
        assert clause.version in wanted.specifier, f"{pin} does not satisfy {wanted}"


def test_constraints_pin_all_that_is_installed():
    pins = {canonicalize_name(pin.name) for pin in constraints()}
    listed = run(sys.executable, "-m", "pip", "list", "--format=freeze", "--exclude-editable")
    installed = {
        canonicalize_name(line.split("==")[0]) for line in listed.splitlines() if "==" in line
    }
    assert installed - pins == set()


def test_native_core_is_compiled_with_tensorflows_own_flags():
    import tensorflow as tf

    build = runpy.run_path(str(ROOT / "setup.py"), run_name="build")
    wheel = build["find_tensorflow"]()
    assert wheel.version == tf.__version__
    ours = [flag.replace("-isystem", "-I") for flag in build["compile_flags"](wheel)]
    theirs = [flag.replace("--std", "-std") for flag in tf.sysconfig.get_compile_flags()]
    assert set(theirs) <= set(ours)
    assert set(tf.sysconfig.get_link_flags()) <= set(build["link_flags"](wheel, in_place=True))


@pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv", reason="this interpreter is not the one of tools/setup"
)
def test_second_setup_takes_under_five_seconds():
    run("tools/setup", seconds=280)  # in case a file was edited since the last one
    start = time.monotonic()
    printed = run("tools/setup")
    assert time.monotonic() - start < 5
    assert printed == f"setup: ready: {ROOT / '.venv'}\n"


@pytest.mark.horovod
def test_horovodrun_sums_over_two_ranks(tmp_path):
    program = tmp_path / "allreduce.py"
    program.write_text(
        textwrap.dedent(
            """
            import horovod.tensorflow as hvd
            import tensorflow as tf

            hvd.init()
            mine = tf.constant([1.0, 10.0]) * (hvd.rank() + 1)
            total = hvd.allreduce(mine, op=hvd.Sum)
            print(f"rank {hvd.rank()} of {hvd.size()}: {total.numpy().tolist()}", flush=True)
            """
        )
    )
    horovodrun = Path(sys.executable).parent / "horovodrun"
    printed = run(horovodrun, "-np", "2", "--gloo", sys.executable, program, seconds=110)
    for rank in (0, 1):
        assert f"rank {rank} of 2: [3.0, 30.0]" in printed
