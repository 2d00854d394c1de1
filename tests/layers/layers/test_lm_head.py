"""Logits are fp32. Their gradients need no fp32 copy of the weight."""

import pytest
import torch

from dsa_layers.layers.lm_head import LanguageModelHead


def head_and_states(dtype):
    torch.manual_seed(0)
    head = LanguageModelHead(256, 300, dtype=dtype)
    return head, torch.randn(70, 256).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_not_rounded(dtype):
    head, x = head_and_states(dtype)
    y = head(x)
    expected = x.double() @ head.weight.double().T
    assert y.dtype == torch.float32 and (y - expected).abs().max() < 1e-5
    with torch.no_grad():
        assert torch.equal(head(x), y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(x), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_are_those_of_fp64_up_to_rounding(dtype):
    """Frozen tensors get none."""
    (head, x), target = head_and_states(dtype), torch.randint(300, (70,))

    def gradients(of_states, of_weight):
        for tensor, learned in ((x, of_states), (head.weight, of_weight)):
            tensor.grad = None
            tensor.requires_grad_(learned)
        torch.nn.functional.cross_entropy(head(x), target).backward()
        return x.grad, head.weight.grad

    exact = [tensor.detach().double().requires_grad_() for tensor in (x, head.weight)]
    torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, target).backward()
    both = gradients(True, True)
    for got, tensor in zip(both, exact):
        assert got.dtype == dtype
        assert (got - tensor.grad).norm() < max(torch.finfo(dtype).eps, 1e-6) * tensor.grad.norm()
    of_states, frozen = gradients(True, False)
    assert torch.equal(of_states, both[0]) and frozen is None
    frozen, of_weight = gradients(False, True)
    assert torch.equal(of_weight, both[1]) and frozen is None


def test_no_copy_is_kept_for_the_backward_pass():
    head, x = head_and_states(torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        head(x)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), head.weight.data_ptr()}
