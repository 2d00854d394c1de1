"""The epilogue of MLA attention without swap A/B: write LSE and O.

A work tile that covers all keys of its query or sequence writes the result. A split writes a partial result,
normalised by the split's own sum, and the split's LSE, from which the combine kernels compute weights.
"""

from dataclasses import dataclass
from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from dsa.cute.shared_memory import pack, store_matrices
from dsa.cute.sm90 import LN2, opaque
from dsa.kernels.mla.limits import HEAD_DIM_V
from dsa.kernels.mla.mla_exchange import Exchange
from dsa.kernels.mla.mla_softmax import SoftmaxState
from dsa.kernels.mla.tile_scheduler import WorkTileInfo

HALF_V = HEAD_DIM_V // 2  # channels per output warpgroup
STAGED = 32  # channels of a row that are staged in shared memory at a time


@dataclass(frozen=True)
class Results:
    """The outputs of a kernel, and the sinks in shared memory.

    out          [B, s_q, h_q, 512]
    lse          [B, h_q, s_q]
    out_partial  [splits, h_k, rows, 512]
    lse_partial  [splits, h_k, rows]
    max_logits   [B, h_q], only with s_q = 1 and without splits
    sink         in shared memory: the attention sinks of the CTA's rows, in log2
    """

    out: cute.Tensor
    lse: cute.Tensor
    out_partial: cute.Tensor
    lse_partial: cute.Tensor
    max_logits: cute.Tensor | None = None
    sink: cute.Tensor | None = None


class QTile(Protocol):
    """The rows of a CTA: first_row to first_row + TILE_M - 1 of the `rows` of a KV head."""

    first_row: Int32
    rows: Int32
    kv_head: Int32

    def coord(self, batch_idx: Int32, row: Int32) -> tuple:
        """Return (sequence, query, head) in the results, of a row of a work tile."""

    def has_row(self, batch_idx: Int32, row: Int32) -> cutlass.Boolean:
        """Whether a work tile has the row."""


class Epilogue:
    """Write O in `dtype`; `with_max_logits` also writes the maximum logits."""

    def __init__(self, dtype: type[cutlass.Numeric], with_max_logits: bool = False):
        self.dtype, self.with_max_logits = dtype, with_max_logits

    @cute.jit
    def write_lse(
        self,
        results: Results,
        exchange: Exchange,
        work: WorkTileInfo,
        q_tile: QTile,
        state: SoftmaxState,
        r: cutlass.Constexpr,
        tile_row,
        lane,
    ):
        """Write LSE of row `tile_row`, the lane's r-th row, and pass the row's factor of O to the output warpgroups."""
        row = opaque(q_tile.first_row + tile_row)
        row_sum = state.whole_sum(r)
        inverse, lse = Float32(0.0), Float32(float("inf"))
        if work.split_idx >= 0:
            lse = -Float32(float("inf"))
        if row_sum != 0.0:
            whole = row_sum
            if const_expr(results.sink is not None):
                if work.split_idx < 0:
                    whole += cute.math.exp2(results.sink[tile_row] - state.row_max[r])
            inverse = 1.0 / whole
            lse = state.row_max[r] * LN2 + cute.math.log(row_sum)
        if lane % 4 == 0:
            exchange.inverse[tile_row] = inverse
            if const_expr(results.lse is not None):
                if q_tile.has_row(work.batch_idx, row):
                    if work.split_idx >= 0:
                        results.lse_partial[work.split_idx, q_tile.kv_head, row] = lse
                    else:
                        sequence, query, head = q_tile.coord(work.batch_idx, row)
                        results.lse[sequence, head, query] = lse
                        if const_expr(self.with_max_logits):
                            results.max_logits[sequence, head] = state.max_logits[r] * LN2

    @cute.jit
    def store(self, acc, upper, lower, results: Results, coords, rows, staging, side, lane):
        """Write 16 rows x 256 channels of O, staged in 1 KiB of P's memory.

        upper, lower  factors of the lane's two rows
        coords        (sequence, query, head) of the two rows
        rows          valid rows from the lane's first row on
        """
        targets = [results.out[*coord, None] for coord in coords]
        vector = cute.make_rmem_tensor((8,), self.dtype)
        for i in cutlass.range_constexpr(HALF_V // STAGED):
            for j in cutlass.range_constexpr(2):
                at = (4 * i + 2 * j) * 4
                words = []
                for n in cutlass.range_constexpr(4):
                    inverse = lower if const_expr(n % 2) else upper
                    words.append(pack(acc[at + 2 * n] * inverse, acc[at + 2 * n + 1] * inverse, self.dtype))
                place = self.staged(lane % 16, 2 * j + lane // 16)
                store_matrices(Int32((staging + place).toint()), words)
            cute.arch.sync_warp()
            for r in cutlass.range_constexpr(2):
                source = cute.make_tensor(staging + self.staged(lane // 4 + 8 * r, lane % 4), cute.make_layout(8))
                cute.autovec_copy(source, vector)
                if 8 * r < rows:
                    place = side * (HALF_V // 8) + i * (STAGED // 8) + lane % 4
                    cute.autovec_copy(vector, cute.local_tile(targets[r], (8,), (place,)))
            cute.arch.sync_warp()

    @cute.jit
    def staged(self, row, vector):
        """Return the offset of a vector of 8 elements among 16 rows of STAGED, swizzled against bank conflicts."""
        return row * STAGED + (vector ^ (row // 2 % 4)) * 8

    @cute.jit
    def store_partial(self, acc, upper, lower, targets, rows, side, lane):
        """Write 16 rows x 256 channels to a partial result, in fp32."""
        pair = cute.make_rmem_tensor((2,), Float32)
        for i in cutlass.range_constexpr(HALF_V // 8):
            for r in cutlass.range_constexpr(2):
                inverse = lower if const_expr(r) else upper
                pair[0], pair[1] = acc[4 * i + 2 * r] * inverse, acc[4 * i + 2 * r + 1] * inverse
                if 8 * r < rows:
                    place = side * (HALF_V // 2) + 4 * i + lane % 4
                    cute.autovec_copy(pair, cute.local_tile(targets[r], (2,), (place,)))
