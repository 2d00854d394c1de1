"""The option that is passed to a checkpoint's chat template or format, and the prompts that these make."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsa_layers import SHIPPED_MODEL, options
from dsa_layers.command.streams import say

if TYPE_CHECKING:
    from dsa_layers.io.tokenizer import Tokenizer

_OPTION = "--chat-option"


def add_chat_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        _OPTION,
        type=_named_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the chat template or an option of the chat format, as enable_thinking=false, or for V4 "
        "reasoning_effort=max: VALUE is JSON, else a string; may be repeated (default: none)",
    )


def has_chat_template(args: argparse.Namespace, tokenizer: "Tokenizer", *, first: bool = True) -> bool:
    """Whether messages become prompts by a template or format. Says so where they do not, except of the shipped model,
    which continues source code. ValueError for a --chat-option without either. first: of the ranks, which alone says
    it."""
    if tokenizer.has_chat_template:
        return True
    if args.chat_option:
        raise ValueError(f"{_OPTION}: must not be given for a checkpoint without a chat template or format")
    if first and args.checkpoint != SHIPPED_MODEL:
        say("The checkpoint has no chat template and no known chat format: text is sent as it is.")
    return False


def chat_prompt(args: argparse.Namespace, tokenizer: "Tokenizer", messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt for `messages` with the options given. Raises ValueError for one that is refused."""
    given = dict(args.chat_option)
    try:
        return tokenizer.apply_chat_template(messages, **given)
    except ValueError as error:
        if str(error).split(":")[0] in given:
            raise ValueError(f"{_OPTION}: {error}") from None
        raise


def _named_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text[:60]!r}")
    if name in ("messages", "add_generation_prompt"):
        raise argparse.ArgumentTypeError(f"must be another name than {name}, which is set already")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, options.text(_OPTION, value)
