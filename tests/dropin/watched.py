"""Runs a program's text plainly and with its loops watched, in this process, and compares them."""

import contextlib
import dataclasses
import io
import linecache
import random
import re
import textwrap
import traceback

import keras
import numpy as np

import terra_tf as terra
from terra_tf.dropin import loops, rewriting


@dataclasses.dataclass
class Run:
    """What a program showed."""

    output: str
    error: str | None
    values: dict
    roles: dict[int, str]
    stats: object


def run(text, name, *, watch, catch=()):
    """Executes a program and returns its Run; what `print` wrote and `shown` holds is compared."""
    text = textwrap.dedent(text).lstrip("\n")
    file = f"/programs/{name}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    known = set(loops.sites())
    code = compile(text, file, "exec", dont_inherit=True)
    if watch:
        for key in [key for key in loops._SITES if key[0] == file]:
            del loops._SITES[key]
        rewritten = rewriting.rewrite(text, file)
        code = code if rewritten is None else rewritten[0]
    keras.utils.set_random_seed(1)
    random.seed(1)
    terra.sync()
    terra.stats().reset()
    names = {"__name__": name, "__file__": file}
    output, error = io.StringIO(), None
    with contextlib.redirect_stdout(output):
        try:
            exec(code, names)
            terra.sync()
        except catch as caught:
            last = traceback.extract_tb(caught.__traceback__)
            lines = [f"{frame.name}:{frame.lineno}" for frame in last if frame.filename == file]
            error = f"{type(caught).__name__} at {', '.join(lines)}"
    roles = {site.line: site.role.name for site in loops.sites() if site not in known}
    values = {key: np.asarray(value) for key, value in names.get("shown", {}).items()}
    return Run(output.getvalue(), error, values, roles, terra.stats())


def expected_roles(text):
    """The roles that comments at the ends of loop heads name: `for x in y:  # STEP`."""
    lines = textwrap.dedent(text).lstrip("\n").splitlines()
    found = {n: re.search(r"# ([A-Z]+)$", line) for n, line in enumerate(lines, 1)}
    return {n: match[1] for n, match in found.items() if match}


def check(text, name, *, coexecuted=0, catch=()):
    """Runs a program both ways; all that it shows has to agree. Returns the watched Run."""
    plain = run(text, name, watch=False, catch=catch)
    watched = run(text, name, watch=True, catch=catch)
    assert watched.output == plain.output
    assert watched.error == plain.error
    assert watched.values.keys() == plain.values.keys()
    for key, value in plain.values.items():
        np.testing.assert_array_equal(watched.values[key], value, err_msg=key)
    wanted = expected_roles(text)
    assert {line: watched.roles.get(line) for line in wanted} == wanted
    assert watched.stats.coexecuted >= coexecuted, watched.stats
    assert not loops.watching()
    return watched
