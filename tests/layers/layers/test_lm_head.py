"""Logits are fp32. Their gradients need no fp32 copy of the weight."""

import pytest
import torch

from dsa_layers.layers.linear import LanguageModelHead


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
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(x), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("learned", [(True, True), (True, False), (False, True)])
def test_gradients_are_those_of_fp64_up_to_rounding(learned, dtype):
    (head, x), target = head_and_states(dtype), torch.randint(300, (70,))
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, head.weight)]
    torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, target).backward()
    for tensor, learns in zip((x, head.weight), learned):
        tensor.requires_grad_(learns)
    torch.nn.functional.cross_entropy(head(x), target).backward()
    for tensor, learns, of_exact in zip((x, head.weight), learned, exact):
        assert (tensor.grad is not None) == learns
        if learns:
            assert tensor.grad.dtype == dtype
            error = (tensor.grad - of_exact.grad).norm() / of_exact.grad.norm()
            assert error < max(torch.finfo(dtype).eps, 1e-6)


def test_no_copy_is_kept_for_the_backward_pass():
    head, x = head_and_states(torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        head(x)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), head.weight.data_ptr()}
