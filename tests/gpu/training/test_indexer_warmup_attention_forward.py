"""The attention of the warm-up stage of training (`_packed_attention.attention_forward`) on the GPU has the bits of
mha_varlen_fwd."""

import pytest
import torch

from dsa.kernels.training.limits import DENSE_CHANNELS
from dsa.ops.training import _packed_attention
from dsa.testing import poison_free_memory
from tests.gpu.attention import INF, case_of, replayed, starts
from tests.gpu.op_checks import assert_same_bits

CASE = case_of("mha_varlen_fwd")
# (heads, KV heads, (queries, keys) of each sequence)
SEQUENCES = {
    "whole tiles": (4, 4, [(256, 256), (384, 384)]),
    "a single token": (2, 1, [(1, 1)]),
    "odd lengths": (4, 2, [(n, n) for n in (1, 77, 129, 300, 64, 1000, 5)]),
    "empty sequences": (3, 1, [(n, n) for n in (0, 5, 0, 0, 130, 0)]),
    "prefixes": (4, 1, [(1, 500), (63, 64), (128, 300), (10, 11), (200, 2000)]),
    "fewer keys": (4, 4, [(200, 100), (64, 1), (130, 0), (500, 300), (10, 0)]),
    "many heads per KV head": (16, 1, [(513, 513), (100, 100)]),
    "many sequences": (2, 1, [(7 * i % 50, 11 * i % 90) for i in range(300)]),
    "long": (4, 4, [(3000, 4096)]),
}


def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, softmax_scale, causal, **_):
    sequences = cu_seqlens_q, cu_seqlens_k, len(q), max_seqlen_k
    return _packed_attention.attention_forward(q, k, v, sequences, softmax_scale, causal)


def check(given, found):
    """mha_varlen_fwd leaves the results of queries that belong to no sequence unspecified."""
    end = int(given["cu_seqlens_q"][-1])
    (out, lse), (expected, expected_lse) = found, CASE.run(given)
    assert_same_bits((out[:end], lse[:, :end]), (expected[:end], expected_lse[:, :end]))
    assert out[end:].eq(0).all() and lse[:, end:].eq(INF).all()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize(("heads", "kv_heads", "sequences"), SEQUENCES.values(), ids=list(SEQUENCES))
@pytest.mark.parametrize("dims", DENSE_CHANNELS, ids=str)
def test_results_have_the_bits_of_multi_head_attention(dims, heads, kv_heads, sequences, causal):
    sizes = {"heads": heads, "kv_heads": kv_heads, "sequences": sequences, "causal": causal}
    given = CASE.arguments("cuda", dims=dims, **sizes)
    poison_free_memory(mebibytes=64)
    check(given, forward(**given))


def test_a_graph_takes_new_bounds():
    held, *renewals = (
        CASE.arguments("cuda", seed, dims=(128, 128), heads=8, sequences=[(cut, cut), (1000 - cut, 1000 - cut)])
        | {"max_seqlen_k": 1000}
        for seed, cut in enumerate((300, 300, 1, 999, 512))
    )
    for found, new in zip(replayed(lambda: forward(**held), held, renewals), renewals, strict=True):
        check(new, found)


@pytest.mark.parametrize(
    "queries, keys, lengths", [(5, 0, [5]), (5, 5, []), (5, 5, [0]), (5, 5, [0, 0]), (0, 5, [0])], ids=str
)
def test_without_keys_rows_are_empty(queries, keys, lengths):
    q, k = (torch.randn(n, 2, 64, device="cuda").bfloat16() for n in (queries, keys))
    bounds = starts(lengths), starts([0] * len(lengths))
    out, lse = _packed_attention.attention_forward(q, k, k, (*bounds, queries, keys), 0.1, True)
    assert not out.any() and lse.eq(INF).all()
    assert out.shape == (queries, 2, 64) and lse.shape == (2, queries)
