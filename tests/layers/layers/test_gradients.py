"""Plain layers have gradients for their input, and for every trainable parameter outside the indexer."""

import pytest
import torch

from dsa_layers import DSAAttention, fuse
from dsa_layers.layers.compressed_attention import CompressedAttention
from tests.layers.layers.calls import record
from tests.layers.layers.small_layers import CASES, INDEXERS

TRAINED = [kind for kind in CASES if kind not in INDEXERS]


@pytest.mark.parametrize("kind", TRAINED, ids=lambda kind: kind.__name__)
def test_gradients_are_the_slope_of_the_loss(kind):
    """The loss is a randomly weighted sum of the results."""
    case = CASES[kind]
    layer, x = case.make(), case.inputs().requires_grad_()
    for name, parameter in layer.named_parameters():
        if "indexer" in name:
            parameter.requires_grad_(False)
    learned = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    weights = torch.randn_like(case.run(layer, x))
    (weights * case.run(layer, x)).sum().backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in learned)
    # Adding `step` times the gradient changes the loss by about `step * slope`.
    slope = sum(tensor.grad.double().square().sum() for tensor in learned)
    step = 1e-3 * slope**-0.5
    losses = []
    with torch.no_grad():
        for sign in (1, -2):
            for tensor in learned:
                tensor += sign * step * tensor.grad
            losses.append((weights.double() * case.run(layer, x).double()).sum())
    assert (losses[0] - losses[1]).item() == pytest.approx((2 * step * slope).item(), rel=0.02)


@pytest.mark.parametrize("kind", INDEXERS, ids=lambda kind: kind.__name__)
def test_selection_takes_no_gradient(kind):
    case = CASES[kind]
    selected = case.run(case.make(), case.inputs().requires_grad_())
    assert selected.dtype == torch.int32 and not selected.requires_grad


@pytest.mark.parametrize(
    ("kind", "of_inference"), [(DSAAttention, "flash_mla_sparse_fwd"), (CompressedAttention, "window_sparse_attention")]
)
def test_plain_attention_takes_the_op_that_has_gradients(kind, of_inference, monkeypatch):
    asked, case = record(monkeypatch, "sparse_mla_attention", of_inference), CASES[kind]
    layer = case.make()
    case.run(layer, case.inputs())
    case.run(fuse(layer), case.inputs())
    assert asked == ["sparse_mla_attention", of_inference]
