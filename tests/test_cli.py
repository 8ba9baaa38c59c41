"""The command line as a whole: help, mistakes, and that it does not load TensorFlow."""

import subprocess
import sys

import pytest

from terra_tf import cli

pytestmark = pytest.mark.timeout(60)


def run_python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=30, check=False
    )


def test_help_names_every_command():
    result = run_python("-m", "terra_tf", "--help")
    assert result.returncode == 0
    for command in cli.SUBCOMMANDS:
        assert f"    {command.NAME} " in result.stdout
    assert "TERRA_DISABLE" in result.stdout


def test_help_of_bench_explains_exit_codes_and_the_median():
    result = run_python("-m", "terra_tf", "bench", "--help")
    assert result.returncode == 0
    assert "exit code" in result.stdout
    assert "second half" in result.stdout


def test_help_loads_no_tensorflow():
    result = run_python(
        "-c",
        "import sys\n"
        "from terra_tf.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "finally:\n"
        "    loaded = {'tensorflow', 'keras'} & set(sys.modules)\n"
        "    print('loaded:', sorted(loaded), file=sys.stderr)\n",
    )
    assert result.returncode == 0
    assert result.stderr == "loaded: []\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["bench"], "required: SCRIPT"),
        (["bench", "no_such_script.py"], "there is no file 'no_such_script.py'"),
        (["bench", "--repeat", "0", __file__], "'0' is not a whole number above 0"),
        (["bench", "--repeat", "often", __file__], "'often' is not a whole number above 0"),
        (["bench", "--ignore", "(", __file__], "'(' is no regular expression"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_all_that_follows_the_script_is_the_scripts():
    arguments = cli.build_parser().parse_args(
        ["bench", "--repeat", "2", __file__, "--repeat", "7", "-h", "--", "x"]
    )
    assert arguments.repeat == 2
    assert arguments.script == __file__
    assert arguments.arguments == ["--repeat", "7", "-h", "--", "x"]
