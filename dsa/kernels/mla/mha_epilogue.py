"""The epilogue of multi-head attention: write LSE, and write O through shared memory.

A warp has 16 rows. It stages OUT_COLUMNS channels of them at a time, so that each row is stored as 128
contiguous bytes. The 16-byte chunk c of row r is at position c ^ (r % 8), which avoids bank conflicts.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from dsa.cute.shared_memory import load_16, pack, store_matrices
from dsa.cute.sm90 import LN2, opaque
from dsa.kernels.mla.mha_scheduler import WorkTileInfo

OUT_ROWS, OUT_COLUMNS = 16, 64  # rows and channels that a warp stages at a time


@dataclass(frozen=True)
class MhaEpilogue:
    """Write `value_dim` channels per head in `dtype`.

    few_registers  recompute values derived from the lane here, instead of keeping them in registers through
                   the mainloop
    """

    dtype: type[cutlass.Numeric]
    value_dim: int
    few_registers: bool

    @cute.jit
    def store(
        self,
        o: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        work_tile: WorkTileInfo,
        staged: Int32,
        own_row: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """Write LSE and O of the warp's rows.

        staged   address of the warp's staging buffer in shared memory
        own_row  the lane's first row; its second row is 8 further
        """
        query, row_count, head = work_tile.query, work_tile.row_count, work_tile.head
        if const_expr(self.few_registers):
            lane = opaque(lane)
        inverse = cute.make_rmem_tensor((2,), Float32)
        for r in cutlass.range_constexpr(2):
            amount = row_sum[r] + cute.arch.shuffle_sync_bfly(row_sum[r], offset=1)
            amount += cute.arch.shuffle_sync_bfly(amount, offset=2)
            inverse[r] = 0.0 if amount == 0.0 else 1.0 / amount
            if lane % 4 == 0 and own_row + 8 * r < row_count:
                result = row_max[r] * LN2 + cute.math.log(amount)
                lse[head, query + own_row + 8 * r] = Float32(float("inf")) if amount == 0.0 else result
        own = lane % OUT_ROWS
        first_row = warp * OUT_ROWS
        eight = cute.make_rmem_tensor((4,), Uint32)
        for first in cutlass.range_constexpr(0, self.value_dim, OUT_COLUMNS):
            for pair in cutlass.range_constexpr(OUT_COLUMNS // 16):
                columns = [first // 2 + 8 * pair + 2 * i for i in range(4)]
                words = [pack(o[i] * inverse[i // 2 % 2], o[i + 1] * inverse[i // 2 % 2], self.dtype) for i in columns]
                # Lanes 0 to 15 address the rows of the even chunk, lanes 16 to 31 those of the odd chunk.
                store_matrices(staged + own * 128 + ((2 * pair + lane // OUT_ROWS) ^ (own % 8)) * 16, words)
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(0, OUT_ROWS * OUT_COLUMNS // 8, 32):
                r, chunk = (i + lane) // 8, (i + lane) % 8
                if first_row + r < row_count:
                    loaded = load_16(staged + r * 128 + (chunk ^ (r % 8)) * 16)
                    for j in cutlass.range_constexpr(4):
                        eight[j] = loaded[j]
                    row = out[query + first_row + r, head, None]
                    cute.autovec_copy(
                        cute.recast_tensor(eight, self.dtype), cute.local_tile(row, (8,), (first // 8 + chunk,))
                    )
            cute.arch.sync_warp()
