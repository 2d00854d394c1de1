"""Online softmax of a 64 x 64 tile of S in registers: row_max, row_sum, and P in 16 bits to shared memory.

- row_max may lag behind the true maximum by a factor of 2^RESCALE_THRESHOLD. So O is rescaled only when the
  lag is larger, and the exponentials need not wait for the tile's maximum.
- P has two halves of the keys. The first half is passed on before the second half is computed.
A lane holds rows lane / 4 and lane / 4 + 8 of its warp's 16. Of every 8 columns it holds lane % 4 * 2 and the
next one.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from dsa.cute.pipeline import PipelineState
from dsa.cute.shared_memory import pack, store_matrices, swizzled
from dsa.kernels.mla.limits import TILE_M, TILE_N
from dsa.kernels.mla.mla_exchange import P_PARTS, Exchange

RESCALE_THRESHOLD = 8.0  # largest lag of row_max behind the true maximum, in log2
NO_MAX = -3e38  # initial row_max; finite, so that s - row_max is never inf - inf = NaN
HALF = TILE_N // 4  # scores per lane in one half of the keys


@dataclass(frozen=True)
class SoftmaxState:
    """Softmax state of a lane's two rows.

    limits      keys that each row sees, where a mask needs it
    row_max     the maximum that P is relative to, in log2; NO_MAX before the first score
    row_sum     the lane's part of the sum of P
    max_logits  the true maximum, in log2
    """

    limits: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    max_logits: cute.Tensor

    @staticmethod
    def make() -> "SoftmaxState":
        return SoftmaxState(*[cute.make_rmem_tensor((2,), dtype) for dtype in (Int32, Float32, Float32, Float32)])

    @cute.jit
    def reset(self):
        """Reset the state before the first tile of a work tile."""
        self.row_max.fill(NO_MAX)
        self.row_sum.fill(0.0)
        self.max_logits.fill(-float("inf"))

    @cute.jit
    def whole_sum(self, r: cutlass.Constexpr):
        """Return the sum of P over the row's four lanes."""
        row_sum = self.row_sum[r] + cute.arch.shuffle_sync_bfly(self.row_sum[r], offset=1)
        return row_sum + cute.arch.shuffle_sync_bfly(row_sum, offset=2)


class OnlineSoftmax:
    """Online softmax with P in `dtype`; `with_max_logits` also tracks the true maxima."""

    def __init__(self, dtype: type[cutlass.Numeric], with_max_logits: bool):
        self.dtype, self.with_max_logits = dtype, with_max_logits

    @cute.jit
    def run(self, scores, state: SoftmaxState, exchange: Exchange, p_state: PipelineState, scale, warp, lane):
        """Write P of a tile's masked scores to its stage, and the factor by which O must be multiplied first."""
        row_max, row_sum = state.row_max, state.row_sum
        p = cute.make_rmem_tensor((HALF,), Float32)
        # First half of P, relative to row_max of the previous tiles. It is recomputed below only if a row of
        # the warp exceeds row_max by more than the threshold.
        self.powers(p, scores, 0, row_max, scale)
        tile_max, rescale = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
        rescale.fill(1.0)
        for r in cutlass.range_constexpr(2):
            value = scores[2 * r]
            for i in cutlass.range_constexpr(1, HALF):
                value = cute.arch.fmax(value, scores[i // 2 * 4 + 2 * r + i % 2])
            value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1))
            tile_max[r] = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2)) * scale
            if const_expr(self.with_max_logits):
                state.max_logits[r] = cute.arch.fmax(state.max_logits[r], tile_max[r])
        if cute.arch.vote_any_sync(
            tile_max[0] > row_max[0] + RESCALE_THRESHOLD or tile_max[1] > row_max[1] + RESCALE_THRESHOLD
        ):
            for r in cutlass.range_constexpr(2):
                if tile_max[r] > row_max[r] + RESCALE_THRESHOLD:
                    rescale[r] = cute.math.exp2(row_max[r] - tile_max[r], fastmath=True)
                    row_max[r] = tile_max[r]
                    row_sum[r] *= rescale[r]
            self.powers(p, scores, 0, row_max, scale)

        if lane % 4 == 0:
            exchange.rescale[warp * 16 + lane // 4, p_state.stage] = rescale[0]
            exchange.rescale[warp * 16 + lane // 4 + 8, p_state.stage] = rescale[1]
        start = Int32(exchange.p.iterator.toint()) + p_state.stage * (TILE_M * TILE_N * 2)
        row = warp * 16 + lane % 16
        for half in cutlass.range_constexpr(P_PARTS):
            if const_expr(half == 1):
                self.powers(p, scores, half, row_max, scale)
            for i in cutlass.range_constexpr(TILE_N // 32):
                words = [pack(p[8 * i + 2 * j], p[8 * i + 2 * j + 1], self.dtype) for j in range(4)]
                vector = half * (TILE_N // 16) + 2 * i + lane // 16
                store_matrices(start + 2 * swizzled(row, vector), words)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            exchange.p_pipeline.producer_commit(p_state, half)
            for i in cutlass.range_constexpr(HALF):
                row_sum[i // 2 % 2] += p[i]

    @cute.jit
    def powers(self, p, scores, half: cutlass.Constexpr, row_max, scale):
        """Compute p = 2^(scale * scores - row_max) for one half of the keys."""
        for i in cutlass.range_constexpr(HALF):
            score = scores[half * HALF + i]
            p[i] = cute.math.exp2(cute.math.fma(score, scale, -row_max[i // 2 % 2]), fastmath=True)
