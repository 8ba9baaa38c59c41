"""A script under `terra run` is the script under `python`: output, errors, exit code, surroundings.

The truth is `python SCRIPT` itself: standard output, standard error with its tracebacks, and exit
code have to be the same, byte for byte.
"""

import signal
import subprocess
import sys
import time

import pytest

from dropin.scripts import ROOT, TERRA, execute, python, terra_run, write

pytestmark = pytest.mark.timeout(120)

# Name -> program. None of them loads TensorFlow, so that many fit into a second.
PROGRAMS = {
    "surroundings": """
        import __main__, os, sys
        print(__name__, __file__, __package__, __spec__, __doc__, __builtins__, __annotations__)
        print(sorted(name for name in globals()), __main__ is sys.modules["__main__"])
        print(sys.argv, sys.path[0], os.getcwd(), type(__loader__).__name__)
        print(__import__("inspect").getsource(__main__)[:20])
        class Local: pass
        pickle = __import__("pickle")
        print(Local.__module__, type(pickle.loads(pickle.dumps(Local()))) is Local)
        """,
    "sys_exit": "import sys; print('before'); sys.exit(3)",
    "sys_exit_text": "import sys; sys.exit('it is over')",
    "sys_exit_none": "import sys; sys.exit()",
    "os_exit": "import os; print('x', flush=True); os._exit(5)",
    "raised": """
        def helper(n):
            for i in range(n):
                int("x" * (i + 1) if i == 2 else i)
        print("first")
        helper(5)
        """,
    "chained": """
        try:
            {}["a"]
        except KeyError as error:
            raise ValueError("second") from error
        """,
    "syntax_error": "print('never')\nfor x in in y:\n    pass\n",
    "syntax_warning": "x = 1\nif x is 1:\n    print('\\d')\nfor i in range(2): id(i)\n",
    "not_iterable": """
        def outer(values):
            for value in values:
                foo(value)
        outer(
            5
        )
        """,
    "not_iterable_in_comprehension": "print([foo(x) for x in 5])",
    "not_iterable_in_nested_call": "def f(): return {foo(x) for x in\n  5}\nprint(f())",
    "not_iterable_expression": "for x in (1 +\n          2): foo(x)\n",
    "error_in_head": "for x in [1, 2][7:9] + undefined(3): foo(x)\n",
    "error_in_generator": """
        def items():
            yield 1
            raise RuntimeError("in the generator")
        def foo(x): print("item", x)
        for x in items():
            foo(x)
        """,
    "error_in_condition": """
        def foo(x): print(x)
        n = 3
        while 6 // n:
            foo(n)
            n -= 1
        """,
    "error_in_comprehension": """
        def foo(x): return 1 // (2 - x)
        print([foo(x) for x in range(2)])
        print({x: foo(x) for x in range(4)})
        """,
    "print_exc": """
        import logging, traceback
        def items():
            yield 1
            raise RuntimeError("in the generator")
        def foo(x): pass
        def run():
            for x in items():
                foo(x)
        try:
            run()
        except RuntimeError:
            traceback.print_exc()
            logging.exception("logged")
        print(len(traceback.extract_stack()) > 0)
        """,
    "stack": """
        import inspect, traceback
        def foo(x):
            frames = inspect.stack()
            own = [f.function for f in frames if f.filename == __file__]
            print(own, frames[1].function, frames[1].lineno)
        for x in range(2):
            foo(x)
        n = 0
        while n < 2:
            n += 1
            foo(n)
        """,
    "excepthook": """
        import sys, atexit
        atexit.register(lambda: print("atexit", getattr(sys, "last_type", None)))
        def hook(kind, error, frames):
            print("hook", kind.__name__, error, frames.tb_lineno, frames.tb_frame.f_code.co_name)
        sys.excepthook = hook
        raise LookupError("x")
        """,
    "thread_error": """
        import threading
        def work():
            for x in range(3):
                hash([]) if x == 1 else hash(x)
        t = threading.Thread(target=work, name="worker"); t.start(); t.join()
        """,
    "loops": """
        def foo(x): return x
        for i in range(100):
            if foo(i) == 90: break
        else:
            print("no break")
        print(i)
        for i in range(3): foo(i)
        else: print("else", i)
        n = 0
        while True:
            n += foo(1)
            if n % 2: continue
            if n > 200: break
        print(n)
        while n > 195:
            n -= foo(1)
        else:
            print("while else", n)
        def find(values):
            for row in values:
                for value in row:
                    if foo(value) == 4:
                        return value, row
            return None
        print(find([[1, 2], [3, 4], [5]]), find([]), find([[1]]))
        def bare(values):
            while values:
                if foo(values.pop()) == 2: return
        rest = [1, 2, 3]; bare(rest); print(rest)
        iterator = iter(range(200))
        for x in iterator:
            if foo(x) == 70: next(iterator)
            if foo(x) > 150: break
        print(x, next(iterator))
        def twice():
            for x in (yield_ for yield_ in range(2)):
                yield foo(x)
        print(list(twice()), [foo(x) for x in range(130)][-1], len({foo(x) for x in "aab"}))
        try:
            for k in (d := {1: 2, 3: 4}): d.pop(foo(k)); d[foo(9)] = foo(1); d[8] = 0
        except RuntimeError as error: print(error)
        for i, (a, *b) in enumerate([(1, 2, 3), (4,)]): foo(i); print(i, a, b)
        iter = lambda *_: 1 / 0
        map = None
        for x in [1, 2]: foo(x)
        try:
            for x in [1, 2, 3]:
                try:
                    if foo(x) == 2: break
                finally: print("finally", x)
        finally: print("done")
        """,
    "once_exhausted": """
        class Restarts:
            def __init__(self): self.left = 2
            def __iter__(self): return self
            def __next__(self):
                self.left -= 1
                if self.left < 0:
                    self.left = 70
                    raise StopIteration
                return self.left
        def foo(x): return x
        source = Restarts()
        for _ in range(3):
            print([foo(x) for x in source].__len__(), end=" ")
            n = 0
            for x in source: n += foo(1)
            print(n)
        """,
    "many_silent_turns": """
        def foo(x): return x
        total = 0
        for i in range(1000):
            total += foo(i)
            for j in range(3):
                total += foo(j)
        print(total)
        """,
    "recursion": """
        def walk(n):
            total = n
            for child in range(n):
                total += walk(child)
                if total > 50: return total
            return total
        print([walk(n) for n in range(8)])
        def down(n):
            while n > 0:
                n -= 1
                down(n)
                if n % 3 == 2: break
            return n
        print([down(n) for n in range(7)])
        """,
    "numba_like": """
        import dis
        def njit(f): return f.__code__
        @njit
        def fast(n):
            for i in range(n): foo(i)
        def slow(n):
            for i in range(n): foo(i)
        print([type(c).__name__ for c in fast.co_consts])
        print([type(c).__name__ for c in njit(slow).co_consts])
        """,
    "asynchronous": """
        import asyncio
        async def numbers():
            for i in range(3):
                yield i
                await asyncio.sleep(0)
        async def main():
            async for x in numbers(): print(x)
            for _ in range(2): await asyncio.sleep(0)
            for x in range(2): print(float(x))
            return [y async for y in numbers()]
        print(asyncio.run(main()))
        """,
    "spawned": """
        import multiprocessing
        def square(x):
            for _ in range(2): x = float(x)
            return x * x
        if __name__ == "__main__":
            multiprocessing.set_start_method("spawn")
            with multiprocessing.Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]))
        """,
    "cloudpickled": """
        import cloudpickle, subprocess, sys
        def work(n):
            total = 0
            for i in range(n): total += int(i)
            while total > 100: total = int(total / 2)
            return total
        code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(30))"
        data = cloudpickle.dumps(work)
        print(subprocess.run([sys.executable, "-c", code], input=data, capture_output=True).stdout)
        """,
    "future": """
        from __future__ import annotations
        def f(x: undefined_name) -> also_undefined:
            for y in [x]: print(y)
        f(1); print(f.__annotations__)
        """,
    "encoded": "# -*- coding: latin-1 -*-\nfor c in 'caf\xe9': print(ascii(c), float(1))\n",
}


