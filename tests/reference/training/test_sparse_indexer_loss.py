"""The sparse stage's loss: the gradients' formula, what learns from it, and what no index names."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.training import with_leaves
from dsa.reference import sparse_indexer_loss
from dsa.reference.training import sparse_indexer_loss as reference
from tests.reference.common import assert_refused

(CASE,) = cases_of("sparse_indexer_loss")
INDEXER = ("q_idx", "k_idx", "w_idx")


def inputs(joint=None, dtype=torch.float64, **sizes):
    sizes = {"tokens": 5, "keys": 7, "k": 4, "d": 6, "heads": 3, "index_heads": 2, "di": 4, "invalid": 0.3} | sizes
    return with_leaves(CASE.arguments(joint=joint, **sizes), dtype)


@pytest.mark.parametrize("joint", [None, 5.0, 40.0])
def test_against_float64(joint):
    CASE.verify(d=512, joint=joint)


def test_the_gradients_formula_is_that_of_autograd():
    given = inputs()
    leaves = [given[name] for name in INDEXER]
    rest = [given[name] for name in ("indices", "softmax_scale", "lse")]
    kl, d_scores = reference.loss_and_score_gradient(given["q"], given["kv"], *leaves, *rest)
    grad = torch.randn_like(kl)
    got = reference.sparse_indexer_loss_gradient(grad, *(x.detach() for x in leaves), given["indices"], d_scores)
    for x, y in zip(got, torch.autograd.grad(kl, leaves, grad), strict=True):
        torch.testing.assert_close(x, y)


def test_the_indexer_learns_from_the_loss_alone():
    given = inputs()
    attention = [given[name].requires_grad_() for name in ("q", "kv")]
    kl = sparse_indexer_loss(**given)
    assert torch.autograd.grad(kl.sum(), attention, allow_unused=True) == (None, None)
    assert kl[-1] == 0 and (kl >= 0).all()


def test_what_no_index_names_reaches_nothing():
    """NaN in row 0, which an invalid index might read; and no rows."""
    given = inputs(leaves=())
    given["indices"][given["indices"] == 0] = -1
    nan = {name: given[name].index_fill(0, torch.tensor(0), torch.nan) for name in ("kv", "k_idx")}
    assert not sparse_indexer_loss(**given | nan).isnan().any()
    assert not sparse_indexer_loss(**given | {name: given[name][:0] for name in nan}).any()


def test_head_weights_have_the_dtype_of_the_index_queries_or_float32():
    given = inputs(dtype=torch.bfloat16, leaves=())
    for accepted in (given["w_idx"], given["w_idx"].float()):
        assert dsa.sparse_indexer_loss(**given | {"w_idx": accepted}).isfinite().all()
    message = "w_idx: dtype must be q_idx's bfloat16 or float32, got float16"
    assert_refused(message, dsa.sparse_indexer_loss, **given | {"w_idx": given["w_idx"].half()})
