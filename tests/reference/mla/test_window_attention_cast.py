"""The reference of windowed attention with a cast against float64, and where its rows are."""

import pytest
import torch

from dsa.cases.elementwise import rotated
from dsa.reference.mla import window_attention_cast as reference
from tests.reference.common import assert_same_bits
from tests.reference.mla.attention_oracle import attend_rows

T, H, D, WINDOW, GROUPS = 7, 4, 256, 3, 2
CU = torch.tensor([0, 3, 7], dtype=torch.int32)
BEGINS = (0, 0, 0, 3, 3, 3, 3)  # of each token's sequence


def inputs(dtype):
    q, kv, entries = (torch.randn(n, h, D).to(dtype) for n, h in ((T, H), (T, 1), (9, 1)))
    return q, kv, entries, torch.randint(-2, 11, (T, 5), dtype=torch.int32), torch.rand(T, 32) * 6


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_against_float64(dtype, selected, use_ue8m0):
    q, kv, entries, indices, angles = inputs(dtype)
    sink, counts = torch.randn(H), torch.tensor([5, 0, 3, 9, -1, 1, 5], dtype=torch.int32)
    some = (entries, indices) if selected else (None, None)
    cast, scale = reference.window_attention_cast_to_fp8(
        *(q, kv, CU, CU, WINDOW, *some, angles.cos(), angles.sin(), GROUPS, 0.1, sink, counts if selected else None),
        use_ue8m0=use_ue8m0,
    )
    keys = [kv[max(begin, t - WINDOW + 1) : t + 1, 0] for t, begin in enumerate(BEGINS)]
    if selected:
        rows = [[i for i in own[: max(n, 0)].tolist() if 0 <= i < 9] for own, n in zip(indices, counts)]
        keys = [torch.cat((near, entries[own, 0])) for near, own in zip(keys, rows)]
    expected, _, _ = attend_rows(q, keys, 0.1, D, sink)
    expected = rotated(expected, angles.cos(), -angles.sin())
    # A group's rows lie together: row g * T + t has the channels of its heads.
    expected = expected.view(T, GROUPS, -1).transpose(0, 1).reshape(GROUPS * T, -1, 128)
    assert cast.shape == (GROUPS * T, H // GROUPS * D) and scale.shape == (GROUPS * T, H // GROUPS * D // 128)
    assert cast.dtype == torch.float8_e4m3fn and cast.is_contiguous() and scale.is_contiguous()
    exact = expected.abs().amax(-1).clamp(min=1e-4) / 448
    ratio = scale.double() / exact
    # The result is rounded before it is turned, and after.
    assert (ratio > 1 - 0.02).all() and (ratio < (2.04 if use_ue8m0 else 1.02)).all()
    step = scale.double()[..., None]
    off = (cast.double().view(expected.shape) * step - expected).abs()
    assert (off <= expected.abs() * (1 / 16 + 2**-6) + step / 256 + exact[..., None] * 448 * 2**-7).all()


def test_one_group_of_all_heads_is_the_other_order():
    q, kv, entries, indices, angles = inputs(torch.bfloat16)
    rest = (q, kv, CU, CU, WINDOW, entries, indices, angles.cos(), angles.sin())
    whole, scales = reference.window_attention_cast_to_fp8(*rest, 1, 0.1)
    parts, of_parts = reference.window_attention_cast_to_fp8(*rest, H, 0.1)
    whole, scales = whole.view(T, H, D).transpose(0, 1), scales.view(T, H, -1).transpose(0, 1)
    assert_same_bits((whole, scales), (parts.view(H, T, D), of_parts.view(H, T, -1)))
