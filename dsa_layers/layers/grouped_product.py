"""Products of rows that are sorted by group, each group with a matrix of its own."""

import torch
from torch import nn


def grouped_product(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """y = x W_g^T for the rows of each group g, which end at ends[g]. Rows after the last end are undefined.

    x [N, I], weights [G, O, I], ends int32 [G] -> [N, O], differentiable in x and weights.
    """
    if x.dtype == torch.bfloat16:
        return nn.functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    return _grouped_product(x, weights, ends)


# torch.compile knows torch's grouped_mm in bf16 alone: of other dtypes it is traced as an op of our own.
@torch.library.custom_op("dsa_layers::grouped_product", mutates_args=())
def _grouped_product(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return nn.functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)


@_grouped_product.register_fake
def _(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weights.shape[1])


@torch.library.custom_op("dsa_layers::grouped_product_backward", mutates_args=())
def _backward(
    grad: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad = grad.contiguous()
    of_x = nn.functional.grouped_mm(grad, weights, offs=ends)
    return of_x, nn.functional.grouped_mm(grad.T, x, offs=ends)


@_backward.register_fake
def _(
    grad: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weights)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return *_backward(grad, *ctx.saved_tensors), None


_grouped_product.register_autograd(_gradients, setup_context=_save)
