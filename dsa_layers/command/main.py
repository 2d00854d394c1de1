"""The `dsa` command: generate, chat, compare, check, verify, compile, plan, convert, bench, tune, tiny."""

# Nothing here is slow to import: torch comes in when a command runs, so that Ctrl-C is caught from the beginning.
import argparse
import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence

from dsa_layers.command import chat, check, compare, compile, convert, generate, plan, tiny, verify
from dsa_layers.command.parser import Parser, WrongCall
from dsa_layers.command.streams import drop_unwritten, messages_to_stderr, on_interrupt, prepare_streams, say, say_json
from dsa_layers.parallel.environment import note_failure

INTERRUPTED, NO_READER = 128 + signal.SIGINT, 128 + signal.SIGPIPE  # what a shell calls them


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for something that failed, 2 for a wrong call or input; 130 after Ctrl-C, and 141
    where nobody reads the output any more, as of a filter that ends so. With --json an error is also an event on the
    standard output."""
    command = "dsa"
    as_json = "--json" in (sys.argv[1:] if argv is None else argv)
    try:
        if argv is None:
            prepare_streams()
        try:
            args = _parser().parse_args(argv)
        finally:  # it exits after --help and --version
            sys.stdout.flush()
        args.argv = list(sys.argv[1:] if argv is None else argv)
        command = f"dsa {args.command}"
        if argv is None:
            _import_torch()
        warnings.showwarning = lambda message, *_: say(f"Warning: {message}")
        with messages_to_stderr():
            code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        note_failure("interrupted")
        say("")
        return INTERRUPTED
    except BrokenPipeError:
        note_failure("nobody reads the output")  # of ranks this one ends, and the others because of it
        return NO_READER
    except WrongCall as error:
        return _failed(str(error), 2, as_json)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error
        return _failed(f"{command}: {problem}", 2, as_json)
    except (ValueError, ImportError) as error:
        return _failed(f"{command}: {error}", 2, as_json)
    except (RuntimeError, MemoryError) as error:
        return _failed(f"{command}: {str(error) or 'out of memory'}", 1, as_json)
    except Exception as error:  # a defect of the command: Python says where
        problem = f"{type(error).__name__}: {error}"
        note_failure(problem)
        if as_json:
            _say_error(problem, 1)
        raise
    finally:
        drop_unwritten()
        if argv is None:
            # Another Ctrl-C ends the process at once, without a traceback of what Python tidies up.
            on_interrupt(signal.SIG_DFL)


def _import_torch() -> None:
    """With everything that commands need. Where Ctrl-C interrupts an import of compiled modules, the exception may be
    taken for another one or get lost, and the command would go on; so it ends the process itself."""
    on_interrupt(lambda *_: os._exit(INTERRUPTED))
    try:
        import dsa_layers.generation.generator  # noqa: F401
    finally:
        on_interrupt(signal.default_int_handler)


def _failed(problem: str, code: int, as_json: bool) -> int:
    """Tells the caller, and gives back the exit code."""
    note_failure(problem)
    say(problem)
    if as_json:
        _say_error(problem, code)
    return code


def _say_error(problem: str, code: int) -> None:
    with contextlib.suppress(OSError):  # nobody reads it, or it cannot be written, which may be the problem itself
        say_json("error", error=problem, exit_code=code)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import importlib.metadata

        try:
            version = importlib.metadata.version("dsa-kernels")
        except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
            from dsa import __version__ as version
        print(f"dsa {version}")
        parser.exit()


def _parser() -> Parser:
    from dsa_bench import command as bench

    parser = Parser(prog="dsa", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True)

    for command in (generate, chat, compare, check, verify, compile, plan, convert):
        command.add_parser(commands)
    bench.add_parsers(commands)
    tiny.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
