"""The routed experts of a mixture, whose weights lie in one tensor."""

import torch
from torch import nn

import dsa
from dsa_layers.layers.linear import BLOCK


class Experts(nn.Module):
    """y[t] = sum_j weights[t, j] SwiGLU_{experts[t, j]}(x[t]) + shared[t], summed in fp32 in the order of j.

    forward(x [T, hidden], experts int64 [T, k], weights fp32 [T, k], shared [T, hidden] or None) -> [T, hidden] in x's
    dtype. Rows are sorted by expert and go through one grouped GEMM a projection; what an expert computes for a token
    depends on no other token.
    limit: as in `SwiGLU`. Parameters: gate_up_proj [E, 2 inner, hidden], an expert's gate above its up projection;
    down_proj [E, hidden, inner]; with `fp8` e4m3 and {gate_up_proj,down_proj}_scale_inv fp32, an entry per 128 x 128
    block, as `BlockFP8Linear` has them. Checkpoints' `experts.e.*_proj.weight` are their parts (`split_experts`).
    """

    def __init__(
        self,
        count: int,
        hidden: int,
        inner: int,
        *,
        limit: float | None = None,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
        use_ue8m0: bool = True,
    ) -> None:
        super().__init__()
        self.limit, self.fp8, self.use_ue8m0 = limit, fp8, use_ue8m0
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            if fp8 and (inner % BLOCK or hidden % BLOCK):
                raise ValueError(
                    f"hidden, inner: must be multiples of {BLOCK} for FP8 weights, got {hidden} and {inner}"
                )
            weight = torch.empty(count, rows, columns, dtype=torch.float32 if fp8 else dtype)
            if weight.device.type != "meta":
                nn.init.normal_(weight, std=columns**-0.5)
            if fp8:
                scale = torch.ones(count, rows // BLOCK, columns // BLOCK, dtype=torch.float32)
                if weight.device.type != "meta":
                    parts = [dsa.per_block_cast_to_fp8(matrix, use_ue8m0) for matrix in weight]
                    weight, scale = (torch.stack(tensors) for tensors in zip(*parts))
                self.register_parameter(f"{name}_scale_inv", nn.Parameter(scale, requires_grad=False))
                weight = weight.to(torch.float8_e4m3fn)
            self.register_parameter(name, nn.Parameter(weight, requires_grad=not fp8))

    def forward(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        count, k = len(self.down_proj), experts.shape[1]
        order, rows, ends = dsa.sort_by_expert(experts, count)
        outputs = (self._fp8_outputs if self.fp8 else self._float_outputs)(x, order // k, ends)
        return dsa.combine_experts(outputs, rows, weights, shared)

    def _float_outputs(self, x: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The experts' outputs [N, hidden] for the tokens [N], of which those up to ends[e] go to expert e."""
        gate_up = nn.functional.grouped_mm(x[tokens], self.gate_up_proj.transpose(1, 2), offs=ends)
        gate, up = gate_up.float().chunk(2, -1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        h = (nn.functional.silu(gate) * up).to(x.dtype)
        return nn.functional.grouped_mm(h, self.down_proj.transpose(1, 2), offs=ends)

    def _fp8_outputs(self, x: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """As `_float_outputs`. Tokens are cast once, and their bytes go to each of their experts."""
        q, scale = dsa.per_token_cast_to_fp8(x, self.use_ue8m0)
        rows = q.view(torch.uint8)[tokens].view(torch.float8_e4m3fn), scale[tokens]
        gate_up = dsa.grouped_fp8_gemm_nt(rows, (self.gate_up_proj, self.gate_up_proj_scale_inv), ends, x.dtype)
        h = dsa.swiglu_cast_to_fp8(*gate_up.chunk(2, -1), self.use_ue8m0, limit=self.limit)
        return dsa.grouped_fp8_gemm_nt(h, (self.down_proj, self.down_proj_scale_inv), ends, x.dtype)
