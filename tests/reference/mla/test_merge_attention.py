"""The merge of attention branches: attention over all keys, empty branches, and arguments that are refused."""

import math

import pytest
import torch

import dsa
from dsa.cases.attention import attend_lists
from dsa.reference import merge_attention
from tests.reference.common import assert_refused

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("counts", [[5], [3, 4], [1, 0, 6], [0, 2], [2, 2, 2, 2]])
@pytest.mark.parametrize("with_sink", [False, True])
def test_merged_branches_are_attention_over_all_keys(counts, with_sink):
    q, keys = torch.randn(2, 3, 8), torch.randn(sum(counts), 8)
    sink = torch.tensor([INF, -INF, 0.7]) if with_sink else None
    lists = torch.arange(sum(counts)).expand(2, -1)
    parts = [attend_lists(q, keys, part, 1.0, 6) for part in lists.split(counts, 1)]
    found = merge_attention([x.out.float() for x in parts], [x.lse.float() for x in parts], sink)
    for got, expected in zip(found, attend_lists(q, keys, lists, 1.0, 6, sink)):
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mark", [INF, -INF])
def test_merge_ignores_what_empty_branches_hold(mark):
    outs = [torch.full((2, 1, 3), NAN), torch.tensor([[[1.0, 2.0, 3.0]], [[NAN, NAN, NAN]]])]
    lses = [torch.full((2, 1), mark), torch.tensor([[5.0], [mark]])]
    out, lse = merge_attention(outs, lses, torch.tensor([-INF]))
    assert out[0, 0].tolist() == [1.0, 2.0, 3.0] and out[1].eq(0).all()
    assert lse.flatten().tolist() == [5.0, INF]


def test_merge_keeps_the_dtype_and_large_lses():
    outs = [torch.ones(1, 1, 2).bfloat16(), torch.zeros(1, 1, 2).bfloat16()]
    out, lse = merge_attention(outs, [torch.tensor([[1000.0]]), torch.tensor([[1000.0]])])
    assert out.dtype == torch.bfloat16 and out.tolist() == [[[0.5, 0.5]]]
    assert lse.item() == pytest.approx(1000 + math.log(2))


OUT, LSE = torch.zeros(2, 3, 4), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([OUT, OUT], [LSE]), "lses: must be a list of as many tensors as outs, 2, got 1"),
        (([], []), "outs: must be a list of at least one tensor, got none"),
        (([OUT, OUT], [LSE, LSE.T]), r"lses\[1\]: shape must be \[2, 3\], got \[3, 2\]"),
        (([OUT], [LSE], torch.zeros(2)), r"attn_sink: shape must be \[3\], got \[2\]"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    assert_refused(message, dsa.merge_attention, *arguments)
