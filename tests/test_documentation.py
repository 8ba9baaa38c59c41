"""Examples in docstrings of the public API run as they stand, and the README's as well."""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import terra_tf as terra
from terra_tf.dropin import roles
from terra_tf.report.log import TOPICS
from terra_tf.report.reasons import REASONS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MODULES = ("api", "configuration", "errors", "keras", "tensorboard", "report.counters")


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(f"terra_tf.{name}")
    failed, tried = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0
    assert tried > 0 or name in ("configuration", "errors", "report.counters")


@pytest.mark.parametrize("name", sorted(set(terra.__all__)))
def test_public_names_are_documented(name):
    thing = getattr(terra, name)
    assert inspect.getdoc(thing), name
    if inspect.isfunction(thing):
        text = inspect.getdoc(thing)
        for parameter in inspect.signature(thing).parameters:
            assert re.search(rf"^ *{parameter}: ", text, re.M), (name, parameter)


def test_readme_names_every_reason_and_topic():
    for code in REASONS:
        assert f"| `{code}` |" in README
    for topic in TOPICS:
        assert f"`{topic}`" in README


def test_readmes_python_is_python():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 3
    for block in blocks:
        ast.parse(block)


def test_readmes_files_exist():
    for path in re.findall(r"\]\(([\w/.-]+)\)", README):
        assert (ROOT / path).exists(), path


def test_examples_have_an_index():
    index = (ROOT / "examples" / "README.md").read_text()
    for path in (ROOT / "examples").iterdir():
        if path.suffix == ".py" or (path.is_dir() and not path.name.startswith("__")):
            assert f"`{path.name}" in index, path.name


def test_how_boundaries_are_found_is_told():
    """What the README says about loops speaks of every rule that decides."""
    for word in ("GradientTape", "tf.data", "epochs", "run_eagerly=True", "--step"):
        assert word in README
    assert {role.name for role in roles.Role} == {"WATCHED", "STEP", "PART", "OUTER", "SILENT"}
