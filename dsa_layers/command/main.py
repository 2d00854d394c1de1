"""The `dsa` command: generate, check, bench, tune, tiny."""

# Nothing here is slow to import: torch comes in when a command runs, so that Ctrl-C is caught from the beginning.
import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence

from dsa_layers.command import check, generate, tiny
from dsa_layers.command.streams import drop_unwritten, on_interrupt, prepare_streams, say

INTERRUPTED, NO_READER = 128 + signal.SIGINT, 128 + signal.SIGPIPE  # what a shell calls them


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for something that failed, 2 for a wrong call or input; 130 after Ctrl-C, and 141
    where nobody reads the output any more, as of a filter that ends so."""
    command = "dsa"
    try:
        if argv is None:
            prepare_streams()
        try:
            args = _parser().parse_args(argv)
        finally:  # it exits after --help and --version
            sys.stdout.flush()
        command = f"dsa {args.command}"
        if argv is None:
            _import_torch()
        warnings.showwarning = lambda message, *_: say(f"Warning: {message}")
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        say("")
        return INTERRUPTED
    except BrokenPipeError:
        return NO_READER
    except OSError as error:
        say(f"{command}: {f'{error.filename}: {error.strerror}' if error.filename else error}")
        return 2
    except (ValueError, ImportError) as error:
        say(f"{command}: {error}")
        return 2
    except (RuntimeError, MemoryError) as error:
        say(f"{command}: {str(error) or 'out of memory'}")
        return 1
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


class _Parser(argparse.ArgumentParser):
    """Its errors are one line."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import importlib.metadata

        try:
            version = importlib.metadata.version("dsa-kernels")
        except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
            from dsa import __version__ as version
        print(f"dsa {version}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    from dsa_bench import command as bench

    parser = _Parser(prog="dsa", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True)

    for add_parsers in (generate.add_parser, check.add_parser, bench.add_parsers, tiny.add_parser):
        add_parsers(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
