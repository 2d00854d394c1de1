"""SwiGLU and the cast of its result to FP8 e4m3 with one scale per token and 128 channels, in one pass. The variant for
attention's gate computes h = sigmoid(gate) * up instead.

h = silu(gate) * up, rounded to the operands' dtype;   scale = max(amax(|h|), 1e-4) / 448;   q = e4m3(h * (1 / scale))
With `limit`, gate and up are clamped first (swiglu_epilogue.py). With `use_ue8m0`, scale is rounded up to a power of
two.

Plan
- 8 lanes of one warp process a group of 128 channels, 16 consecutive channels of gate and of up per lane. The compiler
  can move a thread's last loads after the arithmetic on the first loaded values, so only 32 bytes per thread are sure
  to be in flight. With 40 registers (1536 threads per SM) this is 48 KiB per SM, twice as much as saturates HBM.
- exp is the accurate version (2 ulp in fp32, one MUFU instruction). The division is a reciprocal (1 ulp) and a product.
  The relative error of h before rounding is at most 2^-20. The rest of the arithmetic is that of
  per_token_cast_to_fp8_sm90, bit for bit.
- NaN stays NaN in the clamps of `limit`, as in PyTorch's clamp. silu(-inf) is NaN, because -inf * 0 is NaN.
- Group g of the [T, ceil(I / 128)] grid is in row g // ceil(I / 128); the division uses precomputed numbers. Rows may
  be strided.
- If the last group of a row has fewer than 128 channels, a variant of the kernel with vectors of 8 channels is used.
  Channels past the end are zeros and are not stored.
- Another variant, for the rows of a grouped product, skips rows after the last matrix's rows; only the device knows
  their number. Its grid has as many CTAs as are resident at once. The CTAs read the end of the last matrix's rows, and
  loop over the groups before it.
Shared memory: none.
Constraints: I a multiple of 8, innermost stride 1, rows of gate and up aligned to 16 bytes.
Roofline: bound by memory. Per channel of h 4 bytes are read (bf16), and 1 + 4 / 128 bytes are written. A channel takes
about 25 instructions; an SM issues 34 in the time in which memory moves these bytes.
"""

import itertools

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_contiguous, fake_rows, fake_stream, strides
from dsa.cute.quantize import GROUP, quantize, round_to
from dsa.cute.registers import converted
from dsa.cute.sm90 import thread_and_cta
from dsa.kernels.gemm.limits import CAST_DTYPES, SWIGLU_MULTIPLE
from dsa.kernels.gemm.swiglu_epilogue import swiglu
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

THREADS = 128
CHANNELS = 16  # per lane
LANES = GROUP // CHANNELS
GROUPS_PER_CTA = THREADS // LANES
RESIDENT = 10  # CTAs per SM of the variant for grouped products, which has 48 registers per thread


