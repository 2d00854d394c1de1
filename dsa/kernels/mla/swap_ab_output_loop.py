"""The mainloop of the output warpgroups with swap A/B, for 16-bit and FP8 keys: O^T += V^T P^T.

It runs over the tiles of every work tile. Each of the two warpgroups has 256 channels x `head_tile` of O^T.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.pipeline import PipelineState, state_at, state_at_of_two
from dsa.kernels.mla.mla_epilogue import Results
from dsa.kernels.mla.swap_ab_exchange import HeadRange, SwapAbExchange, Thread
from dsa.kernels.mla.tile_scheduler import WorkTileInfo


class SwapAbOutputLoop:
    """The loop for `head_tile` heads, 16, 32 or 64. O^T is four accumulators of 64 channels.

    A kernel overrides how Q's stages are skipped (`skip_q`), how a tile is multiplied (`add_tile`) and how
    O^T is written (`write`).
    """

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
    def skip_q(self, pipeline, state: PipelineState) -> PipelineState:
        """Return the ring state after the stages with a work tile's Q, which this warpgroup does not read."""
        raise NotImplementedError

    @cute.jit
    def add_tile(
        self, operands, pipeline, exchange: SwapAbExchange, state: PipelineState, tile_count, thread: Thread
    ) -> PipelineState:
        """Compute O^T += V^T P^T of the next tile, after tile_count tiles of P. Return the state after it."""
        raise NotImplementedError

    @cute.jit
    def write(
        self,
        operands,
        results: Results,
        exchange: SwapAbExchange,
        work: WorkTileInfo,
        heads: HeadRange,
        group,
        thread: Thread,
    ):
        """Write O^T times `inverse` to the result, or to the partial result of a split."""
        raise NotImplementedError

    @cute.jit
    def run(
        self,
        results: Results,
        operands,
        acc,
        pipeline,
        exchange: SwapAbExchange,
        state: PipelineState,
        heads: HeadRange,
        group,
        thread: Thread,
    ):
        """Run an output warpgroup: its half of the channels, all work tiles of this CTA.

        acc    a lane's part of O^T, flat
        state  the warpgroup's first state in the ring of keys
        """
        work_count, tile_count, batch_idx = Int32(0), Int32(0), Int32(0)
        while batch_idx >= 0:
            work_state = state_at_of_two(work_count)
            work = pipeline.work.current(work_state)
            pipeline.work.release(work_state)
            batch_idx = work.batch_idx
            if batch_idx >= 0:
                acc.fill(0.0)
                state = self.skip_q(pipeline, state)
                for _ in cutlass.range(work.tiles, unroll=1):
                    state = self.add_tile(operands, pipeline, exchange, state, tile_count, thread)
                    tile_count += 1
                end_state = state_at(work_count, 1)
                exchange.end.consumer_wait(end_state)
                self.write(operands, results, exchange, work, heads, group, thread)
                cute.arch.sync_warp()
                exchange.end.consumer_release(end_state)
                work_count += 1
