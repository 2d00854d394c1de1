"""DeepGEMM's signatures of index scores over the references, on the CPU: its own tests' cases, smaller."""

import inspect
import math

import pytest
import torch

import dsa
from dsa.compat import deep_gemm
from dsa.testing import calc_diff
from tests.reference.common import assert_refused

E4M3, INT32, F32 = torch.float8_e4m3fn, torch.int32, torch.float32


def tolerance(dtype):
    return 3e-5 if dtype == torch.bfloat16 else 5e-6


def cast(x):
    """e4m3 of bf16 rows, and their fp32 scales."""
    scale = x.abs().float().amax(-1).clamp(1e-4) / 448
    return (x / scale[..., None]).to(E4M3), scale


def scores_of(q, k, weights):
    """q [T, H, D], k [n, D] -> [T, n], in fp64."""
    return torch.einsum("thd,nd->thn", q.double(), k.double()).relu().mul(weights.double()[..., None]).sum(1)


def ranges(queries, keys, context_parallel):
    """The key ranges of `generate_ks_ke_tests`."""
    if not context_parallel:
        return torch.zeros(queries, dtype=INT32), torch.arange(queries, dtype=INT32) + (keys - queries)
    half, ranks = queries // 2, keys // queries
    rank = ranks // 3
    rows = torch.arange(half, dtype=INT32)
    return torch.zeros(queries, dtype=INT32), torch.cat((rank * half + rows, (2 * ranks - 1 - rank) * half + rows))


@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [(32, 32), (64, 64), (32, 128), (64, 128)])
@pytest.mark.parametrize("context_parallel", [False, True])
def test_contiguous(logits_dtype, compressed, heads, head_dim, context_parallel):
    """`test_mqa_logits`: cleaned and uncompressed, or compressed and not cleaned."""
    queries, keys = 16, 64
    q, k = (torch.randn(*shape, head_dim).bfloat16() for shape in ((queries, heads), (keys,)))
    weights, (ks, ke) = torch.randn(queries, heads), ranges(queries, keys, context_parallel)
    values, scale = cast(k)
    named = {"q": (q.to(E4M3), None), "kv": (values, scale), "weights": weights, "logits_dtype": logits_dtype}
    named |= {"cu_seq_len_k_start": ks, "cu_seq_len_k_end": ke, "clean_logits": not compressed}
    most = int((ke - ks).max()) if compressed else 0
    got = deep_gemm.fp8_fp4_mqa_logits(**named, max_seqlen_k=most)
    assert got.dtype == logits_dtype and got.shape == (queries, most or keys)
    columns = torch.arange(keys) - ks[:, None]
    seen = (columns >= 0) & (torch.arange(keys) < ke[:, None])
    if compressed:
        got = got.gather(1, columns.clamp(0, most - 1)).where(seen, -math.inf)
    assert torch.equal(got == -math.inf, ~seen)
    expected = scores_of(q.to(E4M3).float(), values.float() * scale[:, None], weights)
    assert calc_diff(got.float().where(seen, 0.0), expected.where(seen, 0.0)) < tolerance(logits_dtype)


def test_contiguous_as_callers_have_it():
    q, (k, scale) = torch.randn(5, 8, 32).to(E4M3), cast(torch.randn(20, 32).bfloat16())
    weights, ks = torch.randn(5, 8), torch.tensor([0, 0, 3, 20, 5], dtype=INT32)
    ke = torch.tensor([1, 20, 9, 20, 15], dtype=INT32)
    arguments = ((k, scale), weights, ks, ke)
    got = deep_gemm.fp8_fp4_mqa_logits((q, None), *arguments, 20)
    assert got.shape == (5, 20) and got.dtype == F32
    assert torch.equal(got, dsa.fp8_mqa_logits(q, *arguments, False, 20))
    old = deep_gemm.fp8_mqa_logits(q, *arguments)
    assert torch.equal(old, dsa.fp8_mqa_logits(q, *arguments))
    assert torch.equal(deep_gemm.fp8_mqa_logits(q, *arguments, False, 20), got)
    # The default of DeepGEMM 2.8.0 and earlier.
    assert torch.equal(deep_gemm.fp8_fp4_mqa_logits((q, None), *arguments), old)
    for changes, message in (
        ({"q": (q, torch.zeros(5, 8, dtype=INT32))}, r"q\[1\]: must be None on Hopper, .*, got Tensor"),
        ({"q": q}, "q: must be a pair"),
        ({"schedule_meta": ks}, "schedule_meta: must be None on Hopper, got Tensor"),
        ({"max_seqlen_k": -1}, "max_seqlen_k: must be at least 0, got -1"),
        ({"max_seqlen_k": True}, "max_seqlen_k: must be an int, got bool"),  # clean_logits of builds before 2.8
    ):
        named = {"q": (q, None), "kv": (k, scale), "weights": weights, "max_seqlen_k": 20, "schedule_meta": None}
        named |= {"cu_seq_len_k_start": ks, "cu_seq_len_k_end": ke}
        assert_refused(message, deep_gemm.fp8_fp4_mqa_logits, **named | changes)


