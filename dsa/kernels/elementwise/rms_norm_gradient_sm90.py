"""Gradients of RMSNorm over rows, y = x r w with r = 1 / sqrt(mean(x^2) + eps), from g, the gradient of y.

    dx = r (g w - x r^2 mean(g w x)),    dw = sum over rows of g x r

Plan
- `lanes` threads (a part of a warp, or several warps) process a row, as in `rms_norm_sm90`. Each thread has in
  registers up to `vectors` 16-byte vectors of x and of g, and for the same channels the weights and the thread's part
  of dw, in fp32. So x and g are read once, and dx is written once.
- CTAs are persistent: the threads of a row process every n-th row, where n is the number of rows that all CTAs process
  at a time. All threads run the same number of iterations, because shuffles need whole warps. Past the end, threads
  load the last row again and discard its results.
- Both sums of a row, of x^2 and of g w x, go through one shuffle tree, and between warps through shared memory.
  Iterations alternate between two buffers in shared memory, so one barrier per row is enough.
- A thread accumulates its part of dw in fp32 over its rows, in order, and writes it once to parts [P, D]. The caller
  adds the P parts to get dw. The bits are the same in every run with the same number of SMs, which determines P.
Shared memory: four numbers per warp of a row. Constraints: rows at multiples of 16 bytes, D a multiple of 8 and at most
1024 vectors: 256 threads x MAX_EARLY vectors.
Roofline: bound by memory, 3 D elements per row. About 9 instructions per channel.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake_rows, fake_stream
from dsa.cute.registers import converted, filled, load_vectors
from dsa.cute.sm90 import WARP, thread_and_cta
from dsa.kernels.elementwise.limits import CHANNEL_MULTIPLE, DTYPES
from dsa.kernels.elementwise.rms_norm_sm90 import CONFIGS, MAX_EARLY, VECTOR_BITS, NormConfig
from dsa.kernels.elementwise.rms_norm_sm90 import choose_config as choose_config
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

# Configurations whose threads have enough registers for x, g, weights and dw.
GRADIENT_CONFIGS = tuple(config for config in CONFIGS if config.threads <= 256 and config.vectors <= MAX_EARLY)


class RmsNormGradientSm90:
    def __init__(self, dtype: type[cutlass.Numeric], config: NormConfig):
        self.width = VECTOR_BITS // dtype.width
        self.lanes, self.vectors, self.threads = config.lanes, config.vectors, config.threads
        self.rows_of_cta = config.threads // config.lanes
        self.warps = max(1, config.lanes // WARP)  # per row

    @cute.jit
    def __call__(
        self,
        grad: cute.Tensor,
        x: cute.Tensor,
        weight: cute.Tensor | None,
        dx: cute.Tensor,
        parts: cute.Tensor | None,
        eps: Float32,
        ctas: Int32,
        stream,
    ):
        rows = x.shape[0] * x.shape[1]
        inner = cute.fast_divmod_create_divisor_v2(x.shape[1])
        share = Float32(1.0) / Float32(x.shape[2])
        steps = cute.ceil_div(rows, self.rows_of_cta * ctas)
        self.kernel(grad, x, weight, dx, parts, eps, share, inner, rows, steps).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        grad: cute.Tensor,
        x: cute.Tensor,
        weight: cute.Tensor | None,
        dx: cute.Tensor,
        parts: cute.Tensor | None,
        eps: Float32,
        share: Float32,
        inner: cute.FastDivmodDivisorV2,
        rows: Int32,
        steps: Int32,
    ):
        tid, block = thread_and_cta()
        ctas, _, _ = cute.arch.grid_dim()
        lane, part = tid % self.lanes, block * self.rows_of_cta + tid // self.lanes
        vectors_of_row = x.shape[2] // self.width
        sums = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((2, self.warps, 2)), 16)
        wait_for_prerequisite_grids()
        gain = filled((self.width, self.vectors), 1.0)
        if const_expr(weight is not None):
            load_vectors(weight, gain, lane, self.lanes, vectors_of_row)
        total = filled((self.width, self.vectors), 0.0)
        raw_x, raw_g = [filled((self.width, self.vectors), 0.0, x.element_type) for _ in range(2)]
        for step in cutlass.range(steps):
            row = step * ctas * self.rows_of_cta + part
            a, b = divmod(cutlass.min(row, rows - 1), inner)
            load_vectors(x[a, b, None], raw_x, lane, self.lanes, vectors_of_row)
            load_vectors(grad[a, b, None], raw_g, lane, self.lanes, vectors_of_row)
            square, product = Float32(0.0), Float32(0.0)
            for n in cutlass.range_constexpr(self.vectors):
                v, g = converted(raw_x[None, n], Float32), converted(raw_g[None, n], Float32)
                for i in cutlass.range_constexpr(self.width):
                    square = cute.math.fma(v[i], v[i], square)
                    product = cute.math.fma(g[i] * gain[i, n], v[i], product)
            square, product = self.sums_of_row(square, product, sums, tid, step % 2)
            inverse = cute.math.rsqrt(square * share + eps)
            correction = inverse * inverse * (product * share)
            for n in cutlass.range_constexpr(self.vectors):
                at = lane + n * self.lanes
                v, g = converted(raw_x[None, n], Float32), converted(raw_g[None, n], Float32)
                if row < rows:
                    for i in cutlass.range_constexpr(self.width):
                        total[i, n] = cute.math.fma(g[i], v[i] * inverse, total[i, n])
                for i in cutlass.range_constexpr(self.width):
                    v[i] = (g[i] * gain[i, n] - v[i] * correction) * inverse
                packed = converted(v, x.element_type)
                if at < vectors_of_row and row < rows:
                    cute.autovec_copy(packed, cute.local_tile(dx[a, b, None], (self.width,), (at,)))
        if const_expr(parts is not None):
            for n in cutlass.range_constexpr(self.vectors):
                at = lane + n * self.lanes
                if at < vectors_of_row:
                    cute.autovec_copy(total[None, n], cute.local_tile(parts[part, None], (self.width,), (at,)))

    @cute.jit
    def sums_of_row(self, x: Float32, y: Float32, sums: cute.Tensor, tid: Int32, half: Int32):
        """-> (sum of x over the row's threads, sum of y over them), the same bits in all of them. half: which of the
        two buffers in `sums` to use."""
        for log in cutlass.range_constexpr(min(self.lanes, WARP).bit_length() - 1):
            x += cute.arch.shuffle_sync_bfly(x, offset=1 << log)
            y += cute.arch.shuffle_sync_bfly(y, offset=1 << log)
        if const_expr(self.warps > 1):
            if tid % WARP == 0:
                sums[0, tid // WARP, half] = x
                sums[1, tid // WARP, half] = y
            cute.arch.sync_threads()
            x, y = Float32(0.0), Float32(0.0)
            for i in cutlass.range_constexpr(self.warps):
                x += sums[0, i, half]
                y += sums[1, i, half]
        return x, y


@cached
def compile_rms_norm_gradient(dtype: str, weighted: bool, config: NormConfig):
    """-> f(grad, x [A, B, D] dtype, weight [D] fp32 or None, dx [A, B, D], parts [P, D] fp32, or None if weight is
    None, eps, ctas); dx and parts are results. P is the number of rows that `ctas` CTAs process at a time, 0 < A * B <
    2^31 - 2^20, D a multiple of 8 up to `max_channels(dtype, config)`. Rows start at multiples of 16 bytes."""
    element = cute_dtype(dtype)
    outer, inner, dim = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=CHANNEL_MULTIPLE)
    return compile_sm90(
        RmsNormGradientSm90(element, config),
        *(fake_rows(element, outer, inner, dim) for _ in range(2)),
        fake_rows(Float32, dim) if weighted else None,
        fake_rows(element, outer, inner, dim),
        fake_rows(Float32, cute.sym_int(), dim) if weighted else None,
        *(Float32(0.0), Int32(1), fake_stream()),
    )


def choose_ctas(rows: int, config: NormConfig, sms: int) -> int:
    return min(-(-rows // (config.threads // config.lanes)), sms * max(1, 1024 // config.threads))


def shipped_variants() -> Variants:
    return [
        (compile_rms_norm_gradient, (dtype, weighted, config))
        for dtype in DTYPES
        for weighted in (True, False)
        for config in GRADIENT_CONFIGS
    ]
