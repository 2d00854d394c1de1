"""Help and version of the commands, wrong calls, and the tables of options in docs/reference/python.md."""

import argparse
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dsa
from dsa_layers import Generator, SamplingParams
from dsa_layers.command.main import main
from dsa_layers.command.parser import make_parser
from dsa_layers.generation.engine_options import EngineOptions

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "python.md").read_text()
HELP = """
import sys
from dsa_layers.command.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    sys.exit(bool({"torch", "numpy", "tokenizers", "dsa", "tqdm", "jinja2"} & sys.modules.keys()))
"""
(_SUBPARSERS,) = [action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)]


@pytest.mark.parametrize("command", _SUBPARSERS.choices)
def test_every_option_names_its_default(command):
    parser = _SUBPARSERS.choices[command]
    for action in parser._actions:
        if action.dest == "help" or action.required or (not action.option_strings and action.nargs != "?"):
            continue
        text = parser._get_formatter()._expand_help(action)
        found = re.search(r"\(default: ([^)]+)\)$", text)
        assert found, f"{command} {action.option_strings or action.dest}: {text!r}"
        if type(action.default) in (int, float, str):
            assert found[1].startswith(str(action.default)), text
        elif action.default is False:
            assert found[1].startswith("off"), text


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["bench", "--help"]])
def test_help_imports_nothing_slow(arguments):
    done = subprocess.run([sys.executable, "-c", HELP, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: dsa"), done.stderr


def test_the_version_is_the_package_s(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"dsa {dsa.__version__}\n"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == dsa.__version__


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "required: command"),
        (["train"], "invalid choice: 'train'"),
        (["generate", "x", "--promp", "y"], "dsa generate: unrecognized arguments: --promp y (see dsa --help)"),
        (["tiny", "x", "--model", "llama"], "--model: invalid choice: 'llama'"),
        (["tiny", ""], "directory: must not be empty"),
        (["generate", "--top-k", "many"], "--top-k: invalid int value: 'many' (see dsa generate --help)"),
        (["generate", "--max-tokens", "1e3"], "--max-tokens: invalid integer value: '1e3'"),
        (["generate", "--chat-option", "x"], "--chat-option: must be NAME=VALUE, got 'x'"),
        (["compare", "--length", "1"], "--length: must be at least 2, got 1"),
        (["convert", "a", "b", "--dtype", "fp8", "--shard-gb", "-1"], "--shard-gb: must be a finite number above 0"),
    ],
)
def test_wrong_calls_are_told_in_one_line(error, arguments, shown):
    assert main(arguments) == 2 and shown in error()


def rows(heading: str) -> list[list[str]]:
    """Return the rows of the table in section `heading` of PAGE, without the head, as lists of cells."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\|(.*)\|$", section, re.M)
    return [[cell.strip() for cell in line.split("|")] for line in lines[2:]]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_documented_table_has_every_option(command):
    actions = _SUBPARSERS.choices[command]._actions
    options = {action.option_strings[0] for action in actions if action.option_strings and action.dest != "help"}
    documented = {option for row in rows("Command options in Python") for option in re.findall(r"--[a-z-]+", row[0])}
    assert options <= documented


@pytest.mark.parametrize("heading, documented", [("Generator", Generator), ("Sampling", SamplingParams)])
def test_the_documented_table_has_every_parameter_with_its_default(heading, documented):
    found = {cells[0].strip("`"): cells[2].split(":")[0].strip("`") for cells in rows(heading)}
    parameters = inspect.signature(documented).parameters.values()
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    defaults = {p.name: "" if p.default is inspect.Parameter.empty else repr(p.default) for p in named}
    options = vars(EngineOptions()) if documented is Generator else {}
    assert found == defaults | {name: repr(value) for name, value in options.items()}


def test_every_key_of_the_events_is_in_the_help(capsys):
    for command, call in [
        ("generate", ["--prompt", "x", "--max-tokens", "2", "--cache-tokens", "256"]),
        ("compare", ["--length", "16", "--max-tokens", "16"]),
        ("generate", ["--prompt", ""]),
    ]:
        main([command, "--json", "--device", "cpu", *call])
        text = _SUBPARSERS.choices[command].format_help()
        for line in capsys.readouterr().out.splitlines():
            event, *keys = re.findall(r'"(\w+)":', line)
            assert event == "event" and all(re.search(rf"\b{key}\b", text) for key in keys), line
