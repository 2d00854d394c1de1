"""The reference of indexer_warmup_attention (the warm-up stage of training): explicit formulas of gradients, which
result has gradients for which tensors, and edge cases."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.training import with_leaves
from dsa.reference import indexer_warmup_attention
from dsa.reference.training import indexer_warmup_attention as reference

(CASE,) = cases_of("indexer_warmup_attention")
ATTENTION, INDEXER = ("q", "k", "v"), ("q_idx", "k_idx", "w_idx")
EVERY = *ATTENTION, *INDEXER


def inputs(lengths, dtype=torch.float64, **sizes):
    sizes = {"heads": 4, "key_heads": 2, "dims": (5, 6), "index": (3, 4), "leaves": EVERY} | sizes
    return with_leaves(CASE.arguments(lengths=lengths, **sizes), dtype)


def test_gradients_of_lse_by_finite_differences():
    """The reference propagates gradients of lse; the Hopper kernels do not."""
    given = inputs([(1, 1), (2, 3), (0, 1), (3, 2)])

    def lse(q, k):
        return indexer_warmup_attention(**given | {"q": q, "k": k})[1].nan_to_num(posinf=0.0)

    assert torch.autograd.gradcheck(lse, (given["q"], given["k"]))


@pytest.mark.parametrize("causal", [True, False])
def test_the_gradients_formulas_are_those_of_autograd(causal):
    given = inputs([(1, 1), (2, 3), (0, 1), (3, 2), (2, 0)], causal=causal)
    out, _, kl = indexer_warmup_attention(**given)
    grads = torch.randn_like(out), torch.randn_like(kl)
    expected = torch.autograd.grad((out, kl), [given[name] for name in EVERY], grads)
    bounds = torch.stack((given["cu_seqlens_q"], given["cu_seqlens_k"]))
    q, k, v, *indexer = (given[name].detach() for name in EVERY)
    rest = bounds, given["softmax_scale"], causal
    got = reference.warmup_attention_gradient(grads[0], q, k, v, out.detach(), *rest)
    got += reference.warmup_loss_gradient(grads[1], q, k, *indexer, *rest)
    torch.testing.assert_close(tuple(got), tuple(expected))


def test_only_the_loss_reaches_the_indexer_and_only_the_indexer():
    given = inputs([(4, 4)])
    out, lse, kl = indexer_warmup_attention(**given)
    attention, indexer = ([given[name] for name in names] for names in (ATTENTION, INDEXER))
    assert torch.autograd.grad(kl.sum(), attention, allow_unused=True, retain_graph=True) == (None,) * 3
    assert torch.autograd.grad(out.sum() + lse.sum(), indexer, allow_unused=True, retain_graph=True) == (None,) * 3


def test_the_loss_is_finite_if_all_mass_is_on_one_key_and_the_indexer_is_uniform():
    given = inputs([(4, 4)], torch.float32)
    kl = indexer_warmup_attention(**given | {"q": 1e4 * given["q"], "w_idx": 0 * given["w_idx"]})[2]
    assert kl.isfinite().all() and (kl <= torch.arange(1, 5).log() + 1e-5).all() and kl[0] == 0


def test_without_sequences():
    nothing = torch.zeros(1, dtype=torch.int32)
    given = inputs([(0, 0)]) | {"cu_seqlens_q": nothing, "cu_seqlens_k": nothing}
    out, lse, kl = indexer_warmup_attention(**given)
    assert out.shape == (0, 4, 6) and lse.shape == (4, 0) and kl.shape == (0,)
