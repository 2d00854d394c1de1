"""The text: the Python standard library of the machine, sources with their docstrings, as bytes."""

import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

# Bytes, and a token that comes before a file and before every sequence.
VOCAB, BEGIN = 257, 256
LICENCE = "Python Software Foundation License Version 2 (PSF-2.0); some modules carry notices of their own"

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}  # the last is tables
_SHORTEST = 256
_HELD_OUT_EVERY = 20
_EXCERPT_BYTES = 20_000


@dataclass(frozen=True)
class Corpus:
    """train, held_out: int32 tokens [N], every file behind a BEGIN; held_out_files: their paths in the library;
    sample: the beginning of a held-out file; excerpt: another one whole, its path and its text."""

    train: torch.Tensor
    held_out: torch.Tensor
    train_files: int
    held_out_files: list[str]
    sample: str
    excerpt: tuple[str, str]

    def facts(self) -> dict[str, object]:
        """What a model card says of the data."""
        return {
            "source": f"standard library of Python {platform.python_version()}: *.py without tests and encodings",
            "licence": LICENCE,
            "train_files": self.train_files,
            "train_bytes": len(self.train) - self.train_files,
            "held_out_files": self.held_out_files,
            "held_out_bytes": len(self.held_out) - len(self.held_out_files),
            "held_out_excerpt": self.excerpt[0],
        }


def library() -> Path:
    """Where the standard library's sources are."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(root: Path | None = None, sample_bytes: int = 1024) -> Corpus:
    """Of the files in their order every twentieth is held out."""
    root = root or library()
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    files = {name: (root / name).read_bytes() for name in names if not _SKIPPED & set(name.split("/"))}
    files = [(name, data) for name, data in files.items() if len(data) >= _SHORTEST]
    parts = [[], []]
    for i, file in enumerate(files):
        parts[i % _HELD_OUT_EVERY == _HELD_OUT_EVERY // 2].append(file)
    train, held_out = parts
    # The first whose beginning is long and plain.
    sample = next(data[:sample_bytes] for _, data in held_out if len(data) >= sample_bytes and data.isascii())
    # The shortest that is long enough for several sequences, or the longest.
    plain = sorted((file for file in held_out if file[1].isascii()), key=lambda file: len(file[1]))
    name, text = next((file for file in plain if len(file[1]) >= _EXCERPT_BYTES), plain[-1])
    tokens = [_tokens([data for _, data in part]) for part in (train, held_out)]
    return Corpus(*tokens, len(train), [name for name, _ in held_out], sample.decode(), (name, text.decode()))


def draw(tokens: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [count, 1 + length]: random pieces of the text, each behind a BEGIN, wherever they lie."""
    begin = torch.randint(len(tokens) - length + 1, (count, 1), generator=generator, device=tokens.device)
    return _behind_begin(tokens[begin + torch.arange(length, device=tokens.device)])


def pieces(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """int64 [N // length, 1 + length]: the whole text, but for its end, in pieces that do not overlap."""
    return _behind_begin(tokens[: len(tokens) // length * length].view(-1, length))


def _behind_begin(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x.long(), (1, 0), value=BEGIN)


def _tokens(texts: list[bytes]) -> torch.Tensor:
    parts = []
    for text in texts:
        parts += [torch.tensor([BEGIN], dtype=torch.int32), torch.frombuffer(bytearray(text), dtype=torch.uint8).int()]
    return torch.cat(parts)
