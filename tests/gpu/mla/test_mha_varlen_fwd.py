"""Multi-head attention over packed sequences on the GPU: against float64, over all keys and over selected ones."""

import itertools

import pytest
import torch

import dsa
import dsa.reference
from dsa.kernels.mla.mha_limits import MHA_DIMS, ROPE_DIMS
from dsa.testing import assert_close, poison_free_memory
from tests.gpu.attention import BF16, FP16, INF, NAN, attend, distinct, starts
from tests.gpu.op_checks import among_nan, assert_same_bits, assert_same_on_the_second_gpu, replays

# Heads, KV heads, queries and keys of each sequence.
CASES = {
    "whole tiles": (4, 4, [256, 384], [256, 384]),
    "a single token": (2, 1, [1], [1]),
    "odd lengths": (4, 2, [1, 77, 129, 300, 64, 1000, 5], [1, 77, 129, 300, 64, 1000, 5]),
    "empty sequences": (3, 1, [0, 5, 0, 0, 130, 0], [0, 5, 0, 0, 130, 0]),
    "prefixes": (4, 1, [1, 63, 128, 10, 200], [500, 64, 300, 11, 2000]),
    "fewer keys": (4, 4, [200, 64, 130, 500, 10], [100, 1, 0, 300, 0]),
    "many heads a KV head": (16, 1, [513, 100], [513, 100]),
    "many sequences": (2, 1, [7 * i % 50 for i in range(300)], [11 * i % 90 for i in range(300)]),
    "long": (4, 4, [3000], [4096]),
}
ROUNDING = {BF16: 2.01 / 256, FP16: 2.01 / 2048}
HOSTILE = [[0, 2**31 - 1], [-5, 100, 70], [70, 3, 500], [-(2**31), 2**31 - 1, 0], [100, 100, 40, 200]]


def inputs(dims, heads, kv_heads, queries, keys, dtype=BF16, scale=1.0):
    """With NaN behind the sequences."""
    (dim, value_dim), tensors = dims, []
    for lengths, count, channels in ((queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim)):
        x = torch.randn(sum(lengths) + 37, count, channels, device="cuda").to(dtype)
        x[sum(lengths) :] = NAN
        tensors.append(x)
    tensors[0] *= scale
    return *tensors, starts(queries), starts(keys), max(keys), dim**-0.5


def selections(q, cu_q, cu_k, longest, top_k):
    """Some keys of every query's sequence: the bits, and bool [Tq, longest] of the same."""
    sequence = torch.searchsorted(cu_q, torch.arange(len(q), device="cuda", dtype=torch.int32), right=True) - 1
    first = cu_k[sequence.clamp(0, len(cu_k) - 2)]
    chosen = distinct(len(q), longest, top_k)
    bits = dsa.selection_bits(chosen + first[:, None], first, longest)
    return bits, torch.zeros(len(q), longest, dtype=torch.bool, device="cuda").scatter_(1, chosen.long(), True)


def in_sequences(results, cu_q):
    """out and lse of the queries of some sequence."""
    rows = slice(int(cu_q[0]), int(cu_q[-1]))
    return results[0][rows], results[1][:, rows]


def expected(q, k, v, cu_q, cu_k, _longest, scale, causal=True, chosen=None):
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64, device="cuda")
    lse = torch.full((q.shape[1], len(q)), INF, dtype=torch.float64, device="cuda")
    for (a, b), (c, d) in zip(*(itertools.pairwise(x.tolist()) for x in (cu_q, cu_k))):
        if a == b or c == d:
            continue
        visible = torch.ones(b - a, d - c, dtype=torch.bool, device="cuda")
        if causal:
            visible = visible.tril((d - c) - (b - a))
        if chosen is not None:
            visible &= chosen[a:b, : d - c]
        out[a:b], lse_of_rows = attend(q[a:b], k[c:d], v[c:d], visible, scale)
        lse[:, a:b] = lse_of_rows.T
    return out, lse


