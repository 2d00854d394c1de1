"""The reference of index_scores: four dtypes, keys for all queries together and keys per query, scores per head, and
gradients."""

import pytest
import torch

from dsa.cases.indexer import scores
from dsa.reference.indexer.index_scores import index_scores
from tests.reference.common import BF16, E4M3, F32, F64


def operands(queries=3, keys=5, heads=4, dim=8, dtype=F64):
    shapes = (queries, heads, dim), (keys, dim), (queries, heads)
    return [torch.randn(shape, dtype=F64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("dtype", "got", "tolerance"), [(F64, F64, 1e-12), (F32, F32, 1e-5), (BF16, F32, 1e-5), (E4M3, F32, 1e-5)]
)
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (3, 0), (0, 5)])
def test_keys_that_all_queries_score(queries, keys, dtype, got, tolerance):
    q, k, weights = operands(queries, keys, dtype=dtype)
    found, expected = index_scores(q, k, weights), scores(q, k, weights)[0]
    assert found.dtype == got and found.shape == (queries, keys)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_each_query_may_have_its_keys():
    q, k, weights = operands()
    keys = torch.stack([k, k.flip(0), k.roll(1, 0)])
    expected = torch.stack([index_scores(*row) for row in zip(q, keys, weights)])
    torch.testing.assert_close(index_scores(q, keys, weights), expected)


def test_each_head_may_be_scored_separately():
    q, k, weights = operands()
    expected = [index_scores(q[:, h : h + 1], k, weights[:, h : h + 1]) for h in range(4)]
    torch.testing.assert_close(index_scores(q[..., None, :], k, weights[..., None]), torch.stack(expected, 1))


def test_gradients_are_those_of_finite_differences():
    inputs = [x.requires_grad_() for x in operands(2, 3, 2, 4)]
    assert torch.autograd.gradcheck(index_scores, inputs)
