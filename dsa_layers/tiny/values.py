"""Random tensors for a manifest, in the dtypes that it names."""

import re

import torch

from dsa_layers.families.manifest import Manifest
from dsa_layers.io.published_format import as_published, scales_of, shape_of_values


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
        values = _random_values(name, shape_of_values(name, manifest), generator, experts)
        tensors |= as_published(name, values, manifest, scales, use_ue8m0=use_ue8m0)
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
