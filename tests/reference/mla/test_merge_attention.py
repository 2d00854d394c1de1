"""The reference of merge_attention: merged branches equal attention over all keys, empty branches, and large LSEs."""

import math

import pytest
import torch

from dsa.cases.attention import attend_lists
from dsa.reference import merge_attention
from tests.reference.common import BF16, INF, NAN, assert_close


@pytest.mark.parametrize("counts", [[5], [3, 4], [1, 0, 6], [0, 2], [2, 2, 2, 2]])
@pytest.mark.parametrize("sink", [None, torch.tensor([INF, -INF, 0.7])])
def test_merged_branches_are_attention_over_all_keys(counts, sink):
    q, keys, lists = torch.randn(2, 3, 8), torch.randn(sum(counts), 8), torch.arange(sum(counts)).expand(2, -1)
    parts = [attend_lists(q, keys, part, 1.0, 6) for part in lists.split(counts, 1)]
    found = merge_attention([x.out.float() for x in parts], [x.lse.float() for x in parts], sink)
    assert_close(found, attend_lists(q, keys, lists, 1.0, 6, sink))


@pytest.mark.parametrize("mark", [INF, -INF])
def test_the_values_of_empty_branches_are_ignored(mark):
    outs = [torch.full((2, 1, 3), NAN), torch.tensor([[[1.0, 2.0, 3.0]], [[NAN, NAN, NAN]]])]
    lses = [torch.full((2, 1), mark), torch.tensor([[5.0], [mark]])]
    out, lse = merge_attention(outs, lses, torch.tensor([-INF]))
    assert out[0, 0].tolist() == [1.0, 2.0, 3.0] and out[1].eq(0).all()
    assert lse.flatten().tolist() == [5.0, INF]


def test_a_merge_keeps_the_dtype_and_large_lses():
    outs = [torch.ones(1, 1, 2).bfloat16(), torch.zeros(1, 1, 2).bfloat16()]
    out, lse = merge_attention(outs, [torch.tensor([[1000.0]])] * 2)
    assert out.dtype == BF16 and out.tolist() == [[[0.5, 0.5]]]
    assert lse.item() == pytest.approx(1000 + math.log(2))