def both(tmp_path, name, text, *arguments):
    path = write(tmp_path, **{name: text})
    if name == "encoded":
        path.write_bytes(text.encode("latin-1"))
    expected = python(path.name, *arguments, folder=tmp_path)
    found = terra_run(path.name, *arguments, folder=tmp_path)
    return expected, found


@pytest.mark.parametrize("name", PROGRAMS)
def test_script_runs_as_under_python(name, tmp_path):
    expected, found = both(tmp_path, name, PROGRAMS[name], "--epochs", "3", "-h")
    assert found == expected


def test_other_ways_to_name_a_script(tmp_path):
    path = write(tmp_path, sub__script="import sys; print(__file__, sys.argv, sys.path[0]); 1 / 0")
    link = tmp_path / "link.py"
    link.symlink_to(path)
    for name in (path, "sub/script.py", "./sub/../sub/script.py", link):
        assert terra_run(name, folder=tmp_path) == python(name, folder=tmp_path)


def test_interpreter_flags_hold(tmp_path):
    path = write(
        tmp_path, script="assert False\nprint(__debug__, __import__('sys').flags.optimize)"
    )
    expected = execute(sys.executable, "-O", path, folder=tmp_path)
    found = execute(sys.executable, "-O", "-m", "terra_tf", "run", path, folder=tmp_path)
    assert found == expected
    assert found.output == "False 1\n"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_as_it_ends_python(sent, tmp_path):
    path = write(
        tmp_path,
        script="""
        import time
        def wait(seconds):
            for _ in range(1000):
                time.sleep(seconds)
        print("ready", flush=True)
        try:
            wait(0.05)
        finally:
            print("finally", flush=True)
        """,
    )
    outcomes = []
    for command in ((sys.executable,), (*TERRA, "run")):
        process = subprocess.Popen(
            [*command, path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"},
        )
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(sent)
        outcomes.append((*process.communicate(timeout=20), process.returncode))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2] == -sent


def test_modules_of_the_project_are_watched_and_cached_as_they_are(tmp_path):
    path = write(
        tmp_path,
        script="""
        import sys
        from package.training import train
        print(train(5), sys.modules["package.training"].__file__)
        import package.training as module
        print(type(module.__spec__).__name__, module.__cached__ is not None)
        """,
        package____init__="",
        package__training="""
        def train(n):
            total = 0
            for i in range(n): total += int(i)
            return total
        """,
    )
    first = terra_run(path, folder=tmp_path)
    assert first == python(path, folder=tmp_path) == terra_run(path, folder=tmp_path)
    assert "TERRA" not in first.errors


def test_a_mistake_on_terras_command_line_is_named(tmp_path):
    assert "there is no file" in terra_run("nothing.py", folder=tmp_path).errors
    path = write(tmp_path, script="def f(): pass\nclass A:\n    def g(self): pass\nprint('ran')\n")
    cases = {
        "f": (2, "is not MODULE:FUNCTION"),
        "__main__:h": (1, "defines no function 'h'; it defines: f, A.g"),
        "elsewhere:f": (1, "never imported 'elsewhere'"),
    }
    for step, (code, message) in cases.items():
        outcome = terra_run(path, folder=tmp_path, options=("--step", step))
        assert (outcome.code, message in outcome.errors) == (code, True), outcome