@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("varlen", [False, True])
def test_paged(logits_dtype, next_n, heads, varlen):
    """`test_paged_mqa_logits`, with lengths of each row. varlen: rows of one sequence are named by `indices`."""
    if varlen and next_n > 1:
        rows_of = torch.tensor([0] * next_n + [1] + [2] * 2, dtype=INT32)
    else:
        rows_of = torch.arange(3, dtype=INT32)
    own_n = 1 if varlen else next_n
    batch, page, dim, lengths = len(rows_of), 64, 128, torch.tensor([70, 200, 64])
    keys = torch.randn(9, page, dim).bfloat16()
    values, scale = cast(keys)
    cache = torch.cat((values.view(9, -1).view(torch.uint8), scale.view(torch.uint8).view(9, -1)), 1)
    cache = cache.view(9, page, 1, dim + 4)
    table = torch.randperm(9)[: 3 * 3].view(3, 3).to(INT32)[rows_of.long()]
    context = (lengths[rows_of.long(), None] - torch.randint(0, 40, (batch, own_n))).to(INT32)
    q, weights = torch.randn(batch, own_n, heads, dim).to(E4M3), torch.randn(batch * own_n, heads)
    indices = rows_of if varlen else None
    plan = deep_gemm.get_paged_mqa_logits_metadata(context, page, deep_gemm.get_num_sms(), indices=indices)
    assert plan.shape == (133, 2) and torch.equal(plan, deep_gemm.get_paged_mqa_logits_metadata(context, page, 132))
    arguments = ((q, None), cache, weights, context, table, plan, 192)
    got = deep_gemm.fp8_fp4_paged_mqa_logits(*arguments, indices=indices, logits_dtype=logits_dtype)
    assert got.shape == (batch * own_n, 192) and got.dtype == logits_dtype
    assert torch.equal(got, deep_gemm.fp8_fp4_paged_mqa_logits(*arguments, None, logits_dtype=logits_dtype))
    for b in range(batch):
        flat = (values.float() * scale[..., None])[table[b].long()].flatten(0, 1)[:192]
        expected = scores_of(q[b].float(), flat, weights[b * own_n : (b + 1) * own_n])
        seen = torch.arange(192) < context[b, :, None]
        own = got[b * own_n : (b + 1) * own_n].float()
        assert calc_diff(own.where(seen, 0.0), expected.where(seen, 0.0)) < tolerance(logits_dtype)


def test_indices_are_checked_and_change_nothing():
    q, cache = torch.randn(3, 1, 8, 32).to(E4M3), torch.zeros(4, 64, 1, 36, dtype=torch.uint8)
    weights, table = torch.randn(3, 8), torch.zeros(3, 1, dtype=INT32)
    context, plan = torch.tensor([[5], [6], [0]], dtype=INT32), None
    arguments = (cache, weights, context, table, plan, 64)
    good = torch.tensor([7, 7, -3], dtype=INT32)
    ways = (
        lambda indices: deep_gemm.get_paged_mqa_logits_metadata(context, 64, 5, indices),
        lambda indices: deep_gemm.get_paged_mqa_logits_metadata(context[:, 0], 64, 5, indices),
        lambda indices: deep_gemm.fp8_fp4_paged_mqa_logits((q, None), *arguments, indices),
        lambda indices: deep_gemm.fp8_paged_mqa_logits(q, *arguments, False, indices),
    )
    for way in ways:
        assert torch.equal(way(good), way(None))
        assert_refused("indices: dtype must be int32, got int64", way, good.long())
        assert_refused(r"indices: shape must be \[3\], got \[2\]", way, good[:2])
        assert_refused("indices: must be on .* device cpu, got meta", way, good.to("meta"))
        assert_refused(r"indices: must be a torch\.Tensor, got bool", way, True)
    message = "indices: must be None with more than one query a row of"
    assert_refused(
        f"{message} context_lens", deep_gemm.get_paged_mqa_logits_metadata, context.repeat(1, 2), 64, 5, good
    )
    q = q.repeat(1, 2, 1, 1)
    assert_refused(f"{message} q", deep_gemm.fp8_paged_mqa_logits, q, *arguments, False, good)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (8, 2), (4, 7, 2), (2, 4, 1), (0, 3)])
def test_scales_by_columns(shape):
    scales = torch.randn(shape)
    got = deep_gemm.get_mn_major_tma_aligned_tensor(scales)
    column = -(-shape[-2] // 4) * 4
    assert torch.equal(got, scales) and got.stride()[-2:] == (1, column)
    assert len(shape) == 2 or got.stride(0) == column * shape[-1]
    assert deep_gemm.get_mn_major_tma_aligned_tensor(got) is got
    assert deep_gemm.get_tma_aligned_size(shape[-2], 4) == column
    wrong = scales.half()
    assert_refused("sf: dtype must be float32, got float16", deep_gemm.get_mn_major_tma_aligned_tensor, wrong)


def test_what_a_position_means_is_the_same_in_all_builds():
    """Those of 2.8; where earlier builds have another argument, that has no position."""
    positions = {
        "fp8_fp4_mqa_logits": "q kv weights cu_seq_len_k_start cu_seq_len_k_end max_seqlen_k schedule_meta",
        "fp8_fp4_paged_mqa_logits": "q kv_cache weights context_lens block_table schedule_meta max_context_len indices",
        "get_paged_mqa_logits_metadata": "context_lens block_kv num_sms indices",
        "fp8_mqa_logits": "q kv weights cu_seq_len_k_start cu_seq_len_k_end clean_logits max_seqlen_k",
        "fp8_paged_mqa_logits": "q kv_cache weights context_lens block_table schedule_meta max_context_len "
        "clean_logits indices",
    }
    for name, names in positions.items():
        parameters = inspect.signature(getattr(deep_gemm, name)).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names.split()
