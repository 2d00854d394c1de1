"""The end of a work tile of multi-head attention: LSE, and O through shared memory to the result.

A warp has 16 rows. They go out OUT_COLUMNS channels at a time, so that each row is stored 128 bytes in a row; chunk c
of 16 bytes of row r lies where c ^ (r % 8) would, and no two lanes want the same banks.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from dsa.cute.shared_memory import load_16, pack, store_matrices
from dsa.cute.sm90 import LN2, opaque
from dsa.kernels.mla.mha_scheduler import WorkTileInfo

OUT_ROWS, OUT_COLUMNS = 16, 64  # results of a warp on their way out


@dataclass(frozen=True)
class MhaEpilogue:
    """out in `dtype`, value_dim channels a head. few_registers: what follows of the lane is not to be kept in them
    through the mainloop."""

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
        """Results of a warp's rows. staged: where the warp's part of shared memory begins; own_row: the lane's first
        row."""
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
                # Lanes 0 to 15 have the rows of the even chunk, the others those of the odd one.
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
