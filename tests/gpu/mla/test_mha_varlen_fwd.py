"""Multi-head attention over packed sequences on the GPU: against float64, over all keys and over selected ones."""

import itertools
import math

import pytest
import torch

import dsa
import dsa.reference
from dsa.kernels.mla.mha_limits import MHA_DIMS, ROPE_DIMS
from dsa.testing import assert_close, poison_free_memory

# Heads, KV heads, queries and keys of each sequence.
CASES = {
    "whole tiles": (4, 4, [256, 384], [256, 384]),
    "a single token": (2, 1, [1], [1]),
    "odd lengths": (4, 2, [1, 77, 129, 300, 64, 1000, 5], [1, 77, 129, 300, 64, 1000, 5]),
    "empty sequences": (3, 1, [0, 5, 0, 0, 130, 0], [0, 5, 0, 0, 130, 0]),
    "prefixes": (4, 1, [1, 63, 128, 10, 200], [500, 64, 300, 11, 2000]),
    "fewer keys": (4, 4, [200, 64, 130, 500, 10], [100, 1, 0, 300, 0]),
    "many sequences": (2, 1, [7 * i % 50 for i in range(300)], [11 * i % 90 for i in range(300)]),
    "long": (4, 4, [3000], [4096]),
}
ROUNDING = {torch.bfloat16: 2.01 / 256, torch.float16: 2.01 / 2048}
HOSTILE = [[0, 2**31 - 1], [-5, 100, 70], [70, 3, 500], [-(2**31), 2**31 - 1, 0], [100, 100, 40, 200]]


def bounds(lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def inputs(dims, heads, kv_heads, queries, keys, dtype=torch.bfloat16, scale=1.0):
    """With NaN behind the sequences."""
    (dim, value_dim), tensors = dims, []
    for own, count, channels in ((queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim)):
        x = torch.randn(sum(own) + 37, count, channels, device="cuda").to(dtype)
        x[sum(own) :] = math.nan
        tensors.append(x)
    tensors[0] *= scale
    return *tensors, bounds(queries), bounds(keys), max(keys), dim**-0.5


def selections(q, cu_q, cu_k, longest, top_k):
    """Some keys of every query's sequence: the bits, and bool [Tq, longest] of the same."""
    sequence = torch.searchsorted(cu_q, torch.arange(len(q), device="cuda", dtype=torch.int32), right=True) - 1
    starts = cu_k[sequence.clamp(0, len(cu_k) - 2)]
    chosen = torch.rand(len(q), longest, device="cuda").argsort(-1)[:, :top_k].int()
    bits = dsa.selection_bits(chosen + starts[:, None], starts, longest)
    return bits, torch.zeros(len(q), longest, dtype=torch.bool, device="cuda").scatter_(1, chosen.long(), True)


def expected(q, k, v, cu_q, cu_k, scale, causal, chosen=None):
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64, device="cuda")
    lse = torch.full((q.shape[1], len(q)), math.inf, dtype=torch.float64, device="cuda")
    for (a, b), (c, d) in zip(*(itertools.pairwise(x.tolist()) for x in (cu_q, cu_k))):
        if a == b or c == d:
            continue
        own = (
            x.double().transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (q[a:b], k[c:d], v[c:d])
        )
        own_q, own_k, own_v = own
        visible = torch.ones(b - a, d - c, dtype=torch.bool, device="cuda")
        if causal:
            visible = visible.tril((d - c) - (b - a))
        if chosen is not None:
            visible &= chosen[a:b, : d - c]
        scores = (own_q @ own_k.mT * scale).masked_fill(~visible, -math.inf)
        own_lse = scores.logsumexp(-1)
        seen = own_lse > -math.inf
        powers = (scores - own_lse.masked_fill(~seen, 0.0)[..., None]).exp()
        out[a:b] = (powers @ own_v).transpose(0, 1)
        lse[:, a:b] = own_lse.masked_fill(~seen, math.inf)
    return out, lse


