"""The parser of `dsa` and of its subcommands: help that names every default, and errors of one line."""

import argparse
from collections.abc import Sequence
from typing import TextIO


class WrongCall(Exception):
    """A call that the parser does not accept; its text is one line for the caller."""


class Parser(argparse.ArgumentParser):
    """Options are spelled out, never abbreviated: an option that is added later changes no script."""

    def __init__(self, **options: object) -> None:
        super().__init__(formatter_class=_Help, allow_abbrev=False, **options)

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """A subcommand's parser refuses what it does not know itself: its help has what it knows."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def print_help(self, file: TextIO | None = None) -> None:
        """Raise OSError if the help cannot be written: argparse ignores that."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> None:
        raise WrongCall(f"{self.prog}: {message} (see {self.prog} --help)")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Adds the default of an option whose help does not name it. Descriptions have their own lines."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        ends = action.nargs == 0 and action.dest in ("help", "version")
        if not action.option_strings or action.required or ends or "default" in text:
            return text
        if action.default is None or action.default == []:
            default = "none"
        else:
            default = "off" if action.default is False else "%(default)s"
        return f"{text} (default: {default})"
