"""`dsa --help` and that of each subcommand: there at once, and every default in it."""

import argparse
import inspect
import re
import resource
import subprocess
import sys

import pytest

from dsa_layers.command.main import _parser, main
from dsa_layers.generation import invariant_models

HELP = """
import sys
from dsa_layers.command.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    sys.exit(bool({"torch", "numpy", "tokenizers", "dsa", "tqdm", "jinja2"} & sys.modules.keys()))
"""
COMMANDS = ["generate", "compare", "check", "compile", "plan", "bench", "tune", "tiny"]


def parser_of(command):
    (commands,) = [a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return commands.choices[command]


def test_the_commands():
    (commands,) = [a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert list(commands.choices) == COMMANDS and len(commands._choices_actions) == len(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_names_its_default(command):
    """As its help is printed: "(default: ...)" with the value where the parser has it."""
    parser = parser_of(command)
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:  # of a process that another one starts
            continue
        if action.dest == "help" or (not action.option_strings and action.nargs != "?"):
            continue
        text = formatter._expand_help(action)
        found = re.search(r"\(default: ([^)]+)\)$", text)
        assert found, f"{command} {action.option_strings or action.dest}: {text!r}"
        if type(action.default) in (int, float, str):
            assert found[1].startswith(str(action.default)), text
        elif action.default is False:
            assert found[1].startswith("off"), text


def test_where_kernels_are_kept():
    (action,) = (a for a in parser_of("compile")._actions if a.dest == "out")
    assert all(name in action.help for name in ("DSA_CACHE_DIR", "XDG_CACHE_HOME", "~/.cache/dsa"))


def test_what_batch_invariance_takes():
    """All of it, as `Generator` says it."""
    (action,) = (a for a in parser_of("generate")._actions if a.dest == "batch_invariant")
    assert "FP8 weights, FP8 indexers and bfloat16:" in action.help
    assert "FP8 weights, FP8 indexers and torch.bfloat16" in inspect.getsource(invariant_models)


def test_a_default_is_named_once():
    parser = parser_of("tiny")
    assert parser.format_help().count("default: 0") == 1


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help_is_there_at_once(arguments):
    """Without torch, in less than 0.15 s of computing; a busy machine may take longer. The best of three."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", HELP, *arguments], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0 and done.stdout.startswith("usage: dsa"), done.stderr
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.15


def test_what_a_script_reads_is_documented(capsys):
    """Every key of `dsa generate`'s and `dsa compare`'s events."""
    for command, call in [
        ("generate", ["--prompt", "x", "--max-new-tokens", "2", "--cache-tokens", "256", "--stats"]),
        ("compare", ["--length", "16", "--max-tokens", "16"]),
        ("generate", ["--prompt", ""]),
    ]:
        main([command, "--json", "--device", "cpu", *call])
        text = parser_of(command).format_help()
        for line in capsys.readouterr().out.splitlines():
            event, *keys = re.findall(r'"(\w+)":', line)
            assert event == "event" and all(re.search(rf"\b{key}\b", text) for key in keys), line
