"""What the headers of safetensors files say of their tensors, as the safetensors library reads and checks them.

The library refuses a file whose header is no valid JSON, whose tensors overlap or leave gaps, and whose size is not
what the header says. The caps here are for what it accepts: a header may be written by anybody, and the model's plan
takes memory for each tensor that it names.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dsa_layers.arguments import shown_json
from dsa_layers.errors import CheckpointError
from dsa_layers.untrusted_files import file_size

MAX_HEADER = 2**25  # bytes, of a checkpoint's files together; of the largest that is published 20 MB
MAX_NAME = 1024  # characters
MAX_TENSORS = 2**18  # of a checkpoint; the largest that is published has 145,000

_MAX_RANK = 16
_LENGTH_BYTES = 8  # little endian, before the header
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}
_BITS |= dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
_BITS |= dict.fromkeys(("I16", "U16", "F16", "BF16"), 16) | dict.fromkeys(("I32", "U32", "F32"), 32)
_BITS |= dict.fromkeys(("I64", "U64", "F64"), 64)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as its file's header describes it. dtype: the library's name ("BF16"). size: bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    size: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def header_length(directory: Path, file: str) -> int:
    """The bytes of a file's header.

    Raises FileNotFoundError, and CheckpointError for a file that cannot be read or that is shorter.
    """
    path = directory / file
    actual = file_size(path, CheckpointError)
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if length > MAX_HEADER:
        raise CheckpointError(
            f"{file}: not a safetensors file: its first 8 bytes announce a header of {length} bytes; accepted: at most "
            f"{MAX_HEADER}"
        )
    if _LENGTH_BYTES + length > actual:
        raise CheckpointError(f"{file}: truncated: {actual} bytes, its header alone needs {_LENGTH_BYTES + length}")
    return length


def read_header(directory: Path, file: str) -> list[tuple[str, TensorInfo]]:
    """The tensors of one file, in the order of their data. Raises CheckpointError for a file that is no safetensors
    file or that is damaged, and for names and shapes that are not accepted."""
    path = directory / file
    try:
        with safe_open(path, framework="numpy") as stored:
            names = stored.offset_keys()
            if len(names) > MAX_TENSORS:
                raise CheckpointError(f"{file}: holds {len(names)} tensors; accepted: at most {MAX_TENSORS}")
            return [(name, _tensor_info(file, name, stored.get_slice(name))) for name in names]
    except (OSError, SafetensorError) as error:
        said = str(error).removeprefix("Error while deserializing header: ")
        size = path.stat().st_size
        raise CheckpointError(f"{file}: not a safetensors file, or cut short at {size} bytes: {said}") from error


def name_problem(name: str) -> str | None:
    """What is wrong with a tensor's name, as a message ends; None if nothing is."""
    if not name or not name.isprintable() or len(name) > MAX_NAME:
        return f"the tensor name {shown_json(name)}; accepted: 1 to {MAX_NAME} printable characters"
    return None


def _tensor_info(file: str, name: str, stored: object) -> TensorInfo:
    if problem := name_problem(name):
        raise CheckpointError(f"{file}: holds {problem}")
    dtype, shape = stored.get_dtype(), tuple(stored.get_shape())
    if dtype not in _BITS:
        raise CheckpointError(f"{file}: {name} is {dtype}; accepted: {', '.join(_BITS)}")
    if len(shape) > _MAX_RANK:
        raise CheckpointError(f"{file}: {name} has {len(shape)} dimensions; accepted: at most {_MAX_RANK}")
    return TensorInfo(file, dtype, shape, _BITS[dtype] * math.prod(shape) // 8)
