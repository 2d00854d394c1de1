"""A block-diagonal projection: one matrix per group of channels."""

import torch
from torch import nn

import dsa
from dsa_layers.layers.linear import BlockFP8Linear, make_linear


class GroupedLinear(nn.Module):
    """y[g] = W_g x[g]. x [T, groups, I] -> y [T, groups, O].

    Parameters are in the submodule `matrices`. weight [groups * O, I] has the matrices concatenated along the rows. If
    `fp8`, `matrices` is a `BlockFP8Linear` with FP8 weight and weight_scale_inv, and O must be a multiple of 128.
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
        """The number of matrices. If the layer is split over ranks, each rank has complete matrices."""
        return len(self.matrices.weight) // self.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.matrices
        if isinstance(layer, BlockFP8Linear):
            matrices = layer.weight.chunk(self.groups), layer.weight_scale_inv.chunk(self.groups)
            products = zip(x.unbind(1), *matrices)
            return torch.stack([dsa.fp8_gemm_nt(layer.cast(x_g), (w, scale), x.dtype) for x_g, w, scale in products], 1)
        return torch.einsum("tgi,goi->tgo", x, layer.weight.unflatten(0, (self.groups, -1)))
