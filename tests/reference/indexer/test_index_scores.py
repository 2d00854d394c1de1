"""The index score in every dtype: shared keys, keys per query, single heads, gradients."""

import pytest
import torch

from dsa.cases.indexer import scores
from dsa.reference.indexer.index_scores import index_scores


def operands(queries=3, keys=5, heads=4, dim=8, dtype=torch.float64):
    shapes = (queries, heads, dim), (keys, dim), (queries, heads)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("dtype", "got", "tolerance"),
    [
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 1e-5),
        (torch.float8_e4m3fn, torch.float32, 1e-5),
    ],
)
def test_keys_that_all_queries_score(dtype, got, tolerance):
    q, k, weights = operands(dtype=dtype)
    found = index_scores(q, k, weights)
    assert found.dtype == got
    torch.testing.assert_close(found.double(), scores(q, k, weights)[0], rtol=tolerance, atol=tolerance)


def test_keys_of_each_query():
    q, k, weights = operands()
    own = torch.stack([k, k.flip(0), k.roll(1, 0)])
    found = index_scores(q, own, weights)
    for t in range(3):
        torch.testing.assert_close(found[t], index_scores(q[t], own[t], weights[t]))


def test_a_single_head():
    q, k, weights = operands()
    heads = index_scores(q[..., None, :], k, weights[..., None])
    for h in range(4):
        torch.testing.assert_close(heads[:, h], index_scores(q[:, h : h + 1], k, weights[:, h : h + 1]))


def test_no_keys_and_no_queries():
    q, k, weights = operands()
    assert index_scores(q, k[:0], weights).shape == (3, 0)
    assert index_scores(q[:0], k, weights[:0]).shape == (0, 5)


def test_gradients():
    inputs = [x.requires_grad_() for x in operands(2, 3, 2, 4)]
    assert torch.autograd.gradcheck(index_scores, inputs)
