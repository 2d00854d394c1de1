"""References of the index scores: row strides, NaN, nothing to score, gradients, refusals."""

import math

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.indexer import scores
from dsa.reference import fp8_mqa_logits, mqa_logits
from dsa.reference.indexer import fp8_mqa_logits as module
from tests.reference.common import i32

CASE, COMPRESSED, UNQUANTISED = cases_of("fp8_mqa_logits")


def operands(queries, keys):
    given = CASE.arguments(queries=queries, keys=keys, heads=4, dim=16)
    return given["q"], *given["kv"], given["weights"]


@pytest.mark.parametrize("chunk", [2**24, 3 * 37 * 4, 1])
@pytest.mark.parametrize("width", [1, 10, 300])
def test_chunks_of_queries(width, chunk, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    COMPRESSED.verify(keys=37, heads=4, dim=16, max_seqlen_k=width)


# 300 + 256 = 556 columns, rounded up to 768 of 4 bytes or 1024 of 2
@pytest.mark.parametrize(("columns", "stride", "bf16_stride"), [(0, 768, 1024), (257, 512, 512)])
def test_row_stride_is_a_multiple_of_1024_bytes_and_bf16_is_the_rounded_fp32(columns, stride, bf16_stride):
    q, k, k_scale, weights = operands(2, 300)
    args = (q, (k, k_scale), weights, i32([0, 5]), i32([300, 200]))
    wide, half = (fp8_mqa_logits(*args, max_seqlen_k=columns, logits_dtype=x) for x in (torch.float32, torch.bfloat16))
    assert wide.stride() == (stride, 1) and half.stride() == (bf16_stride, 1)
    assert half.dtype == torch.bfloat16 and torch.equal(half, wide.bfloat16())


def test_nan_keys_reach_only_their_column():
    q, k, k_scale, weights = operands(2, 8)
    clean = fp8_mqa_logits(q, (k, k_scale), weights, i32([0, 4]), i32([8, 8]))
    k.view(torch.uint8)[2] = 0x7F
    k_scale[3] = math.nan
    got = fp8_mqa_logits(q, (k, k_scale), weights, i32([0, 4]), i32([8, 8]))
    assert got[0, 2:4].isnan().all() and got[1, :4].eq(-math.inf).all()
    keep = [0, 1, 4, 5, 6, 7]
    assert torch.equal(got[:, keep], clean[:, keep])


def test_no_queries_and_no_keys():
    q, k, k_scale, weights = operands(3, 5)
    assert fp8_mqa_logits(q[:0], (k, k_scale), weights[:0], i32([]), i32([])).shape == (0, 5)
    none = (q, (k[:0], k_scale[:0]), weights, i32([0, 0, 0]), i32([1, 0, 5]))
    assert fp8_mqa_logits(*none).shape == (3, 0)
    assert fp8_mqa_logits(*none, max_seqlen_k=4).tolist() == [[-math.inf] * 4] * 3


def test_gradients_of_the_unquantised_form():
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((3, 2, 4), (5, 4), (3, 2))]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ks, ke, upstream = i32([0, 1, 4]), i32([5, 3, 4]), torch.randn(3, 5)
    logits, (expected, _) = mqa_logits(*inputs, ks, ke), scores(*exact)
    gradient = torch.where(logits == -math.inf, 0.0, upstream)
    expected = torch.autograd.grad(expected, exact, gradient.double())
    for got, want in zip(torch.autograd.grad(logits, inputs, gradient), expected):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
