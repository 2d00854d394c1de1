"""The routed experts of a mixture, whose weights lie in one tensor."""

from collections.abc import Callable

import torch
from torch import nn

import dsa
from dsa_layers.layers.branch import Branch
from dsa_layers.layers.joint_linear import Cast
from dsa_layers.layers.linear import BLOCK
from dsa_layers.layers.routing import joins
from dsa_layers.layers.shares import Shares

FP4_GROUP = 32  # columns that share a scale
_FP4_SIZE = 2.9  # the root mean square of e2m1's values


class Experts(nn.Module):
    """y[t] = sum_j weights[t, j] SwiGLU_{experts[t, j]}(x[t]) + shared[t], summed in fp32 in the order of j.

    forward(x [T, hidden], experts int64 [T, k], weights fp32 [T, k], shared, residual [T, hidden] or None, cast=None)
    -> [T, hidden] in x's dtype; residual + y, where there is a residual. Rows are sorted by expert and go through one
    grouped GEMM a projection; what an expert computes for a token depends on no other token. cast: of x, with `fp8`,
    (q [T, hidden], scales [T, hidden / 128]), where the caller has it; of x only the dtype matters then. by_expert:
    what `dsa.sort_by_expert` gives of the experts, numbered from `first` on, where the caller has it. branch: the one
    that makes `shared` (`side_stream`), if it is not joined. combine: what sums a token's outputs, with `shared`, in
    place of `dsa.combine_experts`, for several processes' parts (`Rows.sum_of_experts`).
    limit: as in `SwiGLU`. Parameters: gate_up_proj [E, 2 inner, hidden], an expert's gate above its up projection;
    down_proj [E, hidden, inner]; with `fp8` e4m3 and {gate_up_proj,down_proj}_scale_inv fp32, an entry per 128 x 128
    block, as `BlockFP8Linear` has them. With `fp4`, which goes with `fp8`, two e2m1 columns a byte, int8
    [.., columns / 2], {..}_scale_inv e8m0 [.., columns / 32] and {..}_block_scale fp32, their `dsa.fp4_block_scales`:
    the results are those of the same weights in FP8. Checkpoints' `experts.e.*_proj.weight` are parts of these
    (`split_experts`). Quantised weights are for inference: nothing gets a gradient through them.
    A part has `count` of `total` experts, from number `first` on, and gives the sum over those of a token's experts
    that it has.
    """

    shares = Shares(rows=("",), counts={"count": "experts"}, blocks=False)

    def __init__(
        self,
        count: int,
        hidden: int,
        inner: int,
        *,
        limit: float | None = None,
        fp8: bool = False,
        fp4: bool = False,
        dtype: torch.dtype | None = None,
        use_ue8m0: bool = True,
    ) -> None:
        super().__init__()
        self.count, self.first, self.total = count, 0, count
        self.limit, self.fp8, self.fp4, self.use_ue8m0 = limit, fp8, fp4, use_ue8m0
        if fp4 and not fp8:
            raise ValueError("fp4: FP4 weights are multiplied with FP8 activations; accepted with fp8=True")
        if fp8 and (inner % BLOCK or hidden % BLOCK):
            raise ValueError(f"hidden, inner: must be multiples of {BLOCK} for FP8 weights, got {hidden} and {inner}")
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            if fp4:
                self._make_fp4(name, count, rows, columns)
                continue
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

    def _make_fp4(self, name: str, count: int, rows: int, columns: int) -> None:
        """Parameters of random codes, of about the size that others begin with."""
        packed = torch.empty(count, rows, columns // 2, dtype=torch.int8)
        size = columns**-0.5 / _FP4_SIZE
        scale = torch.full((count, rows, columns // FP4_GROUP), size, dtype=torch.float32).to(torch.float8_e8m0fnu)
        block_scale = torch.empty(count, rows // BLOCK, columns // BLOCK, dtype=torch.float32)
        if packed.device.type != "meta":
            packed = torch.randint(-128, 128, packed.shape, dtype=torch.int8)
            block_scale = dsa.fp4_block_scales(packed, scale)
        for suffix, tensor in (("", packed), ("_scale_inv", scale), ("_block_scale", block_scale)):
            self.register_parameter(name + suffix, nn.Parameter(tensor, requires_grad=False))

    @joins
    def forward(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        *,
        cast: Cast | None = None,
        by_expert: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        branch: Branch | None = None,
        combine: Callable[..., torch.Tensor] | None = None,
    ) -> torch.Tensor:
        # Rows of other parts' experts come last, behind ends[-1]: nothing is computed for them or read of them.
        if by_expert is None:
            own = experts - self.first if self.first else experts
            by_expert = dsa.sort_by_expert(own, self.count)
        order, rows, ends = by_expert
        if self.fp8 and cast is not None and len(cast[0]) == 1:
            # All rows are the one token's, in whatever order: what it is cast to does not wait for the router.
            outputs = self._products(tuple(part.expand(len(order), -1) for part in cast), ends, x.dtype)
        elif self.fp8 and cast is not None:
            outputs = self._products(cast, ends, x.dtype, order // experts.shape[1])
        elif self.fp8:
            # A token is cast once, and stored at its rows.
            outputs = self._products(dsa.scatter_cast_to_fp8(x, rows, self.use_ue8m0), ends, x.dtype)
        else:
            outputs = self._float_outputs(x, order // experts.shape[1], ends)
        if branch is not None:
            branch.join()
        if shared is not None:
            shared = shared.to(outputs.dtype)  # autocast is the shared expert's alone
        if combine is not None:
            y = combine(outputs, rows, weights, shared)
            return y if residual is None else residual + y
        return dsa.combine_experts(outputs, rows, weights, shared, residual)

    def _float_outputs(self, x: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The experts' outputs [N, hidden] for the tokens [N], of which those up to ends[e] go to expert e."""
        gate_up = nn.functional.grouped_mm(x[tokens], self.gate_up_proj.transpose(1, 2), offs=ends)
        h = gated(*gate_up.float().chunk(2, -1), self.limit).to(x.dtype)
        return nn.functional.grouped_mm(h, self.down_proj.transpose(1, 2), offs=ends)

    def _products(
        self, activations: Cast, ends: torch.Tensor, dtype: torch.dtype, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `_float_outputs`, of cast rows [N], or of those of these tokens."""
        swiglu = dsa.grouped_fp8_fp4_gemm_swiglu if self.fp4 else dsa.grouped_fp8_gemm_swiglu
        product = dsa.grouped_fp8_fp4_gemm_nt if self.fp4 else dsa.grouped_fp8_gemm_nt
        suffixes = ("", "_scale_inv", "_block_scale") if self.fp4 else ("", "_scale_inv")
        gate_up, down = (tuple(getattr(self, name + s) for s in suffixes) for name in ("gate_up_proj", "down_proj"))
        options = {"rows": tokens, "limit": self.limit, "use_ue8m0": self.use_ue8m0, "dtype": dtype}
        count = len(activations[0] if tokens is None else tokens)
        # Of a part: its share, if tokens choose all experts alike.
        expected = None if self.count == self.total else -(-count * self.count // self.total)
        h = swiglu(activations, gate_up, ends, **options, expected_rows=expected)
        return product(h, down, ends, dtype, expected_rows=expected)


def gated(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """silu(gate) * up; with a limit gate is at most that, up between -limit and limit."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return nn.functional.silu(gate) * up
