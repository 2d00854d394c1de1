"""Linear layers with weights in a float dtype or in FP8 blocks, and the language-model head."""

from typing import Any

import torch
from torch import nn

import dsa
from dsa.reference.autocast import without_autocast
from dsa.runtime.checks import FLOATS, check_dtype, check_flag, check_tensor

BLOCK = 128  # an FP8 weight has one scale per block of BLOCK rows and columns
HALVES = torch.bfloat16, torch.float16


@without_autocast
def linear_fp32(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return y = scale * x W^T, computed in fp32. x [..., I], weight W [O, I] -> y fp32 [..., O]."""
    y = nn.functional.linear(x.float(), weight.float())
    return y if scale == 1 else y * scale


class Linear(nn.Linear):
    """y = x W^T without a bias. x [..., I] in W's dtype -> y [..., O]. Parameter: weight W [O, I] in a float dtype."""

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(in_features, out_features, bias=False, dtype=dtype)

    def reset_parameters(self) -> None:
        if self.weight.device.type != "meta":
            nn.init.normal_(self.weight, std=self.in_features**-0.5)

    def float_weight(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype)


def computes_product_alone(linear: nn.Module) -> bool:
    """Return whether calling a layer without bias only multiplies by the layer's weight: the layer's class is exactly
    `nn.Linear`, it has no forward hooks, and its weight is not on the meta device (offloaded)."""
    hooks = linear._forward_hooks or linear._forward_pre_hooks
    return type(linear) is nn.Linear and not hooks and not linear.weight.is_meta


def weight_of(linear: nn.Module, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight W [O, in_features] of a layer y = x W^T of any class, in `dtype`."""
    if isinstance(linear, Linear | BlockFP8Linear):
        return linear.float_weight(dtype)
    if computes_product_alone(linear):
        return linear.weight.to(dtype)
    # Quantised and adapted layers store the weight in many ways, so apply the layer to the identity matrix.
    eye = torch.eye(in_features, dtype=dtype, device=next(linear.parameters()).device)
    return linear(eye).T


class FP32Linear(Linear):
    """y = scale * x W^T, computed in fp32 for all dtypes of x and W. y is fp32 [..., O]."""

    def __init__(
        self, in_features: int, out_features: int, *, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(in_features, out_features, dtype=dtype)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_fp32(x, self.weight, self.scale)


class WithPaddedScales(nn.Module):
    """A module whose state_dict() has contiguous copies of scales that `pad_scales` of the engine has moved."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, parameter in self._parameters.items():
            if parameter is not None and not parameter.is_contiguous():
                destination[prefix + name] = destination[prefix + name].contiguous()


class BlockFP8Linear(WithPaddedScales):
    """y = x W^T with W = weight * weight_scale_inv per 128 x 128 block. `forward` quantises the activations x.

    x [..., I] is bf16, fp16 or fp32, and I is a multiple of 128. y [..., O] has x's dtype. Each group of 128 channels
    of a token has one scale, a power of two if `use_ue8m0`. `dsa.fp8_gemm_nt` computes y. The layer has no gradients.
    Parameters: weight [O, I] float8_e4m3fn, weight_scale_inv [ceil(O / 128), I / 128] fp32. Despite its name,
    weight_scale_inv is multiplied with the weight.
    part_of: (layer, slice) if this weight is a slice of the rows of another layer's weight, else None. `float_weight`
    then slices the other layer's dequantised weight, so that both layers share one copy.
    Source: `fp8_gemm` and `act_quant` of DeepSeek-V3.2's inference code.
    """

    part_of: tuple["BlockFP8Linear", slice] | None = None

    def __init__(self, in_features: int, out_features: int, *, use_ue8m0: bool = True) -> None:
        super().__init__()
        if in_features % BLOCK:
            raise ValueError(f"in_features: must be a multiple of {BLOCK}, got {in_features}")
        self.use_ue8m0 = use_ue8m0
        weight = torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn)
        scale = torch.ones(-(-out_features // BLOCK), in_features // BLOCK, dtype=torch.float32)
        if weight.device.type != "meta":
            weight, scale = dsa.per_block_cast_to_fp8(
                torch.randn(out_features, in_features, dtype=torch.float32) * in_features**-0.5, use_ue8m0
            )
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
        self._dequantised: tuple[tuple, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(self.cast(x), x.dtype)

    def cast(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise x [..., I] for `multiply`: return e4m3 [..., I] and scales fp32 [..., I / 128]."""
        return dsa.per_token_cast_to_fp8(x, self.use_ue8m0)

    def multiply(self, activations: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return y [..., O] in `dtype`. activations: the result of `cast`."""
        return dsa.fp8_gemm_nt(activations, (self.weight, with_padding(self.weight_scale_inv)), dtype)

    def float_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return W [O, I] dequantised to `dtype`. The result is cached until the parameters or `dtype` change, unless
        the parameters are inference tensors."""
        if self.part_of is not None:
            whole, rows = self.part_of
            return whole.float_weight(dtype)[rows]
        parameters = self.weight, self.weight_scale_inv
        if any(tensor.is_inference() for tensor in parameters):  # they have no version counter that shows changes
            return dsa.dequantize_per_block(*parameters, dtype)
        state = dtype, *((tensor.data_ptr(), tensor.shape, tensor._version) for tensor in parameters)
        if self._dequantised is None or self._dequantised[0] != state:
            # Make a normal tensor even in inference mode, because a later pass may need gradients.
            with torch.inference_mode(False), torch.no_grad():
                self._dequantised = state, dsa.dequantize_per_block(*parameters, dtype)
        return self._dequantised[1]


def with_padding(scale: torch.Tensor) -> torch.Tensor:
    """Return scales [..., G] as [..., 4 ceil(G / 4)] if their rows in memory have this many columns, else unchanged.

    On a GPU, a product reads scales in place only if the number of columns is a multiple of 4. `prepare` of the engine
    moves the scales of weights to such rows, padded with zeros.
    """
    *leading, groups = scale.shape
    columns = -(-groups // 4) * 4
    if groups == columns or scale.stride(-2) != columns or scale.storage_offset() % columns:
        return scale
    last_row = scale.storage_offset() + sum((n - 1) * stride for n, stride in zip(leading, scale.stride()))
    # A copy of the scales can keep their strides but end with the last scale.
    if scale.untyped_storage().nbytes() < (last_row + columns) * scale.itemsize:
        return scale
    return scale.as_strided((*leading, columns), scale.stride())


def make_linear(
    in_features: int, out_features: int, *, fp8: bool, dtype: torch.dtype | None = None, use_ue8m0: bool = True
) -> Linear | BlockFP8Linear:
    """Return a linear layer without a bias: if `fp8`, a `BlockFP8Linear` with `use_ue8m0`, else a `Linear` in `dtype`
    (None: torch's default dtype). Raise TypeError or ValueError for invalid options."""
    check_flag("fp8", fp8)
    check_flag("use_ue8m0", use_ue8m0)
    if dtype is not None:
        check_dtype("dtype", dtype, FLOATS)
    if fp8:
        return BlockFP8Linear(in_features, out_features, use_ue8m0=use_ue8m0)
    return Linear(in_features, out_features, dtype=dtype)


def check_rows(name: str, x: torch.Tensor, reader: nn.Module) -> None:
    """Raise TypeError or ValueError unless x is [T, I] in a dtype that the layer `reader` accepts as input.

    Do not check x if `reader` is neither a `Linear` nor a `BlockFP8Linear`, or if autocast is enabled and `reader` does
    not accept x's dtype."""
    kind = type(reader)
    if kind is not Linear and kind is not BlockFP8Linear:
        return
    weight = reader.weight  # read once, because nn.Module attribute access is slow
    dtypes = (weight.dtype,) if kind is Linear else FLOATS
    if not isinstance(x, torch.Tensor) or x.dtype in dtypes or not _casts(x):
        check_tensor(name, x, dtypes, ("T", weight.shape[1]))


def _casts(x: torch.Tensor) -> bool:
    """Return whether autocast is enabled on x's device. A product then accepts x and a weight of different dtypes."""
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


class LanguageModelHead(Linear):
    """y = x W^T in fp32, so that logits are not rounded to 16 bits. x [..., I] -> y fp32 [..., O].

    If x and W have the same 16-bit dtype, the backward pass rounds the gradient of y to this dtype and computes 16-bit
    products, so no fp32 copy of W is needed.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.weight.dtype and x.dtype in HALVES:
            return _Logits.apply(x, self.weight)
        return linear_fp32(x, self.weight)


class _Logits(torch.autograd.Function):
    """`linear_fp32` for x [..., I] and weight [O, I] in one 16-bit dtype, with 16-bit products in the backward pass."""

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


class GroupedLinear(nn.Module):
    """y[g] = W_g x[g]. x [T, groups, I] -> y [T, groups, O].

    The submodule `matrices`, from `make_linear`, has the weight [groups * O, I]: the matrices W_g, concatenated along
    the rows. If `fp8`, O must be a multiple of 128.
    """

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        *,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
        use_ue8m0: bool = True,
    ) -> None:
        super().__init__()
        if fp8 and out_features % 128:
            raise ValueError(f"out_features: must be a multiple of 128 for FP8 weights, got {out_features}")
        self.out_features = out_features
        self.matrices = make_linear(in_features, groups * out_features, fp8=fp8, dtype=dtype, use_ue8m0=use_ue8m0)

    @property
    def groups(self) -> int:
        """The number of matrices W_g; in a layer that is split over ranks, the number on this rank."""
        return len(self.matrices.weight) // self.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.matrices
        if isinstance(layer, BlockFP8Linear):
            matrices = layer.weight.chunk(self.groups), layer.weight_scale_inv.chunk(self.groups)
            products = zip(x.unbind(1), *matrices)
            return torch.stack([dsa.fp8_gemm_nt(layer.cast(x_g), (w, scale), x.dtype) for x_g, w, scale in products], 1)
        return torch.einsum("tgi,goi->tgo", x, layer.weight.unflatten(0, (self.groups, -1)))
