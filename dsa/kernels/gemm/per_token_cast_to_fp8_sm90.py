"""Cast to FP8 e4m3 with one scale per token and 128 channels, optionally after a 128-point Hadamard transform.

Plan
- 128 / V lanes of one warp process a group of 128 channels, V consecutive channels per lane, in registers. V and U are
  fields of CastConfig.
- A thread has channels of U groups. It issues the loads for all of them first, so that enough bytes are in flight to
  saturate HBM.
- Hadamard butterflies with strides below V stay in registers. The others take one shuffle per element and stride. The
  order of the strides and the fp32 arithmetic are those of the reference, so results agree bit for bit.
- A tree of shuffles with NaN-propagating maxima gives amax, the largest absolute value of a group. Scales, NaN and
  infinity follow the reference's rules exactly.
- Group g of the [T, K / 128] grid is in row g // (K / 128); the division uses precomputed numbers. Rows may be strided;
  offsets have 64 bits.
- Scattered variant: each group of a token is stored in every row of the results that `places` lists for the token.
Shared memory: none.
Constraints: K a multiple of 128, innermost stride 1, rows aligned to 16 bytes.
Roofline: bound by memory. Per channel 2 bytes are read (bf16), and 1 + 4 / 128 bytes are written. About 6 instructions
per channel (8 if scales are not powers of two) leave half of the issue slots idle at copy bandwidth.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_rows, fake_stream, strides
from dsa.cute.quantize import GROUP, hadamard, quantize, round_to
from dsa.cute.registers import converted
from dsa.cute.sm90 import thread_and_cta
from dsa.kernels.gemm.limits import CAST_DTYPES
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

SHORT_INPUT = 1 << 24  # inputs with fewer elements use one group per thread


@dataclass(frozen=True)
class CastConfig:
    """threads: threads per CTA. channels: V, the channels per thread and group, 8 or 16. groups: U, the groups per
    thread."""

    threads: int = 128
    channels: int = 16
    groups: int = 2


class PerTokenCastToFp8Sm90:
    def __init__(self, use_ue8m0: bool, hadamard: bool, config: CastConfig):
        self.use_ue8m0, self.hadamard = use_ue8m0, hadamard
        self.threads, self.channels, self.unroll = config.threads, config.channels, config.groups
        self.lanes = GROUP // config.channels
        self.groups_per_pass = config.threads // self.lanes
        self.groups_per_cta = self.groups_per_pass * config.groups

    @cute.jit
    def __call__(self, x: cute.Tensor, places: cute.Tensor | None, q: cute.Tensor, scale: cute.Tensor, stream):
        groups_per_row = scale.shape[1]
        total = x.shape[0] * groups_per_row
        self.kernel(x, places, q, scale, cute.fast_divmod_create_divisor_v2(groups_per_row), total).launch(
            grid=(cute.ceil_div(total, self.groups_per_cta), 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        places: cute.Tensor | None,
        q: cute.Tensor,
        scale: cute.Tensor,
        row_groups: cute.FastDivmodDivisorV2,
        total: Int32,
    ):
        tid, block = thread_and_cta()
        lane = tid % self.lanes
        first = block * self.groups_per_cta + tid // self.lanes
        wait_for_prerequisite_grids()

        raw = cute.make_rmem_tensor((self.channels, self.unroll), x.element_type)
        rows, cols = [None] * self.unroll, [None] * self.unroll
        for u in cutlass.range_constexpr(self.unroll):
            group = cutlass.min(first + u * self.groups_per_pass, total - 1)
            rows[u], cols[u] = divmod(group, row_groups)
            source = cute.local_tile(x, (1, self.channels), (rows[u], cols[u] * self.lanes + lane))
            cute.autovec_copy(source[0, None], raw[None, u])

        for u in cutlass.range_constexpr(self.unroll):
            v = converted(raw[None, u], Float32)
            if const_expr(self.hadamard):
                hadamard(v, lane, self.channels)
                round_to(v, x.element_type)
            s = quantize(v, self.channels, self.use_ue8m0)
            out = converted(v, Float8E4M3FN)
            if first + u * self.groups_per_pass < total:
                if const_expr(places is None):
                    self.store(out, s, q, scale, rows[u], cols[u], lane)
                else:
                    for j in cutlass.range(places.shape[1], unroll=1):
                        place = places[rows[u], j]
                        if place >= 0 and place < q.shape[0]:
                            self.store(out, s, q, scale, place, cols[u], lane)

    @cute.jit
    def store(self, out, s, q, scale, row, col, lane):
        target = cute.local_tile(q, (1, self.channels), (row, col * self.lanes + lane))
        cute.autovec_copy(out, target[0, None])
        if lane == 0:
            scale[row, col] = s


@cached
def compile_per_token_cast_to_fp8(
    dtype: str, use_ue8m0: bool, hadamard: bool, config: CastConfig, scattered: bool = False
):
    """-> f(x [T, K] dtype, places int32 [T, k] if `scattered` or None, q [T, K] e4m3, scale [T, K / 128] fp32); T * K >
    0. Rows of x are aligned to 16 bytes, and the row stride of q is a multiple of 128. If `scattered`, row t of the
    cast is written to the rows places[t] of q and scale. q and scale may have any number of rows; a place that is not
    one of these rows is skipped."""
    rows, cols = cute.sym_int(), cute.sym_int(divisibility=GROUP)
    results = cute.sym_int() if scattered else rows
    return compile_sm90(
        PerTokenCastToFp8Sm90(use_ue8m0, hadamard, config),
        fake_rows(cute_dtype(dtype), rows, cols),
        fake_rows(Int32, rows, cute.sym_int(), align=4) if scattered else None,
        fake(Float8E4M3FN, (results, cols), (*strides(1, GROUP), 1)),
        fake_rows(Float32, results, cute.sym_int(), align=4),
        fake_stream(),
    )


def choose_config(dtype: str, elements: int) -> CastConfig:
    """Short inputs use one group per thread, so that there are more CTAs. For long inputs a thread has 64 bytes of
    loads in flight: two groups of a 16-bit input, or one of an fp32 input (measured: docs/explanation/kernels.md)."""
    return CastConfig(groups=1 if dtype == "float32" or elements < SHORT_INPUT else 2)


def shipped_variants() -> Variants:
    return [
        (compile_per_token_cast_to_fp8, (dtype, use_ue8m0, hadamard, config, scattered))
        for dtype in CAST_DTYPES
        for config in sorted({choose_config(dtype, n) for n in (1, SHORT_INPUT)}, key=str)
        for use_ue8m0 in (True, False)
        for hadamard, scattered in ((True, False), (False, False), (False, True))
    ]
