"""The producer warps of dense attention, and the shared memory that they fill.

The LOAD warp loads Q, K and V by TMA. The CLEAR warp zero-fills the V rows past the end of a sequence.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from dsa.cute.pipeline import Mbarriers, Pipeline, expect_bytes, start, state_at
from dsa.cute.shared_memory import store_16
from dsa.cute.work_tile import WorkTilePipeline
from dsa.kernels.mla.mha_scheduler import WorkTileInfo

STAGES = 2  # of K and of V


@dataclass(frozen=True)
class Loads:
    """TMA atoms of Q, K and V, and the tensors [tokens, channels, heads] that they load.

    `rope` and `mrope` load the rope channels of the keys where these are in a tensor of their own.
    """

    q: cute.CopyAtom
    mq: cute.Tensor
    k: cute.CopyAtom
    mk: cute.Tensor
    v: cute.CopyAtom
    mv: cute.Tensor
    rope: cute.CopyAtom | None = None
    mrope: cute.Tensor | None = None


@dataclass(frozen=True)
class SharedTensors:
    """Stages in shared memory: q [rows, d, stage], k [keys, d, stage], v [keys, dv, stage]."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor


@dataclass(frozen=True)
class MhaPipelines:
    """The pipelines of a CTA.

    q           Q of a work tile
    k, v        a block of K, a block of V
    v_loaded    one mbarrier per stage of v: the TMA load is complete, but CLEAR has not zero-filled the rows
                past the sequence yet
    work_tiles  WorkTileInfo

    Each warp role builds them inside its branch of the kernel. Built before the branches, they would keep
    their addresses in registers.
    """

    q: Pipeline
    k: Pipeline
    v: Pipeline
    v_loaded: Mbarriers
    work_tiles: WorkTilePipeline

    @staticmethod
    def of(storage, q_stages: int) -> "MhaPipelines":
        """Return the pipelines whose barriers are in the kernel's shared memory."""
        return MhaPipelines(
            Pipeline.of(storage.q_barriers, q_stages),
            Pipeline.of(storage.k_barriers, STAGES),
            Pipeline.of(storage.v_barriers, STAGES),
            Mbarriers(storage.v_loaded.data_ptr(), STAGES),
            WorkTilePipeline.of(storage.work_tiles, WorkTileInfo),
        )

    @cute.jit
    def init(self, consumer_warps: cutlass.Constexpr):
        """Initialize the barriers; called by one thread. LOAD and CLEAR also read work tiles, hence + 2."""
        for pipeline in (self.q, self.k, self.v):
            pipeline.init(consumer_warps)
        self.v_loaded.init(1)
        self.work_tiles.init(consumer_warps + 2)


