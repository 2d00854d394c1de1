"""docs/reference/python.md has every option of `dsa generate` and `dsa chat`, and every parameter with its default."""

import argparse
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from dsa_layers import Generator, SamplingParams
from dsa_layers.command.main import _parser
from dsa_layers.generation.engine_options import EngineOptions

DEFAULTS = {field.name: field.default for field in fields(EngineOptions)}
PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "python.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\|(.*)\|$", section, re.M)
    return [[cell.strip() for cell in line.split("|")] for line in lines[2:]]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_table_has_every_option(command):
    (subparsers,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    actions = subparsers.choices[command]._actions
    shown = [a for a in actions if a.help is not argparse.SUPPRESS and a.option_strings and a.dest != "help"]
    options = {action.option_strings[0] for action in shown}
    documented = {option for row in rows("Command options in Python") for option in re.findall(r"--[a-z-]+", row[0])}
    assert options <= documented


@pytest.mark.parametrize("heading, documented", [("Generator", Generator), ("Sampling", SamplingParams)])
def test_the_table_has_every_parameter_with_its_default(heading, documented):
    found = {cells[0].strip("`"): cells[2].split(":")[0].strip("`") for cells in rows(heading)}
    parameters = inspect.signature(documented).parameters.values()
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    defaults = {p.name: "" if p.default is inspect.Parameter.empty else repr(p.default) for p in named}
    options = DEFAULTS if documented is Generator else {}
    assert found == defaults | {name: repr(value) for name, value in options.items()}


def test_every_option_of_an_engine_has_a_text():
    assert {*DEFAULTS} == {*re.findall(r"^    (\w+)  ", EngineOptions.__doc__, re.M)}
