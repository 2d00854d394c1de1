"""The reference of sparse_indexer_loss (the loss of the sparse stage of training): the explicit formula of gradients,
which tensors have gradients, and keys that no query selects."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.training import with_leaves
from dsa.reference import sparse_indexer_loss
from dsa.reference.training import sparse_indexer_loss as reference

(CASE,) = cases_of("sparse_indexer_loss")
INDEXER = ("q_idx", "k_idx", "w_idx")


def inputs(dtype=torch.float64, **sizes):
    sizes = {"tokens": 5, "keys": 7, "k": 4, "d": 6, "heads": 3, "index_heads": 2, "di": 4, "invalid": 0.3} | sizes
    return with_leaves(CASE.arguments(**sizes), dtype)


def test_the_gradients_formula_is_that_of_autograd():
    given = inputs()
    leaves = [given[name] for name in INDEXER]
    rest = [given[name] for name in ("indices", "softmax_scale", "lse")]
    kl, d_scores = reference.loss_and_score_gradient(given["q"], given["kv"], *leaves, *rest)
    grad = torch.randn_like(kl)
    got = reference.sparse_indexer_loss_gradient(grad, *(x.detach() for x in leaves), given["indices"], d_scores)
    torch.testing.assert_close(tuple(got), tuple(torch.autograd.grad(kl, leaves, grad)))


def test_only_the_indexer_learns_from_the_loss():
    given = inputs()
    attention = [given[name].requires_grad_() for name in ("q", "kv")]
    kl = sparse_indexer_loss(**given)
    assert torch.autograd.grad(kl.sum(), attention, allow_unused=True) == (None, None)
    assert kl[-1] == 0 and (kl >= 0).all()


def test_nan_in_a_row_that_no_index_names_reaches_nothing():
    """Row 0 is NaN, because an implementation could read it for an invalid index."""
    given = inputs(leaves=())
    given["indices"][given["indices"] == 0] = -1
    nan = {name: given[name].index_fill(0, torch.tensor(0), torch.nan) for name in ("kv", "k_idx")}
    assert not sparse_indexer_loss(**given | nan).isnan().any()
    assert not sparse_indexer_loss(**given | {name: given[name][:0] for name in nan}).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_weights_have_the_dtype_of_the_index_queries_or_float32(dtype):
    given = inputs(dtype=torch.bfloat16, leaves=())
    assert dsa.sparse_indexer_loss(**given | {"w_idx": given["w_idx"].to(dtype)}).isfinite().all()
