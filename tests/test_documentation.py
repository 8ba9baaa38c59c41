"""Examples in docstrings of the public API run as they stand, and the README's as well."""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
from dropin.scripts import python, terra_run

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


def test_readmes_program_runs_and_steps_as_it_says(tmp_path):
    """The blocks before the pipeline's, one after the other, are one program that runs."""
    blocks = re.findall(r"```python\n(.*?)```", README.split("## `pipeline`")[0], re.S)
    first, *others = blocks
    script = tmp_path / "train.py"
    script.write_text(first)
    outcomes = [run(script, folder=tmp_path) for run in (python, terra_run)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].output.count("epoch") == 3
    assert outcomes[0].code == 0
    script.write_text("\n".join(blocks) + "\nprint(terra.stats().coexecuted)\n")
    done = python(script, folder=tmp_path)
    assert done.code == 0, done.errors
    # Two epochs of `fit`, a loop of `iterate` and one of calls, each of 100 iterations.
    assert int(done.output.split()[-1]) > 350
    assert len(others) == 4


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
