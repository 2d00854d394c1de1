"""Construction of the rotary embedding from a configuration."""

import torch

from dsa_layers.config.model_config import RopeConfig
from dsa_layers.layers.rope import RotaryEmbedding, rope_frequencies, yarn_frequencies, yarn_mscale


def make_rotary(dim: int, rope: RopeConfig) -> RotaryEmbedding:
    """Return the rotary embedding for `dim` channels.

    YaRN multiplies cos and sin by yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim). This ratio is 1
    for families whose configurations do not have these fields.
    """
    device = torch.get_default_device()
    # Compute on the CPU. On the meta device torch would import Dynamo, which takes two seconds.
    with torch.device("cpu"):
        frequencies, scale = _frequencies(dim, rope)
    return RotaryEmbedding(frequencies.to(device), scale)


def _frequencies(dim: int, rope: RopeConfig) -> tuple[torch.Tensor, float]:
    if rope.yarn is None:
        return rope_frequencies(dim, rope.theta), 1.0
    yarn = rope.yarn
    frequencies = yarn_frequencies(
        dim,
        rope.theta,
        factor=yarn.factor,
        original_length=yarn.original_max_position_embeddings,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
    )
    scale = yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return frequencies, scale
