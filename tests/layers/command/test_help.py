"""`dsa --help` and that of each subcommand: there at once, and every default in it."""

import argparse
import re
import subprocess
import sys

import pytest

from dsa_layers.command.main import _parser, main

HELP = """
import sys
from dsa_layers.command.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    sys.exit(bool({"torch", "numpy", "tokenizers", "dsa", "tqdm", "jinja2"} & sys.modules.keys()))
"""
COMMANDS = ["generate", "chat", "compare", "check", "verify", "compile", "plan", "convert", "bench", "tune", "tiny"]


(_COMMANDS,) = [action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]


def parser_of(command):
    return _COMMANDS.choices[command]


def test_the_commands():
    assert list(_COMMANDS.choices) == COMMANDS and len(_COMMANDS._choices_actions) == len(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_names_its_default(command):
    """As its help is printed: "(default: ...)" with the value where the parser has it."""
    parser = parser_of(command)
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:  # of a process that another one starts
            continue
        if action.dest == "help" or action.required or (not action.option_strings and action.nargs != "?"):
            continue
        text = formatter._expand_help(action)
        found = re.search(r"\(default: ([^)]+)\)$", text)
        assert found, f"{command} {action.option_strings or action.dest}: {text!r}"
        if type(action.default) in (int, float, str):
            assert found[1].startswith(str(action.default)), text
        elif action.default is False:
            assert found[1].startswith("off"), text


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help_imports_nothing_slow(arguments):
    """So it is there at once."""
    done = subprocess.run([sys.executable, "-c", HELP, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: dsa"), done.stderr


def test_what_a_script_reads_is_documented(capsys):
    """Every key of `dsa generate`'s and `dsa compare`'s events."""
    for command, call in [
        ("generate", ["--prompt", "x", "--max-tokens", "2", "--cache-tokens", "256", "--stats"]),
        ("compare", ["--length", "16", "--max-tokens", "16"]),
        ("generate", ["--prompt", ""]),
    ]:
        main([command, "--json", "--device", "cpu", *call])
        text = parser_of(command).format_help()
        for line in capsys.readouterr().out.splitlines():
            event, *keys = re.findall(r'"(\w+)":', line)
            assert event == "event" and all(re.search(rf"\b{key}\b", text) for key in keys), line
