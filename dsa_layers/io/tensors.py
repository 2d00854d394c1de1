"""Descriptions, dtypes, quantisation and slices of the tensors of checkpoints and models."""

import math
import re
from typing import NamedTuple

import torch

from dsa import per_block_cast_to_fp8
from dsa.reference import quantize_fp4
from dsa_layers.errors import CheckpointError

SCALE_SUFFIX = "_scale_inv"
BLOCK_SCALE_SUFFIX = "_block_scale"  # scales that a model derives from an FP4 weight; no checkpoint contains them

FLOATS = ("BF16", "F16", "F32", "F64")
KINDS = {"F8_E4M3": "FP8", "I8": "FP4"}  # {dtype of a quantised weight: its format}
DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

# A slice of a tensor: an int or a slice object per leading dimension. () is the whole tensor.
Index = tuple[int | slice, ...]


class TensorInfo(NamedTuple):
    """The description of a tensor: its shape, its dtype's name in safetensors ("BF16") and the name of its file."""

    shape: tuple[int, ...]
    dtype: str
    file: str = ""

    @property
    def size(self) -> int:
        """The number of bytes, from the number of bits in the dtype's name: BF16, F8_E4M3, I64."""
        bits = 8 if self.dtype == "BOOL" else int(re.search(r"\d+", self.dtype)[0])
        return math.prod(self.shape) * bits // 8

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


_FUSED = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<projection>gate_up_proj|down_proj)(?P<scale>_scale_inv|_block_scale)?"
)


def quantize(values: torch.Tensor, kind: str, *, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (quantised weight, scale). kind: "FP4" or "FP8"; use_ue8m0: whether FP8 scales are powers of two."""
    return quantize_fp4(values) if kind == "FP4" else per_block_cast_to_fp8(values, use_ue8m0)


def split_experts(name: str, shape: tuple[int, ...], experts: int | None = None, first: int = 0) -> dict[str, Index]:
    """Return {name of a part: its slice} for a tensor that contains all experts, with one part per expert and
    projection. For any other tensor, return {name: ()}, where () is the whole tensor.

    With E experts, I inner and H hidden channels, `experts.gate_up_proj` [E, 2 I, H] contains, for each expert e, the
    rows of `experts.e.gate_proj.weight` and then the rows of `experts.e.up_proj.weight`. `experts.down_proj` [E, H, I]
    contains `experts.e.down_proj.weight`. Scales, with the suffix `_scale_inv` or `_block_scale`, are split in the same
    way.
    experts: the required E, because a corrupt header can claim 10^9 experts; None accepts any E
    first: the number of the first expert in the names of parts
    Raises CheckpointError for a tensor of all experts with any other shape or number of experts.
    """
    match = _FUSED.fullmatch(name)
    if match is None:
        return {name: ()}
    prefix, projection = match["experts"], match["projection"]
    kind = "weight" + (match["scale"] or "")
    if len(shape) != 3 or 0 in shape or (projection == "gate_up_proj" and shape[1] % 2):
        accepted = "[experts, 2 * inner, hidden]" if projection == "gate_up_proj" else "[experts, hidden, inner]"
        raise CheckpointError(f"has shape {list(shape)}; experts in one tensor are {accepted}")
    if experts not in (None, shape[0]):
        raise CheckpointError(f"has shape {list(shape)}, that is {shape[0]} experts; the model has {experts}")
    if projection == "down_proj":
        return {f"{prefix}.{first + e}.down_proj.{kind}": (e,) for e in range(shape[0])}
    inner = shape[1] // 2
    halves = {"gate_proj": slice(0, inner), "up_proj": slice(inner, 2 * inner)}
    return {f"{prefix}.{first + e}.{half}.{kind}": (e, rows) for e in range(shape[0]) for half, rows in halves.items()}


def sliced(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """Return the shape of the slice `index` of a tensor with shape `shape`."""
    kept = (len(range(*place.indices(n))) for n, place in zip(shape, index) if isinstance(place, slice))
    return (*kept, *shape[len(index) :])
