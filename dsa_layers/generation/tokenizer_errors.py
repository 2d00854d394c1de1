"""The error of tokenizers, and what becomes one."""

from collections.abc import Iterator
from contextlib import contextmanager


class TokenizerError(ValueError):
    """A tokenizer or chat template that cannot be used. Names the file, what it holds and what is accepted."""


@contextmanager
def library_failures(problem: str) -> Iterator[None]:
    """Turns what the tokenizers library raises into TokenizerError. The library raises Exception itself, and where a
    state was thought impossible a panic, which is no subclass of Exception."""
    try:
        yield
    except Exception as error:
        raise TokenizerError(f"{problem}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{problem}: {error}") from error
