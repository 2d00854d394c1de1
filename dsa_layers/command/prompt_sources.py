"""Where prompts come from: the command line, files and the standard input."""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dsa_layers import options
from dsa_layers.output_files import naming

_COPY = "--prompt-copy"


@dataclass(frozen=True)
class Prompt:
    """source: the option that it comes from, as messages name it."""

    source: str
    text: str


class AddSource(argparse.Action):
    """Options that share a `dest` leave one list of (option, value), in the order of the command line."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: str, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or ()), (option, values)])


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        action=AddSource,
        dest="prompts",
        metavar="TEXT",
        help="a prompt, or - for the standard input; may be repeated, for a batch, whose printed lines start with [i], "
        "the number of their sequence from 0 on (default: none; one is needed)",
    )
    parser.add_argument(
        "--prompt-file",
        action=AddSource,
        dest="prompts",
        metavar="FILE",
        help="a UTF-8 file that holds one prompt, without the newline at its end; may be repeated and mixed with "
        "--prompt (default: none)",
    )
    # What `for_other_processes` gives them: a file that holds a Prompt.
    parser.add_argument(_COPY, action=AddSource, dest="prompts", help=argparse.SUPPRESS)


def read_prompts(given: Sequence[tuple[str, str]] | None) -> list[Prompt]:
    """Raises ValueError, which names the option, for what is missing, empty, unreadable or no UTF-8."""
    given = _checked(given)
    return [_read(_source(given, i), *entry) for i, entry in enumerate(given)]


@contextlib.contextmanager
def for_other_processes(argv: Sequence[str], given: Sequence[tuple[str, str]] | None) -> Iterator[list[str]]:
    """The arguments of processes that read these prompts in place of this one, which have its standard input, but no
    other file that it has open, as `<(command)` and /dev/fd/3 are: prompt files are copied meanwhile, with the names
    that messages have. Raises ValueError as `read_prompts` does, but for the standard input."""
    with tempfile.TemporaryDirectory(prefix="dsa-prompts-") as folder:
        argv, given = list(argv), _checked(given)
        for i, (option, value) in enumerate(given):
            if (option, value) == ("--prompt", "-"):
                continue
            prompt = _read(_source(given, i), option, value)
            if option == "--prompt-file":
                copy = Path(folder, str(i))
                with naming(copy):
                    copy.write_text(json.dumps(asdict(prompt)), encoding="utf-8")
                at = next(j for j in range(len(argv)) if f"{option}={value}" in (argv[j], "=".join(argv[j : j + 2])))
                argv[at : at + 1 + (argv[at] == option)] = [_COPY, str(copy)]
        yield argv


def _checked(given: Sequence[tuple[str, str]] | None) -> Sequence[tuple[str, str]]:
    if not given:
        raise ValueError("--prompt: must be given, got none; accepted: --prompt TEXT, --prompt -, --prompt-file FILE")
    from_stdin = sum(entry == ("--prompt", "-") for entry in given)
    if from_stdin > 1:
        raise ValueError(f"--prompt: - must come once, as the standard input is read once, got it {from_stdin} times")
    return given


def _source(given: Sequence[tuple[str, str]], i: int) -> str:
    """What messages call prompt i. Several texts are told apart by their numbers."""
    option, value = given[i]
    if option == "--prompt" and value != "-":
        return option if len(given) == 1 else f"{option} (prompt {i + 1} of {len(given)})"
    return f"{option} {value}"


def _read(source: str, option: str, value: str) -> Prompt:
    if option == _COPY:
        try:
            return Prompt(**json.loads(Path(value).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise ValueError(f"{_COPY}: must be a file that dsa wrote for its ranks, got {value}") from None
    if option == "--prompt-file":
        text = read_text_file(option, Path(value))
    elif value == "-":
        text = _decoded(source, _standard_input())
    else:
        text = options.text(source, value)
    if not text:
        raise ValueError(f"{source}: must not be empty, got no text")
    return Prompt(source, text)


def read_text_file(option: str, path: Path) -> str:
    """The file's text without one newline at its end. Raises ValueError that names the option and the file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{option}: must be a readable file, got {path}: {error.strerror}") from None
    return _decoded(f"{option} {path}", content)


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise ValueError("--prompt -: must have a standard input to read, got a closed one")
    return sys.stdin.buffer.read()


def _decoded(source: str, content: bytes) -> str:
    text = options.decoded(source, content)
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
