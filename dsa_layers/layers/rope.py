"""Rotary position embedding: plain and YaRN frequencies, and cos and sin, the arguments of `dsa.apply_rotary`."""

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn

from dsa.runtime.checks import integer, number, shown
from dsa_layers.batch.selectable_keys import cached_property

Angles = tuple[torch.Tensor, torch.Tensor]  # cos and sin, fp32 [T, rope_dim / 2]


def rope_frequencies(dim: int, theta: float) -> torch.Tensor:
    """Return the frequencies f_i = theta^(-2i / dim) for i < dim / 2: fp32 [dim / 2], in radians per position. Raise
    TypeError or ValueError unless dim is an even integer above 0 and theta a finite number above 0."""
    _check(dim, theta)
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def yarn_frequencies(
    dim: int, theta: float, *, factor: float, original_length: int, beta_fast: float = 32.0, beta_slow: float = 1.0
) -> torch.Tensor:
    """Return YaRN's frequencies. Frequencies with many rotations within `original_length` positions stay unchanged;
    those with few rotations are divided by `factor`; those in between are interpolated.

    c(r) = dim ln(original_length / (2 pi r)) / (2 ln theta) is the index i of the frequency that makes r rotations
    within `original_length` positions. low = max(floor(c(beta_fast)), 0) and high = min(ceil(c(beta_slow)), dim - 1).
    The result is f_i * (1 - ramp_i) + f_i / factor * ramp_i, fp32 [dim / 2], where f_i is frequency i of
    `rope_frequencies`, and ramp_i = clamp((i - low) / (high - low), 0, 1). If high = low, 0.001 replaces high - low.
    Source: YaRN (arXiv 2309.00071) as in DeepSeek-V3's inference code.
    """

    _check(dim, theta)

    def channel_of(rotations: float) -> float:
        return dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel_of(beta_fast)), 0)
    high = min(math.ceil(channel_of(beta_slow)), dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = rope_frequencies(dim, theta)
    return frequencies / factor * ramp + frequencies * (1 - ramp)


def _check(dim: int, theta: float) -> None:
    if integer("dim", dim, at_least=2) % 2:
        raise ValueError(f"dim: must be even, got {dim}")
    if not 0 < number("theta", theta) < math.inf:
        raise ValueError(f"theta: must be a finite number above 0, got {shown(theta)}")


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return 0.1 * mscale * ln(factor) + 1, or 1 if factor <= 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class RotaryEmbedding(nn.Module):
    """cos and sin of position * frequency, times `scale`: positions int64 [T] -> (cos, sin), each fp32 [T, dim / 2].

    frequencies: fp32 [dim / 2] from `rope_frequencies` or `yarn_frequencies`. A non-persistent buffer stores their bits
    as int32, so that casting the model to another dtype does not round them.
    """

    def __init__(self, frequencies: torch.Tensor, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("frequency_bits", _bits(frequencies), persistent=False)

    @property
    def frequencies(self) -> torch.Tensor:
        return self.frequency_bits.view(torch.float32)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None] * self.frequencies  # int64 * fp32 -> fp32
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.scale == 1 else (cos * self.scale, sin * self.scale)


class LearnedRotaryEmbedding(RotaryEmbedding):
    """`RotaryEmbedding` with the frequencies f_i * exp(alpha_i) (LeRoPE). Parameter: alpha fp32 [dim / 2], which
    requires no gradient, because `dsa.apply_rotary` computes none for cos and sin.

    Source: `MistralLarge4TextRotaryEmbedding` of transformers 5.
    """

    def __init__(self, frequencies: torch.Tensor, scale: float = 1.0) -> None:
        super().__init__(frequencies, scale)
        self.alpha = nn.Parameter(torch.zeros(len(frequencies), dtype=torch.float32), requires_grad=False)

    @property
    def frequencies(self) -> torch.Tensor:
        return self.frequency_bits.view(torch.float32) * self.alpha.float().exp()


def _bits(frequencies: torch.Tensor) -> torch.Tensor:
    """Return the bits of the fp32 frequencies as int32, which `Module.to(dtype)` leaves unchanged. If a frequency were
    rounded, the position would multiply the error."""
    return frequencies.float().view(torch.int32)


class RopeAngles(tuple[torch.Tensor, torch.Tensor]):
    """(cos, sin), each fp32 [T, rope_dim / 2], and the inverse rotation `back`, which several layers share."""

    @classmethod
    def of(cls, rope: tuple[torch.Tensor, torch.Tensor]) -> Self:
        """Return `rope` as RopeAngles. If `rope` already is one, return the same object, which may have cached
        `back`."""
        return rope if isinstance(rope, cls) else cls(rope)

    @cached_property
    def back(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, -sin), computed once."""
        cos, sin = self
        return cos, -sin


class JointRotary(nn.Module):
    """The angles of several `RotaryEmbedding`s with the same number of channels, computed together.

    embeddings: list of (RotaryEmbedding, ratio); pairs with ratio 1 come first. The angles are at the positions
    max(position + 1 - ratio, 0): for ratio 1 the tokens' positions; else, for each token, the position of the
    compressed entry of `ratio` tokens that ends with this token.
    forward(positions int64 [T]) -> list of one `RopeAngles` per pair
    """

    def __init__(self, embeddings: Sequence[tuple[RotaryEmbedding, int]]) -> None:
        super().__init__()
        ratios = [ratio for _, ratio in embeddings]
        self.own = ratios.count(1)
        self.scales = [embedding.scale for embedding, _ in embeddings]
        first = embeddings[0][0].frequencies
        # torch.stack on meta tensors would import all of Dynamo, which adds two seconds to loading a checkpoint.
        frequencies = first.new_empty(len(embeddings), 1, len(first))
        for row, (embedding, _) in zip(frequencies, embeddings):
            row.copy_(embedding.frequencies)
        self.register_buffer("frequency_bits", _bits(frequencies), persistent=False)
        behind = torch.tensor([[1 - ratio] for ratio in ratios], device=frequencies.device)
        self.register_buffer("behind", behind, persistent=False)

    def forward(self, positions: torch.Tensor) -> list[RopeAngles]:
        angles = (positions + self.behind).clamp_(min=0)[..., None] * self.frequency_bits.view(torch.float32)
        cos, sin = angles.cos(), angles.sin()
        found = []
        for pair, scale in zip(zip(cos, sin), self.scales):
            found.append(RopeAngles(pair if scale == 1 else (part * scale for part in pair)))
        # One kernel negates sin for all pairs with ratio 1.
        if all(scale == 1 for scale in self.scales):
            for own, back in zip(found, -sin[: self.own]):
                own.back = own[0], back
        return found


def make_rotary(dim: int, rope: Any, kind: type[RotaryEmbedding] = RotaryEmbedding) -> RotaryEmbedding:
    """Return the rotary embedding, an instance of `kind`, for `dim` channels. rope: a
    `dsa_layers.config.model_config.RopeConfig`. YaRN multiplies cos and sin by
    yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)."""
    device = torch.get_default_device()
    # Compute on the CPU. On the meta device torch would import Dynamo, which takes two seconds.
    with torch.device("cpu"):
        frequencies, scale = _frequencies(dim, rope)
    return kind(frequencies.to(device), scale)


def _frequencies(dim: int, rope: Any) -> tuple[torch.Tensor, float]:
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
