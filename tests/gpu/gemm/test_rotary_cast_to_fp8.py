"""Heads rotated and cast on the GPU: the bytes of the rotation and of the cast, one after the other."""

from functools import partial

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_bits, replays


def operands(tokens, heads, dim, rotated, dtype):
    size = torch.logspace(-6, 4, heads * dim, device="cuda").view(heads, dim)
    angles = torch.randn(tokens, rotated // 2, device="cuda")
    return (torch.randn(tokens, heads, dim, device="cuda") * size).to(dtype), angles.cos(), angles.sin()


def one_after_the_other(x, cos, sin, groups, use_ue8m0):
    turned = dsa.apply_rotary(x, cos, sin, interleaved=True, dims="last")
    rows = turned.unflatten(1, (groups, -1)).transpose(0, 1).reshape(groups * len(x), -1)
    return dsa.per_token_cast_to_fp8(rows, use_ue8m0)


def check(x, cos, sin, groups, use_ue8m0=True):
    expected = one_after_the_other(x, cos, sin, groups, use_ue8m0)
    poison_free_memory(mebibytes=64)
    q, scale = dsa.rotary_cast_to_fp8(x, cos, sin, groups, use_ue8m0)
    assert q.is_contiguous() and scale.is_contiguous()
    assert_same_bits((q, scale), expected)


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "tokens, heads, dim, rotated, groups",
    [(1, 64, 512, 64, 8), (1, 128, 512, 64, 16), (4, 8, 512, 64, 8), (1, 1, 128, 8, 1), (3, 6, 128, 128, 2),
     (17, 6, 256, 136, 3), (300, 64, 512, 64, 1), (2049, 32, 512, 64, 4)],
)  # fmt: skip
def test_bits(tokens, heads, dim, rotated, groups, dtype, use_ue8m0):
    check(*operands(tokens, heads, dim, rotated, dtype), groups, use_ue8m0)


def test_strided_heads_and_angles():
    x, _, _ = operands(40, 12, 640, 64, torch.bfloat16)
    wide = torch.randn(40, 68, device="cuda")
    cos, sin = wide.cos()[:, 4:36], wide.sin()[:, 36:68]
    for part in (x[..., :512], x[:, ::2, 128:], x[:, 4:8, :128], x.transpose(0, 1).contiguous().transpose(0, 1)):
        check(part, cos, sin, 2)


def test_nan_stays_in_its_group():
    x, cos, sin = operands(5, 4, 256, 64, torch.bfloat16)
    whole = dsa.rotary_cast_to_fp8(x, cos, sin, 2)
    x[2, 1, 250] = torch.nan
    q, scale = dsa.rotary_cast_to_fp8(x, cos, sin, 2)
    row, first = 2, 256 + 128  # group 0, the second head's second 128 channels
    assert q[row, first : first + 128].float().isnan().all() and scale[row, first // 128].isnan()
    q.view(torch.uint8)[row, first : first + 128] = whole[0].view(torch.uint8)[row, first : first + 128]
    scale[row, first // 128] = whole[1][row, first // 128]
    assert_same_bits((q, scale), whole)


def test_graph_replay_with_new_data():
    given = operands(4, 64, 512, 64, torch.bfloat16)
    renew = partial(operands, 4, 64, 512, 64, torch.bfloat16)
    for got in replays(dsa.rotary_cast_to_fp8, given, renew, groups=8):
        assert_same_bits(got, one_after_the_other(*given, 8, True))
