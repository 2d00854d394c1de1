"""The merge of attention branches: attention over all keys in float64, and empty branches."""

import math

import pytest
import torch

from dsa.reference import merge_attention
from tests.reference.common import assert_refused
from tests.reference.mla.attention_oracle import assert_near, attend_rows

INF, NAN = math.inf, math.nan


def branches(counts, heads=3, d=8, d_v=6):
    """Attention of two queries over random keys, split in branches of the given sizes, in float64."""
    q, keys = torch.randn(2, heads, d), torch.randn(sum(counts), d)
    parts = [attend_rows(q, [part, part], 1.0, d_v) for part in keys.split(counts)]
    return q, keys, [out.float() for out, _, _ in parts], [lse.float() for _, lse, _ in parts]


@pytest.mark.parametrize("counts", [[5], [3, 4], [1, 0, 6], [0, 2], [2, 2, 2, 2]])
@pytest.mark.parametrize("with_sink", [False, True])
def test_merge_is_attention_over_all_keys(counts, with_sink):
    q, keys, outs, lses = branches(counts)
    sink = torch.tensor([INF, -INF, 0.7]) if with_sink else None
    out, lse = merge_attention(outs, lses, sink)
    expected, expected_lse, _ = attend_rows(q, [keys, keys], 1.0, 6, sink)
    assert_near(out, expected)
    assert_near(lse, expected_lse)


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
    assert_refused(message, merge_attention, *arguments)