def check(arguments, causal=True, record_error=None, chosen=None, **options):
    q, k, v, cu_q, cu_k, _, scale = arguments
    poison_free_memory(mebibytes=64)
    rows = slice(0, int(cu_q[-1]))
    out, lse = dsa.mha_varlen_fwd(*arguments, causal, **options)
    right, right_lse = expected(q, k, v, cu_q, cu_k, scale, causal, chosen)
    tolerances = {"abs_tol": 4 * ROUNDING[q.dtype], "rel_tol": ROUNDING[q.dtype], "cos_tol": 2e-5}
    error = assert_close("out", out[rows], right[rows], **tolerances)
    assert_close("lse", lse[:, rows], right_lse[:, rows], abs_tol=2e-5, rel_tol=2e-6)
    again, lse_again = dsa.mha_varlen_fwd(*arguments, causal, **options)
    assert torch.equal(again[rows], out[rows]) and torch.equal(lse_again[:, rows], lse[:, rows])
    if record_error:
        record_error(error)
    return out, lse


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("dims", MHA_DIMS, ids=str)
def test_all_keys(dims, case, causal, record_error):
    check(inputs(dims, *case), causal, record_error)


@pytest.mark.parametrize("top_k", [1, 40, 700])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("dims", MHA_DIMS, ids=str)
def test_selected_keys(dims, case, top_k, record_error):
    """Queries of which no selected key is visible have none."""
    arguments = inputs(dims, *case)
    q, _, _, cu_q, cu_k, longest, _ = arguments
    bits, chosen = selections(q, cu_q, cu_k, longest, min(top_k, longest))
    check(arguments, True, record_error, chosen, selected=bits)
    check(arguments, False, None, chosen, selected=bits)


