"""Products of FP4 weights are those of the widened weights."""

import re

import pytest
import torch

from dsa.reference import fp4_block_scales, grouped_fp8_fp4_gemm_nt, grouped_fp8_gemm_nt, widen_fp4
from dsa.reference.gemm import fp8_fp4_gemm_nt as module
from tests.reference.gemm.fp4 import e8m0, pack, random_codes, weight


def operands(columns=140, channels=160, experts=3, tokens=7):
    """a, b as codes and exponents, and ends of so many rows as there are tokens."""
    torch.manual_seed(0)
    a = torch.randn(tokens, channels).to(torch.float8_e4m3fn), torch.rand(tokens, -(-channels // 128)) + 0.1
    codes = random_codes(experts, columns, channels)
    exponents = torch.randint(-14, 1, (experts, columns, channels // 32))
    return a, (codes, exponents), torch.tensor([2, 2, tokens], dtype=torch.int32)


def fp4_weight(codes, exponents):
    packed, scale = pack(codes), e8m0(exponents)
    return packed, scale, fp4_block_scales(packed, scale)


@pytest.mark.parametrize(("columns", "channels"), [(128, 128), (140, 160), (8, 32), (256, 320)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_the_widened_weights(columns, channels, dtype):
    a, b, ends = operands(columns, channels)
    packed, scale, block_scale = fp4_weight(*b)
    wide = widen_fp4(packed, scale)
    got = grouped_fp8_fp4_gemm_nt(a, (packed, scale, block_scale), ends, dtype)
    assert got.dtype == dtype and torch.equal(got, grouped_fp8_gemm_nt(a, wide, ends, dtype))
    bytes_ = packed.view(torch.uint8), scale, block_scale
    assert torch.equal(grouped_fp8_fp4_gemm_nt(a, bytes_, ends, dtype), got)
    rows, weights = torch.tensor([6, 0, 0, 3, 3, 1, 2, 0], dtype=torch.int32), torch.rand(8)
    options = {"rows": rows, "weights": weights}
    ends = torch.tensor([0, 5, 8], dtype=torch.int32)
    got = grouped_fp8_fp4_gemm_nt(a, (packed, scale, block_scale), ends, dtype, **options)
    assert torch.equal(got, grouped_fp8_gemm_nt(a, wide, ends, dtype, **options))


def test_against_float64():
    (q, s), (codes, exponents), ends = operands()
    w = torch.stack([weight(*pair) for pair in zip(codes, exponents)])
    x = q.double() * s.double().repeat_interleave(128, 1)[:, :160]
    got = grouped_fp8_fp4_gemm_nt((q, s), fp4_weight(codes, exponents), ends, torch.float32)
    expected = torch.cat((x[:2] @ w[0].T, x[2:] @ w[2].T))
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_only_weights_with_rows_are_widened(monkeypatch):
    seen = []
    right = module.widen_matrix
    monkeypatch.setattr(module, "widen_matrix", lambda p, s, place: (seen.append(place), right(p, s, place))[1])
    a, b, ends = operands()
    grouped_fp8_fp4_gemm_nt(a, fp4_weight(*b), ends)
    assert seen == [(0,), (2,)]


@pytest.mark.parametrize("ends", [[2, 2, 5], [0, 0, 1], [3, 3, 3], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("gathered", [False, True])
def test_rows_behind_the_last_end_are_nobodys(gathered, ends):
    """They are NaN, and neither they nor the weights without rows are looked at."""
    (q, s), (codes, exponents), _ = operands()
    b, used = fp4_weight(codes, exponents), ends[-1]
    numbers = torch.tensor(ends, dtype=torch.int32)
    rows = torch.tensor([6, 0, 3, 3, 1, -1, 7], dtype=torch.int32) if gathered else None
    if not gathered:
        q.view(torch.uint8)[used:], s[used:] = 0x7F, torch.nan
    for e in range(3):
        if numbers[e] == (numbers[e - 1] if e else 0):
            b[2][e] = torch.nan
    weights = torch.cat((torch.rand(used), torch.full((7 - used,), torch.nan)))
    got = grouped_fp8_fp4_gemm_nt((q, s), b, numbers, rows=rows, weights=weights)
    if gathered:
        own, part = (q, s), {"rows": rows[:used]}
    else:
        own, part = (q[:used], s[:used]), {}
    expected = grouped_fp8_fp4_gemm_nt(own, b, numbers, weights=weights[:used], **part)
    assert got.shape == (7, 140) and torch.equal(got[:used], expected)
    assert not got[:used].isnan().any() and got[used:].isnan().all()


def test_weights_that_fp8_cannot_hold():
    a, (codes, exponents), ends = operands()
    good = fp4_weight(codes, exponents)
    exponents[2, 130, 4], codes[2, 130, 128:] = -40, 1
    bad = pack(codes), e8m0(exponents), good[2]
    with pytest.raises(
        ValueError, match=re.escape("b: block [2, 1, 1] of 128 x 128: its groups' scales go from 2^-40")
    ):
        grouped_fp8_fp4_gemm_nt(a, bad, ends)
    scale = good[1].clone()
    scale.view(torch.uint8)[2, 5, 1] = 255
    with pytest.raises(ValueError, match=re.escape("b: scale[2, 5, 1] is NaN")):
        grouped_fp8_fp4_gemm_nt(a, (good[0], scale, good[2]), ends)


def test_other_block_scales():
    a, b, ends = operands()
    packed, scale, block_scale = fp4_weight(*b)
    wrong = block_scale.clone()
    wrong[2, 1, 0] *= 2
    message = f"b[2]: must be fp4_block_scales(b[0], b[1]), {block_scale[2, 1, 0].item()} at [2, 1, 0], got"
    with pytest.raises(ValueError, match=re.escape(message)):
        grouped_fp8_fp4_gemm_nt(a, (packed, scale, wrong), ends)


def test_empty():
    a, b, _ = operands()
    none = torch.zeros(3, dtype=torch.int32)
    empty = tuple(x[:0] for x in a)
    assert grouped_fp8_fp4_gemm_nt(empty, fp4_weight(*b), none).shape == (0, 140)


def test_refuses_bad_arguments():
    (q, s), b, ends = operands()
    packed, scale, block_scale = fp4_weight(*b)
    for first, second, message in [
        ((q, s), (packed, scale), "b: must be (FP4 values, e8m0 scales, fp32 block scales), got 2 of them"),
        ((q, s), packed, "b: must be (FP4 values, e8m0 scales, fp32 block scales), got Tensor"),
        ((q,), (packed, scale, block_scale), "a: must be a pair (e4m3 values, fp32 scales), got 1 of them"),
    ]:
        with pytest.raises(TypeError, match=re.escape(message)):
            grouped_fp8_fp4_gemm_nt(first, second, ends)
    for first, second, message in [
        (
            (q, s),
            (packed[..., :72], scale, block_scale),
            "b[0]: must have a multiple of 32 channels, two a byte, got 144",
        ),
        ((q, s), (packed.short(), scale, block_scale), "b[0]: dtype must be int8 or uint8, got int16"),
        ((q, s), (packed, scale[..., :4], block_scale), "b[1]: shape must be [3, 140, 5], got [3, 140, 4]"),
        ((q, s), (packed, scale.float(), block_scale), "b[1]: dtype must be float8_e8m0fnu, got float32"),
        ((q, s), (packed, scale, block_scale[:, :1]), "b[2]: shape must be [3, 2, 2], got [3, 1, 2]"),
        ((q[:, :128], s), (packed, scale, block_scale), "a[0]: shape must be [A, 160], got [7, 128]"),
        ((q, s[:, :1]), (packed, scale, block_scale), "a[1]: shape must be [7, 2], got [7, 1]"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            grouped_fp8_fp4_gemm_nt(first, second, ends)
    message = "weights: shape must be [7], got [6] (sizes as of a[0], without rows)"
    with pytest.raises(ValueError, match=re.escape(message)):
        grouped_fp8_fp4_gemm_nt((q, s), (packed, scale, block_scale), ends, weights=torch.ones(6))
