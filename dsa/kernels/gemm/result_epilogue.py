"""The epilogue of the products in fp8_gemm_sm90.py and fp8_fp4_gemm_sm90.py: it multiplies the sums by the weight of
their row, if there are weights, rounds the results once and stores them.

A warp writes its 16 rows of 16-bit results to its part of shared memory in chunks of 64 columns, 128 bytes per row; the
last chunk can be narrower. The layout is TMA's 128-byte swizzle: the 16-byte vector c of row r is at index c ^ (r % 8).
TMA stores the chunks if the warp has shared memory for all chunks of a work tile, every chunk has 64 columns, and all
16 rows belong to the matrix. Otherwise the warp itself stores the chunks, 128 bytes per row. After a store by TMA, the
warp waits for TMA's reads only before it writes this memory again, in the next work tile, and before it exits. fp32
results are stored from registers as pairs of columns, 32 contiguous bytes per row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.copies import partition
from dsa.cute.shared_memory import pack, store_matrices
from dsa.cute.sm90 import opaque
from dsa.kernels.gemm.fp8_gemm_config import CHUNK, CHUNK_BYTES, WARP_ROWS, Fp8GemmConfig
from dsa.kernels.gemm.limits import GROUP
from dsa.kernels.gemm.swap_ab_tile import store_16_bytes, store_swap_ab


class ResultEpilogue:
    """The epilogue that stores the sums. `results` is (out [M, N] out_dtype, weights [M] fp32 or None, None), where
    SwigluEpilogue has a limit instead of the last None."""

    def __init__(self, out_dtype: type[cutlass.Numeric], config: Fp8GemmConfig, weighted: bool):
        self.out_dtype, self.weighted, self.tile_columns = out_dtype, weighted, config.columns
        self.chunks = -(-config.columns // CHUNK) if out_dtype.width == 16 else 0
        self.by_tma = self.chunks > 0 and config.has_room
        self.room, self.warp_bytes = config.chunks, config.chunks * CHUNK_BYTES
        self.piece = config.piece
        self.pieces, self.tile_pieces = GROUP // self.piece, config.columns // self.piece

    parts = 1

    def columns_of_parts(self, column, b_rows):
        """Return the row of the matrix b at which each part of the work tile begins. The tile has one part."""
        return (column,)

    def scale_blocks(self, column, b_rows):
        """Return the two scale blocks (of 128 rows of b) that the work tile can touch."""
        return column // GROUP, column // GROUP + 1

    @cute.jit
    def pieces_in_next_block(self, column):
        """Return, for each piece of the work tile after the first, whether it is in the next scale block."""
        before = column // self.piece % self.pieces
        # `before` is the index of the tile's first piece in that piece's scale block. Piece j is in the next block if
        # before + j >= pieces.
        return [before == self.pieces - 1, *[before >= self.pieces - j for j in range(2, self.tile_pieces)]]

    @cute.jit
    def scale_of(self, part: cutlass.Constexpr, j: cutlass.Constexpr, of_blocks, in_next_block):
        """Return the scale of piece j of the work tile's columns. of_blocks: the scales of the one or two scale blocks
        that the tile can touch. in_next_block: from `pieces_in_next_block`."""
        of = of_blocks[1 if const_expr(j >= self.pieces) else 0]
        if const_expr(len(of_blocks) > 1 and 0 < j < self.pieces):
            of = of_blocks[1] if in_next_block[j - 1] else of_blocks[0]
        return of

    def tma_stores(self, results):
        """-> (TMA atom, TMA tensor, shared-memory layout) for the store of a chunk, or None if warps store the
        results."""
        if const_expr(not self.by_tma):
            return None
        layout = sm90.make_smem_layout_epi(self.out_dtype, LayoutEnum.ROW_MAJOR, (WARP_ROWS, CHUNK), 1)
        store = cute.nvgpu.cpasync.CopyBulkTensorTileS2GOp()
        info = cute.nvgpu.cpasync.make_tiled_tma_atom(
            store, results[0], cute.slice_(layout, (None, None, 0)), (WARP_ROWS, CHUNK)
        )
        return info[0], info[1], layout

    @cute.jit
    def store(self, sums, results, stores, info, row, staged, lane):
        out, weights, _ = results
        sums = sums[0]
        if const_expr(self.weighted):
            for half in cutlass.range_constexpr(2):
                own = weights[cutlass.min(row + (lane >> 2) + 8 * half, info.end - 1)]
                for i in cutlass.range_constexpr(cute.size(sums)):
                    if const_expr(i // 2 % 2 == half):
                        sums[i] = sums[i] * own
        if const_expr(self.by_tma):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            for chunk in cutlass.range_constexpr(self.chunks):
                self.stage(sums, staged, chunk, chunk, lane)
            if row + WARP_ROWS <= info.end:
                self.store_chunks(stores, row, info.column, out.shape[1], staged)
            else:
                cute.arch.sync_warp()
                for chunk in cutlass.range_constexpr(self.chunks):
                    self.store_rows(out, row, info.end, info.column, staged, chunk, chunk, lane)
                cute.arch.sync_warp()
        elif const_expr(self.chunks > 0):
            for chunk in cutlass.range_constexpr(self.chunks):
                self.stage(sums, staged, chunk, chunk % self.room, lane)
                if const_expr((chunk + 1) % self.room == 0 or chunk == self.chunks - 1):
                    cute.arch.sync_warp()
                    for ready in cutlass.range_constexpr(chunk // self.room * self.room, chunk + 1):
                        self.store_rows(out, row, info.end, info.column, staged, ready, ready % self.room, lane)
                    cute.arch.sync_warp()
        else:
            self.store_pairs(sums, out, row + (lane >> 2), info.end, info.column + lane % 4 * 2)

    @cute.jit
    def store_swap_ab(self, sums, results, info, staged, warp, lane):
        """Store the results of a warp's 16 columns from their transposed sums (swap_ab_tile.py)."""
        out, weights, _ = results
        sums = sums[0]
        if const_expr(self.weighted):
            for j in cutlass.range_constexpr(cute.size(sums) // 2):
                own = weights[cutlass.min(info.row + j // 2 * 8 + lane % 4 * 2 + j % 2, info.end - 1)]
                for half in cutlass.range_constexpr(2):
                    i = j // 2 * 4 + 2 * half + j % 2
                    sums[i] = sums[i] * own
        if const_expr(self.by_tma):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
        store_swap_ab(sums, out, info.row, info.end, info.column + warp * WARP_ROWS, staged, lane)

    @cute.jit
    def finish(self):
        """Wait until TMA has read this warp's shared memory: a CTA must not exit before that."""
        if const_expr(self.by_tma):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def stage(self, sums, staged, chunk: cutlass.Constexpr, place: cutlass.Constexpr, lane):
        """Round chunk `chunk` of the sums to 16 bits and write it to the warp's chunk slot `place` in shared memory."""
        own = lane % WARP_ROWS
        for pair in cutlass.range_constexpr(min(4, (self.tile_columns - CHUNK * chunk) // 16)):
            places = [32 * chunk + 8 * pair + 2 * i for i in range(4)]
            words = [pack(sums[i], sums[i + 1], self.out_dtype) for i in places]
            vector = (2 * pair + lane // WARP_ROWS) ^ (own % 8)
            store_matrices(staged + place * CHUNK_BYTES + own * 128 + vector * 16, words)

    @cute.jit
    def store_chunks(self, stores, row, column, columns, staged):
        atom, out, layout = stores
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        for chunk in cutlass.range_constexpr(self.chunks):
            if column + chunk * CHUNK < columns:
                pointer = cute.make_ptr(
                    self.out_dtype, staged + chunk * CHUNK_BYTES, cute.AddressSpace.smem, assumed_align=1024
                )
                source = cute.make_tensor(cute.recast_ptr(pointer, layout.inner, self.out_dtype), layout.outer)
                target = cute.local_tile(
                    cute.domain_offset((row, column + chunk * CHUNK), out), (WARP_ROWS, CHUNK), (0, 0)
                )
                shared, place = partition(atom, source, target)
                cute.copy(atom, shared[None, 0], place)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_rows(self, out, row, end, column, staged, chunk: cutlass.Constexpr, place: cutlass.Constexpr, lane):
        """Copy chunk `chunk` from the warp's chunk slot `place` to global memory, 16 bytes per lane. Rows from `end` on
        are not stored."""
        for i in cutlass.range_constexpr(0, WARP_ROWS * 8, 32):
            r, vector = (i + lane) // 8, (i + lane) % 8
            at = column + chunk * CHUNK + 8 * vector
            inside = at < out.shape[1]
            if const_expr(CHUNK * (chunk + 1) > self.tile_columns):
                inside = inside and CHUNK * chunk + 8 * vector < self.tile_columns
            if row + r < end and inside:
                address = staged + place * CHUNK_BYTES + r * 128 + (vector ^ (r % 8)) * 16
                store_16_bytes(address, out[row + r, None], at // 8)

    @cute.jit
    def store_pairs(self, sums, out, row, end, column):
        """Store a lane's fp32 results in rows `row` and `row` + 8, as pairs of columns from `column` on, 8 columns
        apart."""
        pair = cute.make_rmem_tensor((2,), self.out_dtype)
        for half in cutlass.range_constexpr(2):
            if row + 8 * half < end:
                pairs = cute.local_tile(out[row + 8 * half, None], (2,), (None,))
                for j in cutlass.range_constexpr(self.tile_columns // 8):
                    if column + 8 * j < out.shape[1]:
                        for c in cutlass.range_constexpr(2):
                            pair[c] = sums[4 * j + 2 * half + c]
                        cute.autovec_copy(pair, pairs[None, column // 2 + 4 * j])


class LateResultEpilogue(ResultEpilogue):
    """ResultEpilogue with addresses that ptxas must compute when results are stored. If ptxas kept the addresses across
    work tiles, they would occupy registers that the sums need."""

    @cute.jit
    def store(self, sums, results, stores, info, row, staged, lane):
        ResultEpilogue.store(self, sums, results, stores, info, row, opaque(staged), opaque(lane))

    @cute.jit
    def store_swap_ab(self, sums, results, info, staged, warp, lane):
        ResultEpilogue.store_swap_ab(self, sums, results, info, opaque(staged), opaque(warp), opaque(lane))
