"""What the command writes besides its results: messages on the standard error, and events in JSON."""

import argparse
import contextlib
import json
import re
import sys

# Parameters of the library whose option has another name.
_OPTIONS = {"draft_tokens": "--draft", "drafter": "--draft"}
_POSITIONAL = {"checkpoint", "directory", "op"}


def say(line: str) -> None:
    """Write a line to the standard error in one piece, because other ranks may write at the same time."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")


def say_json(event: str, **fields: object) -> None:
    """Print an event as a JSON object on a line of its own."""
    print(json.dumps({"event": event, **fields}), flush=True)


def by_options(problem: str, args: argparse.Namespace) -> str:
    """Return an error message of the library with the names of the command's options.

    "top_p: ..." becomes "--top-p: ...", and "prompts[1]: ..." becomes the option that gave the second prompt. The same
    is done for a name in parentheses at the end of the message.
    """

    def option(found: re.Match[str]) -> str:
        name, index = found["name"], found["index"]
        if name == "prompts" and index and "prompts" in args:
            return args.prompts[int(index)].name(int(index), len(args.prompts))
        if name in dict(getattr(args, "chat_option", ())):
            return f"--chat-option: {name}"
        if name in args and name not in _POSITIONAL:
            return f"--{name.replace('_', '-')}"
        return _OPTIONS.get(name, found[0])

    return re.sub(r"(^|(?<=\())(?P<name>\w+)(\[(?P<index>\d+)\])?(?=:|\)$)", option, problem)
