"""Arguments that both commands take: the engine, numbers, JSON objects and a directory for logs."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dsa_bench.engines.turns import SIDES

ENGINES = ("vllm", "sglang")


def add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", choices=ENGINES, help="must be installed")
    parser.add_argument("--logs", type=Path, help="directory for the engines' logs (a temporary one)")


def check_engine(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with a message if the engine is not installed or the logs cannot be written."""
    if importlib.util.find_spec(args.engine) is None:
        parser.error(f"engine: {args.engine} is not installed")
    if args.logs is not None:
        try:
            args.logs.mkdir(parents=True, exist_ok=True)
            for side in SIDES:
                (args.logs / f"{side}.log").touch()
        except OSError as error:
            parser.error(f"--logs: {error}")


def print_rows(rows: Iterable[dict[str, Any]]) -> int:
    """Print a line of JSON per row. Return the exit status: 1 if an engine's process ended, which is printed."""
    try:
        for row in rows:
            print(json.dumps(row), flush=True)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value
