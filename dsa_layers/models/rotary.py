"""Rotary embedding as a configuration describes it."""

import torch

from dsa_layers.config.model_config import RopeConfig
from dsa_layers.layers.rope import RotaryEmbedding, rope_frequencies, yarn_frequencies, yarn_mscale


def make_rotary(dim: int, rope: RopeConfig) -> RotaryEmbedding:
    """The embedding of `dim` channels. YaRN multiplies cos and sin by the ratio of mscale's term and mscale_all_dim's,
    which is 1 for families whose angles do not depend on these."""
    device = torch.get_default_device()
    # On the meta device torch would import all of Dynamo for this, which takes two seconds.
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
