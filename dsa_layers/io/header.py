"""The header of a safetensors file, read and checked without trust in anything that it says.

8 bytes, little endian, are the length of a JSON object; the data follows it. The object maps a tensor's name to
{"dtype": ..., "shape": [...], "data_offsets": [begin, end]}, and "__metadata__" to strings. It is read entry by entry,
so that what an entry costs is bounded before it is parsed: JSON of 100 MB can be gigabytes of Python objects.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dsa_layers.arguments import shown_json
from dsa_layers.errors import CheckpointError
from dsa_layers.untrusted_files import file_size

MAX_HEADER = 100_000_000  # bytes, of a checkpoint's files together; the safetensors library has this limit for each
MAX_NAME = 1024  # bytes, as written in JSON
MAX_TENSORS = 2**18  # of a checkpoint; the largest that is published has 145,000

_MAX_ENTRY = 2048
_MAX_METADATA = 2**20
_WINDOW = 2**21  # bytes: more than a name with metadata
_MAX_RANK = 16
_MAX_COUNT = 2**63 - 1  # torch counts elements, and files their bytes, in int64

_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}
_BITS |= dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
_BITS |= dict.fromkeys(("I16", "U16", "F16", "BF16"), 16) | dict.fromkeys(("I32", "U32", "F32"), 32)
_BITS |= dict.fromkeys(("I64", "U64", "F64"), 64)

_SPACE = rb"[ \t\r\n]*"
_START = re.compile(rb"\{" + _SPACE)
_NAME = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"%b:%b' % (_SPACE, _SPACE), re.DOTALL)
_ENTRY = re.compile(rb"\{[^{}]{0,%d}\}" % _MAX_ENTRY)
_NEXT = re.compile(_SPACE + rb"([,}])" + _SPACE)
_FIELDS = {"dtype", "shape", "data_offsets"}
_QUOTED_FIELDS = [f'"{name}"'.encode() for name in _FIELDS]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as its file's header describes it. dtype is safetensors' name ("BF16"); offset and size in bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def header_length(directory: Path, file: str, most: int = MAX_HEADER) -> int:
    """Bytes in the header of a file, as the file announces them. most: what the headers of other files leave of
    MAX_HEADER.

    Raises FileNotFoundError, and CheckpointError for a file that is no safetensors file or has not room for its header.
    """
    path = directory / file
    actual = file_size(path, CheckpointError)
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if actual >= 8 and length > MAX_HEADER:
        raise CheckpointError(
            f"{file}: not a safetensors file: its first 8 bytes announce a header of {length} bytes; "
            f"accepted: at most {MAX_HEADER}"
        )
    if 8 + length > actual:
        raise CheckpointError(f"{file}: truncated: {actual} bytes, its header alone needs {8 + length}")
    if length > most:
        raise CheckpointError(
            f"{file}: its header has {length} bytes, and the files' headers together more than {MAX_HEADER}; accepted: "
            f"at most {MAX_HEADER} together"
        )
    return length


def read_header(directory: Path, file: str, length: int) -> list[tuple[str, TensorInfo]]:
    """The tensors of one file, whose header has `length` bytes, in the order of their data, once its size is known to
    be what the header says.

    Raises CheckpointError for a file that is no safetensors file or that contradicts itself.
    """
    path = directory / file
    actual = file_size(path, CheckpointError)
    entries: dict[str, TensorInfo] = {}
    try:
        with path.open("rb") as stream:
            stream.seek(8)
            _check_count(file, stream, length)
            for name, fields in _entries(_Header(file, stream, length)):
                if name in entries:
                    raise CheckpointError(f"{file}: {name} is there twice")
                entries[name] = _tensor_info(file, name, fields)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    in_order = sorted(entries.items(), key=lambda entry: (entry[1].offset, entry[1].size))
    end = 0
    for name, info in in_order:
        if info.offset != end:
            raise CheckpointError(f"{file}: {name} starts at byte {info.offset} of the data, expected {end}")
        end += info.size
    if actual != 8 + length + end:
        problem = "truncated" if actual < 8 + length + end else "too long"
        raise CheckpointError(f"{file}: {problem}: {actual} bytes, its header describes {8 + length + end}")
    return in_order


def name_problem(name: str) -> str | None:
    """What is wrong with a tensor's name, as a message ends; None if nothing is."""
    if not name or not name.isprintable() or len(name) > MAX_NAME:
        return f"the tensor name {shown_json(name)}; accepted: 1 to {MAX_NAME} printable characters"
    return None


