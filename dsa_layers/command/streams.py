"""What the command does with its streams and with Ctrl-C."""

import contextlib
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator

from dsa_layers.output_files import naming


def on_interrupt(handler: Callable[..., object] | signal.Handlers) -> None:
    """What Ctrl-C does from now on; nothing where the caller has it ignored, as shells do for background jobs."""
    with contextlib.suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, handler)


def say(line: str) -> None:
    """To the standard error, if somebody reads it. In one piece: other ranks may write at the same time, and `print`
    writes a line and its end apart where output is not buffered."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@contextlib.contextmanager
def messages_to_stderr() -> Iterator[None]:
    """Shows what the library logs, as a line each."""
    logger, handler = logging.getLogger("dsa_layers"), _Said()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def say_json(event: str, **fields: object) -> None:
    """One event as a JSON object on a line of its own, in ASCII, to the standard output; it is there at once."""
    print(json.dumps({"event": event, **fields}), flush=True)


class _StandardOutput(io.TextIOWrapper):
    """Name itself in the errors of writing, as `open` names a file."""

    def write(self, text: str) -> int:
        with naming("standard output"):
            return super().write(text)

    def flush(self) -> None:
        with naming("standard output"):
            super().flush()


def prepare_streams() -> None:
    """Show characters that a stream's encoding lacks as question marks. Drop messages for a closed standard error.
    Raise ValueError for a closed standard output, which would lose the result."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    else:
        sys.stderr.reconfigure(errors="replace")
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        raise ValueError("standard output: must be open, got a closed one")
    buffering = {"line_buffering": sys.stdout.line_buffering, "write_through": sys.stdout.write_through}
    encoding = sys.stdout.encoding
    sys.stdout = _StandardOutput(sys.stdout.detach(), encoding=encoding, errors="replace", **buffering)


def drop_unwritten() -> None:
    """Drops quietly what the standard output does not take. Python would print a traceback about it at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
