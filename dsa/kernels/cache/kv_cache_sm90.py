"""Kernels on rows of the paged MLA cache: write rows, read rows, and write rows from their projection (norm, RoPE,
quantisation).

Plan
- One warp per token. A row stays in registers from the loads to the stores (float rows in rounds of 128 vectors).
  kv_row.py says which channels a lane has. All loads of rows are contiguous over the warp. Only loads from the cache
  wait for another load: the load of the slot's index.
- FP8 rows: a shuffle tree computes the amax of the channels that share a scale. Rounding is done as in the PyTorch
  references (dsa/reference), so the bits are equal.
- RMSNorm needs one shuffle tree. RoPE on interleaved pairs stays within a lane. For RoPE on halves (pairs of channels
  32 apart), lane l exchanges its RoPE channels with lane l XOR 16. Norm and RoPE each round to the projection's dtype,
  as separate ops do.
- Copies between float rows and a float cache convert the dtype, with 4 vectors per lane in flight.
- For a slot outside the cache, a write does nothing and a read gives zeros.
Shared memory: none. Constraints: rows at multiples of 16 bytes; channels of float rows a multiple of 8.
Roofline: bound by memory. Bytes read and written per token with bf16 rows, not counting slots: 1808 (V3.2), 1608 (V4),
2304 (bf16 cache, 576 channels); for a write from the projection, 256 more for cosines and sines. At the copy bandwidth,
a warp has about 390 issue slots in the time of 1808 bytes. For V3.2's layout a warp needs 180 of them to write, 140 to
read and 340 to write from the projection. A write needs 50 more to return the rows as a read would give them, and 110
more for scales that are not powers of two.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Uint8, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_contiguous, fake_rows, fake_stream, strides
from dsa.cute.quantize import round_to
from dsa.cute.reductions import warp_reduce_sum
from dsa.cute.registers import converted, load_vectors, loaded
from dsa.cute.rounded import multiply_rounded, rotate_pair
from dsa.cute.sm90 import WARP, thread_and_cta
from dsa.kernels.cache.kv_row import Fp8Row, WarpRow, find_row, store_vectors
from dsa.kernels.cache.limits import (
    CHANNEL_MULTIPLE,
    FLOAT_DTYPES,
    FP8_LAYOUTS,
    LATENT_CHANNELS,
    NORM_CHANNELS,
    ROPE_CHANNELS,
)
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

WARPS = 4  # per CTA
UNROLL = 4  # vectors of a float row per lane in flight


def _vector(*types: type[cutlass.Numeric]) -> int:
    """Return the number of channels per vector, whose elements fill 16 bytes in the widest of `types`."""
    return 128 // max(t.width for t in types)


@cute.jit
def _my_token():
    """Wait for the previous kernels. -> (this warp's token, this thread's lane)."""
    tid, block = thread_and_cta()
    wait_for_prerequisite_grids()
    return block * WARPS + tid // WARP, tid % WARP


def _launch(kernel, tokens: Int32, stream) -> None:
    """Launch one warp per token. Without min_blocks_per_mp, ptxas saves registers and loads a row in four rounds."""
    kernel.launch(
        grid=(cute.ceil_div(tokens, WARPS), 1, 1),
        block=(WARPS * WARP, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )


@cute.jit
def _convert(v: cute.Tensor, dtype: cutlass.Constexpr):
    if const_expr(v.element_type is dtype):
        return v
    return converted(converted(v, Float32), dtype)


class RowsSm90:
    @cute.jit
    def __call__(self, rows: cute.Tensor, cache: cute.Tensor, slots: cute.Tensor, stream):
        divisor = cute.fast_divmod_create_divisor_v2(cache.shape[1])
        _launch(self.kernel(rows, cache, slots, divisor), rows.shape[0], stream)


class FloatRowsSm90(RowsSm90):
    """Copy rows of floats to a cache of floats if `write`, and otherwise from the cache to rows."""

    def __init__(self, row_type: type[cutlass.Numeric], cache_type: type[cutlass.Numeric], write: bool):
        self.write, self.vector = write, _vector(row_type, cache_type)

    @cute.kernel
    def kernel(self, rows: cute.Tensor, cache: cute.Tensor, slots: cute.Tensor, divisor: cute.FastDivmodDivisorV2):
        t, lane = _my_token()
        if t < rows.shape[0]:
            vectors = rows.shape[1] // self.vector
            part = cute.make_rmem_tensor((self.vector, UNROLL), (rows if self.write else cache).element_type)
            if const_expr(self.write):
                for first in cutlass.range(0, vectors, WARP * UNROLL, unroll=1):
                    load_vectors(rows[t, None], part, first + lane, WARP, vectors)
                    # sync_warp keeps the compiler from moving the row's loads after the slot's load.
                    cute.arch.sync_warp()
                    exists, page, offset = find_row(cache, slots, t, rows.shape[0], divisor)
                    if exists:
                        store_vectors(
                            _convert(part, cache.element_type), cache[page, offset, None], first + lane, vectors
                        )
            else:
                exists, page, offset = find_row(cache, slots, t, rows.shape[0], divisor)
                for first in cutlass.range(0, vectors, WARP * UNROLL, unroll=1):
                    part.fill(0)
                    if exists:
                        load_vectors(cache[page, offset, None], part, first + lane, WARP, vectors)
                    store_vectors(_convert(part, rows.element_type), rows[t, None], first + lane, vectors)


class WriteFp8RowsSm90(RowsSm90):
    def __init__(self, row_type: type[cutlass.Numeric], layout: str, use_ue8m0: bool):
        self.row, self.use_ue8m0 = Fp8Row(layout, _vector(row_type)), use_ue8m0

    @cute.kernel
    def kernel(self, kv: cute.Tensor, cache: cute.Tensor, slots: cute.Tensor, divisor: cute.FastDivmodDivisorV2):
        t, lane = _my_token()
        if t < kv.shape[0]:
            raw, raw_pair = self.row.fragments(kv.element_type)
            self.row.load(kv[t, None], raw, lane)
            cute.autovec_copy(self.row.pair(kv[t, None], lane), raw_pair)
            exists, page, offset = find_row(cache, slots, t, kv.shape[0], divisor)
            # Without sync_warp, the compiler would move the pair's load to its first use, after the slot's load.
            cute.arch.sync_warp()
            v, pair = _convert(raw, Float32), _convert(raw_pair, Float32)
            out, scales = self.row.quantize(v, self.use_ue8m0)
            if exists:
                self.row.write(out, scales, pair, cache, page, offset, lane)


class ReadFp8RowsSm90(RowsSm90):
    def __init__(self, layout: str, row_type: type[cutlass.Numeric]):
        self.row = Fp8Row(layout, _vector(row_type))

    @cute.kernel
    def kernel(self, rows: cute.Tensor, cache: cute.Tensor, slots: cute.Tensor, divisor: cute.FastDivmodDivisorV2):
        t, lane = _my_token()
        if t < rows.shape[0]:
            v, pair = self.row.fragments(Float32)
            v.fill(0.0)
            pair.fill(0.0)
            exists, page, offset = find_row(cache, slots, t, rows.shape[0], divisor)
            if exists:
                values, scales, rope = self.row.parts(cache, page, offset)
                raw = cute.make_rmem_tensor(v.shape, Uint8)
                self.row.load(cute.recast_tensor(values, Uint8), raw, lane)
                raw_pair = loaded(cute.local_tile(rope, (2,), (lane,)))
                own_scales = cute.make_rmem_tensor((self.row.steps,), Float32)
                for j in cutlass.range_constexpr(self.row.steps):
                    own_scales[j] = self.row.scale(scales, j, lane)
                self.row.dequantize(cute.recast_tensor(raw, Float8E4M3FN), own_scales, v)
                pair.store(raw_pair.load().to(Float32))
            self.row.store(_convert(v, rows.element_type), rows[t, None], lane)
            cute.autovec_copy(_convert(pair, rows.element_type), self.row.pair(rows[t, None], lane))


class WriteMlaCacheSm90:
    """Write rows from their projection.

    layout    the cache's float dtype or FP8 layout
    channels  576 if the norm covers only the 512 channels before the RoPE channels; 512 if it covers all channels
    """

    def __init__(self, row_type: type[cutlass.Numeric], layout: str, channels: int, interleaved: bool, use_ue8m0: bool):
        self.quantizes = layout in FP8_LAYOUTS
        self.row = (
            Fp8Row(layout, _vector(row_type))
            if self.quantizes
            else WarpRow(channels - ROPE_CHANNELS, _vector(row_type))
        )
        self.interleaved, self.use_ue8m0 = interleaved, use_ue8m0
        self.norms_pair = channels == NORM_CHANNELS

    @cute.jit
    def __call__(
        self,
        kv: cute.Tensor,
        weight: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        cache: cute.Tensor,
        slots: cute.Tensor,
        rows: cute.Tensor,
        keep: Int32,
        eps: Float32,
        stream,
    ):
        divisor = cute.fast_divmod_create_divisor_v2(cache.shape[1])
        _launch(self.kernel(kv, weight, cos, sin, cache, slots, rows, keep, divisor, eps), kv.shape[0], stream)

    @cute.kernel
    def kernel(
        self,
        kv: cute.Tensor,
        weight: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        cache: cute.Tensor,
        slots: cute.Tensor,
        rows: cute.Tensor,
        keep: Int32,
        divisor: cute.FastDivmodDivisorV2,
        eps: Float32,
    ):
        t, lane = _my_token()
        if t < kv.shape[0]:
            raw, raw_pair = self.row.fragments(kv.element_type)
            gain, gain_pair = self.row.fragments(Float32)
            self.row.load(kv[t, None], raw, lane)
            cute.autovec_copy(self.row.pair(kv[t, None], lane), raw_pair)
            self.row.load(weight, gain, lane)
            if const_expr(self.norms_pair):
                cute.autovec_copy(self.row.pair(weight, lane), gain_pair)
            c, s = self.angles(cos[t, None], lane), self.angles(sin[t, None], lane)
            exists, page, offset = find_row(cache, slots, t, kv.shape[0], divisor)
            v, pair = _convert(raw, Float32), _convert(raw_pair, Float32)

            total = Float32(0.0)
            for i in cutlass.range_constexpr(cute.size(v)):
                total += v[i] * v[i]
            if const_expr(self.norms_pair):
                total += pair[0] * pair[0] + pair[1] * pair[1]
            inverse = cute.math.rsqrt(warp_reduce_sum(total) * Float32(1 / NORM_CHANNELS) + eps)
            for i in cutlass.range_constexpr(cute.size(v)):
                v[i] = v[i] * inverse * gain[i]
            round_to(v, kv.element_type)
            if const_expr(self.norms_pair):
                for i in cutlass.range_constexpr(2):
                    pair[i] = pair[i] * inverse * gain_pair[i]
                round_to(pair, kv.element_type)
            self.rotate(pair, c, s, lane)
            round_to(pair, kv.element_type)

            if const_expr(self.quantizes):
                out, scales = self.row.quantize(v, self.use_ue8m0)
                if exists:
                    self.row.write(out, scales, pair, cache, page, offset, lane)
            else:
                if exists:
                    target = cache[page, offset, None]
                    self.row.store(_convert(v, cache.element_type), target, lane)
                    cute.autovec_copy(_convert(pair, cache.element_type), self.row.pair(target, lane))
            if keep != 0:
                if const_expr(self.quantizes):
                    # `rows` gets the values that a read would give.
                    self.row.dequantize(out, scales, v)
                    round_to(pair, BFloat16)
                self.row.store(_convert(v, kv.element_type), rows[t, None], lane)
                cute.autovec_copy(_convert(pair, kv.element_type), self.row.pair(rows[t, None], lane))

    @cute.jit
    def angles(self, row: cute.Tensor, lane: Int32):
        """Return this lane's cosines (or sines) from a token's row [32]: one for an interleaved pair, otherwise one for
        each of the lane's two channels."""
        out = cute.make_rmem_tensor((1 if self.interleaved else 2,), Float32)
        for i in cutlass.range_constexpr(cute.size(out)):
            out[i] = row[lane if self.interleaved else lane % (WARP // 2) * 2 + i]
        return out

    @cute.jit
    def rotate(self, pair: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor, lane: Int32):
        if const_expr(self.interleaved):
            pair[0], pair[1] = rotate_pair(pair[0], pair[1], cos[0], sin[0])
        else:
            for i in cutlass.range_constexpr(2):
                partner = multiply_rounded(cute.arch.shuffle_sync_bfly(pair[i], offset=WARP // 2), sin[i])
                if lane < WARP // 2:
                    partner = -partner
                pair[i] = multiply_rounded(pair[i], cos[i]) + partner


def _cache(layout: str, channels) -> cute.Tensor:
    """Return a fake cache: [pages, P, channels] of floats, or [pages, P, bytes per row] of an FP8 layout."""
    sizes = cute.sym_int(), cute.sym_int()
    if layout in FP8_LAYOUTS:
        return fake_rows(Uint8, *sizes, 656 if layout == "v32" else 576)
    return fake_rows(cute_dtype(layout), *sizes, channels)


def _operands(dtype: type[cutlass.Numeric], layout: str) -> tuple[cute.Tensor, ...]:
    channels = {"v32": 576, "v4": 512}.get(layout) or cute.sym_int(divisibility=CHANNEL_MULTIPLE)
    rows = fake_rows(dtype, cute.sym_int(), channels)
    return rows, _cache(layout, channels), fake_contiguous(Int32, cute.sym_int())


@cached
def compile_write_kv_cache(dtype: str, layout: str, use_ue8m0: bool):
    """-> f(kv [T, d] dtype, cache [pages, P, row], slots), which writes kv to the cache; T, pages > 0. slots is [T]
    int32, or [2 T] int32 that are the words of int64 slots.

    layout: a float dtype, with row = d channels; "v32", with d = 576 and row = 656 bytes; or "v4", with d = 512, row =
    576 bytes and a page's scales after the page's P rows. Rows and pages start at multiples of 16 bytes. use_ue8m0 is
    False for float layouts."""
    element = cute_dtype(dtype)
    if layout in FP8_LAYOUTS:
        kernel = WriteFp8RowsSm90(element, layout, use_ue8m0)
    else:
        kernel = FloatRowsSm90(element, cute_dtype(layout), True)
    return compile_sm90(kernel, *_operands(element, layout), fake_stream())


@cached
def compile_read_kv_cache(layout: str, dtype: str):
    """-> f(rows [T, d] dtype, cache, slots), which copies the slots' rows from the cache to `rows`; layout, cache and
    slots are as in `compile_write_kv_cache`."""
    element = cute_dtype(dtype)
    if layout in FP8_LAYOUTS:
        kernel = ReadFp8RowsSm90(layout, element)
    else:
        kernel = FloatRowsSm90(element, cute_dtype(layout), False)
    return compile_sm90(kernel, *_operands(element, layout), fake_stream())


@cached
def compile_write_mla_cache(dtype: str, layout: str, channels: int, interleaved: bool, use_ue8m0: bool):
    """-> f(kv [T, channels] dtype, weight [512] fp32, cos, sin [T, 32] fp32, cache, slots, rows [T, channels] dtype,
    keep, eps); T > 0. cache and slots are as in `compile_write_kv_cache`. If keep is not 0, f also writes to `rows` the
    rows after norm and RoPE; for an FP8 layout, with the values that a read of the cache would give."""
    element = cute_dtype(dtype)
    tokens = cute.sym_int()
    angles = [fake(Float32, (tokens, ROPE_CHANNELS // 2), strides(2), 4) for _ in range(2)]
    return compile_sm90(
        WriteMlaCacheSm90(element, layout, channels, interleaved, use_ue8m0),
        fake_rows(element, tokens, channels),
        fake_rows(Float32, NORM_CHANNELS),
        *angles,
        _cache(layout, channels),
        fake_contiguous(Int32, cute.sym_int()),
        *(fake_rows(element, tokens, channels), Int32(0), Float32(0.0), fake_stream()),
    )


def shipped_variants() -> Variants:
    scales = [("v32", True), ("v32", False), ("v4", True)]
    stored = [*((cache, False) for cache in FLOAT_DTYPES), *scales]
    rows = [*((cache, channels, False) for cache in FLOAT_DTYPES for channels in LATENT_CHANNELS)]
    rows += [(layout, 576 if layout == "v32" else 512, use_ue8m0) for layout, use_ue8m0 in scales]
    return [
        *((compile_write_kv_cache, (dtype, *o)) for dtype in FLOAT_DTYPES for o in stored),
        *((compile_read_kv_cache, (layout, dtype)) for layout in FLOAT_DTYPES + FP8_LAYOUTS for dtype in FLOAT_DTYPES),
        *(
            (compile_write_mla_cache, (dtype, layout, channels, interleaved, use_ue8m0))
            for dtype in FLOAT_DTYPES
            for layout, channels, use_ue8m0 in rows
            for interleaved in (True, False)
        ),
    ]
