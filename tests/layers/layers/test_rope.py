"""Rotary embeddings: YaRN's frequencies, large positions, cast models, and several at once (`JointRotary`)."""

import pytest
import torch
from torch import nn

from dsa_layers.layers.rope import JointRotary, RotaryEmbedding, rope_frequencies, yarn_frequencies, yarn_mscale


def test_yarn_keeps_high_frequencies_and_divides_low_ones():
    got, plain = yarn_frequencies(64, 1e4, factor=40.0, original_length=4096), rope_frequencies(64, 1e4)
    assert torch.equal(got[:11], plain[:11]) and torch.allclose(got[23:], plain[23:] / 40)
    assert yarn_mscale(40.0, 1.0) ** 2 == pytest.approx(1.87385, abs=1e-5)
    assert yarn_mscale(1.0, 1.0) == 1.0


# fp32 rounds odd positions above 2**24.
POSITIONS = torch.cat((torch.arange(70), 2**20 + torch.arange(-40, 40), 2**24 + torch.arange(40)))


@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_angles_are_fp32_products(scale):
    frequencies = rope_frequencies(64, 1e4)
    cos, sin = RotaryEmbedding(frequencies, scale)(POSITIONS)
    angles = POSITIONS.float()[:, None] * frequencies
    assert torch.equal(cos, angles.cos() * scale) and torch.equal(sin, angles.sin() * scale)
    assert cos.dtype == sin.dtype == torch.float32


def test_joint_angles_are_those_of_each_embedding():
    main, other = RotaryEmbedding(rope_frequencies(64, 1e4)), RotaryEmbedding(rope_frequencies(64, 2e5), 1.25)
    of_ratios = [(main, 1), (other, 1), (other, 4), (other, 128)]
    for angles, (embedding, ratio) in zip(JointRotary(of_ratios)(POSITIONS), of_ratios, strict=True):
        cos, sin = embedding((POSITIONS + 1 - ratio).clamp(min=0))
        assert torch.equal(angles[0], cos) and torch.equal(angles[1], sin)
        assert angles.back[0] is angles[0] and torch.equal(angles.back[1], -sin)


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.double])
def test_frequencies_stay_fp32_in_a_cast_model(cast):
    rotary = RotaryEmbedding(rope_frequencies(64, 1e4))
    model = nn.ModuleList((rotary, JointRotary([(rotary, 1), (rotary, 4)])))
    expected = [rotary(POSITIONS), *model[1](POSITIONS)]
    cast(model)
    assert not model.state_dict()
    for got, angles in zip([rotary(POSITIONS), *model[1](POSITIONS)], expected, strict=True):
        assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(got, angles, strict=True))
