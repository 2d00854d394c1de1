"""The routed experts of a mixture-of-experts layer. Each projection has one parameter for all experts."""

import torch
from torch import library, nn

import dsa
from dsa_layers.layers.linear import BLOCK, WithPaddedScales, with_padding

ByExpert = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the result of `dsa.sort_by_expert`: order, rows, ends
FP4_GROUP = 32  # columns per FP4 scale
_FP4_SIZE = 2.9  # root mean square of the e2m1 values


class Experts(WithPaddedScales):
    """y[t] = sum_j weights[t, j] SwiGLU_{experts[t, j]}(x[t]) + shared[t], summed in fp32 in the order of j.

    forward(x [T, hidden], experts int64 [T, k], weights fp32 [T, k], shared [T, hidden] or None) -> [T, hidden] in x's
    dtype. Rows are sorted by expert, and each projection is one grouped GEMM. No token is dropped.
    limit: see `SwiGLU`.
    Parameters: gate_up_proj [E, 2 inner, hidden], for each expert the rows of the gate projection, then the rows of the
    up projection; down_proj [E, hidden, inner]. Checkpoints store one tensor per expert e and projection,
    `experts.e.*_proj.weight`; `split_experts` maps these names to slices of the parameters.
    fp8: weights are e4m3, and {gate_up_proj,down_proj}_scale_inv fp32 has one scale per 128 x 128 block.
    fp4 (requires fp8): weights are int8 [.., columns / 2] with two e2m1 values per byte, {..}_scale_inv is e8m0
    [.., columns / 32], and {..}_block_scale fp32 is the result of `dsa.fp4_block_scales`.
    Quantised weights have no gradients.
    use_ue8m0: whether the scales of activations, and of FP8 weights at initialisation, are powers of two.
    In a model that is split over ranks, this module has the experts `first` to `first` + `count` - 1 of `total`.
    """

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
        """Register FP4 parameters: random codes, and scales such that the weights' RMS is about columns^-0.5."""
        packed = torch.empty(count, rows, columns // 2, dtype=torch.int8)
        size = columns**-0.5 / _FP4_SIZE
        scale = torch.full((count, rows, columns // FP4_GROUP), size, dtype=torch.float32).to(torch.float8_e8m0fnu)
        block_scale = torch.empty(count, rows // BLOCK, columns // BLOCK, dtype=torch.float32)
        if packed.device.type != "meta":
            packed = torch.randint(-128, 128, packed.shape, dtype=torch.int8)
            block_scale = dsa.fp4_block_scales(packed, scale)
        for suffix, tensor in (("", packed), ("_scale_inv", scale), ("_block_scale", block_scale)):
            self.register_parameter(name + suffix, nn.Parameter(tensor, requires_grad=False))

    def forward(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        by_expert = self.sort(experts)
        outputs = self.outputs(x, by_expert, experts.shape[1])
        shared = None if shared is None else shared.to(outputs.dtype)  # autocast may have changed its dtype
        return dsa.combine_experts(outputs, by_expert[1], weights, shared)

    def sort(self, experts: torch.Tensor) -> ByExpert:
        """Return (order, rows, ends) of `dsa.sort_by_expert` for this rank's experts. Entries with other ranks' experts
        come last; no product is computed for them."""
        return dsa.sort_by_expert(experts - self.first if self.first else experts, self.count)

    def outputs(self, x: torch.Tensor, by_expert: ByExpert, top_k: int) -> torch.Tensor:
        """Return the experts' outputs [T * top_k, hidden], sorted by expert. by_expert: the result of `sort`."""
        order, rows, ends = by_expert
        if self.fp8:
            return self.products(dsa.scatter_cast_to_fp8(x, rows, self.use_ue8m0), ends, x.dtype)
        gate_up = grouped_product(x[order // top_k], self.gate_up_proj, ends)
        h = gated(*gate_up.float().chunk(2, -1), self.limit).to(x.dtype)
        return grouped_product(h, self.down_proj, ends)

    def products(
        self,
        activations: tuple[torch.Tensor, torch.Tensor],
        ends: torch.Tensor,
        dtype: torch.dtype,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the experts' outputs in `dtype`, sorted by expert.

        activations  FP8 rows and their scales
        ends         as in ByExpert
        tokens       int32 [N]: the row of `activations` that each sorted row reads; None if `activations` is sorted
        """
        swiglu = dsa.grouped_fp8_fp4_gemm_swiglu if self.fp4 else dsa.grouped_fp8_gemm_swiglu
        product = dsa.grouped_fp8_fp4_gemm_nt if self.fp4 else dsa.grouped_fp8_gemm_nt
        suffixes = ("", "_scale_inv", "_block_scale") if self.fp4 else ("", "_scale_inv")
        gate_up, down = (tuple(getattr(self, name + s) for s in suffixes) for name in ("gate_up_proj", "down_proj"))
        if not self.fp4:
            gate_up, down = ((weight, with_padding(scale)) for weight, scale in (gate_up, down))
        options = {"rows": tokens, "limit": self.limit, "use_ue8m0": self.use_ue8m0, "dtype": dtype}
        options["pad_scales"] = True
        count = len(activations[0] if tokens is None else tokens)
        # this rank's number of rows if every expert gets equally many rows
        expected = None if self.count == self.total else -(-count * self.count // self.total)
        h = swiglu(activations, gate_up, ends, **options, expected_rows=expected)
        return product(h, down, ends, dtype, expected_rows=expected)


def gated(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Return silu(gate) * up. A limit first clamps `gate` to at most limit and `up` to [-limit, limit]."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return nn.functional.silu(gate) * up


def grouped_product(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute y = x W_g^T for each group g of rows. Group g ends before row ends[g]. Rows of y from ends[-1] on are
    undefined.

    x [N, I], weights [G, O, I], ends int32 [G] -> [N, O], differentiable in x and weights.
    """
    if x.dtype == torch.bfloat16:
        return nn.functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    return _grouped_product(x, weights, ends)


# torch.compile can trace torch's grouped_mm only for bf16, so a custom op wraps it for other dtypes.
@library.custom_op("dsa_layers::grouped_product", mutates_args=())
def _grouped_product(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return nn.functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)


@_grouped_product.register_fake
def _(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weights.shape[1])


@library.custom_op("dsa_layers::grouped_product_backward", mutates_args=())
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
