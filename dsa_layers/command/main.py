"""The `dsa` command: how it runs its commands, and what their errors become."""

import argparse
import contextlib
import importlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence

from dsa_layers.command.messages import by_options, say, say_json
from dsa_layers.command.parser import WrongCall, make_parser
from dsa_layers.parallel.launch import note_failure

# The exit codes that a shell reports for these signals.
INTERRUPTED, NO_READER = 128 + signal.SIGINT, 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. argv: None for the arguments of this process.

    The exit code is 0; 1 for a failure; 2 for a wrong call or input; 130 after Ctrl-C; 141 if the reader of the
    standard output has left. With --json an error is also an event on the standard output.
    """
    is_process = argv is None
    argv = list(sys.argv[1:] if argv is None else argv)
    args = argparse.Namespace(argv=argv, command="")
    logger, handler = logging.getLogger("dsa_layers"), logging.StreamHandler()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        if is_process:
            sys.stdout.reconfigure(errors="replace")  # for characters that its encoding does not have
        make_parser().parse_args(argv, args)
        run = args.run if "run" in args else _import_command(args.command)
        warnings.showwarning = lambda message, *_: say(f"Warning: {message}")
        code = run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        note_failure("interrupted")
        say("")
        return INTERRUPTED
    except BrokenPipeError:
        note_failure("nobody reads the output")
        return NO_READER
    except Exception as error:
        problem, code = _problem(error, args)
        note_failure(problem)
        if "--json" in argv:
            with contextlib.suppress(OSError):
                say_json("error", error=problem, exit_code=code or 1)
        if code is None:
            raise
        say(problem)
        return code
    finally:
        logger.removeHandler(handler)
        try:
            sys.stdout.flush()
        except OSError:  # Python would try again at its end, and print a traceback
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _import_command(name: str) -> Callable[[argparse.Namespace], int]:
    """Return `run` of a command's module, which imports torch. Meanwhile Ctrl-C ends the process without an exception,
    because imports of compiled modules may lose it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    module = importlib.import_module(f"dsa_layers.command.{name}")
    signal.signal(signal.SIGINT, before)
    return module.run


def _problem(error: Exception, args: argparse.Namespace) -> tuple[str, int | None]:
    """Return what is said about an error, and the exit code; None for a defect of this program."""
    if isinstance(error, WrongCall):
        return str(error), 2
    command = f"dsa {args.command}"
    if isinstance(error, OSError):
        problem = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error
        return f"{command}: {problem}", 2
    if isinstance(error, ValueError | ImportError):
        return f"{command}: {by_options(str(error), args)}", 2
    if isinstance(error, RuntimeError | MemoryError):
        return f"{command}: {str(error) or 'out of memory'}", 1
    return f"{type(error).__name__}: {error}", None


if __name__ == "__main__":
    sys.exit(main())
