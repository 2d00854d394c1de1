"""Norms and rotary embeddings against float64 formulas and transformers' YaRN."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._runtime_utils import _cast_buffers_to_dtype_and_device

from dsa import apply_rotary
from dsa_layers.layers.norm import LayerNorm, RMSNorm
from dsa_layers.layers.rope import (
    JointRotary,
    RopeAngles,
    RotaryEmbedding,
    rope_frequencies,
    turn,
    yarn_frequencies,
    yarn_mscale,
)


def test_rms_norm():
    norm, x = RMSNorm(32, eps=1e-3), torch.randn(5, 32)
    norm.weight.data = torch.randn(32)
    d = x.double()
    expected = d / (d.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x), expected.float(), rtol=1e-6, atol=1e-6)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_layer_norm_keeps_its_parameters_in_fp32_and_applies_the_bias():
    norm, x = LayerNorm(32, eps=1e-3), torch.randn(5, 32) * 3 + 1
    assert norm.weight.dtype == torch.float32
    norm.weight.data, norm.bias.data = torch.randn(32), torch.randn(32)
    d = x.double()
    d = (d - d.mean(-1, keepdim=True)) / (d.var(-1, unbiased=False, keepdim=True) + 1e-3).sqrt()
    expected = d * norm.weight.double() + norm.bias.double()
    torch.testing.assert_close(norm(x), expected.float(), rtol=1e-5, atol=1e-5)


def test_yarn_frequencies_of_deepseek_v32():
    from transformers import DeepseekV32Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = DeepseekV32Config(
        max_position_embeddings=163840,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    )  # fmt: skip
    expected, attention_scaling = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    got = yarn_frequencies(64, 1e4, factor=40.0, original_length=4096)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert attention_scaling == 1.0
    # MODELS: channels below 10 keep their frequency, from 23 on they are divided by 40.
    plain = rope_frequencies(64, 1e4)
    assert torch.equal(got[:11], plain[:11]) and torch.allclose(got[23:], plain[23:] / 40)
    assert yarn_mscale(40.0, 1.0) ** 2 == pytest.approx(1.87385, abs=1e-5)
    assert yarn_mscale(1.0, 1.0) == 1.0


@pytest.mark.parametrize("dims", ["first", "last"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_by_hand(interleaved, dims):
    x = torch.arange(1.0, 7.0)[None, None]  # one token, one head, six dimensions of which four turn
    angles = torch.tensor([[0.3, 1.1]])
    got = apply_rotary(x, angles.cos(), angles.sin(), interleaved=interleaved, dims=dims)[0, 0].tolist()
    first = 0 if dims == "first" else 2
    expected = list(map(float, range(1, 7)))
    for i, angle in enumerate((0.3, 1.1)):
        a, b = (first + 2 * i, first + 2 * i + 1) if interleaved else (first + i, first + 2 + i)
        c, s = math.cos(angle), math.sin(angle)
        expected[a], expected[b] = (a + 1) * c - (b + 1) * s, (a + 1) * s + (b + 1) * c
    assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_angles_of_positions_in_fp32(scale):
    """Also of those that fp32 rounds."""
    frequencies = rope_frequencies(64, 1e4)
    positions = torch.cat((torch.arange(70), 2**20 + torch.arange(-40, 40), 2**24 + torch.arange(40)))
    cos, sin = RotaryEmbedding(frequencies, scale)(positions)
    angles = positions.float()[:, None] * frequencies
    assert torch.equal(cos, angles.cos() * scale) and torch.equal(sin, angles.sin() * scale)
    assert cos.dtype == sin.dtype == torch.float32


def cast_by_fsdp(module):
    """As FSDP's buffer_dtype casts a module's buffers."""
    buffers = list(module.buffers())
    dtypes = [torch.bfloat16 if buffer.is_floating_point() else None for buffer in buffers]
    _cast_buffers_to_dtype_and_device(buffers, dtypes, torch.device("cpu"))
    return module


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, nn.Module.double, cast_by_fsdp])
def test_angles_of_a_model_that_is_cast(cast):
    """Frequencies stay fp32, and no checkpoint has them."""
    positions = torch.arange(1900, 2000)

    def model():
        rotary = RotaryEmbedding(rope_frequencies(64, 1e4))
        return nn.ModuleList((rotary, JointRotary([(rotary, 1), (rotary, 4)])))

    one, joint = model()
    own, entries = joint(positions)
    kept = cast(model())
    assert not kept.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(kept[0](positions), one(positions), strict=True))
    for got, expected in zip(kept[1](positions), (own, entries), strict=True):
        assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_angles_back_are_computed_once():
    x, rope = torch.randn(3, 8), RotaryEmbedding(rope_frequencies(8, 1e4))(torch.arange(3))
    angles = RopeAngles.of(rope)
    assert RopeAngles.of(angles) is angles and angles.back[1] is angles.back[1]
    assert all(a is b for a, b in zip(angles, rope)) and angles.back[0] is rope[0]
    turned = apply_rotary(apply_rotary(x, *angles, interleaved=True), *angles.back, interleaved=True)
    assert torch.allclose(turned, x, atol=1e-6)


def test_scores_depend_on_the_distance_only():
    rotary = RotaryEmbedding(rope_frequencies(16, 1e4))
    q, k = torch.randn(16, dtype=torch.float64).float(), torch.randn(16)

    def score(m, n):
        turned = [
            apply_rotary(x[None], *rotary(torch.tensor([p])), interleaved=False)[0].double()
            for x, p in ((q, m), (k, n))
        ]
        return (turned[0] @ turned[1]).item()

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)


def test_too_few_dimensions_is_an_error():
    cos = torch.ones(1, 4)
    with pytest.raises(ValueError, match="x: the last dimension must be at least 8 for these cos and sin, got 6"):
        apply_rotary(torch.zeros(1, 6), cos, cos, interleaved=True)


def test_vectors_are_turned_in_place_unless_gradients_are_on():
    x, angles = torch.randn(3, 2, 8), torch.randn(3, 2)
    options = {"interleaved": True, "dims": "last"}
    expected = apply_rotary(x, angles.cos(), angles.sin(), **options)
    kept = turn(x.clone().requires_grad_(), angles.cos(), angles.sin(), **options)
    assert torch.equal(kept, expected) and kept.requires_grad
    with torch.no_grad():
        own = x.clone()
        assert turn(own, angles.cos(), angles.sin(), **options) is own and torch.equal(own, expected)


@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_joint_angles_are_those_of_each_embedding(scale):
    main, other = RotaryEmbedding(rope_frequencies(64, 1e4)), RotaryEmbedding(rope_frequencies(64, 2e5), scale)
    positions = torch.cat((torch.arange(300), 2**20 + torch.arange(40), 2**24 + torch.arange(40)))
    found = JointRotary([(main, 1), (other, 1), (other, 4), (other, 128)])(positions)
    for angles, (embedding, ratio) in zip(found, [(main, 1), (other, 1), (other, 4), (other, 128)], strict=True):
        expected = embedding((positions + 1 - ratio).clamp(min=0))
        assert torch.equal(angles[0], expected[0]) and torch.equal(angles[1], expected[1])
        assert angles.back[0] is angles[0] and torch.equal(angles.back[1], -expected[1])


def test_joint_angles_of_tokens_come_first():
    rotary = RotaryEmbedding(rope_frequencies(64, 1e4))
    with pytest.raises(ValueError, match=r"embeddings: those of ratio 1 must come first, got ratios \[4, 1\]"):
        JointRotary([(rotary, 4), (rotary, 1)])
