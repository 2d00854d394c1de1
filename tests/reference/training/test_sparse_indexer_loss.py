"""The sparse stage's loss in float64: gradients by finite differences, the formula, and what no index names."""

import pytest
import torch

from dsa.reference import sparse_indexer_loss, sparse_mla_attention
from tests.reference.common import assert_refused
from tests.reference.training.sparse_inputs import sparse_inputs

F64 = torch.float64


@pytest.mark.parametrize("joint", [False, True])
def test_sparse_loss(joint):
    (q, kv, q_idx, k_idx, w_idx), indices = sparse_inputs()
    lse = sparse_mla_attention(q, kv, indices, 0.4, 6)[1].detach()
    # Heads give the selected keys e^0, e^-1 and e^-3 of their attention.
    given = lse + torch.tensor([0.0, 1.0, 3.0], dtype=F64)[:, None] if joint else None

    def run(*indexer):
        return sparse_indexer_loss(q, kv, *indexer, indices, 0.4, given)

    assert torch.autograd.gradcheck(run, (q_idx, k_idx, w_idx))
    kl = run(q_idx, k_idx, w_idx)
    assert kl[2] == 0 and (kl >= 0).all()
    assert torch.autograd.grad(kl.sum(), (q, kv), allow_unused=True) == (None, None)
    seen = indices[0, 0].long()
    heads = torch.stack([(0.4 * kv[seen, 0] @ q[0, h]).softmax(0) for h in range(3)])
    p = (heads * torch.tensor([[1.0], [-1.0], [-3.0]], dtype=F64).exp().index_fill(0, torch.tensor([0]), 1.0)).sum(0)
    p = p / p.sum() if joint else heads.mean(0)
    scores = sum(w_idx[0, j] * (k_idx[seen] @ q_idx[0, j]).clamp(min=0) for j in range(2))
    assert torch.allclose(kl[0], (p * (p / scores.softmax(0)).log()).sum())


def test_what_no_index_names_reaches_nothing():
    """NaN in row 0, which an invalid index might read; and zero rows."""
    (q, kv, q_idx, k_idx, w_idx), indices = sparse_inputs()
    indices[indices == 0] = -1
    kv, k_idx = (x.detach().index_fill(0, torch.tensor(0), torch.nan) for x in (kv, k_idx))
    assert not sparse_indexer_loss(q, kv, q_idx, k_idx, w_idx, indices, 0.4).isnan().any()
    assert not sparse_indexer_loss(q, kv[:0], q_idx, k_idx[:0], w_idx, indices, 0.4).any()


def test_head_weights_have_the_dtype_of_the_index_queries_or_float32():
    tensors, indices = sparse_inputs()
    *others, w_idx = (x.detach().bfloat16() for x in tensors)
    for accepted in (w_idx, w_idx.float()):
        assert sparse_indexer_loss(*others, accepted, indices, 0.4).isfinite().all()
    message = "w_idx: dtype must be q_idx's bfloat16 or float32, got float16"
    assert_refused(message, sparse_indexer_loss, *others, w_idx.half(), indices, 0.4)
