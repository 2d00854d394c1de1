"""The mainloop of the score warpgroups with swap A/B, for 16-bit and FP8 keys.

It runs over work tiles. The warpgroups take the tiles of keys in turns.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from dsa.cute.pipeline import state_at, state_at_of_two
from dsa.kernels.mla.mla_epilogue import Results
from dsa.kernels.mla.swap_ab_exchange import HeadRange, SwapAbExchange, Thread
from dsa.kernels.mla.swap_ab_softmax import SwapAbSoftmax


class SwapAbScoreLoop(SwapAbSoftmax):
    """The loop. A kernel overrides how Q is loaded (`load_q`) and how a tile is scored (`score_tile`)."""

    q_stages = 1  # stages of the ring that a work tile's Q takes

    @cute.jit
    def load_q(self, operands, pipeline, exchange: SwapAbExchange, ring, heads: HeadRange, thread: Thread) -> Any:
        """Copy the work tile's Q, which came as tile `ring` of the ring, to its own memory.

        Return what `score_tile` needs to know of Q.
        """
        raise NotImplementedError

    @cute.jit
    def score_tile(
        self,
        operands,
        pipeline,
        exchange: SwapAbExchange,
        q_power,
        ring,
        tile_count,
        tile,
        max_logits,
        scale,
        thread: Thread,
    ):
        """Compute P^T of tile `tile` of the work tile.

        ring, tile_count: the position in the ring and in P of the work tile's first tile.
        """
        raise NotImplementedError

    @cute.jit
    def run(
        self,
        results: Results,
        operands,
        pipeline,
        exchange: SwapAbExchange,
        heads: HeadRange,
        group,
        scale,
        thread: Thread,
    ):
        """Run a score warpgroup: all work tiles of this CTA."""
        max_logits = None
        if const_expr(self.with_max_logits):
            max_logits = cute.make_rmem_tensor((self.columns,), Float32)
        # Counts so far: tiles of the ring, work tiles, tiles of P.
        ring, work_count, tile_count, batch_idx = Int32(0), Int32(0), Int32(0), Int32(0)
        while batch_idx >= 0:
            work_state = state_at_of_two(work_count)
            work = pipeline.work.current(work_state)
            pipeline.work.release(work_state)
            batch_idx = work.batch_idx
            if batch_idx >= 0:
                # Wait until all score warpgroups are done with the previous Q.
                self.sync_score()
                q_power = self.load_q(operands, pipeline, exchange, ring, heads, thread)
                ring += self.q_stages
                self.prologue(exchange, thread)
                if const_expr(self.with_max_logits):
                    max_logits.fill(-float("inf"))
                cute.arch.fence_proxy("async.shared", space="cta")
                self.sync_score()
                first = (tile_count ^ thread.side) & (self.score_warpgroups - 1)
                for tile in cutlass.range(first, work.tiles, self.score_warpgroups, unroll=1):
                    self.score_tile(
                        *(operands, pipeline, exchange, q_power, ring, tile_count, tile, max_logits, scale, thread)
                    )
                ring, tile_count = ring + work.tiles, tile_count + work.tiles
                end_state = state_at(work_count, 1)
                self.write_lse(results, exchange, work, heads, group, tile_count, end_state, max_logits, thread)
                work_count += 1
