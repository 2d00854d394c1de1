"""Index scores of key tiles from a paged cache: the loads and products of fp8_paged_mqa_logits_sm90.py.

A producer warp loads the tiles of a consumer warpgroup, page by page, and the warpgroup scores them against a
sequence's queries: a wgmma tile has 64 keys as rows and the N = next_n * H (query, head) pairs as columns.
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
RANGE_BARRIER = 1  # a work tile's queries are in fp16's range


class Pipelines(NamedTuple):
    """q: queries, weights and WorkTileInfo; k: keys and scales of all consumer warpgroups' rings, of which `k.ring`
    gives one."""

    q: Pipeline
    k: Pipeline


@dataclass(frozen=True)
class KeyCopies:
    """What a producer warp loads key tiles by, into its ring: the copies of a page's keys and of its scales, from and
    to; valid_pages of each stage."""

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
    """What a consumer thread scores key tiles by: the product's operands and accumulators, in registers weights and
    what the epilogue has of the last tile, in shared memory scales and valid_pages of each stage."""

    acc: cute.Tensor
    flat: cute.Tensor
    ra: cute.Tensor
    rb: cute.Tensor
    w: cute.Tensor
    sums: cute.Tensor
    unit: cute.Tensor  # what the scores of the lane's rows are counted in
    limits: cute.Tensor  # keys that each of the lane's rows sees
    scales: cute.Tensor
    valid_pages: cute.Tensor
    ring: Pipeline
    key_in_tile: Int32
    own_page: Int32
    quad: Int32


class PagedScoreTiles:
    """groups: consumer warpgroups; stages: key tiles in flight for each; sequences: stages of queries."""

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
        self.lane_rows = (next_n + 1) // 2  # rows of the result that a lane stores to

    def loads(self, q: cute.Tensor, cache: cute.Tensor):
        """TMA of queries and of pages' keys, and their shared memory's layouts: of queries, of tiles, of pages."""
        k_layout = key_layout(TILE, self.n, self.dim, self.stages)
        # The same bytes by pages.
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
        """How many keys row `row` of a sequence sees. One length a sequence belongs to its last row."""
        columns = lengths.shape[1]
        # Not below 0 before the subtraction, which would make the lowest int32 a large number.
        length = cutlass.max(lengths[sequence, cutlass.min(row, columns - 1)], 0)
        if columns < self.next_n:
            length += row + 1 - self.next_n
        return cutlass.max(cutlass.min(length, capacity), 0)

    @cute.jit
    def page_numbers(self, block_table, sequence, tile, lane):
        """Of the pages of 32 / pages_a_tile tiles of a warpgroup, from `tile` on, one a lane."""
        index = (tile + lane // self.pages_a_tile * self.groups) * self.pages_a_tile + lane % self.pages_a_tile
        page = Int32(-1)
        if index < block_table.shape[1]:
            page = block_table[sequence, index]
        return page

    def query_copies(self, q_atom, mq, sq):
        """The queries of each stage, and in global memory those of each sequence."""
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
        """Of a sequence, to a stage: n (dim + 4) bytes."""
        cute.copy(q_atom, tqg[None, sequence], tqs[None, stage], tma_bar_ptr=barrier)
        with cute.arch.elect_one():  # a bulk copy, unlike TMA, runs once for every lane that reaches it
            for i in cutlass.range_constexpr(self.next_n):
                row = weights[sequence * self.next_n + i, None]
                cute.copy(weights_atom, row, sweights[None, i, stage], mbar_ptr=barrier)

    @cute.jit
    def load_tiles(self, copies: KeyCopies, block_table, sequence, first, tiles, tile, page_numbers, k_state, lane):
        """A warpgroup's key tiles tile, tile + groups and so on of a work tile of `tiles` from the sequence's tile
        `first` on. page_numbers: of the first of them. -> (its next tile, counted from behind this work tile, state)
        """
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
        # A lane stores one key of each of its rows: after the transposition lanes 2 and 3 of a quad have the upper half
        # of the keys, odd lanes the second query of a pair. Without a second query they have a copy of the first.
        key_in_tile = (warp % 4) * 16 + lane // 4 + 8 * (quad // 2)
        ring = pipelines.k.ring(warp // 4, self.group_stages)
        operands = acc, flat, ra, rb, w, sums, unit, limits, ss, valid_pages
        return Scoring(*operands, ring, key_in_tile, key_in_tile // self.page, quad)

    def lane_row(self, i: int, scoring: Scoring) -> Int32:
        """The i-th of the sequence's rows that the lane stores to."""
        return cutlass.min(2 * i + scoring.quad % 2, self.next_n - 1)

    @cute.jit
    def take_weights(self, scoring: Scoring, sq, sweights, powers, stage, tid):
        """A work tile's weights to registers."""
        sw = cute.make_tensor(sweights.iterator, cute.make_layout((self.n, self.sequences)))
        if const_expr(self.half):
            self.prepare(sq, sw, powers, stage, scoring.w, scoring.unit, tid, scoring.quad)
        else:
            for j in cutlass.range_constexpr(self.n // 8):
                for c in cutlass.range_constexpr(2):
                    scoring.w[2 * j + c] = sw[j * 8 + scoring.quad * 2 + c, stage] * 0.5

    @cute.jit
    def score_tiles(self, mma, scoring: Scoring, rows, q_stage, first, tiles, tile, k_state):
        """A warpgroup's key tiles tile, tile + groups and so on of a work tile of `tiles` from the sequence's tile
        `first` on. rows: where the scores of the lane's rows go. -> (its next tile, counted from behind this work tile,
        state)"""
        ring, sums, key_in_tile = scoring.ring, scoring.sums, scoring.key_in_tile
        # No tile is without its epilogue yet: a key that is stored nowhere.
        scale, masked_key, key = Float32(0.0), Int32(NO_KEY), Int32(NO_KEY)
        if tile < tiles:
            ring.consumer_wait(k_state)
        while tile < tiles:
            done, stage = k_state, ring.index(k_state)
            multiply(mma, scoring.acc, scoring.ra, scoring.rb, stage, q_stage)
            # While it runs: the last tile's epilogue, and what this one's needs.
            self.epilogue(scoring, scale, masked_key, rows, key)
            scale = scoring.scales[key_in_tile, stage]
            key = (first + tile) * TILE + key_in_tile
            # A key that no row sees is as if beyond every limit.
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
        """Of half scores: bring a work tile's queries into fp16's range, and the weights with them. All consumer
        warpgroups come together in it."""
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
            # The rows that `consume` gives to even and odd lanes; without a second query odd lanes have the first's.
            if const_expr(i % 2 == 0):
                unit[i // 2] = scale
            elif quad % 2 == 1:
                unit[i // 2] = scale

    @cute.jit
    def epilogue(self, scoring: Scoring, scale, masked_key, rows, key):
        """Add up the quads' sums over heads, give each lane a key of its rows, scale, mask, store; NO_KEY: no tile."""
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
