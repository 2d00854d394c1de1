"""The text: the Python standard library of the machine, and installed packages whose licences allow it."""

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from .licences import collected, licence_of, licence_text
from .source_files import Duplicates, library, library_files, package_files, readable

LICENCE = "Python Software Foundation License Version 2 (PSF-2.0); some modules carry notices of their own"

# Of the library's files every twentieth, as in earlier runs, whose figures can be compared; of a package's fewer.
_HELD_OUT_EVERY, _HELD_OUT_EVERY_OF_PACKAGES = 20, 50
_EXCERPT_BYTES = 20_000

# Of a package: from how many bytes on it is taken, and about how many of them.
SMALLEST_PACKAGE, MOST_OF_PACKAGE = 500_000, 8_000_000


@dataclass(frozen=True)
class Text:
    """train: files' texts. held_out: the same of those that are kept for measuring, by "library" and "packages".
    sample: the beginning of a held-out file of the library; excerpt: another one whole, its path and its text.
    facts: what a model card says of the data; licences: the packages' texts."""

    train: list[str]
    held_out: dict[str, list[str]]
    sample: str
    excerpt: tuple[str, str]
    facts: dict[str, object]
    licences: str


def read_text(
    root: Path | None = None, packages: Iterable[Distribution] | None = None, sample_bytes: int = 2048
) -> Text:
    """root: of the standard library; packages: those of this Python, if None. Files are held out whole, and files that
    are nearly the same as one of these are left out."""
    files = library_files(root or library())
    held_out, train = [], []
    for i, (name, data) in enumerate(files):
        if i % _HELD_OUT_EVERY == _HELD_OUT_EVERY // 2:
            held_out.append((name, data.decode(errors="replace")))
        elif (text := readable(data)) is not None:
            train.append((name, text))
    sources = _accepted(distributions() if packages is None else packages)
    kept = {name: source.split() for name, source in sources.items()}
    others = [text for _, apart in kept.values() for _, text in apart]
    duplicates = Duplicates([text for _, text in held_out] + others)
    admitted = [text for _, text in train if duplicates.admits(text)]
    facts = {
        "source": f"standard library of Python {platform.python_version()}: *.py without tests and encodings",
        "licence": LICENCE,
        "train_files": len(admitted),
        "train_bytes": _size(admitted),
        "held_out_files": [name for name, _ in held_out],
        "held_out_bytes": _size(text for _, text in held_out),
    }
    facts["packages"] = []
    for name, (own, apart) in kept.items():
        texts = [text for _, text in own if duplicates.admits(text)]
        admitted += texts
        facts["packages"].append(
            {
                "name": name,
                "version": sources[name].version,
                "licence": sources[name].licence,
                "files": len(texts),
                "bytes": _size(texts),
                "held_out_files": [path for path, _ in apart],
                "held_out_bytes": _size(text for _, text in apart),
            }
        )
    # The first whose beginning is long and plain.
    plain = [(name, text) for name, text in held_out if text.isascii()]
    sample = next(text[:sample_bytes] for _, text in plain if len(text) >= sample_bytes)
    # The shortest that is long enough for several sequences, or the longest.
    plain.sort(key=lambda file: len(file[1]))
    excerpt = next((file for file in plain if len(file[1]) >= _EXCERPT_BYTES), plain[-1])
    facts["held_out_excerpt"] = excerpt[0]
    licences = collected({f"{name} {source.version}": source.text for name, source in sources.items()})
    measured = {"library": [text for _, text in held_out], "packages": others}
    return Text(admitted, measured, sample, excerpt, facts, licences)


@dataclass(frozen=True)
class _Source:
    version: str
    licence: str
    text: str  # of the licence
    files: list[tuple[str, str]]

    def split(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Files to train on, and those that are held out."""
        parts = [], []
        for i, file in enumerate(self.files):
            every = _HELD_OUT_EVERY_OF_PACKAGES
            parts[i % every == every // 2].append(file)
        return parts


def _accepted(packages: Iterable[Distribution]) -> dict[str, _Source]:
    """Those with an accepted licence, its text, and enough sources; in their names' order."""
    sources = {}
    for distribution in packages:
        licence, text = licence_of(distribution), licence_text(distribution)
        if licence is None or not text or distribution.name in sources:  # the first on the path is what is imported
            continue
        files = package_files(distribution, MOST_OF_PACKAGE)
        if _size(text for _, text in files) >= SMALLEST_PACKAGE:
            sources[distribution.name] = _Source(distribution.version, licence, text, files)
    return dict(sorted(sources.items()))


def _size(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)
