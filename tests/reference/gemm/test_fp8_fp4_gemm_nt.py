"""Products of FP4 weights: the bits of the widened weights, and weights that are refused."""

import re

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference.gemm import fp8_fp4_gemm_nt as module
from tests.reference.common import assert_refused, i32
from tests.reference.gemm.fp4 import e8m0

CASE, *_ = cases_of("fp8_fp4_gemm_nt")


@pytest.mark.parametrize(("columns", "channels"), [(128, 128), (140, 160), (8, 32), (256, 320)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 7])
def test_bits_of_the_widened_weights(columns, channels, tokens, dtype):
    """Rows from the last end on are NaN. Bytes may be int8 or uint8."""
    for sizes in ([2, 0, 5], [0, 5, 1], [0, 0, 0]):
        sizes = {"sizes": sizes, "tokens": tokens, "columns": columns, "channels": channels, "after": 2}
        given = CASE.arguments(**sizes, out_dtype=dtype, weighted=tokens > 0)
        (got,) = CASE.run(given)
        CASE.check(given, [got])
        packed, *scales = given["b"]
        assert torch.equal(CASE.run(given | {"b": (packed.view(torch.int8), *scales)})[0][:-2], got[:-2])
        assert got.dtype == dtype and got[-2:].isnan().all() and not got[:-2].isnan().any()


def test_only_weights_with_rows_are_widened(monkeypatch):
    seen = []
    right = module.widen_matrix
    monkeypatch.setattr(module, "widen_matrix", lambda p, s, place: (seen.append(place), right(p, s, place))[1])
    CASE.run(CASE.arguments(sizes=[2, 0, 5]))
    assert seen == [(0,), (2,)]


def test_weights_that_fp8_cannot_hold():
    given = CASE.arguments(sizes=[2, 0, 5], columns=140)
    packed, scale, block_scale = given["b"]
    wide, nan = block_scale.clone(), scale.clone()
    wide[2, 1, 0] *= 2
    message = f"b[2]: must be fp4_block_scales(b[0], b[1]), {block_scale[2, 1, 0].item()} at [2, 1, 0], got"
    assert_refused(re.escape(message), CASE.run, given | {"b": (packed, scale, wide)})
    nan.view(torch.uint8)[2, 5, 1] = 255
    assert_refused(r"b: scale\[2, 5, 1\] is NaN", CASE.run, given | {"b": (packed, nan, block_scale)})
    scale.view(torch.uint8)[2, 130, 4], packed[2, 130, 64:] = 127 - 40, 0x11
    message = r"b: block \[2, 1, 1\] of 128 x 128: its groups' scales go from 2\^-40"
    assert_refused(message, CASE.run, given)


Q, S = torch.zeros(7, 160).to(torch.float8_e4m3fn), torch.ones(7, 2)
P, E8M0, BLOCK = torch.zeros(3, 140, 80, dtype=torch.int8), e8m0(torch.zeros(3, 140, 5)), torch.ones(3, 2, 2)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((Q, S), (P, E8M0), "b: must be (FP4 values, e8m0 scales, fp32 block scales), got 2 of them"),
        ((Q, S), P, "b: must be (FP4 values, e8m0 scales, fp32 block scales), got Tensor"),
        ((Q,), (P, E8M0, BLOCK), "a: must be a pair (e4m3 values, fp32 scales), got 1 of them"),
        ((Q, S), (P[..., :72], E8M0, BLOCK), "b[0]: must have a multiple of 32 channels, two a byte, got 144"),
        ((Q, S), (P.short(), E8M0, BLOCK), "b[0]: dtype must be int8 or uint8, got int16"),
        ((Q, S), (P, E8M0[..., :4], BLOCK), "b[1]: shape must be [3, 140, 5], got [3, 140, 4]"),
        ((Q, S), (P, E8M0.float(), BLOCK), "b[1]: dtype must be float8_e8m0fnu, got float32"),
        ((Q, S), (P, E8M0, BLOCK[:, :1]), "b[2]: shape must be [3, 2, 2], got [3, 1, 2]"),
        ((Q[:, :128], S), (P, E8M0, BLOCK), "a[0]: shape must be [A, 160], got [7, 128]"),
        ((Q, S[:, :1]), (P, E8M0, BLOCK), "a[1]: shape must be [7, 2], got [7, 1]"),
    ],
)
def test_wrong_arguments_are_named(a, b, message):
    assert_refused(re.escape(message), dsa.grouped_fp8_fp4_gemm_nt, a, b, i32([2, 2, 7]))


def test_wrong_weights_of_rows_are_named():
    message = r"weights: shape must be \[7\], got \[6\] \(sizes as of a\[0\], without rows\)"
    arguments = (Q, S), (P, E8M0, BLOCK), i32([2, 2, 7])
    assert_refused(message, dsa.grouped_fp8_fp4_gemm_nt, *arguments, weights=torch.ones(6))
