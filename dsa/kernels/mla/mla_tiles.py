"""Tiles of latent keys in shared memory: their parts, and the rings of stages that they go through.

A tile is TILE_N keys. A key is four v chunks of 128 channels, which are the value too, and, of HEAD_DIM channels, 64
rope channels. The v chunks and the rope parts have a ring each, so that a tile of which only a part fits is loaded
that far. A v chunk is two k chunks of 64 channels: rows of 128 bytes, which the swizzle works on and the scores'
products take.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import Pipeline, PipelineState
from dsa.kernels.mla.limits import HEAD_DIM_V, TILE_N
from dsa.kernels.mla.tile_scheduler import WORK_STAGES, WorkTileRing

K_CHUNK, V_CHUNK = 64, 128  # channels
K_PER_V, V_CHUNKS = V_CHUNK // K_CHUNK, HEAD_DIM_V // V_CHUNK
ROPE_CHUNK = HEAD_DIM_V // K_CHUNK  # the k chunk behind the value's
# The order in which a tile's v chunks are loaded and scored: what the output warpgroups need first comes first.
V_CHUNK_ORDER = (0, 2, 1, 3)
ROPE_AFTER = 2  # v chunks
MASK_WORDS = 4
K16 = 16  # the depth of a wgmma instruction of 16-bit numbers


def k_chunk_order(head_dim: int) -> list[int]:
    """The k chunks in the order in which a key's v chunks come, and its rope part if it has one."""
    order = [v_chunk * K_PER_V + c for v_chunk in V_CHUNK_ORDER for c in range(K_PER_V)]
    if head_dim > HEAD_DIM_V:
        order.insert(ROPE_AFTER * K_PER_V, ROPE_CHUNK)
    return order


class KvState(NamedTuple):
    """Where a thread is in the rings of v chunks and of rope parts."""

    v: PipelineState
    rope: PipelineState


class LoadState(NamedTuple):
    """Where a load warp is in the rings of v chunks, of rope parts and of work tiles."""

    v: PipelineState
    rope: PipelineState
    work: PipelineState


@dataclass(frozen=True)
class KvPipeline:
    """The barriers of the rings, and what the load warps tell the others.

    v           of v chunks; `full` has a barrier for each of a stage's k chunks: see `v_full`
    rope        of rope parts; keys without one use the ring for their valid mask alone
    valid_mask  [MASK_WORDS, rope stages]: which keys of the tile exist. Paged loads: a bit of the first word for each
                box; top-k gathers: 16 bits of each word for as many keys
    work        the work tiles
    """

    v: Pipeline
    rope: Pipeline
    valid_mask: cute.Tensor
    work: WorkTileRing

    def v_full(self, stage, k_chunk) -> cute.Pointer:
        """The barrier of a k chunk of a v chunk's stage."""
        return self.v.full + (stage * K_PER_V + k_chunk)


@dataclass(frozen=True)
class KvTensors:
    """The stages in shared memory: v [TILE_N, V_CHUNK, stages], rope [TILE_N, K_CHUNK, stages]."""

    v: cute.Tensor
    rope: cute.Tensor


class KvStages:
    """The rings of a CTA: `v_stages` of v chunks, `rope_stages` of rope parts. `cluster` CTAs load into each other's
    shared memory."""

    has_rope = True

    def __init__(self, dtype: type[cutlass.Numeric], v_stages: int, rope_stages: int, cluster: int = 1):
        self.dtype, self.v_stages, self.rope_stages, self.cluster = dtype, v_stages, rope_stages, cluster

    def v_layout(self) -> cute.ComposedLayout:
        """[keys, channels, stage]"""
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE_N, TILE_N, V_CHUNK), self.dtype, self.v_stages)

    def rope_layout(self) -> cute.ComposedLayout:
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE_N, TILE_N, K_CHUNK), self.dtype, self.rope_stages)

    def storage(self) -> type:
        @cute.struct
        class PipelineStorage:
            v_full: cute.struct.MemRange[Int64, self.v_stages * K_PER_V]
            v_empty: cute.struct.MemRange[Int64, self.v_stages]
            rope_full: cute.struct.MemRange[Int64, self.rope_stages]
            rope_empty: cute.struct.MemRange[Int64, self.rope_stages]
            work_batch_known: cute.struct.MemRange[Int64, WORK_STAGES]
            work_full: cute.struct.MemRange[Int64, WORK_STAGES]
            work_empty: cute.struct.MemRange[Int64, WORK_STAGES]
            valid_mask: cute.struct.Align[cute.struct.MemRange[Uint32, MASK_WORDS * self.rope_stages], 16]
            work_info: cute.struct.MemRange[Int32, 8 * WORK_STAGES]

        return PipelineStorage

    def pipeline(self, storage) -> KvPipeline:
        return KvPipeline(
            v=Pipeline(storage.v_full.data_ptr(), storage.v_empty.data_ptr(), self.v_stages, Int32(0)),
            rope=Pipeline(storage.rope_full.data_ptr(), storage.rope_empty.data_ptr(), self.rope_stages, Int32(0)),
            valid_mask=storage.valid_mask.get_tensor(cute.make_layout((MASK_WORDS, self.rope_stages))),
            work=WorkTileRing.of(storage),
        )

    def tensor_storage(self) -> dict[str, Any]:
        """The stages as members of a CTA's shared memory. Keys of 512 channels have no rope part."""
        rope_size = cute.cosize(self.rope_layout()) if self.has_rope else 8
        return {
            "v": cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(self.v_layout())], 1024],
            "rope": cute.struct.Align[cute.struct.MemRange[self.dtype, rope_size], 1024],
        }

    def tensors(self, storage, v_layout: cute.ComposedLayout, rope_layout: cute.ComposedLayout) -> KvTensors:
        return KvTensors(
            storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner),
            storage.rope.get_tensor(rope_layout.outer, swizzle=rope_layout.inner),
        )

    @cute.jit
    def init(
        self,
        pipeline: KvPipeline,
        v_producers: cutlass.Constexpr,
        rope_producers: cutlass.Constexpr,
        consumers: cutlass.Constexpr = 12,
    ):
        """Make the barriers: so many arrivals fill a k chunk or a rope part; four warps of every CTA of the cluster
        empty a stage, and `consumers` warps read work tiles. One thread's work."""
        for i in cutlass.range_constexpr(self.v_stages * K_PER_V):
            cute.arch.mbarrier_init(pipeline.v.full + i, v_producers)
        for i in cutlass.range_constexpr(self.v_stages):
            cute.arch.mbarrier_init(pipeline.v.empty + i, 4 * self.cluster)
        pipeline.rope.init(4 * self.cluster, rope_producers)
        pipeline.work.init(consumers)

    @cute.jit
    def release(self, empty: cute.Pointer):
        """This warp has read a stage: tell all CTAs that load into it, by the stage's `empty` barrier."""
        with cute.arch.elect_one():
            if const_expr(self.cluster > 1):
                for peer in cutlass.range_constexpr(self.cluster):
                    cute.arch.mbarrier_arrive(empty, peer)
            else:
                cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def skip_v(self, stage, count: cutlass.Constexpr):
        """The stage `count` v chunks further."""
        return stage + count - self.v_stages if stage >= self.v_stages - count else stage + count

    @cute.jit
    def advance_v(self, state: KvState) -> KvState:
        return KvState(state.v.advance(self.v_stages), state.rope)

    @cute.jit
    def advance_rope(self, state: KvState) -> KvState:
        return KvState(state.v, state.rope.advance(self.rope_stages))
