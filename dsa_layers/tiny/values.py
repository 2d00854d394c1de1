"""Random tensors for a manifest, in the dtypes that it names."""

import re

import torch

from dsa import per_block_cast_to_fp8
from dsa_layers.checkpoint import SCALE_SUFFIX
from dsa_layers.checkpoint.fp4 import quantize_fp4
from dsa_layers.families.family import Manifest

_TORCH_DTYPE = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64, "F8_E8M0": torch.float8_e8m0fnu}
_QUANTIZED = ("F8_E4M3", "I8")


def scales_of(manifest: Manifest) -> dict[str, str]:
    """Quantised weight -> its scale, under the name that its family gives it."""
    weights = [name for name, (_, dtype) in manifest.items() if dtype in _QUANTIZED]
    spellings = {name: (name + SCALE_SUFFIX, name.removesuffix("weight") + "scale") for name in weights}
    return {name: next(scale for scale in names if scale in manifest) for name, names in spellings.items()}


def random_tensors(
    names: list[str], manifest: Manifest, generator: torch.Generator, *, experts: int, use_ue8m0: bool
) -> dict[str, torch.Tensor]:
    """The tensors `names`, of which each scale comes with its weight. They follow from the state of `generator`,
    whether the manifest is of a quantised checkpoint or not.

    experts: that a table of experts may name; use_ue8m0: FP8 scales are powers of two.
    """
    scales = scales_of({name: manifest[name] for name in names})
    made_with_weight = set(scales.values())
    tensors = {}
    for name in names:
        if name in made_with_weight:
            continue
        shape, dtype = manifest[name]
        # What is packed has half the columns.
        values = _random_values(name, (shape[0], 2 * shape[1]) if dtype == "I8" else shape, generator, experts)
        if dtype in _QUANTIZED:
            q, scale = quantize_fp4(values) if dtype == "I8" else per_block_cast_to_fp8(values, use_ue8m0)
            tensors[name], tensors[scales[name]] = q, scale.to(_TORCH_DTYPE[manifest[scales[name]][1]])
        else:
            tensors[name] = values.to(_TORCH_DTYPE[dtype])
    return tensors


def _random_values(name: str, shape: tuple[int, ...], generator: torch.Generator, experts: int) -> torch.Tensor:
    """Values at which every part has an effect: activations of order 1, logits that spread, norms that are not 1."""
    if name.endswith("tid2eid"):
        return torch.rand(shape[0], experts, generator=generator, device="cpu").argsort(-1)[:, : shape[1]].contiguous()
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    if name.endswith("norm.weight") or re.search(r"hc_\w+_scale$", name):
        return 1 + 0.1 * values
    if name.endswith(("k_norm.bias", "e_score_correction_bias", "gate.bias")):
        return 0.1 * values
    if name.endswith(("attn_sink", "ape", "_base")):
        return 0.5 * values
    if name.endswith(("embed_tokens.weight", "embed.weight")):
        return values
    # Of unit gain, except the heads: their rows see a normalised input, and twice the gain sharpens the softmax.
    gain = 2 if name.endswith("head.weight") else 1
    return values * gain * shape[1] ** -0.5
