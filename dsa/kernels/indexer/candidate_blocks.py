"""Preparation of the next block of queries in shared memory, for the passes that keep candidates.

The consumers score the previous block meanwhile, and so begin each block without a wait. The queries arrive by TMA.
Each of the four producer warps prepares a quarter of the block's columns. With fp16 accumulation, it scales the query
rows into fp16's range. It also packs the weights in the layout of the consumers' lanes. One of the four warps computes
the work tiles, writes the queries' key ranges and bounds, and opens and closes their lists.
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
QUERY_WARP = PRODUCER_WARPS - 1  # index in the producer warpgroup of the warp that loads queries
PADDING = 4  # words after a quad lane's weights, so that the four lanes of a quad access different banks
NO_BLOCK = -1
QUIET_NAN = float("nan")


class Ranges(NamedTuple):
    """starts, ends: the queries' key ranges. keys: number of keys. log_stride, log_period: the pass has the key tiles
    that are multiples of 1 << log_stride but not of 1 << (log_stride + log_period)."""

    starts: cute.Tensor
    ends: cute.Tensor
    keys: Int32
    log_stride: Int32
    log_period: Int32


class Lists(NamedTuple):
    """entries [queries, CAPACITY]: (score, key). counts [queries, 2]: numbers of entries at the front and at the back.
    bounds [queries]."""

    entries: cute.Tensor
    counts: cute.Tensor
    bounds: cute.Tensor


class WorkTileInfo(NamedTuple):
    """block: the block of queries, or NO_BLOCK after the last work tile. base, tiles: its Frame. first, end: its range
    of the pass's tiles. back: whether the CTA appends from the lists' end."""

    block: Int32
    base: Int32
    tiles: Int32
    first: Int32
    end: Int32
    back: Int32


@dataclass(frozen=True)
class Blocks:
    """Shared memory of the blocks in flight, indexed by the stage of the queries.

    Each stage holds the fields of a WorkTileInfo (`info`) and, per query, its bound, its key range (first_keys,
    counts), the length of its list (counters) and the power of two that its scores are multiplied by (units). A query
    past the end has a count below 0. `factors` is the address of the query rows' factors. `weights` is the address of
    the packed weights, a row per quad lane. The queries' full barrier covers info, bounds, ranges and counters. The
    barrier `ready` covers all of it."""

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
    """What the producer warps of a candidate pass do for the next block."""

    sample: bool  # whether this is the first pass, which has no lists
    weight_row: int  # words per quad lane: each holds a pair of fp16 weights (fp16 accumulation) or an fp32 weight

    @cute.jit
    def open_block(self, tile: WorkTileInfo, ranges: Ranges, lists: Lists, blocks: Blocks, stage: Int32, lane):
        """Write what the other warps need to know about a block, including the current lengths of its lists."""
        if lane < self.block_q:
            query = tile.block * self.block_q + lane
            # For a query past the end: NaN, a bound that no score reaches.
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
        """Write back the list lengths of this stage's previous work tile, if there was one."""
        if const_expr(not self.sample):
            block, back = blocks.info[0, stage], blocks.info[5, stage]
            query = block * self.block_q + lane
            if block != NO_BLOCK and lane < self.block_q and query < lists.bounds.shape[0]:
                lists.counts[query, back] = blocks.counters[lane, stage]
            cute.arch.sync_warp()  # before the stage is overwritten

    @cute.jit
    def prepare_part(
        self, block: Int32, weights: cute.Tensor, sq: cute.Tensor, blocks: Blocks, stage: Int32, part: Int32, lane
    ):
        """Prepare a producer warp's quarter of a block's columns, after its queries have arrived: with fp16
        accumulation, scale the queries into fp16's range; pack the weights."""
        rows = self.n // PRODUCER_WARPS
        factors = blocks.factors + (stage * self.n + part * rows) * 4
        # Each lane has a pair of heads. If there are fewer pairs than lanes, several lanes have the same pair.
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
            # Include the query's largest weight, so that all its heads are divided by the same power of two.
            pairs, unit = half_scores.pack_weights([a, b, most, most])
            store_4(to + pair // 4 * 4, pairs[0])
            blocks.units[query, stage] = unit
        else:
            store_4(to + pair // 4 * 8, (a * 0.5).bitcast(Uint32))
            store_4(to + pair // 4 * 8 + 4, (b * 0.5).bitcast(Uint32))
        cute.arch.sync_warp()
        blocks.ready.arrive(stage)
