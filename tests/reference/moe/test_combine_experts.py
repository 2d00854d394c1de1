import math

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.moe import summed
from dsa.reference import combine_experts, sort_by_expert

(CASE,) = cases_of("combine_experts")


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_against_float64(dtype, index_dtype, shared, weighted):
    kind = {"dtype": dtype, "index_dtype": index_dtype, "shared": shared, "residual": not shared, "weighted": weighted}
    CASE.verify(tokens=11, k=5, channels=24, **kind)


def test_rounds_once_and_in_order():
    """2^24 takes up no 1 in fp32, so that the order shows; 16-bit results keep what 16-bit partial sums would not."""
    y, rows = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]]), torch.tensor([[0, 1, 2], [0, 2, 1]])
    assert combine_experts(y, rows, torch.ones(2, 3)).tolist() == [[0.0], [1.0]]
    y = torch.tensor([[256.0], [0.75], [0.75]]).bfloat16()
    shared = torch.tensor([[0.5]]).bfloat16()
    assert combine_experts(y, torch.tensor([[0, 1, 2]]), torch.ones(1, 3), shared).item() == 258.0


def test_absent_rows_count_as_zero_whatever_their_weight():
    y, weights = torch.ones(2, 8), torch.tensor([[math.inf, 2.0, math.nan]])
    got = combine_experts(y, torch.tensor([[-1, 1, 2**40]]), weights)
    assert got.tolist() == [[2.0] * 8]
    assert combine_experts(y[:0], torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)).tolist() == [[0.0] * 8] * 3
    shared = torch.randn(3, 8)
    assert torch.equal(combine_experts(y, torch.zeros(3, 0, dtype=torch.int32), torch.ones(3, 0), shared), shared)
    assert combine_experts(y, torch.zeros(0, 4, dtype=torch.int32), torch.ones(0, 4)).shape == (0, 8)


def test_nan_reaches_the_tokens_that_use_it():
    y = torch.ones(3, 4)
    y[1, 2] = math.nan
    got = combine_experts(y, torch.tensor([[0, 1], [0, 2]]), torch.ones(2, 2))
    assert got.isnan().nonzero().tolist() == [[0, 2]]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_no_token_names_are_not_read(dtype, weighted):
    """Those behind the rows of a process' own experts, where products leave anything: here NaN and infinity. Of the
    gradients they get nothing, and the weights of others' experts nothing either."""
    experts = torch.randint(0, 12, (10, 3))
    _, rows, ends = sort_by_expert(experts - 4, 4)
    used = int(ends[-1])
    assert 0 < used < 30
    y = torch.randn(30, 8, dtype=torch.float32).to(dtype)
    y[used:], y[-1] = math.nan, math.inf
    y.requires_grad_()
    weights, shared = torch.rand(10, 3, requires_grad=True) if weighted else None, torch.randn(10, 8).to(dtype)
    got = combine_experts(y, rows, weights, shared)
    assert torch.equal(got, combine_experts(y[:used], rows, weights, shared)) and got.isfinite().all()
    alone = (rows < 0).all(1)
    assert torch.equal(got[alone], shared[alone])
    got.sum().backward()
    assert not y.grad[used:].any() and y.grad.isfinite().all()
    assert not weighted or (not weights.grad[rows < 0].any() and weights.grad.isfinite().all())


def test_gradients_are_those_of_the_formula():
    tensors = [torch.randn(shape, requires_grad=True) for shape in ((5, 4), (3, 2), (3, 4))]
    y, weights, shared = tensors
    rows, upstream = torch.tensor([[0, 4], [2, -1], [2, 3]]), torch.randn(3, 4)
    got = torch.autograd.grad(combine_experts(y, rows, weights, shared), tensors, upstream)
    expected = torch.autograd.grad(
        summed({"y": y, "rows": rows, "weights": weights, "shared": shared, "residual": None}),
        tensors,
        upstream.double(),
    )
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, theirs)
