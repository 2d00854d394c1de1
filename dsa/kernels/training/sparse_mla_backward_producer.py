"""The producer warpgroup of the sparse MLA backward kernel (sparse_mla_backward_sm90.py), and the definitions that the
kernel's roles share: sizes, shared memory, pipelines, tile scheduler.

A work tile is 64 heads of a query with all of the query's keys, in tiles of 64 keys. The producer takes work tiles,
loads the Q and dO of a work tile by TMA, and gathers the query's selected keys by cp.async, 16 bytes per lane.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from dsa.cute.copies import arrive_when_gathered, bulk_gather, gather_16, prefetch_to_l2
from dsa.cute.pipeline import Mbarriers, Pipeline, PipelineState, expect_bytes, state_at, state_at_of_two
from dsa.cute.shared_memory import swizzled
from dsa.cute.sm90 import WARP, WARPGROUP, opaque
from dsa.cute.tile_counter import draw
from dsa.cute.work_tile import WorkTilePipeline
from dsa.kernels.training.limits import MLA_V_CHANNELS, SPARSE_HEAD_TILE, SPARSE_KEY_TILE
from dsa.kernels.training.mainloop import tma_tiles

TILE, HEADS = SPARSE_KEY_TILE, SPARSE_HEAD_TILE
CHUNK = 64  # channels per chunk
VALUE = MLA_V_CHANNELS
CHUNKS = VALUE // CHUNK
HALF, HALF_CHUNKS = VALUE // 2, CHUNKS // 2
ROPE_HALF = 32
CONSUMER_WARPS, THREADS = 8, 3 * WARPGROUP  # warp CONSUMER_WARPS is the first producer warp
KEY_ROW_STAGES = 4
HEAD_TERM_BYTES = HEADS * 8
WARP_KEYS = TILE // 4  # keys of a tile that one producer warp gathers


class BackwardConfig:
    """Configuration of a variant of the kernel.

    dtype         dtype of q, kv, dout and dq
    channels      channels per key
    ordered       store the dKV of each key tile to separate rows, which another kernel sums in a fixed order. Otherwise
                  add it to the rows of the keys
    rope          whether keys have a rope part
    strip         channels of dKV per product. 64: operand A is P^T from registers and dS^T from shared memory. 32: both
                  are from registers, which takes 8% less time with a rope part and 5% more without it
    query_chunks  order in which the chunks of Q and dO are released at the end of a work tile, and loaded again: the
                  rope part of Q (number CHUNKS) first, if there is one. The consumer that computed the scores of the
                  last key tile releases a chunk when it no longer needs it for dKV
    k_parts       number of parts in which half of a key tile's channels is loaded and used: HALF_CHUNKS chunks, then
                  half of the rope part
    """

    def __init__(self, dtype: type[cutlass.Numeric], channels: int, ordered: bool):
        self.dtype, self.channels, self.ordered, self.rope = dtype, channels, ordered, channels > VALUE
        self.strip = 32 if self.rope else 64
        self.query_chunks = [*([CHUNKS] if self.rope else []), *range(CHUNKS)]
        self.k_parts = HALF_CHUNKS + (1 if self.rope else 0)


@dataclass(frozen=True)
class SharedTensors:
    """A CTA's shared memory. The tensors k to ds have the dtype of q.

    k           [64 keys, 64 channels, 8]: a key tile in chunks of 64 channels, without the rope part
    k_rope      [64 keys, 32 channels, 2]: the rope part of the key tile
    k_half      [64 keys, 256 channels, 2]: a view of k as two halves of the channels
    q, do       [64 heads, 64 channels, 8]: strips of 64 channels; with a rope part [64, 32, 18] and [64, 32, 16], q's
                rope part last
    ds          [64 keys, 64 heads, 2 consumer warpgroups]: dS of the last key tile whose scores the warpgroup computed
    head_terms  address of the fp32 pairs (l / ln 2, e) of the heads, see sparse_mla_backward_sm90.py
    key_rows    [64, KEY_ROW_STAGES]: for the last KEY_ROW_STAGES key tiles, each key's row in kv, or -1 for an invalid
                key
    """

    k: cute.Tensor
    k_rope: cute.Tensor
    k_half: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    head_terms: Int32
    key_rows: cute.Tensor


class WorkTileInfo(NamedTuple):
    """A work tile. number: index of the work tile. The end marker is a number that is not below the number of work
    tiles."""

    number: Int32


@dataclass(frozen=True)
class BackwardPipelines:
    """The pipelines of a CTA.

    work_tiles  WorkTileInfos, from the first producer warp to all warps of the CTA
    q           a one-stage ring per chunk of 64 channels of Q and dO, and one for Q's rope part
    k           a one-stage ring per half of a key tile's channels; a half arrives in `k_parts` parts
    ds_full     mbarrier whose phase ends when a key tile's dS is in shared memory; one phase per key tile
    """

    work_tiles: WorkTilePipeline
    q: Pipeline
    k: Pipeline
    ds_full: Mbarriers

    @cute.jit
    def init(self):
        self.work_tiles.init(THREADS // WARP)
        self.q.init(CONSUMER_WARPS)
        # Each producer thread arrives at each part of k when its copies are complete. At the first part of half 0 each
        # producer warp also arrives once, after it has written its key_rows.
        Mbarriers(self.k.full, 1).init(WARPGROUP + 4)
        Mbarriers(self.k.full + 1, self.k.stages * self.k.parts - 1).init(WARPGROUP)
        Mbarriers(self.k.empty, self.k.stages).init(4)
        self.ds_full.init(4)

    def q_chunk(self, chunk: int) -> Pipeline:
        """Return the ring of chunk `chunk` of Q and dO; chunk number CHUNKS is the rope part of Q."""
        return self.q.ring(chunk, 1)

    def k_half(self, half: int | Int32) -> Pipeline:
        """Return the ring of half `half` of a key tile's channels."""
        return self.k.ring(half, 1)