class _Header:
    """A header of which a window is in memory: all that an entry can need."""

    def __init__(self, file: str, stream: BinaryIO, length: int) -> None:
        self.file, self._stream, self._left = file, stream, length
        self.window, self.place, self._begin = b"", 0, 0

    def more(self) -> None:
        """At least _WINDOW bytes from `place` on, or all that there are."""
        if self._left and len(self.window) - self.place < _WINDOW:
            block = self._stream.read(min(self._left, 2 * _WINDOW))
            self._left = self._left - len(block) if block else 0
            self.window = self.window[self.place :] + block
            self._begin, self.place = self._begin + self.place, 0

    def only_spaces_follow(self) -> bool:
        while not self.window[self.place :].strip(b" \t\r\n"):
            self.place = len(self.window)
            self.more()
            if self.place == len(self.window):
                return True
        return False

    def malformed(self, place: int, expected: str, error: Exception | None = None) -> CheckpointError:
        found = shown_json(self.window[place : place + 40]) if error is None else f"{type(error).__name__}: {error}"
        return CheckpointError(
            f"{self.file}: not a safetensors file: byte {self._begin + place} of its header should begin {expected}; "
            f"{'found ' if error is None else ''}{found}"
        )


def _check_count(file: str, stream: BinaryIO, length: int) -> None:
    """Raises CheckpointError for more tensors than are accepted, which takes less than parsing them. The stream is
    back where it was."""
    start, count = stream.tell(), 0
    while stream.tell() < start + length and (block := stream.read(min(_WINDOW, start + length - stream.tell()))):
        count += block.count(b'"data_offsets"')
        if count > MAX_TENSORS:
            raise CheckpointError(f"{file}: holds more than {MAX_TENSORS} tensors")
    stream.seek(start)


def _entries(header: _Header) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each tensor's name and fields, as parsed and not yet checked."""
    header.more()
    match = _START.match(header.window)
    if match is None:
        raise header.malformed(0, "a JSON object")
    header.place = match.end()
    closed = header.window.startswith(b"}", header.place)
    header.place += closed
    has_metadata = False
    while not closed:
        header.more()
        name = _NAME.match(header.window, header.place)
        if name is None or len(name[1]) > MAX_NAME:
            raise header.malformed(header.place, f"a tensor's name of at most {MAX_NAME} bytes")
        if name[1] == b"__metadata__":
            if has_metadata:
                raise CheckpointError(f"{header.file}: __metadata__ is there twice")
            has_metadata = True
            header.place = _end_of_metadata(header, name.end())
        else:
            entry = _ENTRY.match(header.window, name.end())
            if entry is None:
                raise header.malformed(name.end(), f"a tensor's fields, an object of up to {_MAX_ENTRY} bytes")
            yield _parsed(header, name, entry)
            header.place = entry.end()
        separator = _NEXT.match(header.window, header.place)
        if separator is None:
            raise header.malformed(header.place, "',' or '}'")
        header.place, closed = separator.end(), separator[1] == b"}"
    if not header.only_spaces_follow():
        raise header.malformed(header.place, "nothing behind the JSON object")


def _parsed(header: _Header, name: re.Match[bytes], entry: re.Match[bytes]) -> tuple[str, dict[str, Any]]:
    try:
        text, fields = json.loads(b'["%b",%b]' % (name[1], entry[0]))
    except (ValueError, RecursionError) as error:
        raise header.malformed(name.start(), "JSON", error) from error
    if problem := name_problem(text):
        raise CheckpointError(f"{header.file}: holds {problem}")
    # The names as they are written: without escapes, and none twice. None of the values may hold a quoted name.
    if fields.keys() != _FIELDS or any(entry[0].count(quoted) != 1 for quoted in _QUOTED_FIELDS):
        raise CheckpointError(
            f"{header.file}: {text} has the fields {shown_json(list(fields))}; accepted: {sorted(_FIELDS)}"
        )
    return text, fields


def _end_of_metadata(header: _Header, place: int) -> int:
    # Latin-1 leaves every byte a character, so places in the text are places in the header.
    content = header.window[place : place + _MAX_METADATA]
    try:
        _, length = json.JSONDecoder().raw_decode(content.decode("latin-1"))
        metadata = json.loads(content[:length])
    except (ValueError, RecursionError) as error:
        expected = f"metadata, an object of up to {_MAX_METADATA} bytes"
        raise header.malformed(place, expected, error) from error
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{header.file}: __metadata__ is {shown_json(metadata)}; accepted: an object of strings")
    return place + length


def _tensor_info(file: str, name: str, fields: dict[str, Any]) -> TensorInfo:
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"{file}: {name} has dtype {shown_json(dtype)}; accepted: {', '.join(_BITS)}")
    # A dimension of 0 does not excuse the others: views and slices multiply them without it.
    if not _are_counts(shape) or len(shape) > _MAX_RANK or math.prod(filter(None, shape)) > _MAX_COUNT:
        raise CheckpointError(
            f"{file}: {name} has shape {shown_json(shape)}; accepted: a list of up to {_MAX_RANK} integers of at least "
            "0, with a product below 2^63"
        )
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= _MAX_COUNT:
        raise CheckpointError(
            f"{file}: {name} has data_offsets {shown_json(offsets)}; accepted: [begin, end], integers from 0 to 2^63"
        )
    info = TensorInfo(file, dtype, tuple(shape), offsets[0], offsets[1] - offsets[0])
    if 8 * info.size != _BITS[dtype] * math.prod(shape):
        raise CheckpointError(f"{file}: {name} is {dtype} {shown_json(shape)} but has {info.size} bytes")
    return info


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
