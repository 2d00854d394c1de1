"""Rope's angles at a million tokens: fp32, as the published models compute them, beside float64 formulas."""

import math

import pytest
import torch

from dsa_bench.e2e.stacks import skeleton
from dsa_layers.models.rotary import make_rotary

TOKENS = 2**20
# The most that cos or sin is off among the last 8192 positions, as docs/explanation/performance.md has it: of the
# angle's rounding, by half of 2^-4 at most, and the frequency's, by up to 1.7e-7 of it, a million times.
MOST = {"V3.2": [0.040], "GLM-5": [0.038], "GLM-5.2": [0.052], "V4-Flash": [0.040, 0.056]}


def exact_frequencies(dim, rope):
    """In Python's float64."""
    plain = [rope.theta ** (-2 * i / dim) for i in range(dim // 2)]
    if rope.yarn is None:
        return torch.tensor(plain, dtype=torch.float64)
    yarn = rope.yarn

    def channel(turns):
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = max(math.floor(channel(yarn.beta_fast)), 0), min(math.ceil(channel(yarn.beta_slow)), dim - 1)
    ramps = [min(max((i - low) / (high - low), 0), 1) for i in range(dim // 2)]
    mixed = [f * (1 - ramp) + f / yarn.factor * ramp for f, ramp in zip(plain, ramps)]
    return torch.tensor(mixed, dtype=torch.float64)


def variants(name):
    config = skeleton(name).config
    return config.qk_rope_head_dim, [config.rope, *([config.compress_rope] if name.startswith("V4") else [])]


def error(dim, rope, end):
    """The most that cos or sin is off at the last 8192 positions before `end`."""
    positions = torch.arange(end - 8192, end)
    found, angles = make_rotary(dim, rope)(positions), positions[:, None].double() * exact_frequencies(dim, rope)
    return max((x.double() - y).abs().max().item() for x, y in zip(found, (angles.cos(), angles.sin())))


@pytest.mark.parametrize("name", MOST)
def test_angles_are_off_by_what_fp32_rounds(name):
    dim, ropes = variants(name)
    for rope, most in zip(ropes, MOST[name], strict=True):
        assert 0.9 * most - 0.002 < error(dim, rope, TOKENS) <= most
        assert error(dim, rope, 2**17) < most / 7  # it grows with the position: at 128K tokens it is an eighth
