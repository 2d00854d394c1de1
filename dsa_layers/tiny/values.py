"""Random values for the tensors of a manifest."""

import re

import torch


def random_values(name: str, shape: tuple[int, ...], generator: torch.Generator, experts: int) -> torch.Tensor:
    """Values at which every part has an effect: activations of order 1, logits that spread, norms that are not 1.

    experts: the number of experts that a table of experts names
    """
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