# Each role keeps one register `count`. Its lowest two bits are the number of key tiles that the role has processed,
# modulo 4. The upper bits are the number of work tiles that the role has processed. The functions below return the
# pipeline states at a count, and the next counts.


def work_tile_state(count: Int32) -> PipelineState:
    return state_at_of_two(count >> 2)


def q_state(count: Int32) -> PipelineState:
    return state_at(count >> 2, 1)


def k_state(count: Int32) -> PipelineState:
    return state_at(count, 1)


def next_key_tile(count: Int32) -> Int32:
    return (count & -4) | ((count + 1) & 3)


def next_work_tile(count: Int32) -> Int32:
    return count + 4


@dataclass(frozen=True)
class TileScheduler:
    """A dynamic persistent scheduler. The index of a CTA's first work tile is the CTA's block index. While the CTA
    computes a work tile, its producer takes the next index from a tile counter in global memory. A WorkTilePipeline
    passes it to the consumers.

    work_tiles  number of work tiles of all queries
    key_tiles   number of key tiles per query
    ctas        number of CTAs
    head_tiles  number of blocks of 64 heads per query, as a divisor
    """

    work_tiles: Int32
    key_tiles: Int32
    ctas: Int32
    head_tiles: cute.FastDivmodDivisorV2

    @cute.jit
    def coordinates(self, number):
        query, head_tile = divmod(number, self.head_tiles)
        return query, head_tile * HEADS


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
        """Run the producer warpgroup: load all work tiles of this CTA. atoms, sources: TMA atoms and TMA tensors of q
        and dout. inputs: (q, kv, dout, head_terms, indices, tile_counter), see `compile_sparse_mla_backward`."""
        q, kv, dout, head_terms, indices, tile_counter = inputs
        work_tiles = pipelines.work_tiles
        count = Int32(0)
        block, _, _ = cute.arch.block_idx()
        if warp == 0:
            work_tiles.publish(work_tile_state(count), WorkTileInfo(Int32(block)))
        while work_tiles.current(work_tile_state(count)).number < scheduler.work_tiles:
            query, _ = scheduler.coordinates(work_tiles.read(work_tile_state(count)).number)
            index = self.index_of(indices, query, warp * WARP_KEYS + (opaque(lane) & (WARP_KEYS - 1)))
            for tile in cutlass.range(scheduler.key_tiles, unroll=1):
                valid = index >= 0 and index < kv.shape[0]
                row = index if valid else Int32(-1)
                address = kv[cutlass.max(row, 0), None].iterator.toint()
                valid_mask = Uint32(cute.arch.vote_ballot_sync(valid)) & 0xFFFF
                # Prefetch the next tile's indices while this tile's keys are gathered.
                index = self.index_of(
                    indices, query, (tile + 1) * TILE + warp * WARP_KEYS + (opaque(lane) & (WARP_KEYS - 1))
                )
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
                    # Take the next work tile late, after three quarters of the key tiles. Otherwise a slow CTA could
                    # take one that another CTA could begin sooner.
                    if tile == (3 * scheduler.key_tiles) >> 2:
                        following = WorkTileInfo(scheduler.ctas + draw(tile_counter, lane))
                        work_tiles.publish(work_tile_state(next_work_tile(count)), following)
                count = next_key_tile(count)
            work_tiles.release(work_tile_state(count))
            count = next_work_tile(count)
            following = work_tiles.current(work_tile_state(count))
            self.prefetch_q(q, dout, scheduler, following.number, warp, opaque(lane))

    @cute.jit
    def prefetch_q(self, q, dout, scheduler: TileScheduler, number, warp, lane):
        """Prefetch the rows of q and dout of work tile `number` into the L2 cache. Nothing is prefetched for the end
        marker."""
        query, first = scheduler.coordinates(number)
        head = first + (warp & 1) * 32 + lane
        if query < q.shape[0] and head < q.shape[1]:
            if warp < 2:
                prefetch_to_l2(Int64(q[query, head, None].iterator.toint()), Int32(2 * self.cfg.channels))
            else:
                prefetch_to_l2(Int64(dout[query, head, None].iterator.toint()), Int32(2 * VALUE))

    @cute.jit
    def index_of(self, indices, query, position):
        """Return entry `position` of a query's list of indices, or -1 past the end of the list."""
        index = Int32(-1)
        if position < indices.shape[1]:
            index = indices[query, position]
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
        """Load Q, dO and the head terms of 64 heads, chunk by chunk, as the consumers release those of the previous
        work tile. Q and dO of heads after the last one are zeros (TMA), and the terms of these heads give P = 0."""
        query, first = scheduler.coordinates(pipelines.work_tiles.read(work_tile_state(count)).number)
        state = q_state(count)
        strip_width = self.cfg.strip
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
                own, source = tma_tiles(
                    *(atoms[n], target, sources[n], (HEADS, strip_width), (0, 0, 0), (first // HEADS, None, query))
                )
                barrier = pipeline.producer_barrier(state)
                cute.copy(atoms[n], source[None, strip], own[None, strip], tma_bar_ptr=barrier)

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
        """Gather half of the channels of this warp's 16 keys, 16 bytes per lane. Eight lanes copy 128 bytes of a key.
        address: global address of key lane % 16. valid_mask: bit i is 1 if key i is valid; invalid keys become
        zeros."""
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
            # Half of a key's rope part is 64 bytes, which four lanes copy. So a warp copies 8 of its 16 keys at a time.
            start = Int32(shared.k_rope.iterator.toint()) + half * (2 * TILE * ROPE_HALF)
            for i in cutlass.range_constexpr(WARP_KEYS // 8):
                key = 8 * i + (lane >> 2)
                own_low, own_high = cute.arch.shuffle_sync(low, key), cute.arch.shuffle_sync(high, key)
                source = (Int64(own_high) << 32) + Int64(Uint32(own_low))
                row = warp * WARP_KEYS + key
                offset = row * (2 * ROPE_HALF) + (((lane & 3) ^ ((row >> 1) & 3)) << 4)
                source += 2 * VALUE + half * (2 * ROPE_HALF) + (lane & 3) * 16
                gather_16(start + offset, source, (valid_mask >> key) & 1 != 0)
            arrive_when_gathered(pipeline.producer_barrier(state, HALF_CHUNKS))
