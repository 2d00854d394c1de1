"""The kernel of the experts' sum against the reference: bit for bit, on the GPU."""

import math
from functools import partial
from itertools import product

import pytest
import torch

import dsa
from dsa.reference.moe import combine_experts as reference
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import (
    among_nan,
    assert_equal,
    assert_runs_have_the_same_bits,
    assert_same_on_the_second_gpu,
    on_a_late_stream,
    replays,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAN, INF = math.nan, math.inf


def inputs(tokens, k, channels, dtype=torch.bfloat16, index_dtype=torch.int32, shared=True):
    """As a mixture has them: every expert's output is one token's."""
    y = torch.randn(max(tokens * k, 1), channels, device="cuda").to(dtype)
    rows = torch.randperm(tokens * k, device="cuda").view(tokens, k).to(index_dtype)
    weights = torch.rand(tokens, k, device="cuda")
    return y, rows, weights, torch.randn(tokens, channels, device="cuda").to(dtype) if shared else None


def check(y, rows, weights, shared=None, record_error=None):
    poison_free_memory(mebibytes=64)
    got = dsa.combine_experts(y, rows, weights, shared)
    expected = reference.combine_experts(y, rows, weights, shared)
    assert got.dtype == y.dtype and got.is_contiguous()
    assert_equal(got, expected)
    residual = torch.randn(expected.shape, device="cuda").to(y.dtype)
    added = dsa.combine_experts(y, rows, weights, shared, residual)
    assert_equal(added, residual + expected)
    if record_error:
        record_error((got.float() - expected.float()).abs().nan_to_num().max() if got.numel() else 0.0)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("with_shared", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("k", [1, 2, 6, 7, 8, 9, 16, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_variants(dtype, k, index_dtype, with_shared, weighted, record_error):
    """Without weights they are 1. Rows outside y are zeros."""
    y, rows, weights, shared = inputs(37, k, 1536, dtype, index_dtype, with_shared)
    rows[::5, 0], rows[1::5, -1] = -1, len(y)
    y[rows[2, 0]] = INF
    check(y, rows, weights if weighted else None, shared, record_error)


@pytest.mark.parametrize(
    ("tokens", "k", "channels", "dtype"),
    [
        *product((1, 7, 300), (8,), (8, 16, 200, 1016, 1024, 1032, 4096, 7168), DTYPES),
        *((tokens, k, channels, DTYPES[0]) for tokens in (1024, 4096) for k, channels in ((8, 7168), (6, 4096))),
    ],
    ids=str,
)
def test_shapes(tokens, k, channels, dtype, record_error):
    check(*inputs(tokens, k, channels, dtype), record_error)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_outside(dtype, index_dtype):
    """Those are zero, even with weights that no sum survives; and what surrounds y is NaN."""
    wide = torch.full((60, 1024), NAN, device="cuda", dtype=dtype)
    wide[20:40, 64:576] = torch.randn(20, 512, device="cuda").to(dtype)
    y = wide[20:40, 64:576]
    rows = torch.randint(20, (50, 9), device="cuda", dtype=index_dtype)
    weights, shared = torch.rand(50, 9, device="cuda"), torch.randn(50, 512, device="cuda").to(dtype)
    info = torch.iinfo(index_dtype)
    for column, (row, weight) in enumerate([(-1, INF), (20, NAN), (info.min, 1.0), (info.max, -INF)]):
        rows[::2, 2 * column], weights[::2, 2 * column] = row, weight
    if index_dtype == torch.int64:
        rows[1::2, 1] = 2**32 + 3  # not row 3
    check(y, rows, weights, shared)
    assert dsa.combine_experts(y, rows, weights, shared).isfinite().all()
    rows.fill_(-1)
    assert torch.equal(dsa.combine_experts(y, rows, weights, shared), shared)
    assert not dsa.combine_experts(y, rows, weights).any()


def test_rows_that_are_used_twice_and_never():
    y, _, weights, shared = inputs(100, 8, 2048)
    check(y, torch.randint(5, (100, 8), device="cuda", dtype=torch.int32), weights, shared)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_no_token_names_are_not_read(dtype, weighted):
    """Those behind the rows of a process' own experts, where products leave anything."""
    experts = torch.rand(90, 24, device="cuda").argsort(-1)[:, :8]
    for begin, count in ((8, 8), (0, 5), (20, 4), (40, 3)):
        _, rows, ends = dsa.sort_by_expert(experts - begin, count)
        used = int(ends[-1])
        y = torch.randn(720, 512, device="cuda").to(dtype)
        y[used:], y[-1] = NAN, INF
        weights = torch.rand(90, 8, device="cuda") if weighted else None
        shared = torch.randn(90, 512, device="cuda").to(dtype)
        got = dsa.combine_experts(y, rows, weights, shared)
        assert got.isfinite().all()
        assert torch.equal(got, reference.combine_experts(y[:used], rows, weights, shared))


def test_nan_and_infinity_reach_their_tokens_only():
    y, rows, weights, shared = inputs(40, 8, 512)
    y[rows[3, 2], 100], y[rows[5, 0], 7], weights[9, 4], shared[11, 1] = NAN, INF, NAN, -INF
    check(y, rows, weights, shared)
    bad = ~dsa.combine_experts(y, rows, weights, shared).isfinite()
    assert bad.any(1).nonzero().flatten().tolist() == [3, 5, 9, 11] and bad.sum() == 512 + 3


def test_weights_of_every_size_and_sign():
    y, rows, weights, shared = inputs(64, 8, 1024, torch.float32)
    check(y, rows, torch.randn_like(weights) * torch.logspace(-30, 30, 64, device="cuda")[:, None], shared)
    check(y, rows, torch.zeros_like(weights), shared)


def test_strides():
    y, rows, weights, shared = inputs(50, 6, 512)
    wide_y, wide_shared = among_nan(y), among_nan(shared)
    check(wide_y, rows.T.contiguous().T, weights.repeat_interleave(2, 1)[:, ::2], wide_shared)
    check(y[::2], rows // 2, weights, shared[:1].expand(50, 512))
    got = dsa.combine_experts(y, rows, weights, None, wide_shared)
    assert torch.equal(got, wide_shared + dsa.combine_experts(y, rows, weights))
    check(y[:1], rows * 0, weights, shared)


def test_offsets_beyond_32_bits():
    y = torch.zeros(340_000, 7168, device="cuda", dtype=torch.bfloat16)  # 2.4e9 elements
    y[-3:] = torch.randn(3, 7168, device="cuda").bfloat16()
    rows = torch.tensor([[339_997, 339_999, 0], [5, 339_998, 340_000]], device="cuda", dtype=torch.int32)
    weights = torch.rand(2, 3, device="cuda")
    expected = reference.combine_experts(y[-3:], rows - 339_997, weights)
    assert torch.equal(dsa.combine_experts(y, rows, weights), expected)


def test_twenty_runs_are_identical():
    assert_runs_have_the_same_bits(dsa.combine_experts, *inputs(1000, 8, 4096))


def test_graph_replay_with_new_data():
    given = inputs(100, 8, 2048)
    for got in replays(dsa.combine_experts, given, partial(inputs, 100, 8, 2048)):
        assert torch.equal(got, reference.combine_experts(*given))


def test_side_stream():
    y, rows, weights, _ = inputs(2000, 8, 4096)
    expected = dsa.combine_experts(y, rows, weights)
    got = on_a_late_stream(lambda: y.mul_(2), dsa.combine_experts, y, rows, weights)
    assert torch.equal(got, 2 * expected)


@pytest.mark.several_gpus
def test_tensors_on_another_gpu_than_the_current_one():
    assert_same_on_the_second_gpu(dsa.combine_experts, *inputs(30, 8, 512))
