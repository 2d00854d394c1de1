"""The weighted sum of the rows that a token's experts computed, plus the shared expert's row.

out[t] = round(sum_j weights[t, j] * y[rows[t, j]] + shared[t]). Without `weights`, every weight is 1. A row index
outside y adds nothing, and without `shared` that term is left out. With a residual, this rounded sum is added to
residual[t], and out[t] is the result, rounded again.

Plan
- A thread computes one 16-byte vector of a token's channels, so threads exchange nothing. A CTA computes THREADS
  vectors of one token. A token has ceil(H / (THREADS * channels per vector)) CTAs, so that a few tokens occupy more
  SMs.
- Each thread reads the row indices and weights of up to BATCH rows. Then it copies one vector of each of these rows,
  and issues all these copies at once by cp.async (dsa/cute/weighted_rows.py), so it has 128 bytes in flight. This
  repeats for the next BATCH rows.
- The vectors of shared and residual are loaded at the start.
- Products are rounded to fp32 and then added in the order of j, and `shared` is added last, so the result has the
  reference's bits.
Shared memory: BATCH * THREADS * 16 bytes, 16 KiB. Constraints: H a multiple of 8, innermost stride 1, rows aligned to
16 bytes.
Roofline: bound by memory, (k + 1) H elements per token, plus H each for shared and residual. Arithmetic is not the
bound: an element of y takes 9 instructions, and an SM issues 13 in the time in which memory delivers the element's 2
bytes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_rows, fake_stream, strides
from dsa.cute.quantize import round_to
from dsa.cute.registers import converted, filled, loaded
from dsa.cute.sm90 import thread_and_cta
from dsa.cute.weighted_rows import add_weighted_rows, scratch_of_thread
from dsa.kernels.moe.limits import COMBINE_CTA_BYTES, COMBINE_DTYPES
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

VECTOR_BITS = 128
VECTOR_BYTES = VECTOR_BITS // 8
THREADS = COMBINE_CTA_BYTES // VECTOR_BYTES


class CombineExpertsSm90:
    def __init__(self, dtype: type[cutlass.Numeric]):
        self.dtype, self.width = dtype, VECTOR_BITS // dtype.width

    @cute.jit
    def __call__(
        self,
        y: cute.Tensor,
        rows: cute.Tensor,
        weights: cute.Tensor | None,
        shared: cute.Tensor | None,
        residual: cute.Tensor | None,
        out: cute.Tensor,
        stream,
    ):
        parts = cute.ceil_div(out.shape[1], THREADS * self.width)
        self.kernel(y, rows, weights, shared, residual, out, cute.fast_divmod_create_divisor_v2(parts)).launch(
            grid=(out.shape[0] * parts, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        y: cute.Tensor,
        rows: cute.Tensor,
        weights: cute.Tensor | None,
        shared: cute.Tensor | None,
        residual: cute.Tensor | None,
        out: cute.Tensor,
        parts: cute.FastDivmodDivisorV2,
    ):
        tid, block = thread_and_cta()
        token, part = divmod(block, parts)
        vector = part * THREADS + tid
        scratch = scratch_of_thread(VECTOR_BYTES, THREADS, tid)
        wait_for_prerequisite_grids()
        if vector * self.width < out.shape[1]:
            if const_expr(shared is not None):
                own = loaded(cute.local_tile(shared[token, None], (self.width,), (vector,)))
            if const_expr(residual is not None):
                stream_part = loaded(cute.local_tile(residual[token, None], (self.width,), (vector,)))
            acc = filled((self.width,), 0.0)
            add_weighted_rows(acc, y, rows, weights, scratch, VECTOR_BYTES, THREADS, token, vector)
            if const_expr(shared is not None):
                for i in cutlass.range_constexpr(self.width):
                    acc[i] += own[i].to(Float32)
            if const_expr(residual is not None):
                round_to(acc, self.dtype)
                acc.store(acc.load() + stream_part.load().to(Float32))
            target = cute.local_tile(out[token, None], (self.width,), (vector,))
            cute.autovec_copy(converted(acc, self.dtype), target)


@cached
def compile_combine_experts(dtype: str, index_dtype: str, weighted: bool, shared: bool, residual: bool):
    """-> f(y [M, H] dtype, rows [T, k] index_dtype, weights [T, k] fp32 or None, shared and residual [T, H] dtype or
    None, out [T, H] dtype). T, H, M and T * ceil(H / (THREADS * channels in 16 bytes)) are from 1 to 2^31 - 1. Rows of
    H elements are aligned to 16 bytes."""
    element = cute_dtype(dtype)
    index = cute_dtype(index_dtype)
    sources, tokens, top_k, channels = cute.sym_int(), cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8)

    return compile_sm90(
        CombineExpertsSm90(element),
        fake_rows(element, sources, channels),
        fake(index, (tokens, top_k), strides(2), index.width // 8),
        fake(Float32, (tokens, top_k), strides(2), 4) if weighted else None,
        fake_rows(element, tokens, channels) if shared else None,
        fake_rows(element, tokens, channels) if residual else None,
        fake_rows(element, tokens, channels),
        fake_stream(),
    )


def shipped_variants() -> Variants:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [
        (compile_combine_experts, (dtype, index_dtype, weighted, shared, residual))
        for dtype in COMBINE_DTYPES
        for index_dtype in ("int32", "int64")
        for weighted in (True, False)
        for shared in (False, True)
        for residual in (False, True)
    ]
