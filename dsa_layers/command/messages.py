"""Messages on the standard error, and events in JSON on the standard output."""

import argparse
import json
import re
import sys

# Parameters of the library whose option has another name.
_OPTIONS = {"draft_tokens": "--draft", "drafter": "--draft"}
_POSITIONAL = {"checkpoint", "directory", "op"}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def say_json(event: str, **fields: object) -> None:
    """Print an event as a JSON object on a line of its own."""
    print(json.dumps({"event": event, **fields}), flush=True)


def by_options(problem: str, args: argparse.Namespace) -> str:
    """Return an error message of the library with the command's options in place of the library's parameters:
    "top_p: ..." becomes "--top-p: ...", and "... (cache_tokens)" becomes "... (--cache-tokens)"."""

    def option(found: re.Match[str]) -> str:
        name = found[0]
        if name in args and name not in _POSITIONAL:
            return f"--{name.replace('_', '-')}"
        return _OPTIONS.get(name, name)

    return re.sub(r"(^|(?<=\())\w+(?=:|\)$)", option, problem)