class SwigluCastSm90:
    """silu: whether h = silu(gate) * up, else sigmoid(gate) * up."""

    def __init__(self, use_ue8m0: bool, ragged: bool, silu: bool = True):
        self.use_ue8m0, self.ragged, self.silu = use_ue8m0, ragged, silu
        self.width = SWIGLU_MULTIPLE if ragged else CHANNELS

    @cute.jit
    def __call__(
        self,
        gate: cute.Tensor,
        up: cute.Tensor,
        q: cute.Tensor,
        scale: cute.Tensor,
        limit: Float32 | None,
        stream,
    ):
        groups_per_row = scale.shape[1]
        total = scale.shape[0] * groups_per_row
        self.kernel(gate, up, q, scale, limit, cute.fast_divmod_create_divisor_v2(groups_per_row), total).launch(
            grid=(cute.ceil_div(total, GROUPS_PER_CTA), 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        gate: cute.Tensor,
        up: cute.Tensor,
        q: cute.Tensor,
        scale: cute.Tensor,
        limit: Float32 | None,
        row_groups: cute.FastDivmodDivisorV2,
        total: Int32,
    ):
        tid, block = thread_and_cta()
        group = block * GROUPS_PER_CTA + tid // LANES
        wait_for_prerequisite_grids()
        self.cast(gate, up, q, scale, limit, row_groups, group, total, tid % LANES)

    @cute.jit
    def cast(self, gate, up, q, scale, limit, row_groups, group, total, lane):
        # Lanes past the end compute the last group, since the shuffles need all lanes.
        row, col = divmod(cutlass.min(group, total - 1), row_groups)
        channel = col * GROUP + lane * CHANNELS

        gates, ups = [cute.make_rmem_tensor((CHANNELS,), gate.element_type) for _ in range(2)]
        self.copy(gates, gate[row, None], channel, write=False)
        self.copy(ups, up[row, None], channel, write=False)
        h = cute.make_rmem_tensor((CHANNELS,), Float32)
        for i in cutlass.range_constexpr(CHANNELS):
            g, u = gates[i].to(Float32), ups[i].to(Float32)
            if const_expr(self.silu):
                h[i] = swiglu(g, u, limit)
            else:
                h[i] = cute.arch.rcp_approx(Float32(1.0) + cute.math.exp(-g)) * u
        round_to(h, gate.element_type)
        s = quantize(h, CHANNELS, self.use_ue8m0)
        out = converted(h, Float8E4M3FN)
        if group < total:
            self.copy(out, q[row, None], channel, write=True)
            if lane == 0:
                scale[row, col] = s

    @cute.jit
    def copy(self, registers: cute.Tensor, row: cute.Tensor, channel: Int32, write: cutlass.Constexpr):
        """Copy a lane's channels of a row, from `channel` on, to registers, or back with `write`. Channels past the end
        of the row are read as zeros."""
        if const_expr(self.ragged and not write):
            registers.fill(0.0)
        for i in cutlass.range_constexpr(CHANNELS // self.width):
            own = cute.local_tile(registers, (self.width,), (i,))
            place = cute.local_tile(row, (self.width,), (channel // self.width + i,))
            source, target = (own, place) if write else (place, own)
            if const_expr(self.ragged):
                if channel + i * self.width < row.shape[0]:
                    cute.autovec_copy(source, target)
            else:
                cute.autovec_copy(source, target)


class SwigluCastOfMatricesSm90(SwigluCastSm90):
    @cute.jit
    def __call__(
        self,
        gate: cute.Tensor,
        up: cute.Tensor,
        q: cute.Tensor,
        scale: cute.Tensor,
        limit: Float32 | None,
        ends: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        row_groups = cute.fast_divmod_create_divisor_v2(scale.shape[1])
        self.kernel_of_matrices(gate, up, q, scale, limit, ends, row_groups).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel_of_matrices(
        self,
        gate: cute.Tensor,
        up: cute.Tensor,
        q: cute.Tensor,
        scale: cute.Tensor,
        limit: Float32 | None,
        ends: cute.Tensor,
        row_groups: cute.FastDivmodDivisorV2,
    ):
        tid, block = thread_and_cta()
        ctas, _, _ = cute.arch.grid_dim()
        wait_for_prerequisite_grids()
        end = ends[ends.shape[0] - 1]
        # If the last end is out of range, other matrices can have rows anywhere.
        if end < 0 or end > scale.shape[0]:
            end = scale.shape[0]
        total = end * scale.shape[1]
        for first in cutlass.range(block * GROUPS_PER_CTA, total, ctas * GROUPS_PER_CTA, unroll=1):
            self.cast(gate, up, q, scale, limit, row_groups, first + tid // LANES, total, tid % LANES)


def _operands(dtype: str, limited: bool, multiple: int):
    rows, cols = cute.sym_int(), cute.sym_int(divisibility=multiple)
    return (
        *(fake_rows(cute_dtype(dtype), rows, cols) for _ in range(2)),
        fake(Float8E4M3FN, (rows, cols), (*strides(1, multiple), 1)),
        fake_rows(Float32, rows, cute.sym_int(), align=4),
        Float32(1.0) if limited else None,
    )


@cached
def compile_swiglu_cast(dtype: str, use_ue8m0: bool, limited: bool, ragged: bool):
    """-> f(gate [T, I] dtype, up [T, I] dtype, q [T, I] e4m3, scale [T, ceil(I / 128)] fp32, limit if `limited` or
    None); T * I > 0. I and the row stride of q are multiples of 128, or of 8 if `ragged`. Rows of gate and up are
    aligned to 16 bytes."""
    operands = _operands(dtype, limited, SWIGLU_MULTIPLE if ragged else GROUP)
    return compile_sm90(SwigluCastSm90(use_ue8m0, ragged), *operands, fake_stream())


@cached
def compile_gate_cast(dtype: str, use_ue8m0: bool, ragged: bool):
    """-> f(gate, x, q, scale, None), like `compile_swiglu_cast` with h = sigmoid(gate) * x."""
    operands = _operands(dtype, False, SWIGLU_MULTIPLE if ragged else GROUP)
    return compile_sm90(SwigluCastSm90(use_ue8m0, ragged, silu=False), *operands, fake_stream())


@cached
def compile_swiglu_cast_of_matrices(dtype: str, use_ue8m0: bool, limited: bool):
    """-> f(gate, up, q, scale, limit, ends [E] int32 ascending, ctas), which computes what `compile_swiglu_cast` does
    for the rows before ends[E - 1], or for all rows if ends[E - 1] is out of range. I is a multiple of 128, E > 0.
    ctas: RESIDENT per SM."""
    return compile_sm90(
        SwigluCastOfMatricesSm90(use_ue8m0, ragged=False),
        *_operands(dtype, limited, GROUP),
        fake_contiguous(Int32, cute.sym_int()),
        *(Int32(1), fake_stream()),
    )


def shipped_variants() -> Variants:
    kinds = [(dtype, *options) for dtype in CAST_DTYPES for options in itertools.product((True, False), repeat=2)]
    plain = [(compile_swiglu_cast, (*kind, ragged)) for kind in kinds for ragged in (True, False)]
    gates = [
        (compile_gate_cast, (dtype, use_ue8m0, ragged))
        for dtype, use_ue8m0, ragged in itertools.product(CAST_DTYPES, (True, False), (True, False))
    ]
    return plain + gates + [(compile_swiglu_cast_of_matrices, kind) for kind in kinds]