def check(arguments, causal=True, record_error=None, chosen=None, **options):
    q, cu_q = arguments[0], arguments[3]
    poison_free_memory(mebibytes=64)
    got = out, lse = in_sequences(dsa.mha_varlen_fwd(*arguments, causal, **options), cu_q)
    right, right_lse = in_sequences(expected(*arguments, causal, chosen), cu_q)
    tolerances = {"abs_tol": 4 * ROUNDING[q.dtype], "rel_tol": ROUNDING[q.dtype], "cos_tol": 2e-5}
    error = assert_close("out", out, right, **tolerances)
    assert_close("lse", lse, right_lse, abs_tol=2e-5, rel_tol=2e-6)
    assert_same_bits(in_sequences(dsa.mha_varlen_fwd(*arguments, causal, **options), cu_q), got)
    if record_error:
        record_error(error)
    return got


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
    bits, chosen = selections(q, *rest[2:5], max(rest[4] // 2, 1))
    check((q, *rest), True, None, chosen, selected=bits)
    check((q, *rest), False, None, chosen, selected=bits)


@pytest.mark.parametrize("dims", MHA_DIMS, ids=str)
@pytest.mark.parametrize("dense_keys", [0, 1, 100, 640, 10**6])
def test_queries_with_few_keys_are_not_looked_up(dims, dense_keys):
    """All of theirs are selected; the same bits whatever is read."""
    arguments = inputs(dims, 4, 4, [700, 300], [900, 300])
    bits, chosen = selections(arguments[0], *arguments[3:6], 300)
    seen = torch.cat((torch.arange(201, 901), torch.arange(1, 301))).cuda()
    bits[:1000][seen <= dense_keys] = -1
    chosen[:1000][seen <= dense_keys] = True
    got = check(arguments, True, None, chosen, selected=bits, dense_keys=dense_keys)
    assert_same_bits(in_sequences(dsa.mha_varlen_fwd(*arguments, selected=bits), arguments[3]), got)


@pytest.mark.parametrize("dims", ROPE_DIMS, ids=str)
def test_rope_channels_apart(dims):
    """And keys and values as parts of one tensor, as a projection of latents gives them: the same bits."""
    rope = ROPE_DIMS[dims]
    q, _, _, *rest = inputs(dims, 4, 4, [513, 100], [700, 100])
    both = torch.randn(837, 4, sum(dims) - rope, device="cuda").bfloat16()
    k, v = both[..., : dims[0] - rope], both[..., dims[0] - rope :]
    shared = torch.randn(837, rope, device="cuda").bfloat16()
    whole = torch.cat((k, shared[:, None].expand(-1, 4, -1)), -1)
    bits, _ = selections(q, *rest[:3], 100)
    for options in ({}, {"selected": bits}):
        got = dsa.mha_varlen_fwd(q, k, v, *rest, k_rope=shared, **options)
        apart = dsa.mha_varlen_fwd(q, whole, v.contiguous(), *rest, **options)
        assert_same_bits(in_sequences(got, rest[0]), in_sequences(apart, rest[0]))


@pytest.mark.parametrize("dims", [(48, 32), (96, 64), (136, 96), (192, 192), (200, 8)], ids=str)
def test_channels_between_those_of_the_kernels(dims, record_error):
    check(inputs(dims, 4, 2, [513, 100], [700, 100]), True, record_error)


@pytest.mark.parametrize("dims", MHA_DIMS, ids=str)
def test_all_bits_are_no_selection(dims):
    arguments = inputs(dims, 2, 2, [513, 100], [700, 100])
    bits = torch.full((len(arguments[0]), 24), -1, dtype=torch.int32, device="cuda")
    got, whole = dsa.mha_varlen_fwd(*arguments, selected=bits), dsa.mha_varlen_fwd(*arguments)
    assert_same_bits(in_sequences(got, arguments[3]), in_sequences(whole, arguments[3]))


@pytest.mark.parametrize("dims", MHA_DIMS, ids=str)
def test_a_query_depends_on_no_other(dims):
    """A sequence alone, and the last queries of it as a chunk behind a prefix."""
    q, k, v, *_, scale = inputs(dims, 4, 2, [300, 700], [300, 700])
    cu = starts([300, 700])
    bits, _ = selections(q, cu, cu, 700, 200)
    out, lse = dsa.mha_varlen_fwd(q, k, v, cu, cu, 700, scale, selected=bits)
    for first in (300, 301, 555, 999):
        part = dsa.mha_varlen_fwd(
            *(q[first:1000], k[300:1000], v[300:1000], starts([1000 - first]), starts([700]), 700, scale),
            selected=bits[first:1000],
        )
        assert_same_bits(part, (out[first:1000], lse[:, first:1000]))


@pytest.mark.parametrize("dims", MHA_DIMS, ids=str)
def test_fp16_large_scores_and_strides(dims, record_error):
    check(inputs(dims, 4, 2, [513, 100], [513, 400], FP16), True, record_error)
    check(inputs(dims, 4, 2, [513, 700], [513, 700], scale=30.0))
    q, k, v, *rest = inputs(dims, 4, 2, [513, 100], [513, 100])
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k)]
    check((*by_head, torch.cat([v, v], -1)[..., : v.shape[2]], *rest))
    odd = among_nan(q, 1, 2)  # rows at no multiple of 16 bytes
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


def test_a_graph_takes_new_bounds_and_bits():
    q, k, v, cu, _, _, scale = inputs((192, 128), 8, 8, [300, 700], [300, 700])
    bits, _ = selections(q, cu, cu, 1000, 200)
    cuts = iter((300, 1, 999, 512))

    def renew():
        new = starts([next(cuts), 0])
        new[2] = 1000
        return new, selections(q, new, new, 1000, 100)[0]

    def call(cu, bits):
        return dsa.mha_varlen_fwd(q, k, v, cu, cu, 1000, scale, selected=bits)

    for got in replays(call, (cu, bits), renew, times=4):
        assert_same_bits(in_sequences(got, cu), in_sequences(call(cu, bits), cu))


@pytest.mark.several_gpus
def test_tensors_on_another_gpu_than_the_current_one():
    q, k, v, *bounds = (x[:50] if x.dim() == 3 else x for x in inputs((64, 64), 2, 2, [50], [50])[:5])

    def call(*tensors):
        return dsa.mha_varlen_fwd(*tensors, 50, 0.125)

    assert_same_on_the_second_gpu(call, q, k, v, *bounds)
