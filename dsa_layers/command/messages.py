"""Print messages to the standard error, and JSON events to the standard output."""

import argparse
import json
import re
import sys

# {parameter of the library: option}, for options with another name than their parameter
_OPTIONS = {"draft_tokens": "--draft", "drafter": "--draft"}
_POSITIONAL = {"checkpoint", "directory", "op"}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def say_json(event: str, **fields: object) -> None:
    """Print an event as one line of JSON."""
    print(json.dumps({"event": event, **fields}), flush=True)


def by_options(problem: str, args: argparse.Namespace) -> str:
    """Replace parameter names in an error message of the library by the command's options. For example, "top_p: ..."
    becomes "--top-p: ...", and "... (cache_tokens)" becomes "... (--cache-tokens)"."""
    options = {name: f"--{name.replace('_', '-')}" for name in vars(args).keys() - _POSITIONAL} | _OPTIONS
    return re.sub(r"(^|(?<=\())\w+(?=:|\)$)", lambda found: options.get(found[0], found[0]), problem)
