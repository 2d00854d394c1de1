"""The entry point of the `dsa` command: it runs a subcommand and reports errors."""

import argparse
import contextlib
import importlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence

from dsa_layers.command.parser import by_options, make_parser, say, say_json
from dsa_layers.parallel.launch import note_failure

# Exit codes that a shell reports for a process that SIGINT or SIGPIPE ended.
INTERRUPTED, NO_READER = 128 + signal.SIGINT, 128 + signal.SIGPIPE
# {subcommand: module}, for subcommands that are not in a module of the same name. The function that runs a subcommand
# has the subcommand's name.
_MODULES = {
    "chat": "generate",
    "compile": "model",
    "plan": "model",
    "convert": "model",
    "tiny": "model",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. argv: the arguments; None: the arguments of this process.

    The exit code is 0 for success, 1 for a failure, 2 for a wrong call or input, 130 after Ctrl-C, and 141 if the
    reader of the standard output has closed the pipe. With --json, failures and wrong calls are also printed as events
    on the standard output.
    """
    args = argparse.Namespace(argv=list(sys.argv[1:] if argv is None else argv), command="")
    logger, handler = logging.getLogger("dsa_layers"), logging.StreamHandler()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        if argv is None:
            sys.stdout.reconfigure(errors="replace")  # print "?" for characters that the output's encoding lacks
        make_parser().parse_args(args.argv, args)
        if "run" not in args:  # import the subcommand's module here, so that `dsa --help` does not import torch
            module = importlib.import_module(f"dsa_layers.command.{_MODULES.get(args.command, args.command)}")
            args.run = getattr(module, args.command)
        warnings.showwarning = lambda message, *_: say(f"Warning: {message}")
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        note_failure("interrupted")
        say("")
        return INTERRUPTED
    except BrokenPipeError:
        note_failure("nobody reads the output")
        return NO_READER
    except (OSError, ValueError, ImportError, RuntimeError, MemoryError) as error:
        problem = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.filename:
            problem = f"{error.filename}: {error.strerror}"
        command = f"dsa {args.command}".rstrip()  # no trailing space if the call names no subcommand
        problem = f"{command}: {by_options(problem, args)}"
        code = 1 if isinstance(error, RuntimeError | MemoryError) else 2
        note_failure(problem)
        if "--json" in args.argv:
            with contextlib.suppress(OSError):
                say_json("error", error=problem, exit_code=code)
        say(problem)
        return code
    finally:
        logger.removeHandler(handler)
        try:
            sys.stdout.flush()
        except OSError:  # otherwise Python would flush again at exit and print an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
