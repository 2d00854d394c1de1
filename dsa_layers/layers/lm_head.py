"""The language model's head."""

import torch

from dsa_layers.layers.linear import HALVES, Linear, linear_fp32


class LanguageModelHead(Linear):
    """y = x W^T in fp32, so that logits are not rounded to 16 bits. x [..., I] of W's dtype -> fp32 [..., O].

    For 16-bit operands y's gradient is rounded to 16 bits, and the gradients of x and W are products in 16 bits. W is
    the largest matrix of a model, and no copy of it in fp32 is kept for the backward pass.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.weight.dtype and x.dtype in HALVES:
            return _Logits.apply(x, self.weight)
        return linear_fp32(x, self.weight)


class _Logits(torch.autograd.Function):
    """x [..., I] and weight [O, I] of one 16-bit dtype -> `linear_fp32` of them."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        if not x.is_cuda:
            return linear_fp32(x, weight)
        return torch.mm(x.flatten(0, -2), weight.T, out_dtype=torch.float32).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        grad = grad.to(weight.dtype)
        return (
            grad @ weight if of_x else None,
            grad.flatten(0, -2).T @ x.flatten(0, -2) if of_weight else None,
        )
