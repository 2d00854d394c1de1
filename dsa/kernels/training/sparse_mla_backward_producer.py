"""The producer warpgroup of the sparse MLA backward kernel. It takes work tiles, loads their Q and dO by TMA, and
gathers their selected keys, 16 bytes per lane."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from dsa.cute.copies import arrive_when_gathered, bulk_gather, gather_16, prefetch_to_l2
from dsa.cute.pipeline import PipelineState, expect_bytes
from dsa.cute.shared_memory import swizzled
from dsa.cute.sm90 import opaque
from dsa.kernels.training.sparse_mla_backward_tiles import (
    CHUNK,
    CHUNKS,
    HALF_CHUNKS,
    HEAD_TERM_BYTES,
    HEADS,
    KEY_ROW_STAGES,
    ROPE_HALF,
    TILE,
    VALUE,
    BackwardConfig,
    BackwardPipelines,
    SharedTensors,
    TileScheduler,
    k_state,
    next_key_tile,
    next_work_tile,
    q_state,
    work_tile_state,
)

WARP_KEYS = TILE // 4  # keys of a tile per warp


class BackwardProducer:
    def __init__(self, cfg: BackwardConfig):
        self.cfg = cfg

    @cute.jit
    def run(
        self,
        atoms,
        sources,
        inputs,
        scheduler: TileScheduler,
        shared: SharedTensors,
        pipelines: BackwardPipelines,
        warp,
        lane,
    ):
        """Load all work tiles of this CTA. atoms, sources: TMA atoms and tensors of q and dout. inputs: q, kv, dout,
        head_terms, indices, tile_counter."""
        q, kv, dout, head_terms, indices, tile_counter = inputs
        work_tiles = pipelines.work_tiles
        count = Int32(0)
        if warp == 0:
            work_tiles.publish(work_tile_state(count), scheduler.first())
        while work_tiles.current(work_tile_state(count)).number < scheduler.work_tiles:
            query, _ = scheduler.coordinates(work_tiles.read(work_tile_state(count)).number)
            index = self.index_of(indices, query, warp * WARP_KEYS + (opaque(lane) & (WARP_KEYS - 1)))
            for tile in cutlass.range(scheduler.key_tiles, unroll=1):
                valid = index >= 0 and index < kv.shape[0]
                row = index if valid else Int32(-1)
                address = kv[cutlass.max(row, 0), None].iterator.toint()
                valid_mask = Uint32(cute.arch.vote_ballot_sync(valid)) & 0xFFFF
                # Prefetch the next tile's indices while this tile's keys are gathered.
                own = opaque(lane) & (WARP_KEYS - 1)
                index = self.index_of(indices, query, (tile + 1) * TILE + warp * WARP_KEYS + own)
                for half in cutlass.range_constexpr(2):
                    pipelines.k_half(half).producer_wait(k_state(count))
                    if const_expr(half == 0):
                        if lane < WARP_KEYS:
                            shared.key_rows[warp * WARP_KEYS + lane, count & (KEY_ROW_STAGES - 1)] = row
                        cute.arch.sync_warp()
                        pipelines.k_half(half).producer_commit(k_state(count))
                    self.gather_half(shared, pipelines, half, k_state(count), address, valid_mask, warp, opaque(lane))
                if warp == 0:
                    if tile == 0:
                        self.load_q(atoms, sources, head_terms, scheduler, shared, pipelines, count)
                    # Late, so that a slow CTA does not take a work tile that another CTA could begin sooner.
                    if tile == (3 * scheduler.key_tiles) >> 2:
                        following = scheduler.advance(tile_counter, lane)
                        work_tiles.publish(work_tile_state(next_work_tile(count)), following)
                count = next_key_tile(count)
            work_tiles.release(work_tile_state(count))
            count = next_work_tile(count)
            number = work_tiles.current(work_tile_state(count)).number
            self.prefetch_q(q, dout, scheduler, number, warp, opaque(lane))

    @cute.jit
    def prefetch_q(self, q, dout, scheduler: TileScheduler, number, warp, lane):
        """Prefetch a work tile's rows of q and dout into the L2 cache."""
        query, first = scheduler.coordinates(number)
        head = first + (warp & 1) * 32 + lane
        if query < q.shape[0] and head < q.shape[1]:
            if warp < 2:
                prefetch_to_l2(Int64(q[query, head, None].iterator.toint()), Int32(2 * self.cfg.channels))
            else:
                prefetch_to_l2(Int64(dout[query, head, None].iterator.toint()), Int32(2 * VALUE))

    @cute.jit
    def index_of(self, indices, query, place):
        """Entry `place` of a query's list of indices, -1 after the last one."""
        index = Int32(-1)
        if place < indices.shape[1]:
            index = indices[query, place]
        return index

    @cute.jit
    def load_q(
        self,
        atoms,
        sources,
        head_terms,
        scheduler: TileScheduler,
        shared: SharedTensors,
        pipelines: BackwardPipelines,
        count,
    ):
        """Load Q, dO and the terms of 64 heads, each chunk as soon as the consumers release the previous work tile's.
        Heads after the last one are zeros, and their terms give P = 0."""
        query, first = scheduler.coordinates(pipelines.work_tiles.read(work_tile_state(count)).number)
        state = q_state(count)
        one, strip_width = cute.make_layout(1), self.cfg.strip
        for chunk in self.cfg.query_chunks:
            is_first = chunk == self.cfg.query_chunks[0]
            strips_a_chunk = CHUNK // strip_width
            targets = (shared.q, shared.do) if chunk < CHUNKS else (shared.q,)
            strips = [(n, x, chunk * strips_a_chunk + i) for n, x in enumerate(targets) for i in range(strips_a_chunk)]
            pipeline = pipelines.q_chunk(chunk)
            pipeline.producer_wait(state)
            size = len(strips) * 2 * HEADS * strip_width + (HEAD_TERM_BYTES if is_first else 0)
            with cute.arch.elect_one():
                expect_bytes(pipeline.producer_barrier(state), size)
                if const_expr(is_first):
                    source = Int64(head_terms[query, first // HEADS, None].iterator.toint())
                    barrier = pipeline.producer_barrier(state)
                    bulk_gather(shared.head_terms, source, Int32(HEAD_TERM_BYTES), barrier)
            for n, target, strip in strips:
                tiles = cute.local_tile(sources[n], (HEADS, strip_width), (first // HEADS, None, query))
                own, source = cute.nvgpu.cpasync.tma_partition(
                    atoms[n], 0, one, cute.group_modes(target, 0, 2), cute.group_modes(tiles, 0, 2)
                )
                full = pipeline.producer_barrier(state)
                cute.copy(atoms[n], source[None, strip], own[None, strip], tma_bar_ptr=full)

    @cute.jit
    def gather_half(
        self,
        shared: SharedTensors,
        pipelines: BackwardPipelines,
        half: cutlass.Constexpr,
        state: PipelineState,
        address: Int64,
        valid_mask: Uint32,
        warp,
        lane,
    ):
        """Gather half of the channels of this warp's 16 keys, 16 bytes per lane, 8 lanes per key. address: of key
        lane % 16. valid_mask: one bit per key."""
        low, high = Int32(address & 0xFFFFFFFF), Int32(address >> 32)
        own, vector = warp * WARP_KEYS + (lane >> 3), lane & 7
        sources, valid = [], []
        for i in cutlass.range_constexpr(WARP_KEYS // 4):
            key = 4 * i + (lane >> 3)
            own_low, own_high = cute.arch.shuffle_sync(low, key), cute.arch.shuffle_sync(high, key)
            sources.append((Int64(own_high) << 32) + Int64(Uint32(own_low)) + vector * 16)
            valid.append((valid_mask >> key) & 1 != 0)
        pipeline = pipelines.k_half(half)
        start = Int32(shared.k.iterator.toint())
        for part in cutlass.range_constexpr(HALF_CHUNKS):
            chunk = half * HALF_CHUNKS + part
            for i in cutlass.range_constexpr(WARP_KEYS // 4):
                target = start + 2 * (chunk * TILE * CHUNK + swizzled(own + 4 * i, vector))
                gather_16(target, sources[i] + 2 * CHUNK * chunk, valid[i])
            arrive_when_gathered(pipeline.producer_barrier(state, part))
        if const_expr(self.cfg.rope):
            # Rows have 64 bytes, four lanes per key, so 8 of the 16 keys at a time.
            start = Int32(shared.k_rope.iterator.toint()) + half * (2 * TILE * ROPE_HALF)
            for i in cutlass.range_constexpr(WARP_KEYS // 8):
                key = 8 * i + (lane >> 2)
                own_low, own_high = cute.arch.shuffle_sync(low, key), cute.arch.shuffle_sync(high, key)
                source = (Int64(own_high) << 32) + Int64(Uint32(own_low))
                row = warp * WARP_KEYS + key
                place = row * (2 * ROPE_HALF) + (((lane & 3) ^ ((row >> 1) & 3)) << 4)
                source += 2 * VALUE + half * (2 * ROPE_HALF) + (lane & 3) * 16
                gather_16(start + place, source, (valid_mask >> key) & 1 != 0)
            arrive_when_gathered(pipeline.producer_barrier(state, HALF_CHUNKS))
