"""DeepGEMM's signatures over the index-score kernel, at sizes of DeepGEMM's own tests, on the GPU."""

import pytest
import torch

import dsa
from dsa.compat import deep_gemm
from dsa.reference.indexer import fp8_mqa_logits as reference
from dsa.testing import calc_diff, poison_free_memory
from tests.gpu.op_checks import assert_equal, captured

E4M3, INT32 = torch.float8_e4m3fn, torch.int32
MAX_DIFF = {torch.float32: 5e-6, torch.bfloat16: 3e-5}
QUERIES, KEYS = 2048, 8192


def cast(x):
    """e4m3 of bf16 rows and their scales, as DeepGEMM's tests cast keys."""
    scale = x.abs().float().amax(-1).clamp(1e-4) / 448
    return (x * (1 / scale[:, None])).to(E4M3), scale


def inputs(heads, dim):
    q = torch.randn(QUERIES, heads, dim, device="cuda").bfloat16().to(E4M3)
    return q, cast(torch.randn(KEYS, dim, device="cuda").bfloat16()), torch.randn(QUERIES, heads, device="cuda")


def ranges(context_parallel):
    """The key ranges of `generate_ks_ke_tests`."""
    ks, rows = torch.zeros(QUERIES, dtype=INT32, device="cuda"), torch.arange(QUERIES, dtype=INT32, device="cuda")
    if not context_parallel:
        return ks, rows + (KEYS - QUERIES)
    half, ranks = QUERIES // 2, KEYS // QUERIES
    rank = ranks // 3
    return ks, torch.cat((rank * half + rows[:half], (2 * ranks - 1 - rank) * half + rows[:half]))


@pytest.mark.parametrize("context_parallel", [False, True])
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float32])
def test_mqa_logits(logits_dtype, compressed, heads, dim, context_parallel, record_error):
    """Cleaned and uncompressed, or compressed and not cleaned."""
    q, kv, weights = inputs(heads, dim)
    ks, ke = ranges(context_parallel)
    most = int((ke - ks).max()) if compressed else 0
    named = {"q": (q, None), "kv": kv, "weights": weights, "cu_seq_len_k_start": ks, "cu_seq_len_k_end": ke}
    named |= {"clean_logits": not compressed, "max_seqlen_k": most, "logits_dtype": logits_dtype}
    poison_free_memory(mebibytes=64)
    got = deep_gemm.fp8_fp4_mqa_logits(**named)
    expected = reference.fp8_mqa_logits(q, kv, weights, ks, ke, True, most, logits_dtype)
    assert got.shape == (QUERIES, most or KEYS) and got.dtype == logits_dtype
    hidden = expected == -torch.inf
    if not compressed:
        assert torch.equal(got == -torch.inf, hidden)
    shown = got.masked_fill(hidden, 0)
    difference = calc_diff(shown, expected.masked_fill(hidden, 0))
    record_error(difference)
    assert difference < MAX_DIFF[logits_dtype]


def test_as_vllm_calls_it():
    """By position, compressed; and into a graph."""
    q, kv, weights = inputs(64, 128)
    ks, ke = ranges(True)
    most = int((ke - ks).max())
    hidden = torch.arange(most, device="cuda") >= (ke - ks)[:, None]
    expected = dsa.fp8_mqa_logits(q, kv, weights, ks, ke, False, most).masked_fill(hidden, 0)
    graph, got = captured(deep_gemm.fp8_fp4_mqa_logits, (q, None), kv, weights, ks, ke, most)
    graph.replay()
    assert_equal(got.masked_fill(hidden, 0), expected)
    old = deep_gemm.fp8_mqa_logits(q, kv, weights, ks, ke)
    assert_equal(old, dsa.fp8_mqa_logits(q, kv, weights, ks, ke))
