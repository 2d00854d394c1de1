"""What the tokenizers library raises, as an error of ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from dsa_layers.errors import TokenizerError


@contextmanager
def tokenizer_failures(problem: str) -> Iterator[None]:
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