@pytest.mark.parametrize("tokens", [1, 64, 127, 128, 129, 640, 1000])
@pytest.mark.parametrize("dims", MHA_DIMS, ids=str)
def test_the_last_query_reads_its_own_bits(dims, tokens):
    """Nothing lies behind the last sequence, neither queries nor bits."""
    q, *rest = inputs(dims, 4, 4, [30, tokens], [30, tokens])
    q = q[: 30 + tokens].clone()
    _, _, cu_q, cu_k, longest, _ = rest
    bits, chosen = selections(q, cu_q, cu_k, longest, max(longest // 2, 1))
    check((q, *rest), True, None, chosen, selected=bits)
    check((q, *rest), False, None, chosen, selected=bits)


@pytest.mark.parametrize("dims", MHA_DIMS, ids=str)
@pytest.mark.parametrize("dense_keys", [0, 1, 100, 640, 10**6])
def test_queries_with_few_keys_are_not_looked_up(dims, dense_keys):
    """All of theirs are selected; the same bits whatever is read."""
    arguments = inputs(dims, 4, 4, [700, 300], [900, 300])
    q, _, _, cu_q, cu_k, longest, _ = arguments
    bits, chosen = selections(q, cu_q, cu_k, longest, 300)
    seen = torch.cat((torch.arange(201, 901), torch.arange(1, 301))).cuda()
    bits[:1000][seen <= dense_keys] = -1
    chosen[:1000][seen <= dense_keys] = True
    out, lse = check(arguments, True, None, chosen, selected=bits, dense_keys=dense_keys)
    other = dsa.mha_varlen_fwd(*arguments, selected=bits)
    assert torch.equal(out[:1000], other[0][:1000]) and torch.equal(lse[:, :1000], other[1][:, :1000])


@pytest.mark.parametrize("dims", ROPE_DIMS, ids=str)
def test_rope_channels_apart(dims):
    """And keys and values as parts of one tensor, as a projection of latents gives them: the same bits."""
    rope = ROPE_DIMS[dims]
    q, _, _, *rest = inputs(dims, 4, 4, [513, 100], [700, 100])
    both = torch.randn(837, 4, sum(dims) - rope, device="cuda").bfloat16()
    k, v, shared = (
        both[..., : dims[0] - rope],
        both[..., dims[0] - rope :],
        torch.randn(837, rope, device="cuda").bfloat16(),
    )
    whole = torch.cat((k, shared[:, None].expand(-1, 4, -1)), -1)
    bits, _ = selections(q, *rest[:3], 100)
    for options in ({}, {"selected": bits}):
        got = dsa.mha_varlen_fwd(q, k, v, *rest, k_rope=shared, **options)
        expected = dsa.mha_varlen_fwd(q, whole, v.contiguous(), *rest, **options)
        assert torch.equal(got[0][:613], expected[0][:613]) and torch.equal(got[1][:, :613], expected[1][:, :613])


@pytest.mark.parametrize("dims", [(48, 32), (96, 64), (136, 96), (192, 192), (200, 8)], ids=str)
def test_channels_between_those_of_the_kernels(dims, record_error):
    check(inputs(dims, 4, 2, [513, 100], [700, 100]), True, record_error)


@pytest.mark.parametrize("dims", MHA_DIMS, ids=str)
def test_all_bits_are_no_selection(dims):
    arguments = inputs(dims, 2, 2, [513, 100], [700, 100])
    bits = torch.full((len(arguments[0]), 24), -1, dtype=torch.int32, device="cuda")
    for x, y in zip(dsa.mha_varlen_fwd(*arguments, selected=bits), dsa.mha_varlen_fwd(*arguments), strict=True):
        assert torch.equal(x[..., :613] if x.dim() == 2 else x[:613], y[..., :613] if y.dim() == 2 else y[:613])


@pytest.mark.parametrize("dims", MHA_DIMS, ids=str)
def test_a_query_depends_on_no_other(dims):
    """A sequence alone, and the last queries of it as a chunk behind a prefix."""
    q, k, v, *_, scale = inputs(dims, 4, 2, [300, 700], [300, 700])
    cu = bounds([300, 700])
    bits, _ = selections(q, cu, cu, 700, 200)
    whole, lse = dsa.mha_varlen_fwd(q, k, v, cu, cu, 700, scale, selected=bits)
    for first in (300, 301, 555, 999):
        part = dsa.mha_varlen_fwd(
            *(q[first:1000], k[300:1000], v[300:1000], bounds([1000 - first]), bounds([700]), 700, scale),
            selected=bits[first:1000],
        )
        assert torch.equal(part[0], whole[first:1000]) and torch.equal(part[1], lse[:, first:1000])


@pytest.mark.parametrize("dims", MHA_DIMS, ids=str)
def test_fp16_large_scores_and_strides(dims, record_error):
    check(inputs(dims, 4, 2, [513, 100], [513, 400], torch.float16), True, record_error)
    check(inputs(dims, 4, 2, [513, 700], [513, 700], scale=30.0))
    q, k, v, *rest = inputs(dims, 4, 2, [513, 100], [513, 100])
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k)]
    check((*by_head, torch.cat([v, v], -1)[..., : v.shape[2]], *rest))
    odd = torch.cat([q, q[..., :3]], -1)[..., : q.shape[2]]
    check((odd, k, v[:, :1].expand(v.shape), *rest))


@pytest.mark.parametrize("cu_k", HOSTILE, ids=str)
@pytest.mark.parametrize("cu_q", HOSTILE, ids=str)
def test_whatever_the_bounds_and_bits_say(cu_q, cu_k):
    """Rows that one sequence alone has are right, whatever others say."""
    count = max(len(cu_q), len(cu_k))
    cu_q, cu_k = (torch.tensor([*x, *[x[-1]] * (count - len(x))]).int() for x in (cu_q, cu_k))
    q, k = (torch.randn(n, 2, 128, device="cuda").bfloat16() for n in (200, 260))
    bits = torch.randint(-(2**31), 2**31 - 1, (200, 12), dtype=torch.int32, device="cuda")
    for selected in (None, bits):
        poison_free_memory(mebibytes=64)
        out, lse = dsa.mha_varlen_fwd(q, k, k, cu_q.cuda(), cu_k.cuda(), 260, 0.1, selected=selected)
        own = None if selected is None else selected.cpu()
        right, right_lse = dsa.reference.mha_varlen_fwd(q.cpu(), k.cpu(), k.cpu(), cu_q, cu_k, 260, 0.1, selected=own)
        # Sequences that overlap write the same rows, one of them last.
        spans = itertools.pairwise(cu_q.tolist())
        rows = [r for a, b in spans if 0 <= a <= b <= 200 for r in range(a, b)]
        once = torch.tensor([r for r in set(rows) if rows.count(r) == 1], dtype=torch.int64)
        # Both round to bf16.
        assert_close("out", out.cpu()[once], right[once].double(), abs_tol=0.05, rel_tol=0.02, cos_tol=1e-5)
        assert_close("lse", lse.cpu()[:, once], right_lse[:, once], abs_tol=0.01, rel_tol=0.01)


