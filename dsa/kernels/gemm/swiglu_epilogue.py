"""The epilogue of an expert's first product: h = silu(gate) * up, cast to FP8 with one scale per 128 channels.

A work tile has 128 channels of h. Part 0 is the 128 columns of gate; part 1 is the 128 columns of up. In b, the rows of
up come after all rows of gate. gate, up and then h are rounded to `dtype`, so that the FP8 bytes are those of a product
with results of this dtype, followed by `swiglu_cast_to_fp8`. A quad of lanes has the 128 channels of a row, 32 per
lane. The FP8 bytes of a warp's 16 rows pass through the warp's part of shared memory, 128 bytes per row, where the
16-byte vector c of row r is at index c ^ (r % 8).

In a work tile with swapped operands (swap_ab_tile.py), the channels of a row are spread over all eight warps, 16 per
warp. The warps exchange the maximum of each row through shared memory. Then they write the rows' bytes to shared
memory, in the layout above, and each warp stores four rows at a time to global memory. Barriers of the consumer warps
separate these steps.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from dsa.cute.quantize import AMAX_MIN, GROUP, quantize, round_to, scale_and_reciprocal, store_pair
from dsa.cute.shared_memory import load_4, store_4
from dsa.kernels.gemm.fp8_gemm_config import CHUNK_BYTES, SWAP_AB_ROWS, WARP_ROWS
from dsa.kernels.gemm.swap_ab_tile import store_16_bytes

OWN = GROUP // 4  # channels of a row per lane
WARPS = 8  # consumer warps of a work tile with swapped operands


@cute.jit
def swiglu(gate: Float32, up: Float32, limit: Float32 | None) -> Float32:
    """Return silu(gate) * up. The separate cast (swiglu_cast_sm90.py) and this epilogue share the formula, so they give
    the same bits.

    The formula is gate * (1 / (1 + exp(-gate))) * up with the approximate reciprocal. The relative error is at most
    2^-20, or the absolute error is at most 1e-36 * max(|up|, 1). The absolute bound is for large negative gates: below
    -88, exp(-gate) overflows to infinity, whose reciprocal is 0.

    limit  if not None, gate is first clamped to at most limit, and up to [-limit, limit]; NaN stays NaN
    """
    g, u = gate, up
    if const_expr(limit is not None):
        g = cute.arch.fmin(g, limit, nan=True)
        u = cute.arch.fmax(cute.arch.fmin(u, limit, nan=True), -limit, nan=True)
    return g * cute.arch.rcp_approx(Float32(1.0) + cute.math.exp(-g)) * u


class SwigluEpilogue:
    """`results` is (q [M, I] e4m3, scale [M, I / 128] fp32, limit or None)."""

    parts, tile_columns, warp_bytes = 2, GROUP, CHUNK_BYTES

    def __init__(self, dtype: type[cutlass.Numeric], use_ue8m0: bool):
        self.dtype, self.use_ue8m0 = dtype, use_ue8m0

    def columns_of_parts(self, column, b_rows):
        return column, b_rows // 2 + column

    def scale_blocks(self, column, b_rows):
        """Return the scale block (of 128 rows of b) of each part."""
        return column // GROUP, (b_rows // 2 + column) // GROUP

    def pieces_in_next_block(self, column):
        return None

    def scale_of(self, part, j, of_blocks, in_next_block):
        """All columns of a part are in one scale block."""
        return of_blocks[part]

    def tma_stores(self, results):
        return None

    @cute.jit
    def store(self, sums, results, stores, info, row, staged, lane):
        q, scale, limit = results
        for half in cutlass.range_constexpr(2):
            operands = cute.make_rmem_tensor((2 * OWN,), Float32)
            for i in cutlass.range_constexpr(OWN):
                at = i // 2 * 4 + 2 * half + i % 2
                operands[i], operands[OWN + i] = sums[0][at], sums[1][at]
            round_to(operands, self.dtype)
            h = cute.make_rmem_tensor((OWN,), Float32)
            for i in cutlass.range_constexpr(OWN):
                h[i] = swiglu(operands[i], operands[OWN + i], limit)
            round_to(h, self.dtype)
            own_scale = quantize(h, OWN, self.use_ue8m0)
            r = (lane >> 2) + 8 * half
            if lane % 4 == 0 and row + r < info.end:
                scale[row + r, info.column // GROUP] = own_scale
            for i in cutlass.range_constexpr(0, OWN, 2):
                # Columns 4 i + 2 (lane % 4) and the next one are in the 16-byte vector i // 4.
                at = r * GROUP + ((i // 4) ^ (r % 8)) * 16 + i // 2 % 2 * 8 + lane % 4 * 2
                store_pair(Int32(staged + at), h[i], h[i + 1])
        cute.arch.sync_warp()
        self.store_rows(q, 0, WARP_ROWS, row, info.end, info.column, staged, lane)
        cute.arch.sync_warp()

    @cute.jit
    def store_rows(self, q, first, count: cutlass.Constexpr, row, end, column, staged, lane):
        """Store `count` rows at `staged`, from row `first` on, to q. Row 0 at `staged` is row `row` of q. `count` is a
        multiple of 4."""
        for i in cutlass.range_constexpr(0, count * 8, 32):
            r, vector = first + (i + lane) // 8, lane % 8
            if row + r < end:
                address = staged + r * GROUP + (vector ^ (r % 8)) * 16
                store_16_bytes(address, q[row + r, None], column // 16 + vector)

    @cute.jit
    def store_swap_ab(self, sums, results, info, staged, warp, lane):
        """Like `store`, from transposed sums. A warp has 16 channels of all rows of the work tile."""
        q, scale, limit = results
        count = cute.size(sums[0])
        for part in cutlass.range_constexpr(2):
            round_to(sums[part], self.dtype)
        h = cute.make_rmem_tensor((count,), Float32)
        for i in cutlass.range_constexpr(count):
            h[i] = swiglu(sums[0][i], sums[1][i], limit)
        round_to(h, self.dtype)
        all_staged = staged - warp * CHUNK_BYTES
        maxima = all_staged + SWAP_AB_ROWS * GROUP
        rows = [j // 2 * 8 + lane % 4 * 2 + j % 2 for j in range(count // 2)]
        of_row = [j // 2 * 4 + j % 2 for j in range(count // 2)]  # index in h of the first of a row's two channels
        # With small K, a warp can get here while another warp still stores the previous work tile from shared memory.
        self.wait_for_all()
        for j in cutlass.range_constexpr(count // 2):
            amax = cute.arch.fmax(cute.math.absf(h[of_row[j]]), cute.math.absf(h[of_row[j] + 2]), nan=True)
            for offset in cutlass.range_constexpr(2, 5):
                amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, offset=1 << offset), nan=True)
            if lane < 4:
                store_4(Int32(maxima + (warp * SWAP_AB_ROWS + rows[j]) * 4), amax.bitcast(Uint32))
        self.wait_for_all()
        for j in cutlass.range_constexpr(count // 2):
            amax = Float32(AMAX_MIN)
            for other in cutlass.range_constexpr(WARPS):
                of_warp = load_4(Int32(maxima + (other * SWAP_AB_ROWS + rows[j]) * 4)).bitcast(Float32)
                amax = cute.arch.fmax(amax, of_warp, nan=True)
            own_scale, reciprocal = scale_and_reciprocal(amax, self.use_ue8m0)
            if warp == 0 and lane < 4 and info.row + rows[j] < info.end:
                scale[info.row + rows[j], info.column // GROUP] = own_scale
            for i in cutlass.range_constexpr(0, 4, 2):
                h[of_row[j] + i] = h[of_row[j] + i] * reciprocal
        for i in cutlass.range_constexpr(0, count, 2):
            # Sums i and i + 1 are two rows of one channel.
            channel = warp * WARP_ROWS + lane // 4 + i // 2 % 2 * 8
            places = [
                Int32(all_staged + r * GROUP + ((channel // 16) ^ (r % 8)) * 16 + channel % 16)
                for r in rows[i // 4 * 2 : i // 4 * 2 + 2]
            ]
            store_bytes(*places, h[i], h[i + 1])
        self.wait_for_all()
        for first in cutlass.range_constexpr(0, 2 * count, WARPS * 4):
            own = first + warp * 4
            if own < 2 * count:
                self.store_rows(q, own, 4, info.row, info.end, info.column, all_staged, lane)
        self.wait_for_all()

    @cute.jit
    def wait_for_all(self):
        cute.arch.barrier(barrier_id=1, number_of_threads=32 * WARPS)

    @cute.jit
    def finish(self):
        """Do nothing: no TMA store is in flight."""


@cute.jit
def store_bytes(low_address: Int32, high_address: Int32, low: Float32, high: Float32):
    cute.arch.inline_ptx(
        "{ .reg .b16 pair, upper; cvt.rn.satfinite.e4m3x2.f32 pair, {$r3}, {$r2}; shr.u16 upper, pair, 8; "
        "st.shared.b8 [{$r0}], pair; st.shared.b8 [{$r1}], upper; }",
        read_only_args=[low_address, high_address, low, high],
    )
