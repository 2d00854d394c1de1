"""The Python sources of this machine that are worth learning from: the standard library's, and installed packages'."""

import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from pathlib import Path, PurePath

# Folders of tests, of tables, and of other packages' sources.
_NOT_OF_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
_VENDORED = {"_vendor", "vendor", "vendored", "_vendored", "extern", "externals", "third_party", "thirdparty"}
_NOT_OF_PACKAGE = {"test", "tests", "testing", "examples", "benchmarks"} | _VENDORED

_SHORTEST, _LONGEST = 256, 256 * 1024  # bytes
_LONGEST_LINE = 400
_LEAST_LETTERS = 0.5  # of what is not white space; tables have fewer
_HEAD = 2000  # characters in which a file says that it is generated
_GENERATED = re.compile(
    r"auto-?\s?generated|automatically generated|generated (?:by|from)|do not (?:edit|modify)", re.IGNORECASE
)


def library() -> Path:
    """Where the standard library's sources are."""
    return Path(sysconfig.get_paths()["stdlib"])


def library_files(root: Path) -> list[tuple[str, bytes]]:
    """(path in `root`, content) in the paths' order, without tests and encodings."""
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    files = ((name, (root / name).read_bytes()) for name in names if not _NOT_OF_LIBRARY & set(name.split("/")))
    return [(name, data) for name, data in files if len(data) >= _SHORTEST]


def package_files(distribution: Distribution, most: int) -> list[tuple[str, str]]:
    """(path, text) of the package's readable sources in the paths' order, without tests and what it vendors. Of a
    larger package about `most` bytes, files from everywhere in it."""
    own = (path for path in distribution.files or [] if path.suffix == ".py" and ".." not in path.parts)
    names = [str(path) for path in own if not _NOT_OF_PACKAGE & set(path.parts)]
    files, size = [], 0
    for name in sorted(names, key=lambda name: zlib.crc32(name.encode())):
        path = Path(distribution.locate_file(PurePath(name)))
        text = readable(path.read_bytes()) if path.is_file() else None
        if text is not None:
            files.append((name, text))
            size += len(text)
        if size >= most:
            break
    return sorted(files)


def readable(data: bytes) -> str | None:
    """A source file's text, or None for one that nobody wrote to be read: not UTF-8, generated, a table, very short or
    very long."""
    if not _SHORTEST <= len(data) <= _LONGEST:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    if _GENERATED.search(text[:_HEAD]) or max(map(len, text.splitlines())) > _LONGEST_LINE:
        return None
    dense = "".join(text.split())
    return text if sum(map(str.isalpha, dense)) >= _LEAST_LETTERS * len(dense) else None


class Duplicates:
    """Files that have much of their text in common, by their longer lines.

    held_out  texts that nothing similar may be trained on
    `admits` says whether a file shares less than half of its lines, or of theirs, with each of these, and less than
    most with all files that it admitted before.
    """

    _LINE = 25  # characters from which on a line is somebody's own
    _FEWEST = 4  # lines that say something about a file
    _OF_HELD_OUT, _OF_SEEN = 0.5, 0.7

    def __init__(self, held_out: Iterable[str]) -> None:
        self._held_out = [self._lines(text) for text in held_out]
        self._files_of: dict[int, list[int]] = {}
        for i, lines in enumerate(self._held_out):
            for line in lines:
                self._files_of.setdefault(line, []).append(i)
        self._seen: set[int] = set()

    def admits(self, text: str) -> bool:
        lines = set(self._lines(text))
        if len(lines) >= self._FEWEST:
            shared: dict[int, int] = {}
            for line in lines:
                for i in self._files_of.get(line, ()):
                    shared[i] = shared.get(i, 0) + 1
            for i, count in shared.items():
                fewer = min(len(lines), len(self._held_out[i]))
                if count >= max(self._FEWEST, self._OF_HELD_OUT * fewer):
                    return False
            if len(lines & self._seen) > self._OF_SEEN * len(lines):
                return False
        self._seen |= lines
        return True

    def _lines(self, text: str) -> set[int]:
        return {hash(line) for line in _stripped(text) if len(line) >= self._LINE}


def _stripped(text: str) -> Iterator[str]:
    return (line.strip() for line in text.splitlines())
