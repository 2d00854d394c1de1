"""Index scores of key tiles from a paged cache: the loads and products of fp8_paged_mqa_logits_sm90.py.

A producer warp loads the tiles of a consumer warpgroup page by page. The warpgroup scores them against a sequence's
queries. A wgmma tile has 64 keys as rows and N = next_n * H columns, the (query, head) pairs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float16, Float32, Int32, Uint32, const_expr

from dsa.cute.copies import EVICT_FIRST, tile_load
from dsa.cute.pipeline import Pipeline, expect_bytes
from dsa.cute.reductions import quad_reduce_scatter
from dsa.cute.shared_memory import load_8
from dsa.cute.sm90 import REGISTERS, WARPGROUP
from dsa.cute.wgmma import multiply
from dsa.kernels.indexer import half_scores
from dsa.kernels.indexer.score_tile import TILE, head_sum, key_layout, quad_pair, query_layout

NO_KEY = 2**30
RANGE_BARRIER = 1  # named barrier: a work tile's queries are in fp16's range


class Pipelines(NamedTuple):
    """q: queries, weights and WorkTileInfo. k: keys and scales in all consumer warpgroups' rings; `k.ring` is the ring
    of one warpgroup."""

    q: Pipeline
    k: Pipeline


@dataclass(frozen=True)
class KeyCopies:
    """What a producer warp needs to load key tiles into its ring: copy atom, source and target for a page's keys and
    for its scales. valid_pages: the valid mask of each stage."""

    k_atom: cute.CopyAtom
    tkg: cute.Tensor
    tks: cute.Tensor
    scales_atom: cute.CopyAtom
    gscales: cute.Tensor
    scales: cute.Tensor
    valid_pages: cute.Tensor
    ring: Pipeline


@dataclass(frozen=True)
class Scoring:
    """State of a consumer thread. In registers: accumulators, weights, and what the epilogue needs of the previous
    tile. In shared memory: the wgmma operands, and the scales and valid_pages of each stage."""

    acc: cute.Tensor
    flat: cute.Tensor
    ra: cute.Tensor
    rb: cute.Tensor
    w: cute.Tensor
    sums: cute.Tensor
    unit: cute.Tensor  # with fp16 accumulation: power of two that a row's scores are multiplied by
    limits: cute.Tensor  # number of keys that each of the lane's rows sees
    scales: cute.Tensor
    valid_pages: cute.Tensor
    ring: Pipeline
    key_in_tile: Int32
    own_page: Int32
    quad: Int32


class PagedScoreTiles:
    """groups: number of consumer warpgroups. stages: key tiles in flight per warpgroup. sequences: stages of
    queries."""

    def __init__(
        self,
        heads: int,
        dim: int,
        next_n: int,
        page_size: int,
        out_dtype: type[cutlass.Numeric],
        half: bool,
        groups: int,
        stages: int,
        sequences: int,
    ):
        self.half, self.accumulators = half, Float16 if half else Float32
        self.head_sum = half_scores.head_sum if half else head_sum
        self.heads, self.dim, self.next_n, self.page = heads, dim, next_n, page_size
        self.out_dtype = out_dtype
        self.group_stages, self.sequences, self.groups = stages, sequences, groups
        self.stages = groups * stages
        self.consumer_warps, self.threads = 4 * groups, (groups + 1) * WARPGROUP
        self.consumer_registers, self.producer_registers = REGISTERS[groups]
        self.n = next_n * heads
        self.pages_a_tile = TILE // page_size
        self.lane_rows = (next_n + 1) // 2  # rows of the output that a lane stores to

    def loads(self, q: cute.Tensor, cache: cute.Tensor):
        """TMA atoms and tensors of queries and of pages' keys, and shared-memory layouts of queries, key tiles and
        pages."""
        k_layout = key_layout(TILE, self.n, self.dim, self.stages)
        # The same bytes as pages.
        page_layout = key_layout(self.page, self.n, self.dim, self.stages * self.pages_a_tile)
        q_layout = query_layout(self.n, self.dim, self.sequences)
        pages, page_stride = cache.shape[0], cache.stride[0]
        keys = cute.make_tensor(
            cute.recast_ptr(cache.iterator, dtype=Float8E4M3FN),
            cute.make_layout((self.page, self.dim, pages), stride=(self.dim, 1, page_stride)),
        )
        k_atom, k_tma = tile_load(keys, page_layout, (self.page, self.dim))
        q_atom, q_tma = tile_load(q, q_layout, (self.n, self.dim))
        return (q_atom, q_tma, k_atom, k_tma), (q_layout, k_layout, page_layout)

    @cute.jit
    def visible_keys(self, lengths, sequence, row: cutlass.Constexpr, capacity):
        """Number of keys that row `row` of a sequence sees. With one length per sequence, it is that of the last
        row."""
        columns = lengths.shape[1]
        # Clip to 0 before the subtraction, which would overflow for the lowest int32.
        length = cutlass.max(lengths[sequence, cutlass.min(row, columns - 1)], 0)
        if columns < self.next_n:
            length += row + 1 - self.next_n
        return cutlass.max(cutlass.min(length, capacity), 0)

    @cute.jit
    def page_numbers(self, block_table, sequence, tile, lane):
        """Page numbers of a warpgroup's next 32 / pages_a_tile tiles, from `tile` on, one per lane."""
        index = (tile + lane // self.pages_a_tile * self.groups) * self.pages_a_tile + lane % self.pages_a_tile
        page = Int32(-1)
        if index < block_table.shape[1]:
            page = block_table[sequence, index]
        return page

    def query_copies(self, q_atom, mq, sq):
        """TMA partitions: the queries of each stage, and in global memory those of each sequence."""
        gq = cute.local_tile(mq, (self.n, self.dim), (None, 0))
        one = cute.make_layout(1)
        return cute.nvgpu.cpasync.tma_partition(q_atom, 0, one, cute.group_modes(sq, 0, 2), cute.group_modes(gq, 0, 2))

    def weights_copy(self):
        bulk = cute.nvgpu.cpasync.CopyBulkG2SOp()
        return cute.make_copy_atom(bulk, Float32, num_bits_per_copy=self.heads * 32)

    def key_copies(self, k_atom, mk, cache, spages, valid_pages, scales, pipelines: Pipelines, group) -> KeyCopies:
        gk = cute.local_tile(mk, (self.page, self.dim), (0, 0, None))
        tks, tkg = cute.nvgpu.cpasync.tma_partition(
            k_atom, 0, cute.make_layout(1), cute.group_modes(spages, 0, 2), cute.group_modes(gk, 0, 2)
        )
        gscales = cute.make_tensor(
            cute.recast_ptr(cache.iterator + self.page * self.dim, dtype=Float32),
            cute.make_layout((self.page, cache.shape[0]), stride=(1, cache.stride[0] // 4)),
        )
        bulk = cute.nvgpu.cpasync.CopyBulkG2SOp()
        scales_atom = cute.make_copy_atom(bulk, Float32, num_bits_per_copy=self.page * 32)
        ring = pipelines.k.ring(group, self.group_stages)
        return KeyCopies(k_atom, tkg, tks, scales_atom, gscales, scales, valid_pages, ring)

    @cute.jit
    def load_queries(self, q_atom, tqg, tqs, weights_atom, weights, sweights, sequence, stage, barrier):
        """Load a sequence's queries and weights into a stage: n (dim + 4) bytes."""
        cute.copy(q_atom, tqg[None, sequence], tqs[None, stage], tma_bar_ptr=barrier)
        with cute.arch.elect_one():  # unlike a TMA copy, a bulk copy runs once per lane that reaches it
            for i in cutlass.range_constexpr(self.next_n):
                row = weights[sequence * self.next_n + i, None]
                cute.copy(weights_atom, row, sweights[None, i, stage], mbar_ptr=barrier)

    @cute.jit
    def load_tiles(self, copies: KeyCopies, block_table, sequence, first, tiles, tile, page_numbers, k_state, lane):
        """Load a warpgroup's key tiles tile, tile + groups, ... of a work tile. The work tile has `tiles` tiles, from
        the sequence's tile `first` on. page_numbers: of the first tiles to load, one per lane. -> (the warpgroup's next
        tile, relative to the end of this work tile; state)"""
        ring, at, page_bytes = copies.ring, Int32(0), self.page * (self.dim + 4)
        pages = copies.gscales.shape[1]
        while tile < tiles:
            if at == 32:
                at = Int32(0)
                page_numbers = self.page_numbers(block_table, sequence, first + tile, lane)
            page = [cute.arch.shuffle_sync(page_numbers, at + i) for i in range(self.pages_a_tile)]
            bits = Uint32(0)
            for i in cutlass.range_constexpr(self.pages_a_tile):
                if page[i] >= 0 and page[i] < pages:
                    bits |= 1 << i
            stage, k_full = ring.index(k_state), ring.producer_barrier(k_state)
            ring.producer_wait(k_state)
            with cute.arch.elect_one():
                copies.valid_pages[stage] = bits
                expect_bytes(k_full, cute.arch.popc(bits) * page_bytes)
            for i in cutlass.range_constexpr(self.pages_a_tile):
                if bits & (1 << i) != 0:
                    place = stage * self.pages_a_tile + i
                    policy = cutlass.Int64(EVICT_FIRST)
                    cute.copy(
                        *(copies.k_atom, copies.tkg[None, page[i]], copies.tks[None, place]),
                        tma_bar_ptr=k_full,
                        cache_policy=policy,
                    )
                    with cute.arch.elect_one():
                        source, target = copies.gscales[None, page[i]], copies.scales[None, place]
                        cute.copy(copies.scales_atom, source, target, mbar_ptr=k_full)
            k_state = ring.advance(k_state)
            tile += self.groups
            at += self.pages_a_tile
        return tile - tiles, k_state

    def scoring(self, mma, sq, sk, valid_pages, scales, pipelines: Pipelines, tid, warp, lane) -> Scoring:
        thr_mma = mma.get_slice(tid % WARPGROUP)
        ra, rb = mma.make_fragment_A(thr_mma.partition_A(sk)), mma.make_fragment_B(thr_mma.partition_B(sq))
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE, self.n)), self.accumulators)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(self.n // 2))
        word, weights = Float32, self.n // 4
        if self.half:
            flat, word, weights = cute.recast_tensor(flat, Uint32), Uint32, self.n // 8
        w, sums = cute.make_rmem_tensor((weights,), word), cute.make_rmem_tensor((2 * self.next_n,), word)
        unit = cute.make_rmem_tensor((self.lane_rows,), Float32)
        limits = cute.make_rmem_tensor((self.lane_rows,), Int32)
        sums.fill(0)
        ss = cute.make_tensor(scales.iterator, cute.make_layout((TILE, self.stages)))
        quad = lane % 4
        # A lane stores one key of each of its rows. After the transposing reduction, lanes 2 and 3 of a quad have the
        # upper 8 of 16 keys, and odd lanes have the second query of a pair. Without a second query, they have a copy of
        # the first.
        key_in_tile = (warp % 4) * 16 + lane // 4 + 8 * (quad // 2)
        ring = pipelines.k.ring(warp // 4, self.group_stages)
        operands = acc, flat, ra, rb, w, sums, unit, limits, ss, valid_pages
        return Scoring(*operands, ring, key_in_tile, key_in_tile // self.page, quad)

    def lane_row(self, i: int, scoring: Scoring) -> Int32:
        """The i-th of the sequence's rows that this lane stores to."""
        return cutlass.min(2 * i + scoring.quad % 2, self.next_n - 1)

    @cute.jit
    def take_weights(self, scoring: Scoring, sq, sweights, powers, stage, tid):
        """Load a work tile's weights into registers."""
        sw = cute.make_tensor(sweights.iterator, cute.make_layout((self.n, self.sequences)))
        if const_expr(self.half):
            self.prepare(sq, sw, powers, stage, scoring.w, scoring.unit, tid, scoring.quad)
        else:
            for j in cutlass.range_constexpr(self.n // 8):
                for c in cutlass.range_constexpr(2):
                    scoring.w[2 * j + c] = sw[j * 8 + scoring.quad * 2 + c, stage] * 0.5

    @cute.jit
    def score_tiles(self, mma, scoring: Scoring, rows, q_stage, first, tiles, tile, k_state):
        """Score a warpgroup's key tiles tile, tile + groups, ... of a work tile. The work tile has `tiles` tiles, from
        the sequence's tile `first` on. rows: output of the lane's rows. -> (the warpgroup's next tile, relative to the
        end of this work tile; state)"""
        ring, sums, key_in_tile = scoring.ring, scoring.sums, scoring.key_in_tile
        # No tile waits for its epilogue yet: NO_KEY is not stored.
        scale, masked_key, key = Float32(0.0), Int32(NO_KEY), Int32(NO_KEY)
        if tile < tiles:
            ring.consumer_wait(k_state)
        while tile < tiles:
            done, stage = k_state, ring.index(k_state)
            multiply(mma, scoring.acc, scoring.ra, scoring.rb, stage, q_stage)
            # During the wgmma: the previous tile's epilogue, and what this tile's epilogue needs.
            self.epilogue(scoring, scale, masked_key, rows, key)
            scale = scoring.scales[key_in_tile, stage]
            key = (first + tile) * TILE + key_in_tile
            # A key on an invalid page is masked like a key beyond every limit.
            valid = (scoring.valid_pages[stage] >> scoring.own_page) & 1 != 0
            masked_key = key if valid else Int32(NO_KEY)
            k_state = ring.advance(k_state)
            tile += self.groups
            cute.nvgpu.warpgroup.wait_group(0)
            ring.consumer_release(done)
            if tile < tiles:
                ring.consumer_wait(k_state)
            for i in cutlass.range_constexpr(self.next_n):
                sums[2 * i], sums[2 * i + 1] = self.head_sum(scoring.flat, scoring.w, i, self.heads)
        self.epilogue(scoring, scale, masked_key, rows, key)
        return tile - tiles, k_state

    @cute.jit
    def prepare(self, sq, sw, powers, stage, w, unit, tid, quad):
        """With fp16 accumulation: scale a work tile's queries into fp16's range, and adjust the weights. All consumer
        warpgroups synchronize in it."""
        own = powers + stage * (self.n * 4)
        if tid < half_scores.THREADS:
            at = Int32(sq.iterator.toint()) + stage * (self.n * self.dim)
            half_scores.bring_into_range(at, own, self.n, self.dim, tid)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=RANGE_BARRIER, number_of_threads=self.groups * WARPGROUP)
        steps = self.heads // 8
        for i in cutlass.range_constexpr(self.next_n):
            scaled = []
            for j in cutlass.range_constexpr(i * steps, (i + 1) * steps):
                column = j * 8 + quad * 2
                factors = load_8(own + column * 4)
                scaled.extend(sw[column + c, stage] * factors[c].bitcast(Float32) for c in range(2))
            pairs, scale = half_scores.pack_weights(scaled)
            for j in cutlass.range_constexpr(steps):
                w[i * steps + j] = pairs[j]
            # As in `lane_row`: even and odd lanes have different rows. Without a second query, odd lanes have the
            # first.
            if const_expr(i % 2 == 0):
                unit[i // 2] = scale
            elif quad % 2 == 1:
                unit[i // 2] = scale

    @cute.jit
    def epilogue(self, scoring: Scoring, scale, masked_key, rows, key):
        """Add up the quads' sums over heads, so that each lane has one key of each of its rows; scale, mask, store. A
        key of NO_KEY means that there is no tile."""
        quad = scoring.quad
        upper, odd = (quad & 2) != 0, (quad & 1) != 0
        for i in cutlass.range_constexpr(self.lane_rows):
            own = [scoring.sums[at] for at in range(4 * i, min(4 * i + 4, 2 * self.next_n))]
            if const_expr(self.half):
                own = [half_scores.pair_sum(x) for x in own]
            if const_expr(2 * i + 1 < self.next_n):
                value = quad_reduce_scatter(own[0], own[2], own[1], own[3], upper, odd)
                stores = key < NO_KEY
            else:
                value = quad_pair(*own, upper)
                stores = key < NO_KEY and not odd
            if const_expr(self.half):
                value = value * scoring.unit[i]
            result = value * scale
            if masked_key >= scoring.limits[i]:
                result = -Float32(float("inf"))
            if stores:
                rows[i][key] = result.to(self.out_dtype)
