"""A block of queries of the passes that keep candidates, prepared in shared memory while the block before it is
multiplied: so the consumers begin it without a wait.

The queries come by TMA. Each of the four producer warps brings a quarter of the rows into fp16's range, of half scores,
and packs their weights as the consumers' lanes have them. One of them, which knows the work tiles, says which keys are
the block's, gives the queries' ranges and bounds, and opens and closes their lists.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from dsa.cute.pipeline import Mbarriers
from dsa.cute.shared_memory import load_8, store_4
from dsa.cute.sm90 import WARP
from dsa.cute.work_tile import write_info
from dsa.kernels.indexer import half_scores
from dsa.kernels.indexer.candidate_tiles import key_range
from dsa.kernels.indexer.fp8_mqa_logits_sm90 import Fp8MqaLogitsSm90

PRODUCER_WARPS = 4
QUERY_WARP = PRODUCER_WARPS - 1  # of the producer warpgroup, the one that loads queries
PADDING = 4  # words behind the weights of a lane of a quad, so that those of a quad meet in no bank
NO_BLOCK = -1
QUIET_NAN = float("nan")


class Ranges(NamedTuple):
    """What all roles know of the keys: the queries' ranges, how many keys, and which tiles are the pass's."""

    starts: cute.Tensor
    ends: cute.Tensor
    keys: Int32
    log_stride: Int32
    log_period: Int32


class Lists(NamedTuple):
    """entries [queries, CAPACITY] of (score, key); counts [queries, 2] from either end; bounds [queries]."""

    entries: cute.Tensor
    counts: cute.Tensor
    bounds: cute.Tensor


class WorkTileInfo(NamedTuple):
    """block: of queries; base, tiles: its Frame; first, end: which of the pass's tiles, none behind the last work tile;
    back: whether the CTA appends from the lists' end."""

    block: Int32
    base: Int32
    tiles: Int32
    first: Int32
    end: Int32
    back: Int32


@dataclass(frozen=True)
class Blocks:
    """Shared memory of the blocks in flight, indexed by the stage of the queries.

    Each stage holds the fields of a WorkTileInfo (`info`) and, per query, its bound, the range of its keys, the length
    of its list and what its scores are counted in. A query that does not exist has a count below 0. A stage also holds
    the addresses of the query rows' factors and, per lane of a quad, the addresses of the weights of its columns. The
    barrier `ready` says that all of this is written; the queries' full barrier covers only info and ranges."""

    info: cute.Tensor
    bounds: cute.Tensor
    first_keys: cute.Tensor
    counts: cute.Tensor
    counters: cute.Tensor
    units: cute.Tensor
    factors: Int32
    weights: Int32
    ready: Mbarriers


class PreparedBlocksSm90(Fp8MqaLogitsSm90):
    """What a kernel of such a pass does for its next block."""

    sample: bool  # whether it is the first pass, which has no lists
    weight_row: int  # words of a lane of a quad: pairs of half scores, or a weight each

    @cute.jit
    def open_block(self, tile: WorkTileInfo, ranges: Ranges, lists: Lists, blocks: Blocks, stage: Int32, lane):
        """What the other warps know of a block: where it goes on in its lists, too."""
        if lane < self.block_q:
            query = tile.block * self.block_q + lane
            # Of a query past the end: a bound that nothing reaches.
            bound, first_key, keys, listed = Float32(QUIET_NAN), Int32(0), Int32(-1), Int32(0)
            if query < ranges.starts.shape[0]:
                first_key, keys = key_range(ranges.starts, ranges.ends, query, ranges.keys)
                if const_expr(not self.sample):
                    bound = lists.bounds[query]
                    if tile.back == 0:
                        listed = lists.counts[query, 0]
            blocks.bounds[lane, stage], blocks.counters[lane, stage] = bound, listed
            blocks.first_keys[lane, stage], blocks.counts[lane, stage] = first_key, keys
        with cute.arch.elect_one():
            write_info(blocks.info, stage, tile)
        cute.arch.sync_warp()

    @cute.jit
    def close_lists(self, lists: Lists, blocks: Blocks, stage: Int32, lane):
        """How many there are behind the work tile that was in this stage, if one was."""
        if const_expr(not self.sample):
            block, back = blocks.info[0, stage], blocks.info[5, stage]
            query = block * self.block_q + lane
            if block != NO_BLOCK and lane < self.block_q and query < lists.bounds.shape[0]:
                lists.counts[query, back] = blocks.counters[lane, stage]
            cute.arch.sync_warp()  # before it is written again

    @cute.jit
    def prepare_part(
        self, block: Int32, weights: cute.Tensor, sq: cute.Tensor, blocks: Blocks, stage: Int32, part: Int32, lane
    ):
        """A producer warp's quarter of a block's columns, whose queries are there: bring them into fp16's range, and
        pack their weights."""
        rows = self.n // PRODUCER_WARPS
        factors = blocks.factors + (stage * self.n + part * rows) * 4
        # A lane has two heads, which are a pair; where there are fewer, some have the same ones.
        own = lane % (rows // 2)
        pair = part * (rows // 2) + own
        query, head = 2 * pair // self.heads, 2 * pair % self.heads
        row = cutlass.min(block * self.block_q + query, weights.shape[0] - 1)
        a, b = weights[row, head], weights[row, head + 1]
        if const_expr(self.half):
            queries = Int32(sq.iterator.toint()) + (stage * self.n + part * rows) * self.dim
            for step in cutlass.range(half_scores.THREADS // WARP, unroll=1):
                half_scores.bring_into_range(queries, factors, rows, self.dim, step * WARP + lane)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
        to = blocks.weights + ((stage * 4 + pair % 4) * self.weight_row) * 4
        if const_expr(self.half):
            powers = load_8(factors + own * 8)
            a, b = a * powers[0].bitcast(Float32), b * powers[1].bitcast(Float32)
            most = cute.arch.fmax(cute.math.absf(a), cute.math.absf(b))
            for log in cutlass.range_constexpr((self.heads // 2).bit_length() - 1):
                most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=1 << log))
            # The largest of the query goes with them: all its heads are divided by the same.
            pairs, unit = half_scores.pack_weights([a, b, most, most])
            store_4(to + pair // 4 * 4, pairs[0])
            blocks.units[query, stage] = unit
        else:
            store_4(to + pair // 4 * 8, (a * 0.5).bitcast(Uint32))
            store_4(to + pair // 4 * 8 + 4, (b * 0.5).bitcast(Uint32))
        cute.arch.sync_warp()
        blocks.ready.arrive(stage)
