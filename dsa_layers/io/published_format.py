"""Values as a family's manifest has them: in a float dtype, or quantised, with their scale beside them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from dsa import per_block_cast_to_fp8
from dsa_layers.families.manifest import SCALE_SUFFIX, Manifest
from dsa_layers.io.fp4 import quantize_fp4

_TORCH_DTYPE = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64, "F8_E8M0": torch.float8_e8m0fnu}
_QUANTIZED = ("F8_E4M3", "I8")


def scales_of(manifest: Manifest) -> dict[str, str]:
    """Quantised weight -> its scale, under the name that its family gives it."""
    weights = [name for name, (_, dtype) in manifest.items() if dtype in _QUANTIZED]
    spellings = {name: (name + SCALE_SUFFIX, name.removesuffix("weight") + "scale") for name in weights}
    return {name: next(scale for scale in names if scale in manifest) for name, names in spellings.items()}


def shape_of_values(name: str, manifest: Manifest) -> tuple[int, ...]:
    """The shape of a tensor before it is quantised: FP4 (I8) packs two columns in one."""
    shape, dtype = manifest[name]
    return (shape[0], 2 * shape[1]) if dtype == "I8" else shape


def as_published(
    name: str, values: torch.Tensor, manifest: Manifest, scales: Mapping[str, str], *, use_ue8m0: bool
) -> dict[str, torch.Tensor]:
    """The tensor `name` of the manifest, and its scale if it has one, made of `values`.

    scales: `scales_of` the manifest; use_ue8m0: FP8 scales are powers of two.
    Raises ValueError for a dtype that is not written: all but BF16, F32, I64, F8_E4M3 and FP4 (I8).
    """
    dtype = manifest[name][1]
    if dtype in _QUANTIZED:
        values = values.float()
        q, scale = quantize_fp4(values) if dtype == "I8" else per_block_cast_to_fp8(values, use_ue8m0)
        return {name: q, scales[name]: scale.to(_TORCH_DTYPE[manifest[scales[name]][1]])}
    if dtype not in _TORCH_DTYPE:
        accepted = ", ".join((*_TORCH_DTYPE, *_QUANTIZED))
        raise ValueError(f"manifest: {name} is {dtype}; tensors that can be written are {accepted}")
    return {name: values.to(_TORCH_DTYPE[dtype]).contiguous()}


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], *, like: Path) -> None:
    """Write a safetensors file with the permissions of the file `like`. The library's own ignore the umask."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from None
    path.chmod(like.stat().st_mode)