def test_it_is_what_sparse_attention_gives():
    """The absorbed form over the same keys, up to rounding: keys and values of all heads are projections of latents."""
    heads, tokens, top_k, scale = 8, 900, 256, 192**-0.5
    latent, rope = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (512, 64))
    w_uk, w_uv = (torch.randn(heads, 128, 512, device="cuda").bfloat16() / 16 for _ in range(2))
    q = torch.randn(tokens, heads, 192, device="cuda").bfloat16()
    k = torch.cat((torch.einsum("tc,hdc->thd", latent, w_uk), rope[:, None].expand(-1, heads, -1)), -1)
    v = torch.einsum("tc,hdc->thd", latent, w_uv)
    indices = torch.rand(tokens, tokens, device="cuda").tril().argsort(-1, descending=True)[:, :top_k]
    indices = indices.where(indices <= torch.arange(tokens, device="cuda")[:, None], -1).int()
    cu, starts = bounds([tokens]), torch.zeros(tokens, dtype=torch.int32, device="cuda")
    bits = dsa.selection_bits(indices, starts, tokens)
    out, lse = dsa.mha_varlen_fwd(q, k, v, cu, cu, tokens, scale, selected=bits, dense_keys=top_k)
    absorbed = torch.cat((torch.einsum("thd,hdc->thc", q[..., :128], w_uk), q[..., 128:]), -1)
    kv = torch.cat((latent, rope), -1)[:, None]
    sparse, _, sparse_lse = dsa.flash_mla_sparse_fwd(absorbed, kv, indices[:, None], scale)
    assert_close("lse", lse.T, sparse_lse, abs_tol=0.05, rel_tol=0.02)
    assert_close("out", out, torch.einsum("thc,hdc->thd", sparse, w_uv), abs_tol=0.1, rel_tol=0.05, cos_tol=1e-3)


def test_graph_replay_with_new_bounds_and_bits():
    q, k, v, cu, _, _, scale = inputs((192, 128), 8, 8, [300, 700], [300, 700])
    bits, _ = selections(q, cu, cu, 1000, 200)
    dsa.mha_varlen_fwd(q, k, v, cu, cu, 1000, scale, selected=bits)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        out, lse = dsa.mha_varlen_fwd(q, k, v, cu, cu, 1000, scale, selected=bits)
    for cut in (300, 1, 999, 512):
        cu[1] = cut
        bits.copy_(selections(q, cu, cu, 1000, 100)[0])
        graph.replay()
        again, lse_again = dsa.mha_varlen_fwd(q, k, v, cu, cu, 1000, scale, selected=bits)
        assert torch.equal(out[:1000], again[:1000]) and torch.equal(lse[:, :1000], lse_again[:, :1000])


@pytest.mark.several_gpus
def test_tensors_on_another_gpu_than_the_current_one():
    arguments = [x.to("cuda:1") if isinstance(x, torch.Tensor) else x for x in inputs((64, 64), 2, 2, [50], [50])]
    with torch.cuda.device(0):
        out, _ = dsa.mha_varlen_fwd(*arguments)
    assert out.device.index == 1 and not out[:50].isnan().any()