class MhaProducer:
    """Load Q tiles of `rows` x `dim` into `q_stages` stages, and blocks of `keys` keys and values.

    width  bytes per element
    rope   number of a key's last channels that all heads share and that are loaded from a tensor of their own
    """

    def __init__(self, rows: int, keys: int, dim: int, value_dim: int, width: int, q_stages: int, rope: int):
        self.rows, self.keys, self.dim, self.value_dim = rows, keys, dim, value_dim
        self.width, self.q_stages, self.rope = width, q_stages, rope

    @cute.jit
    def load(self, storage, loads: Loads, shared: SharedTensors):
        """Run the LOAD warp: all work tiles of this CTA."""
        q_bytes, k_bytes = self.rows * self.dim * self.width, self.keys * self.dim * self.width
        v_bytes = self.keys * self.value_dim * self.width
        pipelines = MhaPipelines.of(storage, self.q_stages)
        tile_state, q_state, k_state, v_state = start(), start(), start(), start()
        blocks = Int32(1)
        nope = self.dim - self.rope
        k_shared, rope_shared = shared.k, shared.k
        if const_expr(self.rope > 0):
            k_shared = cute.local_tile(shared.k, (self.keys, nope, STAGES), (0, 0, 0))
            rope_shared = cute.local_tile(shared.k, (self.keys, self.rope, STAGES), (0, nope // self.rope, 0))
        while blocks > 0:
            work_tile = pipelines.work_tiles.current(tile_state)
            tile_state = pipelines.work_tiles.release(tile_state)
            blocks, query, head = work_tile.blocks, work_tile.query, work_tile.head
            key, kv_head = work_tile.key, work_tile.kv_head
            if blocks > 0:
                tq, gq = blocks_of(loads.q, loads.mq, shared.q, query, head, (self.rows, self.dim))
                tk, gk = blocks_of(loads.k, loads.mk, k_shared, key, kv_head, (self.keys, nope))
                tr, gr = tk, gk
                if const_expr(self.rope > 0):
                    tr, gr = blocks_of(loads.rope, loads.mrope, rope_shared, key, 0, (self.keys, self.rope))
                tv, gv = blocks_of(loads.v, loads.mv, shared.v, key, kv_head, (self.keys, self.value_dim))
                pipelines.q.producer_acquire(q_state, q_bytes)
                q_full = pipelines.q.producer_barrier(q_state)
                cute.copy(loads.q, gq[None, 0], tq[None, q_state.stage], tma_bar_ptr=q_full)
                q_state = pipelines.q.advance(q_state)
                for i in cutlass.range(blocks, unroll=1):
                    n = blocks - 1 - i
                    pipelines.k.producer_acquire(k_state, k_bytes)
                    k_full = pipelines.k.producer_barrier(k_state)
                    cute.copy(loads.k, gk[None, n], tk[None, k_state.stage], tma_bar_ptr=k_full)
                    if const_expr(self.rope > 0):
                        cute.copy(loads.rope, gr[None, n], tr[None, k_state.stage], tma_bar_ptr=k_full)
                    k_state = pipelines.k.advance(k_state)
                    pipelines.v.producer_wait(v_state)
                    v_full = pipelines.v.producer_barrier(v_state)
                    if i == 0 and work_tile.value_rows < self.keys:
                        v_full = pipelines.v_loaded.barrier(v_state.stage)
                    with cute.arch.elect_one():
                        expect_bytes(v_full, v_bytes)
                    cute.copy(loads.v, gv[None, n], tv[None, v_state.stage], tma_bar_ptr=v_full)
                    v_state = pipelines.v.advance(v_state)

    @cute.jit
    def clear(self, storage, shared: SharedTensors, lane):
        """Run the CLEAR warp: zero-fill the rows of the last V block that are past the sequence's end.

        P is 0 in these rows, but 0 * NaN is NaN.
        """
        pipelines = MhaPipelines.of(storage, self.q_stages)
        # count: V blocks so far. phases: one phase bit per stage of v_loaded, since not every block needs
        # clearing.
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
                    self.clear_values(shared.v, v_state.stage, work_tile.value_rows, lane)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.sync_warp()
                    pipelines.v.producer_commit(v_state)
                count += blocks

    @cute.jit
    def clear_values(self, values: cute.Tensor, stage, first, lane):
        """Zero-fill rows `first` and above of a V stage; called by a warp.

        A stage is stored as blocks of 64 columns, in which a row has 128 contiguous bytes.
        """
        zero = Uint32(0)
        start = Int32(values.iterator.toint()) + stage * (self.keys * self.value_dim * 2)
        for block in cutlass.range_constexpr(self.value_dim // 64):
            for place in cutlass.range(first * 8 + lane, self.keys * 8, 32, unroll=1):
                store_16(start + block * (self.keys * 128) + place * 16, [zero, zero, zero, zero])


@cute.jit
def blocks_of(atom: cute.CopyAtom, x: cute.Tensor, shared: cute.Tensor, row, head, shape: cutlass.Constexpr):
    """Partition for a TMA load: shared memory [., stage], and the blocks [., n] of a head's rows from `row` on."""
    blocks = cute.local_tile(cute.domain_offset((row, 0), x[None, None, head]), shape, (None, 0))
    return cute.nvgpu.cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(blocks, 0, 2)
    )
