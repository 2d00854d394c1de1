"""The mainloop of the output warpgroups with swap A/B, for 16-bit and FP8 keys: O^T += V^T P^T.

It runs over the tiles of every work tile. Each of the two warpgroups has 256 channels x `head_tile` of O^T.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsa.cute.pipeline import PipelineState, state_at, state_at_of_two
from dsa.kernels.mla.limits import TILE_N
from dsa.kernels.mla.mla_attention import MlaShared
from dsa.kernels.mla.mla_epilogue import Results
from dsa.kernels.mla.swap_ab_exchange import HeadRange, SwapAbExchange, Thread


class ValueOperands(NamedTuple):
    """Tiled MMA, V^T and P^T as wgmma operands, and the accumulators of O^T; `flat` is the same memory, flat."""

    mma: cute.TiledMma
    v: cute.Tensor
    p: cute.Tensor
    accs: list[cute.Tensor]
    flat: cute.Tensor


class SwapAbOutputLoop:
    """The loop for `head_tile` heads, 16, 32 or 64. An accumulator of O^T has `acc_channels` channels.

    A kernel adds how a tile is multiplied and how O^T is written:

    skip_q(pipeline, state)
        Return the ring state after the stages with a work tile's Q, which this warpgroup does not read.
    add_tile(operands, shared, state, tile_count, thread)
        Compute O^T += V^T P^T of the next tile, after tile_count tiles of P. Return the state after it.
    write(operands, results, shared, work, heads, group, thread)
        Write O^T times `inverse` to the result, or to the partial result of a split.
    """

    acc_channels = TILE_N

    def __init__(self, head_tile: int):
        self.head_tile, self.columns = head_tile, head_tile // 4  # columns (heads) per lane

    def element(self, column: int, j: int) -> int:
        """Return the index, in a lane's accumulators, of the j-th of its eight channels of a column: two per
        accumulator.
        """
        return j // 2 * (self.head_tile // 2) + column // 2 * 4 + j % 2 * 2 + column % 2

    def head_of(self, column: int, lane):
        """Return which of the CTA's heads a lane's column is."""
        return column // 2 * 8 + (lane & 3) * 2 + column % 2

    @cute.jit
    def rescale(self, acc, exchange: SwapAbExchange, p_stage, lane):
        """Multiply O^T by the rescale factors of a stage of P, if there are any."""
        if exchange.rescaled[p_stage] != 0:
            for c in cutlass.range_constexpr(self.columns):
                factor = exchange.rescale[self.head_of(c, lane), p_stage]
                for j in cutlass.range_constexpr(8):
                    acc[self.element(c, j)] *= factor

    @cute.jit
    def run(
        self,
        results: Results,
        mma: cute.TiledMma,
        v: cute.Tensor,
        shared: MlaShared,
        state: PipelineState,
        heads: HeadRange,
        group,
        thread: Thread,
    ):
        """Run an output warpgroup: its half of the channels, all work tiles of this CTA.

        v      V^T as a wgmma operand
        state  the warpgroup's first state in the ring of keys
        """
        pipeline, exchange, thr = shared.pipeline, shared.exchange, mma.get_slice(thread.tid)
        p = mma.make_fragment_B(thr.partition_B(exchange.p))
        flat = cute.make_rmem_tensor((2 * self.head_tile,), Float32)
        layout = cute.make_layout(thr.partition_shape_C((self.acc_channels, self.head_tile)))
        accs = [cute.make_tensor(flat.iterator + i, layout) for i in range(0, 2 * self.head_tile, cute.size(layout))]
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        operands = ValueOperands(mma, v, p, accs, flat)
        work_count, tile_count, batch_idx = Int32(0), Int32(0), Int32(0)
        while batch_idx >= 0:
            work_state = state_at_of_two(work_count)
            work = pipeline.work.current(work_state)
            pipeline.work.release(work_state)
            batch_idx = work.batch_idx
            if batch_idx >= 0:
                flat.fill(0.0)
                state = self.skip_q(pipeline, state)
                for _ in cutlass.range(work.tiles, unroll=1):
                    state = self.add_tile(operands, shared, state, tile_count, thread)
                    tile_count += 1
                end_state = state_at(work_count, 1)
                exchange.end.consumer_wait(end_state)
                self.write(operands, results, shared, work, heads, group, thread)
                cute.arch.sync_warp()
                exchange.end.consumer_release(end_state)
                work_count += 1
