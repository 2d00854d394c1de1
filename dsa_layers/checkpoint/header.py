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
from typing import Any

from dsa_layers.checkpoint.errors import CheckpointError
from dsa_layers.untrusted_files import file_size, shown

MAX_HEADER = 100_000_000  # bytes; the safetensors library has the same limit
MAX_NAME = 1024  # bytes, as written in JSON
MAX_TENSORS = 2**18  # of a checkpoint; the largest that is published has 145,000

_MAX_ENTRY = 2048
_MAX_METADATA = 2**20
_MAX_COUNT = 2**63 - 1  # torch counts elements, and files their bytes, in int64

_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}
_BITS |= dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
_BITS |= dict.fromkeys(("I16", "U16", "F16", "BF16"), 16) | dict.fromkeys(("I32", "U32", "F32"), 32)
_BITS |= dict.fromkeys(("I64", "U64", "F64"), 64)

_SPACE = rb"[ \t\r\n]*"
_START = re.compile(rb"\{" + _SPACE)
_NAME = re.compile(rb'"((?:[^"\\]|\\.){0,%d})"%b:%b' % (MAX_NAME, _SPACE, _SPACE), re.DOTALL)
_ENTRY = re.compile(rb"\{[^{}]{0,%d}\}" % _MAX_ENTRY)
_NEXT = re.compile(_SPACE + rb"([,}])" + _SPACE)
_FIELDS = {"dtype", "shape", "data_offsets"}


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


def read_header(directory: Path, file: str) -> list[tuple[str, TensorInfo]]:
    """The tensors of one file in the order of their data, once its size is known to be what the header says.

    Raises FileNotFoundError, and CheckpointError for a file that is no safetensors file or that contradicts itself.
    """
    path = directory / file
    actual = file_size(path, CheckpointError)
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if actual >= 8 and length > MAX_HEADER:
                raise CheckpointError(
                    f"{file}: not a safetensors file: its first 8 bytes announce a header of {length} bytes; "
                    f"accepted: at most {MAX_HEADER}"
                )
            if 8 + length > actual:
                raise CheckpointError(f"{file}: truncated: {actual} bytes, its header alone needs {8 + length}")
            header = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error

    if header.count(b'"data_offsets"') > MAX_TENSORS:
        raise CheckpointError(f"{file}: holds more than {MAX_TENSORS} tensors")
    entries: dict[str, TensorInfo] = {}
    for name, fields in _entries(file, header):
        if name in entries:
            raise CheckpointError(f"{file}: {name} is there twice")
        entries[name] = _tensor_info(file, name, fields)
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
        return f"the tensor name {shown(name)}; accepted: 1 to {MAX_NAME} printable characters"
    return None


def _entries(file: str, header: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each tensor's name and fields, as parsed and not yet checked."""
    match = _START.match(header)
    if match is None:
        raise _malformed(file, header, 0, "a JSON object")
    place = match.end()
    closed = header.startswith(b"}", place)
    place += closed
    while not closed:
        name = _NAME.match(header, place)
        if name is None:
            raise _malformed(file, header, place, f"a tensor's name of at most {MAX_NAME} bytes")
        if name[1] == b"__metadata__":
            place = _end_of_metadata(file, header, name.end())
        else:
            entry = _ENTRY.match(header, name.end())
            if entry is None:
                raise _malformed(file, header, name.end(), f"a tensor's fields, an object of up to {_MAX_ENTRY} bytes")
            yield _parsed(file, header, name, entry)
            place = entry.end()
        separator = _NEXT.match(header, place)
        if separator is None:
            raise _malformed(file, header, place, "',' or '}'")
        place, closed = separator.end(), separator[1] == b"}"
    if header[place:].strip(b" \t\r\n"):
        raise _malformed(file, header, place, "nothing behind the JSON object")


def _parsed(file: str, header: bytes, name: re.Match[bytes], entry: re.Match[bytes]) -> tuple[str, dict[str, Any]]:
    try:
        ((text, fields),) = json.loads(f"{{{header[name.start() : entry.end()].decode()}}}").items()
    except (ValueError, RecursionError) as error:
        raise _malformed(file, header, name.start(), "JSON", error) from error
    if problem := name_problem(text):
        raise CheckpointError(f"{file}: holds {problem}")
    # The names as they are written: without escapes, and none twice. None of the values may hold a quoted name.
    if fields.keys() != _FIELDS or any(entry[0].count(b'"%b"' % name.encode()) != 1 for name in _FIELDS):
        raise CheckpointError(f"{file}: {text} has the fields {shown(list(fields))}; accepted: {sorted(_FIELDS)}")
    return text, fields


def _end_of_metadata(file: str, header: bytes, place: int) -> int:
    # Latin-1 leaves every byte a character, so places in the text are places in the header.
    text = header[place : place + _MAX_METADATA].decode("latin-1")
    try:
        _, length = json.JSONDecoder().raw_decode(text)
        metadata = json.loads(header[place : place + length])
    except (ValueError, RecursionError) as error:
        raise _malformed(file, header, place, f"metadata, an object of up to {_MAX_METADATA} bytes", error) from error
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ is {shown(metadata)}; accepted: an object of strings")
    return place + length


def _malformed(file: str, header: bytes, place: int, expected: str, error: Exception | None = None) -> CheckpointError:
    found = f"found {shown(header[place : place + 40])}" if error is None else f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"{file}: not a safetensors file: byte {place} of its header should begin {expected}; {found}"
    )


def _tensor_info(file: str, name: str, fields: dict[str, Any]) -> TensorInfo:
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"{file}: {name} has dtype {shown(dtype)}; accepted: {', '.join(_BITS)}")
    # A dimension of 0 does not excuse the others: views and slices multiply them without it.
    if not _are_counts(shape) or math.prod(n for n in shape if n) > _MAX_COUNT:
        raise CheckpointError(
            f"{file}: {name} has shape {shown(shape)}; accepted: a list of integers of at least 0, "
            "with a product below 2^63"
        )
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= _MAX_COUNT:
        raise CheckpointError(
            f"{file}: {name} has data_offsets {shown(offsets)}; accepted: [begin, end], integers from 0 to 2^63"
        )
    info = TensorInfo(file, dtype, tuple(shape), offsets[0], offsets[1] - offsets[0])
    if 8 * info.size != _BITS[dtype] * math.prod(shape):
        raise CheckpointError(f"{file}: {name} is {dtype} {shown(shape)} but has {info.size} bytes")
    return info


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
