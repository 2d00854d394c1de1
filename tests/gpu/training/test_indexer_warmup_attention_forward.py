"""Attention over packed sequences on the GPU against float64."""

import itertools
import math

import pytest
import torch

from dsa.kernels.training.limits import DENSE_CHANNELS
from dsa.ops.training import _packed_attention
from dsa.testing import assert_close, poison_free_memory

SAME = None  # as many keys as queries
# Name -> heads, KV heads, queries and keys of each sequence.
CASES = {
    "whole tiles": (4, 4, [256, 384], SAME),
    "a single token": (2, 1, [1], SAME),
    "odd lengths": (4, 2, [1, 77, 129, 300, 64, 1000, 5], SAME),
    "empty sequences": (3, 1, [0, 5, 0, 0, 130, 0], SAME),
    "fewer queries": (4, 1, [1, 63, 128, 10, 200], [500, 64, 300, 11, 2000]),
    "fewer keys": (4, 4, [200, 64, 130, 500, 10], [100, 1, 0, 300, 0]),
    "many heads a KV head": (16, 1, [513, 100], SAME),
    "many sequences": (2, 1, [7 * i % 50 for i in range(300)], SAME),
    "long": (4, 2, [4096], SAME),
}
ROUNDING = {torch.bfloat16: 2.01 / 256, torch.float16: 2.01 / 2048}


def attention_forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal=True):
    return _packed_attention.attention_forward(q, k, v, (cu_q, cu_k, max_q, max_k), scale, causal)


def starts(lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def inputs(dims, heads, kv_heads, queries, keys, dtype=torch.bfloat16, scale=1.0):
    """q, k and v, with rows of NaN behind them that belong to no sequence, and where the sequences begin."""
    (dim, value_dim), lengths = dims, (queries, queries if keys is SAME else keys)
    shapes = (lengths[0], heads, dim), (lengths[1], kv_heads, dim), (lengths[1], kv_heads, value_dim)
    tensors = []
    for own, count, channels in shapes:
        x = torch.randn(sum(own) + 37, count, channels, device="cuda").to(dtype)
        x[sum(own) :] = math.nan
        tensors.append(x)
    tensors[0] *= scale
    return *tensors, *map(starts, lengths), *(max(x) for x in lengths), dim**-0.5


def expected(q, k, v, cu_q, cu_k, _max_q, _max_k, scale, causal):
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64, device="cuda")
    lse = torch.full((q.shape[1], len(q)), math.inf, dtype=torch.float64, device="cuda")
    for (a, b), (c, d) in zip(*(itertools.pairwise(x.tolist()) for x in (cu_q, cu_k))):
        if a == b or c == d:
            continue
        own_q, own_k, own_v = (
            x.double().transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (q[a:b], k[c:d], v[c:d])
        )
        scores = own_q @ own_k.mT * scale
        if causal:
            last = torch.arange(b - a, device="cuda")[:, None] + (d - c) - (b - a)
            scores = scores.masked_fill(torch.arange(d - c, device="cuda") > last, -math.inf)
        own = scores.logsumexp(-1)
        seen = own > -math.inf
        powers = (scores - own.masked_fill(~seen, 0.0)[..., None]).exp()
        out[a:b] = (powers @ own_v).transpose(0, 1)
        lse[:, a:b] = own.masked_fill(~seen, math.inf)
    return out, lse


def check(arguments, causal, record_error=None):
    q = arguments[0]
    poison_free_memory(mebibytes=64)
    out, lse = attention_forward(*arguments, causal)
    right, right_lse = expected(*arguments, causal)
    tolerances = {"abs_tol": 4 * ROUNDING[q.dtype], "rel_tol": ROUNDING[q.dtype], "cos_tol": 2e-5}
    error = assert_close("out", out, right, **tolerances)
    assert_close("lse", lse, right_lse, abs_tol=2e-5, rel_tol=2e-6)
    again, lse_again = attention_forward(*arguments, causal)
    assert torch.equal(again, out) and torch.equal(lse_again, lse)
    if record_error:
        record_error(error)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("dims", DENSE_CHANNELS, ids=str)
def test_sequences(dims, case, causal, record_error):
    check(inputs(dims, *case), causal, record_error)


@pytest.mark.parametrize("dims", DENSE_CHANNELS, ids=str)
def test_fp16(dims, record_error):
    check(inputs(dims, 4, 2, [513, 100], SAME, torch.float16), True, record_error)


@pytest.mark.parametrize("dims", DENSE_CHANNELS, ids=str)
def test_large_scores(dims):
    check(inputs(dims, 4, 2, [513, 700], SAME, scale=30.0), True)


@pytest.mark.parametrize("dims", DENSE_CHANNELS, ids=str)
def test_strides(dims):
    q, k, v, *rest = inputs(dims, 4, 2, [513, 100], SAME)
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k)]
    wide = torch.cat([v, v], -1)[..., : v.shape[2]]
    check((*by_head, wide, *rest), True)
    odd = torch.cat([q, q[..., :3]], -1)[..., : q.shape[2]]  # rows at no multiple of 16 bytes
    check((odd, k, v[:, :1].expand(v.shape), *rest), True)


def test_graph():
    q, k, v, cu, _, longest, _, scale = inputs((128, 128), 8, 2, [300, 700], SAME)
    attention_forward(q, k, v, cu, cu, 1000, 1000, scale)  # a kernel cannot be loaded while a graph is captured
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        out, lse = attention_forward(q, k, v, cu, cu, 1000, 1000, scale)
    for cut in (300, 1, 999, 512):
        cu[1] = cut
        for x in (q, k, v):
            x[:1000].normal_()
        graph.replay()
        again, lse_again = attention_forward(q, k, v, cu, cu, 1000, 1000, scale)
        assert torch.equal(out[:1000], again[:1000]) and torch.equal(lse[:, :1000], lse_again[:, :1000])
        check((q, k, v, cu, cu, longest, longest, scale), True)


def test_no_keys_at_all():
    q = torch.randn(5, 2, 64, device="cuda").bfloat16()
    out, lse = attention_forward(q, q[:0], q[:0], starts([5]), starts([0]), 5, 0, 0.1)
    assert not out.any() and lse.eq(math.inf).all()
    for bounds in (starts([]), starts([0]), starts([0, 0])):
        out, lse = attention_forward(q, q, q, bounds, bounds, 5, 5, 0.1)
        assert not out.any() and lse.eq(math.inf).all()
    out, lse = attention_forward(q[:0], q, q, starts([0]), starts([5]), 0, 5, 0.1)
    assert out.shape == (0, 2, 64) and lse.shape == (2, 0)
