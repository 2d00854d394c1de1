"""Training's selection: every shape of sequence against the formula, NaN, and wrong arguments."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import indexer_topk
from tests.reference.common import assert_refused

(CASE,) = cases_of("indexer_topk")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 20])
def test_the_best_keys_of_each_query(top_k, causal):
    CASE.verify(lengths=((4, 9), (0, 2), (3, 5), (2, 1), (5, 0)), heads=3, di=4, top_k=top_k, causal=causal)


def test_nan_is_never_picked():
    given = CASE.arguments(lengths=((2, 6),), top_k=6, causal=False)
    given["k_idx"][3] = torch.nan
    assert 3 not in indexer_topk(**given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k_idx": torch.zeros(6, 5).bfloat16()},
            r"k_idx: shape must be \[Tk, 4\], got \[6, 5\] \(sizes as of q_idx\)",
        ),
        ({"w_idx": torch.zeros(2, 3).half()}, "w_idx: dtype must be q_idx's bfloat16 or float32, got float16"),
        ({"top_k": 0}, "top_k: must be at least 1, got 0"),
        (
            {"cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32)},
            r"cu_seqlens_q: must ascend from 0 to 2, got \[0, 3\] \(sizes as of q_idx\)",
        ),
        ({"max_seqlen_k": -1}, "max_seqlen_k: must be at least 0, got -1"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    assert_refused(message, dsa.indexer_topk, **CASE.arguments(lengths=((2, 6),), heads=3, di=4) | change)
