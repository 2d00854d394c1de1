"""A block-diagonal projection: each group of channels has a matrix of its own."""

import torch
from torch import nn

import dsa
from dsa_layers.layers.linear import BlockFP8Linear, make_linear


class GroupedLinear(nn.Module):
    """y[g] = W_g x[g]: x [T, groups, I] -> y [T, groups, O], with the matrices one below the other, [groups * O, I].

    Parameters: weight, FP8 with weight_scale_inv as `BlockFP8Linear` has them if `fp8`; then O is a multiple of 128.
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
        self.groups = groups
        self.matrices = make_linear(in_features, groups * out_features, fp8=fp8, dtype=dtype, use_ue8m0=use_ue8m0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.matrices
        if not isinstance(layer, BlockFP8Linear):
            weight = layer.weight.unflatten(0, (self.groups, -1))
            return torch.einsum("tgi,goi->tgo", x, weight)
        # All groups' rows below each other: one product that knows whose rows are whose.
        q, scale = dsa.per_token_cast_to_fp8(x.contiguous(), layer.use_ue8m0)
        rows = _swapped(q).flatten(0, 1), scale.transpose(0, 1).flatten(0, 1)
        matrices = tuple(t.unflatten(0, (self.groups, -1)) for t in (layer.weight, layer.weight_scale_inv))
        ends = torch.arange(1, self.groups + 1, dtype=torch.int32, device=x.device) * len(x)
        return _swapped(dsa.grouped_fp8_gemm_nt(rows, matrices, ends, x.dtype).unflatten(0, (self.groups, len(x))))


def _swapped(x: torch.Tensor) -> torch.Tensor:
    """x [A, B, C] -> [B, A, C], contiguous; C elements are a multiple of 8 bytes, which are copied as one number."""
    return x.view(torch.int64).transpose(0, 1).contiguous().view(x.dtype)
