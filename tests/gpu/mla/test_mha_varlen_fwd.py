"""Multi-head attention over packed sequences on the GPU: over all keys and over selected ones, bounds, strides."""

import itertools

import pytest
import torch

import dsa
from dsa.kernels.mla.limits import MHA_DIMS, ROPE_DIMS
from dsa.testing import assert_close, poison_free_memory
from tests.gpu.attention import FP16, case_of, checked, replayed, starts
from tests.gpu.op_checks import among_nan, assert_same_bits

CASE = case_of("mha_varlen_fwd")
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
HOSTILE = [[0, 2**31 - 1], [-5, 100, 70], [70, 3, 500], [-(2**31), 2**31 - 1, 0], [100, 100, 40, 200]]
by_dims = pytest.mark.parametrize("dims", MHA_DIMS, ids=str)
by_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def call(dims, heads, kv_heads, queries, keys, **options):
    sizes = {"dims": dims, "heads": heads, "kv_heads": kv_heads, "sequences": tuple(zip(queries, keys))}
    return CASE.arguments("cuda", **sizes, **options)


def inputs(*sizes, **options):
    """The first seven arguments of a call, with NaN after the sequences."""
    return tuple(call(*sizes, **options).values())[:7]


def in_sequences(results, cu_q):
    """out and lse of the queries of some sequence."""
    rows = slice(int(cu_q[0]), int(cu_q[-1]))
    return results[0][rows], results[1][:, rows]


def same_in_sequences(given, got, expected):
    assert_same_bits(in_sequences(got, given["cu_seqlens_q"]), in_sequences(expected, given["cu_seqlens_q"]))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@by_case
@by_dims
def test_all_keys_are_right(dims, case, causal, record_error):
    given = call(dims, *case, causal=causal)
    same_in_sequences(given, CASE.run(given), checked(CASE, given, record_error))


@pytest.mark.parametrize("top_k", [1, 40, 700])
@by_case
@by_dims
def test_selected_keys_are_right(dims, case, top_k, record_error):
    """Queries of which no selected key is visible have none."""
    given = call(dims, *case, top_k=top_k)
    checked(CASE, given, record_error)
    checked(CASE, given | {"causal": False}, record_error)


@pytest.mark.parametrize("tokens", [1, 64, 127, 128, 129, 640, 1000])
@by_dims
def test_the_last_query_reads_its_own_bits(dims, tokens):
    """Nothing lies after the last sequence, neither queries nor bits."""
    given = call(dims, 4, 4, [30, tokens], [30, tokens], top_k=max(tokens, 30) // 2, more=0)
    checked(CASE, given)
    checked(CASE, given | {"causal": False})


@by_dims
@pytest.mark.parametrize("dense_keys", [0, 1, 100, 640, 10**6])
def test_queries_with_few_keys_are_not_looked_up(dims, dense_keys):
    """All of theirs are selected; the same bits whatever is read."""
    given = call(dims, 4, 4, [700, 300], [900, 300], top_k=300) | {"dense_keys": dense_keys}
    seen = torch.cat((torch.arange(201, 901), torch.arange(1, 301))).cuda()
    given["selected"][:1000][seen <= dense_keys] = -1
    got = checked(CASE, given)
    same_in_sequences(given, got, CASE.run(given | {"dense_keys": 0}))


@pytest.mark.parametrize("dims", ROPE_DIMS, ids=str)
def test_rope_channels_apart_give_the_same_bits(dims):
    """And keys and values as parts of one tensor, as a projection of latents gives them."""
    rope, given = ROPE_DIMS[dims], call(dims, 4, 4, [513, 100], [700, 100], rope=ROPE_DIMS[dims], top_k=100)
    both = torch.cat((given["k"], given["v"]), -1)
    parts = {"k": both[..., : dims[0] - rope], "v": both[..., dims[0] - rope :]}
    whole = {"k": torch.cat((given["k"], given["k_rope"][:, None].expand(-1, 4, -1)), -1), "k_rope": None}
    for selected in (None, given["selected"]):
        given["selected"] = selected
        same_in_sequences(given, CASE.run(given | parts), CASE.run(given | whole))


@pytest.mark.parametrize("dims", [(48, 32), (96, 64), (136, 96), (192, 192), (200, 8)], ids=str)
def test_channels_between_those_of_the_kernels_are_right(dims, record_error):
    checked(CASE, call(dims, 4, 2, [513, 100], [700, 100]), record_error)


@by_dims
def test_all_bits_are_no_selection(dims):
    given = call(dims, 2, 2, [513, 100], [700, 100])
    bits = torch.full((len(given["q"]), 24), -1, dtype=torch.int32, device="cuda")
    same_in_sequences(given, CASE.run(given | {"selected": bits}), CASE.run(given))


@by_dims
def test_a_query_depends_on_no_other(dims):
    """A sequence alone, and its last queries as a chunk after a prefix."""
    given = call(dims, 4, 2, [300, 700], [300, 700], top_k=200)
    out, lse = CASE.run(given)
    for first in (300, 301, 555, 999):
        part = {name: given[name][first:1000] for name in ("q", "selected")}
        part |= {name: given[name][300:1000] for name in ("k", "v")}
        part |= {"cu_seqlens_q": starts([1000 - first]), "cu_seqlens_k": starts([700])}
        assert_same_bits(CASE.run(given | part), (out[first:1000], lse[:, first:1000]))


@by_dims
def test_fp16_large_scores_and_strides_are_right(dims, record_error):
    checked(CASE, call(dims, 4, 2, [513, 100], [513, 400], dtype=FP16), record_error)
    checked(CASE, call(dims, 4, 2, [513, 700], [513, 700], scale=30.0))
    given = call(dims, 4, 2, [513, 100], [513, 100])
    q, v = given["q"], given["v"]
    by_head = {name: given[name].transpose(0, 1).contiguous().transpose(0, 1) for name in "qk"}
    checked(CASE, given | by_head | {"v": torch.cat([v, v], -1)[..., : v.shape[2]]})
    # Rows at no multiple of 16 bytes.
    checked(CASE, given | {"q": among_nan(q, 1, 2), "v": v[:, :1].expand(v.shape)})


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
    given = call((192, 128), 8, 8, [300, 700], [300, 700]) | {"max_seqlen_k": 1000}
    given["selected"] = torch.zeros(len(given["q"]), 32, dtype=torch.int32, device="cuda")
    new = {name: given[name].clone() for name in ("cu_seqlens_q", "cu_seqlens_k", "selected")}

    def renewals():
        for cut in (300, 1, 999, 512):
            new["cu_seqlens_q"][1] = new["cu_seqlens_k"][1] = cut
            new["selected"].random_(-(2**31), 2**31 - 1)
            yield given | new

    for found in replayed(lambda: CASE.run(given), given, renewals()):
        CASE.check(given, found)
