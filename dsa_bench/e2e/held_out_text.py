"""Text on which a model of examples/train_indexer.py was not trained, as sequences of tokens."""

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from dsa_layers import Tokenizer


def held_out_sequences(checkpoint: Path, tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """Return sequences of a BOS token and `length` tokens, which are consecutive tokens of the held-out files.

    The checkpoint's metrics.json names the files, which are read from this Python's standard library and packages.
    Raises ValueError if metrics.json does not list files, and if the files have fewer than `length` tokens.
    """
    begin = tokenizer.bos_token_id
    if begin is None:
        raise ValueError(f"checkpoint: the tokenizer of {checkpoint} must have a BOS token, got none")
    tokens: list[int] = []
    for path in held_out_files(checkpoint):
        tokens += [begin, *tokenizer.encode(path.read_text(encoding="utf-8", errors="replace"), add_bos=False)]
    sequences = [[begin, *tokens[i : i + length]] for i in range(0, len(tokens) - length + 1, length)]
    if not sequences:
        raise ValueError(f"checkpoint: {checkpoint}'s held-out files have {len(tokens)} tokens here; needed: {length}")
    return sequences


def held_out_files(checkpoint: Path) -> Iterator[Path]:
    """Yield the paths of those held-out files that this Python's standard library and packages contain."""
    metrics = checkpoint / "metrics.json"
    try:
        data = json.loads(metrics.read_text(encoding="utf-8"))["data"]
        names = [name for source in (data, *data["packages"]) for name in source["held_out_files"]]
        for path in map(PurePosixPath, names):
            if path.suffix != ".py" or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"names of Python files within a library are accepted, not {str(path)[:200]!r}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"checkpoint: {metrics} must list held-out files, got {problem}") from None
    folders = [Path(sysconfig.get_path("stdlib")), *map(Path, sys.path)]
    for name in names:
        found = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if found is not None:
            yield found
