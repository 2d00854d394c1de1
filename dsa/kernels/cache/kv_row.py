"""Rows of the paged MLA cache. A row contains one token. This file defines the layout of a row's parts in a page, and
in the registers of a warp.

A row has N channels (512 or 448) without RoPE, followed by the 64 channels that RoPE rotates. A warp holds a row in
registers. The N channels are processed in steps of 32 V channels: in each step a lane holds V consecutive channels,
which are 16 bytes in the dtype of the caller's rows. A lane also holds two adjacent RoPE channels, which interleaved
RoPE rotates as a pair. So every access of a warp covers contiguous bytes, and in an FP8 row the channels that share a
scale are in adjacent lanes in one step.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint32, const_expr

from dsa.cute.indexer_page import find_slot
from dsa.cute.quantize import quantize_group
from dsa.cute.registers import converted, load_vectors
from dsa.cute.sm90 import WARP
from dsa.kernels.cache.limits import ROPE_CHANNELS


@cute.jit
def find_row(cache: cute.Tensor, slots: cute.Tensor, t: Int32, tokens: Int32, divisor: cute.FastDivmodDivisorV2):
    """-> (whether token t's slot is in the cache, the slot's page, its offset in the page). For a slot outside the
    cache, page and offset are those of slot 0. cache [pages, P, ...]; slots is [tokens] int32, or [2 * tokens] int32
    that are the words of int64 slots."""
    wide = slots.shape[0] != tokens
    at = 2 * t if wide else t
    low = slots[at]
    slot = Int64(low)
    if wide:
        slot = (Int64(slots[at + 1]) << 32) | Int64(low.bitcast(Uint32))
    return find_slot(cache, slot, cache.shape[1], divisor)


@cute.jit
def store_vectors(values: cute.Tensor, row: cute.Tensor, first: Int32, count):
    """Store values [width, n] to vectors `first`, `first` + WARP and so on of a row. A vector is `width` channels, and
    the row has `count` vectors."""
    for n in cutlass.range_constexpr(values.shape[1]):
        at = first + n * WARP
        if at < count:
            cute.autovec_copy(values[None, n], cute.local_tile(row, (values.shape[0],), (at,)))


class WarpRow:
    """A row with `nope` channels before the RoPE channels. Per step, a lane holds `vector` of these `nope` channels."""

    def __init__(self, nope: int, vector: int):
        self.nope, self.vector = nope, vector
        self.vectors = nope // vector
        self.steps = -(-self.vectors // WARP)

    def fragments(self, dtype: type[cutlass.Numeric]) -> tuple[cute.Tensor, cute.Tensor]:
        """-> (registers [V, steps] for a lane's channels before the RoPE channels, registers [2] for its RoPE pair)."""
        return cute.make_rmem_tensor((self.vector, self.steps), dtype), cute.make_rmem_tensor((2,), dtype)

    @cute.jit
    def load(self, row: cute.Tensor, v: cute.Tensor, lane: Int32):
        """Load this lane's channels before the RoPE channels into v [V, steps]. If the row ends before this lane's
        channels of the last step, they are zeros."""
        if const_expr(self.vectors % WARP != 0):
            v.fill(0)
        load_vectors(row, v, lane, WARP, self.vectors)

    @cute.jit
    def store(self, v: cute.Tensor, row: cute.Tensor, lane: Int32):
        store_vectors(v, row, lane, self.vectors)

    @cute.jit
    def pair(self, row: cute.Tensor, lane: Int32):
        return cute.local_tile(row, (2,), (self.nope // 2 + lane,))


class Fp8Row(WarpRow):
    """A row of an FP8 layout, V3.2 ("v32") or V4 ("v4"): `nope` channels in e4m3, with a scale per 128 (V3.2) or 64
    (V4) channels, and the 64 RoPE channels in bf16.

    V3.2: a row has 656 bytes: values, 4 fp32 scales, RoPE channels. V4: a row has 576 bytes: values, RoPE channels. The
    scales of a page come after all its rows, 8 bytes per row: 7 ue8m0 scales and a zero.
    """

    def __init__(self, layout: str, vector: int):
        self.is_v4 = layout == "v4"
        super().__init__(448 if self.is_v4 else 512, vector)
        self.lanes = (64 if self.is_v4 else 128) // vector  # lanes with the channels of one scale

    @cute.jit
    def parts(self, cache: cute.Tensor, page: Int32, offset: Int32):
        """-> views of one row of the cache: (values [N], scales [4] fp32 or [8] ue8m0, RoPE channels [64]). cache
        [pages, P, 656 or 576] uint8."""
        row = cache[page, offset, None].iterator.align(16)
        values = cute.make_tensor(cute.recast_ptr(row, dtype=Float8E4M3FN), cute.make_layout(self.nope))
        if const_expr(self.is_v4):
            after_rows = cache[page, 0, None].iterator + cache.shape[1] * cache.shape[2] + offset * 8
            scales = cute.make_tensor(after_rows, cute.make_layout(8))
            rope = row + self.nope
        else:
            scales = cute.make_tensor(cute.recast_ptr(row + self.nope, dtype=Float32), cute.make_layout(4))
            rope = row + self.nope + 16
        return (
            values,
            scales,
            cute.make_tensor(cute.recast_ptr(rope.align(16), dtype=BFloat16), cute.make_layout(ROPE_CHANNELS)),
        )

    @cute.jit
    def quantize(self, v: cute.Tensor, use_ue8m0: cutlass.Constexpr):
        """Quantise v (fp32, [V, steps]), which is overwritten. -> (e4m3 values [V, steps], fp32 scales [steps] of this
        lane's channels)."""
        scales = cute.make_rmem_tensor((self.steps,), Float32)
        for j in cutlass.range_constexpr(self.steps):
            scales[j] = quantize_group(v[None, j], self.lanes, use_ue8m0)
        return converted(v, Float8E4M3FN), scales

    @cute.jit
    def dequantize(self, values: cute.Tensor, scales: cute.Tensor, v: cute.Tensor):
        v.store(values.load().to(Float32))
        for j in cutlass.range_constexpr(self.steps):
            for i in cutlass.range_constexpr(self.vector):
                v[i, j] = v[i, j] * scales[j]

    @cute.jit
    def write(
        self,
        out: cute.Tensor,
        scales: cute.Tensor,
        pair: cute.Tensor,
        cache: cute.Tensor,
        page: Int32,
        offset: Int32,
        lane: Int32,
    ):
        values, places, rope = self.parts(cache, page, offset)
        self.store(out, values, lane)
        for j in cutlass.range_constexpr(self.steps):
            if lane % self.lanes == 0:
                group = (j * WARP + lane) // self.lanes
                if const_expr(self.is_v4):
                    exponent = scales[j].bitcast(Uint32) >> 23
                    places[group] = Uint8(exponent if group < 7 else Uint32(0))
                else:
                    places[group] = scales[j]
        cute.autovec_copy(converted(pair, BFloat16), cute.local_tile(rope, (2,), (lane,)))

    @cute.jit
    def scale(self, places: cute.Tensor, j: cutlass.Constexpr, lane: Int32) -> Float32:
        """Return the fp32 scale of this lane's channels in step j, from `places`, the row's scales in the cache."""
        # Lanes without a vector in V4's last step read the zero after the 7 scales.
        found = places[(j * WARP + lane) // self.lanes]
        if const_expr(not self.is_v4):
            return found
        exponent = Uint32(found)  # convert before comparing: in the compiler, a Uint8 never equals 255
        bits = exponent << 23
        if exponent == 0:
            bits = Uint32(1 << 22)  # 2^-127 is subnormal in fp32
        if exponent == 255:
            bits = Uint32(0x7FC00000)
        return bits.bitcast(Float32)
