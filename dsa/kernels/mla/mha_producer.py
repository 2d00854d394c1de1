"""The producer warps of multi-head attention over packed (varlen) sequences.

The LOAD warp loads Q, K and V by TMA. The CLEAR warp zero-fills the V rows past the end of a sequence.

The SCHEDULE warp runs a dynamic persistent scheduler. A work tile is a tile of query rows of one head, with all KV
blocks that any of these rows sees. Work tiles are numbered sequence by sequence and, in a sequence, by groups of heads.
In a group, row tiles run from the last rows, which see the most keys if attention is causal, to the first rows, and
heads vary fastest. A CTA begins with the work tile whose number equals the CTA's index. For each further work tile, the
SCHEDULE warp takes a value from a tile counter in global memory (dsa/cute/tile_counter.py), and adds the number of CTAs
to get the work tile's number. The SCHEDULE warp publishes each WorkTileInfo to the other warps through a two-stage
pipeline in shared memory.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from dsa.cute.pipeline import Mbarriers, Pipeline, expect_bytes, start, state_at
from dsa.cute.reductions import warp_inclusive_scan
from dsa.cute.shared_memory import store_16
from dsa.cute.sm90 import SHARED_BYTES, WARP
from dsa.cute.tile_counter import draw
from dsa.cute.work_tile import WorkTilePipeline

STAGES = 2  # stages of the pipelines of K and of V


OUT_ROWS, OUT_COLUMNS = 16, 64  # rows and channels of O that a warp stages in shared memory at a time


@dataclass(frozen=True)
class MhaConfig:
    """Tile shape and pipeline of a variant.

    dim, value_dim  channels of a head: D of Q and K, DV of V
    keys            keys per KV block
    warpgroups      number of consumer warpgroups, 64 query rows each
    q_stages        stages of the pipeline of Q, each for the Q of one work tile
    q_rmem          whether consumers copy Q from shared memory to registers, as operand A of S = Q K^T
    """

    dim: int
    value_dim: int
    keys: int
    warpgroups: int
    q_stages: int
    q_rmem: bool

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    def fits(self) -> bool:
        """Whether the variant fits in shared memory, with 3 KiB left for barriers, work tiles and alignment."""
        queries = self.q_stages * self.rows * self.dim
        loaded = STAGES * self.keys * (self.dim + self.value_dim)
        return 2 * (queries + loaded + 4 * self.warpgroups * OUT_ROWS * OUT_COLUMNS) + 3 * 1024 <= SHARED_BYTES


class WorkTileInfo(NamedTuple):
    """A work tile, as the SCHEDULE warp publishes it to the other warps.

    blocks         number of KV blocks; 0 after the last work tile
    query          first query row, among the rows of all sequences
    row_count      number of query rows from `query` to the end of the sequence
    head, kv_head  query head, and the KV head that it reads
    key            first key of the sequence, among the keys of all sequences
    key_count      number of keys of the sequence
    first          number of keys that the first query row sees; each further row sees one more, up to key_count. Can be
                   negative if attention is causal
    value_rows     number of the sequence's V rows from the start of the work tile's last block on; 0 if the work tile
                   sees no key. CLEAR zero-fills the rows of this block from row value_rows on
    """

    blocks: Int32
    query: Int32
    row_count: Int32
    head: Int32
    kv_head: Int32
    key: Int32
    key_count: Int32
    first: Int32
    value_rows: Int32

    @staticmethod
    def last() -> "WorkTileInfo":
        return WorkTileInfo(*(Int32(0) for _ in WorkTileInfo._fields))


@dataclass(frozen=True)
class MhaPipelines:
    """The pipelines of a CTA.

    q           Q of a work tile
    k, v        a block of K, a block of V
    v_loaded    one mbarrier per stage of v. If a block has rows past the sequence's end, its load completes this
                mbarrier instead of v's full barrier. When the load is complete, CLEAR zero-fills these rows and arrives
                at v's full barrier
    work_tiles  pipeline of WorkTileInfo

    Each warp role creates the pipelines inside its branch of the kernel. If the kernel created them before the
    branches, the addresses would stay in registers.
    """

    q: Pipeline
    k: Pipeline
    v: Pipeline
    v_loaded: Mbarriers
    work_tiles: WorkTilePipeline

    @staticmethod
    def of(storage, q_stages: int) -> "MhaPipelines":
        return MhaPipelines(
            Pipeline.of(storage.q_barriers, q_stages),
            Pipeline.of(storage.k_barriers, STAGES),
            Pipeline.of(storage.v_barriers, STAGES),
            Mbarriers(storage.v_loaded.data_ptr(), STAGES),
            WorkTilePipeline.of(storage.work_tiles, WorkTileInfo),
        )

    @cute.jit
    def init(self, consumer_warps: cutlass.Constexpr):
        """Initialize the barriers; called by one thread. LOAD and CLEAR read work tiles, too, hence the 2."""
        for pipeline in (self.q, self.k, self.v):
            pipeline.init(consumer_warps)
        self.v_loaded.init(1)
        self.work_tiles.init(consumer_warps + 2)


class MhaProducer:
    """The LOAD and CLEAR warps.

    rope  number of rope channels, the last channels of a key, if these are in a separate tensor that all heads share;
          otherwise 0
    """

    def __init__(self, dtype: type[cutlass.Numeric], cfg: MhaConfig, rope: int):
        self.dtype, self.cfg, self.rope = dtype, cfg, rope
        self.rows, self.keys, self.dim, self.value_dim = cfg.rows, cfg.keys, cfg.dim, cfg.value_dim

    @cute.jit
    def load(self, storage, loads: list, shared: list):
        """Run the LOAD warp over all work tiles of this CTA.

        loads   (TMA atom, tensor [tokens, channels, heads]) of Q, of K, of V, and of the rope channels if these
                are a separate tensor
        shared  stages of Q [rows, d, stage], of K [keys, d, stage] and of V [keys, dv, stage]
        """
        width, pipelines = self.dtype.width // 8, MhaPipelines.of(storage, self.cfg.q_stages)
        (q_atom, mq), (k_atom, mk), (v_atom, mv), *_ = loads
        rope_atom, mrope = loads[-1]
        sq, sk, sv = shared
        tile_state, q_state, k_state, v_state = start(), start(), start(), start()
        blocks = Int32(1)
        nope = self.dim - self.rope
        k_shared, rope_shared = sk, sk
        if const_expr(self.rope > 0):
            k_shared = cute.local_tile(sk, (self.keys, nope, STAGES), (0, 0, 0))
            rope_shared = cute.local_tile(sk, (self.keys, self.rope, STAGES), (0, nope // self.rope, 0))
        while blocks > 0:
            work_tile = pipelines.work_tiles.current(tile_state)
            tile_state = pipelines.work_tiles.release(tile_state)
            blocks, key, kv_head = work_tile.blocks, work_tile.key, work_tile.kv_head
            if blocks > 0:
                tq, gq = blocks_of(q_atom, mq, sq, work_tile.query, work_tile.head, (self.rows, self.dim))
                tk, gk = blocks_of(k_atom, mk, k_shared, key, kv_head, (self.keys, nope))
                tr, gr = tk, gk
                if const_expr(self.rope > 0):
                    tr, gr = blocks_of(rope_atom, mrope, rope_shared, key, 0, (self.keys, self.rope))
                tv, gv = blocks_of(v_atom, mv, sv, key, kv_head, (self.keys, self.value_dim))
                pipelines.q.producer_acquire(q_state, self.rows * self.dim * width)
                cute.copy(
                    *(q_atom, gq[None, 0], tq[None, q_state.stage]), tma_bar_ptr=pipelines.q.producer_barrier(q_state)
                )
                q_state = pipelines.q.advance(q_state)
                for i in cutlass.range(blocks, unroll=1):
                    n = blocks - 1 - i
                    pipelines.k.producer_acquire(k_state, self.keys * self.dim * width)
                    k_full = pipelines.k.producer_barrier(k_state)
                    cute.copy(k_atom, gk[None, n], tk[None, k_state.stage], tma_bar_ptr=k_full)
                    if const_expr(self.rope > 0):
                        cute.copy(rope_atom, gr[None, n], tr[None, k_state.stage], tma_bar_ptr=k_full)
                    k_state = pipelines.k.advance(k_state)
                    pipelines.v.producer_wait(v_state)
                    v_full = pipelines.v.producer_barrier(v_state)
                    if i == 0 and work_tile.value_rows < self.keys:
                        v_full = pipelines.v_loaded.barrier(v_state.stage)
                    with cute.arch.elect_one():
                        expect_bytes(v_full, self.keys * self.value_dim * width)
                    cute.copy(v_atom, gv[None, n], tv[None, v_state.stage], tma_bar_ptr=v_full)
                    v_state = pipelines.v.advance(v_state)

    @cute.jit
    def clear(self, storage, values: cute.Tensor, lane):
        """Run the CLEAR warp: in the last V block of each work tile, zero-fill the rows past the sequence's end.

        These rows belong to the next sequence. P of their keys is 0, but the rows can contain NaN, and 0 * NaN is NaN.
        """
        pipelines = MhaPipelines.of(storage, self.cfg.q_stages)
        # count: number of V blocks so far. phases: one phase bit per stage of v_loaded. The phases cannot be computed
        # from `count`, because not every block uses v_loaded.
        tile_state, blocks, count, phases = start(), Int32(1), Int32(0), Int32(0)
        while blocks > 0:
            work_tile = pipelines.work_tiles.current(tile_state)
            tile_state = pipelines.work_tiles.release(tile_state)
            blocks = work_tile.blocks
            if blocks > 0:
                if work_tile.value_rows < self.keys:
                    v_state = state_at(count, STAGES)
                    pipelines.v_loaded.wait((phases >> v_state.stage) & 1, v_state.stage)
                    phases = phases ^ (1 << v_state.stage)
                    self.clear_values(values, v_state.stage, work_tile.value_rows, lane)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.sync_warp()
                    pipelines.v.producer_commit(v_state)
                count += blocks

    @cute.jit
    def clear_values(self, values: cute.Tensor, stage, first, lane):
        """Zero-fill the rows of a V stage from row `first` on; called by a warp.

        A stage consists of blocks of 64 channels. In a block, a row is 128 contiguous bytes.
        """
        start = Int32(values.iterator.toint()) + stage * (self.keys * self.value_dim * 2)
        for block in cutlass.range_constexpr(self.value_dim // 64):
            for place in cutlass.range(first * 8 + lane, self.keys * 8, 32, unroll=1):
                store_16(start + block * (self.keys * 128) + place * 16, [Uint32(0)] * 4)


@cute.jit
def blocks_of(atom: cute.CopyAtom, x: cute.Tensor, shared: cute.Tensor, row, head, shape: cutlass.Constexpr):
    """Partition a TMA load of blocks of `shape` (rows, channels). Return (shared memory [block, stage], global memory
    [block, n]), where the first mode is all elements of a block.

    Block n of global memory has shape[0] rows of head `head`, from row `row` + n * shape[0] on.
    """
    blocks = cute.local_tile(cute.domain_offset((row, 0), x[None, None, head]), shape, (None, 0))
    return cute.nvgpu.cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(blocks, 0, 2)
    )


@dataclass(frozen=True)
class MhaScheduler:
    """Computes the work tiles of a CTA.

    cu_q, cu_k        [B + 1] int32: first row of each sequence in Q and in K, then the total
    tile_counter      [1] int32, 0 at launch
    heads             number of query heads
    group             query heads per group, whose work tiles are adjacent
    ratio             query heads per KV head
    causal            > 0: the last row of a sequence sees all keys, and each row one key less than the next row.
                      Otherwise all rows see all keys
    queries, kv_rows  numbers of rows of Q and of K, over all sequences
    rows, keys        number of query rows of a work tile, number of keys of a KV block
    """

    cu_q: cute.Tensor
    cu_k: cute.Tensor
    tile_counter: cute.Tensor
    heads: Int32
    group: Int32
    ratio: Int32
    causal: Int32
    queries: Int32
    kv_rows: Int32
    rows: cutlass.Constexpr[int]
    keys: cutlass.Constexpr[int]

    @cute.jit
    def run(self, work_tiles: WorkTilePipeline, lane):
        """Publish this CTA's work tiles, one after the other; called by a warp."""
        index, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        batch = self.cu_q.shape[0] - 1
        state, more = start(), Int32(1)
        sequence, before = Int32(0), Int32(0)
        while more > 0:
            # Find the sequence that contains work tile number `index`. A CTA's numbers increase, so the search resumes
            # at the previous work tile's sequence. Each step checks 32 sequences, one per lane.
            passed = Int32(WARP)
            while passed == WARP:
                other = sequence + lane
                own = Int32(0)
                if other < batch:
                    _, own = span(self.cu_q, other, self.queries)
                    own = (own + self.rows - 1) // self.rows * self.heads
                end = before + warp_inclusive_scan(own, lane)
                passed = cute.arch.popc(cute.arch.vote_ballot_sync(other < batch and end <= index))
                if passed > 0:
                    before = cute.arch.shuffle_sync(end, passed - 1)
                sequence += passed
            work_tile = WorkTileInfo.last()
            if sequence < batch:
                work_tile = self.work_tile(sequence, index - before)
            else:
                more = Int32(0)
            state = work_tiles.publish(state, work_tile)
            index = ctas + draw(self.tile_counter, lane)

    @cute.jit
    def work_tile(self, sequence, local) -> WorkTileInfo:
        """Return work tile number `local` of sequence `sequence`. Numbers in a sequence begin at 0."""
        query, queries = span(self.cu_q, sequence, self.queries)
        key, keys = span(self.cu_k, sequence, self.kv_rows)
        tiles = (queries + self.rows - 1) // self.rows
        first_head = local // (tiles * self.group) * self.group
        local -= first_head * tiles
        together = cutlass.min(self.group, self.heads - first_head)
        row = (tiles - 1 - local // together) * self.rows
        head = first_head + local % together
        count = queries - row
        first, seen = keys, keys
        if self.causal > 0:
            first = row + keys - queries + 1
            seen = cutlass.min(keys, first + cutlass.min(count, self.rows) - 1)
        # A work tile whose rows see no key still gets one block, which is fully masked.
        blocks = cutlass.max((seen + self.keys - 1) // self.keys, 1)
        value_rows = keys - (blocks - 1) * self.keys
        if seen <= 0:
            value_rows = Int32(0)
        return WorkTileInfo(
            blocks=blocks,
            query=query + row,
            row_count=count,
            head=head,
            kv_head=head // self.ratio,
            key=key,
            key_count=keys,
            first=first,
            value_rows=value_rows,
        )


@cute.jit
def span(bounds: cute.Tensor, sequence, rows: Int32):
    """Return (first row, number of rows) of a sequence.

    A sequence with wrong bounds counts as empty, so that no work tile reads or writes outside the tensors.
    """
    first, end = bounds[sequence], bounds[sequence + 1]
    if first < 0 or end < first or end > rows:
        first, end = Int32(0), Int32(0)
    return first, end - first
