"""The reference of sparse_mla_attention (attention of the sparse stage of training): the explicit formula of gradients,
extreme sinks, and keys that no query selects."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.training import with_leaves
from dsa.reference import sparse_mla_attention
from dsa.reference.training import sparse_mla_attention as reference

(CASE,) = cases_of("sparse_mla_attention")


def inputs(sink=True, dtype=torch.float64, **sizes):
    sizes = {"tokens": 5, "keys": 7, "k": 4, "d": 6, "heads": 3, "invalid": 0.3, "size": 1.0} | sizes
    return with_leaves(CASE.arguments(sink=sink, **sizes), dtype) | {"d_v": 4}


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("of", [(0,), (1,), (0, 1)])
def test_the_gradients_formula_is_that_of_autograd(of, sink):
    given = inputs(sink)
    leaves = [given[name] for name in ("q", "kv", "attn_sink")[: 2 + sink]]
    results = sparse_mla_attention(**given)
    grads = [torch.randn_like(x) if i in of else None for i, x in enumerate(results)]
    chosen = [results[i] for i in of], leaves, [grads[i] for i in of]
    expected = torch.autograd.grad(*chosen, materialize_grads=True)
    of_forward = (given[name] for name in ("q", "kv", "indices", "softmax_scale", "attn_sink"))
    got = reference.sparse_mla_attention_gradient(*of_forward, *results, *grads)
    torch.testing.assert_close(tuple(got)[: len(leaves)], tuple(expected))


def test_nan_in_a_row_that_no_index_names_reaches_nothing():
    """Row 0 is NaN, because an implementation could read it for an invalid index."""
    given = inputs(sink=False, leaves=())
    given["indices"][given["indices"] == 0] = -1
    nan = {"kv": given["kv"].index_fill(0, torch.tensor(0), torch.nan)}
    assert not any(x.isnan().any() for x in sparse_mla_attention(**given | nan))
    out, lse = sparse_mla_attention(**given | {"kv": given["kv"][:0]})
    assert not out.any() and lse.eq(torch.inf).all()


@pytest.mark.parametrize("sink", [torch.inf, -torch.inf])
def test_an_infinite_sink_has_a_gradient(sink):
    """The gradient of an infinite sink is 0. The LSE of the last query is infinite, too, and the difference of LSE and
    sink must not become NaN."""
    given = inputs() | {"attn_sink": torch.full((3,), sink, dtype=torch.float64, requires_grad=True)}
    out, lse = sparse_mla_attention(**given)
    assert (out[-1] == 0).all()
    leaves = [given[name] for name in ("q", "kv", "attn_sink")]
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    assert not gradients[2].any() and all(g.isfinite().all() for g in gradients)
    of_forward = [given[name].detach() for name in ("q", "kv", "indices")]
    formula = reference.sparse_mla_attention_gradient(
        *of_forward, given["softmax_scale"], leaves[2], out, lse, 2 * out, None
    )
    torch.testing.assert_close(tuple(formula), tuple(gradients))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("above", [14.7, 17.0, 40.0])
def test_a_sink_far_below_the_keys_has_its_full_gradient(above, dtype):
    """The sink's probability, about e^-above, is too small to be computed as 1 minus the keys' probabilities."""
    given = inputs(dtype=dtype, tokens=1, leaves=(), invalid=0.0)
    plain, lse = sparse_mla_attention(**with_leaves(given, torch.float64) | {"attn_sink": None})
    sink = (lse[:, 0] - above).to(dtype).requires_grad_()
    out, _ = sparse_mla_attention(**given | {"attn_sink": sink})
    (got,) = torch.autograd.grad(out, sink, torch.ones_like(out))
    below = lse[:, 0] - sink.double()
    expected = -plain.sum((0, 2)) * below.sigmoid() * (-below).sigmoid()
    assert torch.allclose(got.double(), expected, rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=0)
