"""The reference of combine_experts: the order of sums, row indices outside y, NaN, unused rows, and gradients."""

import pytest
import torch

from dsa.cases.moe import summed
from dsa.reference import combine_experts, sort_by_expert
from tests.reference.common import BF16, F32, INF, NAN, assert_same_gradients, i32


def test_sums_are_rounded_once_and_in_order():
    """In fp32, 2^24 + 1 is 2^24, so the first result shows the order of the sum. In bf16, 256 + 0.75 is 256, so the
    second result shows that partial sums are not rounded to bf16."""
    y, rows = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]]), torch.tensor([[0, 1, 2], [0, 2, 1]])
    assert combine_experts(y, rows, torch.ones(2, 3)).tolist() == [[0.0], [1.0]]
    y = torch.tensor([[256.0], [0.75], [0.75]]).bfloat16()
    shared = torch.tensor([[0.5]]).bfloat16()
    assert combine_experts(y, torch.tensor([[0, 1, 2]]), torch.ones(1, 3), shared).item() == 258.0


def test_absent_rows_count_as_zero_for_any_weight():
    y = torch.ones(2, 8)
    got = combine_experts(y, torch.tensor([[-1, 1, 2**40]]), torch.tensor([[INF, 2.0, NAN]]))
    assert got.tolist() == [[2.0] * 8]
    assert not combine_experts(y[:0], i32([[0, 0]] * 3), torch.ones(3, 2)).any()
    assert combine_experts(y, i32([[0] * 4])[:0], torch.ones(0, 4)).shape == (0, 8)


def test_nan_reaches_only_the_tokens_that_use_it():
    y = torch.ones(3, 4)
    y[1, 2] = NAN
    got = combine_experts(y, torch.tensor([[0, 1], [0, 2]]), torch.ones(2, 2))
    assert got.isnan().nonzero().tolist() == [[0, 2]]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_that_no_token_names_are_neither_read_nor_get_a_gradient(dtype, weighted):
    """A process has 4 of the 12 experts. Grouped products leave the rows of y after `used` undefined; here they are NaN
    and infinity. They get no gradient, and neither do the weights of other experts' entries."""
    _, rows, ends = sort_by_expert(torch.randint(0, 12, (10, 3)) - 4, 4)
    used = int(ends[-1])
    assert 0 < used < 30
    y, shared = torch.randn(30, 8).to(dtype), torch.randn(10, 8).to(dtype)
    y[used:], y[-1] = NAN, INF
    y.requires_grad_()
    weights = torch.rand(10, 3, requires_grad=True) if weighted else None
    got = combine_experts(y, rows, weights, shared)
    assert torch.equal(got, combine_experts(y[:used], rows, weights, shared)) and got.isfinite().all()
    got.sum().backward()
    assert not y.grad[used:].any() and y.grad.isfinite().all()
    assert not weighted or (not weights.grad[rows < 0].any() and weights.grad.isfinite().all())


def test_gradients_are_those_of_the_formula():
    rows, inputs = torch.tensor([[0, 4], [2, -1], [2, 3]]), [torch.randn(n) for n in ((5, 4), (3, 2), (3, 4))]

    def formula(y, weights, shared):
        return summed({"y": y, "rows": rows, "weights": weights, "shared": shared, "residual": None})

    assert_same_gradients(lambda y, *rest: combine_experts(y, rows, *rest), formula, inputs)
