"""A block-diagonal projection, each group of channels with a matrix of its own, and the one behind it."""

import torch
from torch import nn

import dsa
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.layers.linear import BlockFP8Linear, Linear, make_linear


class GroupedLinear(nn.Module):
    """then(y), y[g] = W_g x[g]: x [T, groups, I] -> y [T, groups, O], flattened -> [T, outputs of `then`].

    The matrices are one below the other, [groups * O, I]. batch: of the tokens; the cast in front of a product of FP8
    weights writes each row to the place that it has there, and nothing is copied. `multiply` takes x cast.
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
        self.out_features = out_features
        self.matrices = make_linear(in_features, groups * out_features, fp8=fp8, dtype=dtype, use_ue8m0=use_ue8m0)

    @property
    def groups(self) -> int:
        """As many as there are matrices: a part of the layer has whole ones."""
        return len(self.matrices.weight) // self.out_features

    def forward(self, x: torch.Tensor, then: Linear | BlockFP8Linear, batch: TokenBatch) -> torch.Tensor:
        layer = self.matrices
        if not isinstance(layer, BlockFP8Linear):
            weight = layer.weight.unflatten(0, (self.groups, -1))
            return then(torch.einsum("tgi,goi->tgo", x, weight).flatten(1))
        rows = batch.group_rows(self.groups, len(x))
        activations = dsa.scatter_cast_to_fp8(x.flatten(0, 1), rows.to_groups, layer.use_ue8m0)
        return self.multiply(activations, then, batch, x.dtype)

    def multiply(
        self,
        activations: tuple[torch.Tensor, torch.Tensor],
        then: Linear | BlockFP8Linear,
        batch: TokenBatch,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The same, in `dtype`, of x in FP8 with its scales, [groups * T, I] and [groups * T, I / 128]: a group's rows
        together. FP8 weights alone have it."""
        layer, groups = self.matrices, self.groups
        tokens = len(activations[0]) // groups
        rows = batch.group_rows(groups, tokens)
        matrices = tuple(t.unflatten(0, (groups, -1)) for t in (layer.weight, layer.weight_scale_inv))
        y = dsa.grouped_fp8_gemm_nt(activations, matrices, rows.ends, dtype)
        if not isinstance(then, BlockFP8Linear):
            return then(y.unflatten(0, (groups, tokens)).transpose(0, 1).flatten(1))
        activations = dsa.scatter_cast_to_fp8(y, rows.to_tokens, then.use_ue8m0)
        return then.multiply(tuple(part.view(tokens, groups * part.shape[1]) for part in activations), dtype)
