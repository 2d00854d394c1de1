"""The sparse stage's attention in float64: gradients by finite differences, and what no index names."""

import pytest
import torch

from dsa.reference import sparse_mla_attention
from tests.reference.training.sparse_inputs import sparse_inputs

F64 = torch.float64


@pytest.mark.parametrize("sink", [False, True])
def test_sparse_attention_gradients(sink):
    (q, kv, *_), indices = sparse_inputs()
    sinks = (torch.randn(3, dtype=F64, requires_grad=True),) if sink else ()

    def run(q, kv, *sink):
        out, lse = sparse_mla_attention(q, kv, indices, 0.4, 4, *sink)
        return out, lse.masked_fill(lse == torch.inf, 0.0)

    assert torch.autograd.gradcheck(run, (q, kv, *sinks))
    out, lse = sparse_mla_attention(q, kv, indices, 0.4, 4, *sinks)
    assert (out[2] == 0).all() and (lse[:, 2] == torch.inf).all()
    seen = indices[1, 0, :2].long()
    logits = 0.4 * kv[seen, 0] @ q[1, 0]
    whole = torch.cat((logits, sinks[0][:1])) if sink else logits
    assert torch.allclose(out[1, 0], whole.softmax(0)[:2] @ kv[seen, 0, :4])


def test_what_no_index_names_reaches_nothing():
    """NaN in the first row, where an index that is no key might look; and no rows at all."""
    (q, kv, *_), indices = sparse_inputs()
    indices[indices == 0] = -1
    kv = kv.detach().index_fill(0, torch.tensor(0), torch.nan)
    assert not any(x.isnan().any() for x in sparse_mla_attention(q, kv, indices, 0.4, 4))
    out, lse = sparse_mla_attention(q, kv[:0], indices, 0.4, 4)
    assert not out.any() and lse.eq(torch.inf).all()


@pytest.mark.parametrize("sink", [torch.inf, -torch.inf])
def test_an_infinite_sink_has_a_gradient(sink):
    """Also where a query has no keys, whose LSE is infinite, too; its gradient is 0."""
    (q, kv, *_), indices = sparse_inputs()
    sinks = torch.full((3,), sink, dtype=F64, requires_grad=True)
    out, _ = sparse_mla_attention(q, kv, indices, 0.4, 4, sinks)
    assert (out[2] == 0).all()
    *gradients, of_sinks = torch.autograd.grad(out.square().sum(), (q, kv, sinks))
    assert not of_sinks.any() and all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("above", [14.7, 17.0, 40.0])
def test_a_sink_far_below_the_keys_has_its_whole_gradient(above, dtype):
    """Its probability, e^-above, is less than what 1 - sum_j p_j can tell from 0."""
    given, indices = sparse_inputs()
    q, kv, indices = *(x.detach().to(dtype) for x in given[:2]), indices[1:2]
    plain, lse = sparse_mla_attention(q[1:2].double(), kv.double(), indices, 0.4, 4)
    sink = (lse[:, 0] - above).to(dtype).requires_grad_()
    out, _ = sparse_mla_attention(q[1:2], kv, indices, 0.4, 4, sink)
    (got,) = torch.autograd.grad(out, sink, torch.ones_like(out))
    below = lse[:, 0] - sink.double()
    expected = -plain.sum((0, 2)) * below.sigmoid() * (-below).sigmoid()
    assert torch.allclose(got.double(), expected, rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=0)
