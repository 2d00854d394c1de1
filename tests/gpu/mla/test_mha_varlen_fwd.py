"""mha_varlen_fwd (multi-head attention over packed sequences) on the GPU, over all keys and over selected keys."""

import pytest
import torch

from dsa.kernels.mla.limits import MHA_DIMS, ROPE_DIMS
from tests.gpu.attention import FP16, case_of, checked, replayed, starts
from tests.gpu.op_checks import assert_same_bits

CASE = case_of("mha_varlen_fwd")
# name -> (heads, KV heads, queries of each sequence, keys of each sequence)
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
OPTIONS = [{"dims": dims, "dtype": FP16} for dims in MHA_DIMS] + [{"dims": dims, "scale": 30.0} for dims in MHA_DIMS]
BETWEEN = [{"dims": dims} for dims in ((48, 32), (96, 64), (136, 96), (192, 192), (200, 8))]
by_dims = pytest.mark.parametrize("dims", MHA_DIMS, ids=str)
by_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def call(dims, heads, kv_heads, queries, keys, **options):
    sizes = {"dims": dims, "heads": heads, "kv_heads": kv_heads, "sequences": tuple(zip(queries, keys))}
    return CASE.arguments("cuda", **sizes, **options)


def in_sequences(results, cu_q):
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
    given = call(dims, *case, top_k=top_k)
    checked(CASE, given, record_error)
    checked(CASE, given | {"causal": False}, record_error)


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"causal": False}], ids=str)
@by_case
@by_dims
def test_sinks_are_right(dims, case, options, record_error):
    given = call(dims, *case, sinks=True, **options)
    checked(CASE, given, record_error)
    without = CASE.run(given | {"attn_sink": None})
    same_in_sequences(given, CASE.run(given | {"attn_sink": torch.full_like(given["attn_sink"], -torch.inf)}), without)
    for sink in (30.0, -30.0, torch.inf):
        checked(CASE, given | {"attn_sink": torch.full_like(given["attn_sink"], sink)})


@pytest.mark.parametrize("tokens", [1, 64, 127, 128, 129, 640, 1000])
@by_dims
def test_the_last_query_reads_its_own_bits(dims, tokens):
    """A read past the last sequence's queries or selection bits would be out of bounds."""
    given = call(dims, 4, 4, [30, tokens], [30, tokens], top_k=max(tokens, 30) // 2, more=0)
    checked(CASE, given)
    checked(CASE, given | {"causal": False})


@by_dims
@pytest.mark.parametrize("dense_keys", [0, 1, 100, 640, 10**6])
def test_queries_with_few_keys_are_not_looked_up(dims, dense_keys):
    """For queries that see at most dense_keys keys, the op may ignore the selection. Here the bits select all keys of
    these queries."""
    given = call(dims, 4, 4, [700, 300], [900, 300], top_k=300) | {"dense_keys": dense_keys}
    seen = torch.cat((torch.arange(201, 901), torch.arange(1, 301))).cuda()
    given["selected"][:1000][seen <= dense_keys] = -1
    got = checked(CASE, given)
    same_in_sequences(given, got, CASE.run(given | {"dense_keys": 0}))


@pytest.mark.parametrize("dims", ROPE_DIMS, ids=str)
def test_rope_channels_apart_give_the_same_bits(dims):
    """In `parts` the rope channels are in k_rope. There k and v are views of one tensor, as a projection of latents
    gives them."""
    rope, given = ROPE_DIMS[dims], call(dims, 4, 4, [513, 100], [700, 100], rope=ROPE_DIMS[dims], top_k=100)
    both = torch.cat((given["k"], given["v"]), -1)
    parts = {"k": both[..., : dims[0] - rope], "v": both[..., dims[0] - rope :]}
    whole = {"k": torch.cat((given["k"], given["k_rope"][:, None].expand(-1, 4, -1)), -1), "k_rope": None}
    for selected in (None, given["selected"]):
        given["selected"] = selected
        same_in_sequences(given, CASE.run(given | parts), CASE.run(given | whole))


@pytest.mark.parametrize("options", [*OPTIONS, *BETWEEN], ids=str)
def test_fp16_large_scores_and_other_channels_are_right(options, record_error):
    """The kernels do not support the numbers of channels in BETWEEN, so the op pads the channels."""
    given = call(heads=4, kv_heads=2, queries=[513, 100], keys=[700, 400], **options)
    checked(CASE, given, record_error)
    one_head = given["v"][:, :1].expand(given["v"].shape)
    checked(CASE, given | {"v": one_head})


@by_dims
def test_all_bits_are_no_selection(dims):
    given = call(dims, 2, 2, [513, 100], [700, 100])
    bits = torch.full((len(given["q"]), 24), -1, dtype=torch.int32, device="cuda")
    same_in_sequences(given, CASE.run(given | {"selected": bits}), CASE.run(given))


@by_dims
def test_a_query_depends_on_no_other(dims):
    given = call(dims, 4, 2, [300, 700], [300, 700], top_k=200)
    out, lse = CASE.run(given)
    for first in (300, 301, 555, 999):
        part = {name: given[name][first:1000] for name in ("q", "selected")}
        part |= {name: given[name][300:1000] for name in ("k", "v")}
        part |= {"cu_seqlens_q": starts([1000 - first]), "cu_seqlens_k": starts([700])}
        assert_same_bits(CASE.run(given | part), (out[first:1000], lse[:, first:1000]))


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
