"""Rotary embedding as a configuration describes it."""

from dsa_layers.families.parts import RopeConfig
from dsa_layers.layers.rope import RotaryEmbedding, rope_frequencies, yarn_frequencies, yarn_mscale


def make_rotary(dim: int, rope: RopeConfig) -> RotaryEmbedding:
    """The embedding of `dim` channels. YaRN multiplies cos and sin by the ratio of mscale's term and mscale_all_dim's,
    which is 1 for families whose angles do not depend on these."""
    if rope.yarn is None:
        return RotaryEmbedding(rope_frequencies(dim, rope.theta))
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
    return RotaryEmbedding(frequencies, scale)
