"""The language model's head."""

import torch

from dsa_layers.layers.linear import HALVES, Linear, linear_fp32


class LanguageModelHead(Linear):
    """y = x W^T in fp32, summed in fp32: logits are not rounded to 16 bits. x [..., I] of W's dtype -> fp32 [..., O].

    With gradients, too. Of 16-bit operands the gradients are products in these 16 bits, to which y's gradient is
    rounded: W is the largest matrix of a model, and a copy of it in fp32 is not kept for the backward pass.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and x.dtype == self.weight.dtype and x.dtype in HALVES:
            return _Logits.apply(x, self.weight)
        return linear_fp32(x, self.weight)


class _Logits(torch.autograd.Function):
    """x [..., I] and weight [O, I] of one 16-bit dtype -> `linear_fp32` of them."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return linear_fp32(x, weight)

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
