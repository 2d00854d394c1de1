"""The norm with rope on the GPU: the bits of the norm and of the rotation, one after the other."""

from functools import partial

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_equal, replays

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# The ends of what each configuration holds, and V4's query heads.
ROTATED = [(64, 64), (72, 64), (128, 8), (136, 64), (256, 128), (264, 8), (512, 64), (512, 512), (520, 64), (1024, 64)]


def inputs(tokens, heads, dim, rotated, dtype=torch.bfloat16):
    """Rows of norms from 1e-3 to 1e3; cos and sin are views of larger tensors."""
    size = torch.logspace(-3, 3, tokens * heads, device="cuda").view(tokens, heads, 1)
    angles = torch.randn(tokens, rotated // 2 + 4, device="cuda")
    x = (torch.randn(tokens, heads, dim, device="cuda") * size).to(dtype)
    return x, angles.cos()[:, : rotated // 2], angles.sin()[:, 4:]


def norm_and_rotary(x, weight, cos, sin):
    return dsa.apply_rotary(dsa.rms_norm(x, weight), cos, sin, interleaved=True, dims="last")


def check(x, weight, cos, sin):
    expected = norm_and_rotary(x, weight, cos, sin)
    poison_free_memory(mebibytes=64)
    got = dsa.rms_norm_rotary(x, weight, cos, sin)
    assert got.is_contiguous()
    assert_equal(got, expected)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dim, rotated", ROTATED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits(dtype, dim, rotated, weighted):
    if dtype == torch.float32 and dim > 512:
        pytest.skip("longer than the kernel takes in fp32")
    weight = torch.randn(dim, device="cuda") if weighted else None
    for tokens, heads in ((1, 1), (1, 64), (7, 3), (300, 64)):
        x, *angles = inputs(tokens, heads, dim, rotated, dtype)
        check(x, weight, *angles)


def test_strided_heads():
    base, cos, sin = inputs(60, 8, 576, 64)
    for x in (base[..., :512], base[:, ::2, 64:], base[:, :1, :512], base.transpose(0, 1).contiguous().transpose(0, 1)):
        check(x, None, cos, sin)


def test_bits_of_nan():
    x, cos, sin = inputs(40, 4, 512, 64)
    x[3, 1, 5], x[17, 2, -1] = torch.nan, torch.nan
    check(x, None, cos, sin)


def test_offsets_beyond_32_bits():
    tokens = 2**31 // (64 * 512) + 50
    x = torch.zeros(tokens, 64, 512, dtype=torch.bfloat16, device="cuda")
    some, cos, sin = inputs(100, 64, 512, 64)
    x[-100:] = some
    angles = torch.zeros(2, tokens, 32, device="cuda")
    angles[0, -100:], angles[1, -100:] = cos, sin
    got = dsa.rms_norm_rotary(x, None, *angles)
    assert torch.equal(got[-100:], dsa.rms_norm_rotary(some, None, cos, sin)) and not got[:-100].any()


def test_graph_replay_with_new_data():
    given = inputs(4, 64, 512, 64)

    def op(x, cos, sin):
        return dsa.rms_norm_rotary(x, None, cos, sin)

    for got in replays(op, given, partial(inputs, 4, 64, 512, 64)):
        assert torch.equal(got, norm_and_rotary(given[0], None, *given[1:]))
