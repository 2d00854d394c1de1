"""The mainloop of the score warpgroups with A and B swapped, of 16-bit and of FP8 keys: work tiles, and their tiles of
keys in turns between the warpgroups.
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
    """A kernel says how queries come (`load_q`) and how a tile is scored (`score_tile`)."""

    q_stages = 1  # of the ring of tiles, for the queries of a work tile

    @cute.jit
    def load_q(self, operands, pipeline, exchange: SwapAbExchange, ring, heads: HeadRange, thread: Thread) -> Any:
        """The work tile's queries, which came as tile number `ring`, to their own memory. -> what `score_tile` needs to
        know about them."""
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
        """P^T of tile number `tile` of the work tile. ring, tile_count: tiles of the ring and of P before these."""
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
        """A score warpgroup: all work tiles of this CTA."""
        max_logits = None
        if const_expr(self.with_max_logits):
            max_logits = cute.make_rmem_tensor((self.columns,), Float32)
        # Tiles of the ring, work tiles and tiles of P so far.
        ring, work_count, tile_count, batch_idx = Int32(0), Int32(0), Int32(0), Int32(0)
        while batch_idx >= 0:
            work_state = state_at_of_two(work_count)
            work = pipeline.work.current(work_state)
            pipeline.work.release(work_state)
            batch_idx = work.batch_idx
            if batch_idx >= 0:
                # All have multiplied with the queries before.
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
