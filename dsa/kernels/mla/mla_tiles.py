"""Tiles of latent keys in shared memory: their parts, and the rings of stages that they go through.

A tile is TILE_N keys. A key is four v chunks of 128 channels, which are the value too, and, of HEAD_DIM channels, 64
rope channels. The v chunks and the rope parts have a ring each, so that a tile of which only a part fits is loaded
that far. A v chunk is two k chunks of 64 channels: rows of 128 bytes, which the swizzle works on and the scores'
products take.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Uint32, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import Pipeline, PipelineState, arrive, pipeline_storage, start
from dsa.cute.work_tile import WorkTilePipeline, work_tile_storage
from dsa.kernels.mla.limits import HEAD_DIM_V, TILE_N
from dsa.kernels.mla.tile_scheduler import WorkTileInfo

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


@dataclass(frozen=True)
class KvPipeline:
    """The rings' barriers, and what the load warps tell the others.

    v           of v chunks; each of a stage's k chunks is a part of its own
    rope        of rope parts; keys without one use the ring for their valid mask alone
    valid_mask  [MASK_WORDS, rope stages]: which keys of the tile exist. Paged loads: a bit of the first word for each
                box; top-k gathers: 16 bits of each word for as many keys; where queries share keys, MASK_WORDS for each
    work        the work tiles
    """

    v: Pipeline
    rope: Pipeline
    valid_mask: cute.Tensor
    work: WorkTilePipeline

    def start(self) -> KvState:
        """Before the first stages."""
        return KvState(start(), start())

    def advance_v(self, state: KvState) -> KvState:
        return KvState(self.v.advance(state.v), state.rope)

    def advance_rope(self, state: KvState) -> KvState:
        return KvState(state.v, self.rope.advance(state.rope))


@dataclass(frozen=True)
class KvTensors:
    """The stages in shared memory: v [TILE_N, V_CHUNK, stages], rope [TILE_N, K_CHUNK, stages]."""

    v: cute.Tensor
    rope: cute.Tensor


class KvStages:
    """The rings of a CTA: `v_stages` of v chunks, `rope_stages` of rope parts. `cluster` CTAs load into each other's
    shared memory. So many arrivals as `v_producers` and `rope_producers` fill a k chunk or a rope part."""

    has_rope = True
    masks = 1  # valid masks of a tile
    v_producers, rope_producers = 1, 1

    def __init__(self, dtype: type[cutlass.Numeric], v_stages: int, rope_stages: int, cluster: int = 1):
        self.dtype, self.v_stages, self.rope_stages, self.cluster = dtype, v_stages, rope_stages, cluster

    def v_layout(self) -> cute.ComposedLayout:
        """[keys, channels, stage]"""
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE_N, TILE_N, V_CHUNK), self.dtype, self.v_stages)

    def rope_layout(self) -> cute.ComposedLayout:
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE_N, TILE_N, K_CHUNK), self.dtype, self.rope_stages)

    def storage(self) -> type:
        """The shared memory of a KvPipeline."""

        @cute.struct
        class PipelineStorage:
            v: pipeline_storage(self.v_stages, parts=K_PER_V)
            rope: pipeline_storage(self.rope_stages)
            work: self.work_tile_storage()
            valid_mask: cute.struct.Align[cute.struct.MemRange[Uint32, self.masks * MASK_WORDS * self.rope_stages], 16]

        return PipelineStorage

    def pipeline(self, storage) -> KvPipeline:
        return KvPipeline(
            v=Pipeline.of(storage.v, self.v_stages, parts=K_PER_V),
            rope=Pipeline.of(storage.rope, self.rope_stages),
            valid_mask=storage.valid_mask.get_tensor(cute.make_layout((self.masks * MASK_WORDS, self.rope_stages))),
            work=self.work_tile_pipeline(storage.work),
        )

    def work_tile_storage(self) -> type:
        return work_tile_storage(WorkTileInfo)

    def work_tile_pipeline(self, storage) -> WorkTilePipeline:
        return WorkTilePipeline.of(storage, WorkTileInfo)

    def tensor_storage(self) -> type:
        """The shared memory of the stages. Keys of 512 channels have no rope part."""
        rope_size = cute.cosize(self.rope_layout()) if self.has_rope else 8

        @cute.struct
        class TensorStorage:
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(self.v_layout())], 1024]
            rope: cute.struct.Align[cute.struct.MemRange[self.dtype, rope_size], 1024]

        return TensorStorage

    def tensors(self, storage, v_layout: cute.ComposedLayout, rope_layout: cute.ComposedLayout) -> KvTensors:
        return KvTensors(
            storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner),
            storage.rope.get_tensor(rope_layout.outer, swizzle=rope_layout.inner),
        )

    @cute.jit
    def init(self, pipeline: KvPipeline, consumers: cutlass.Constexpr):
        """Make the barriers: four warps of every CTA of the cluster empty a stage, and `consumers` warps read work
        tiles. One thread's work."""
        pipeline.v.init(4 * self.cluster, self.v_producers)
        pipeline.rope.init(4 * self.cluster, self.rope_producers)
        pipeline.work.init(consumers)

    def tile_is_loaded(self, pipeline: KvPipeline, last: KvState) -> cutlass.Boolean | bool:
        """Whether a tile has arrived whole, so that its chunks need no wait; last: its last v chunk and its rope part.
        Always False here: TMA fills each chunk's barrier alone, and the chunk is visible to wgmma after the wait."""
        return False

    @cute.jit
    def fence(self):
        """Make the keys that this thread has waited for visible to wgmma. TMA writes through wgmma's own proxy."""

    @cute.jit
    def release(self, pipeline: Pipeline, state: PipelineState):
        """This warp has read a stage of keys: tell all CTAs that load into it. An elected lane's work."""
        if const_expr(self.cluster == 1):
            pipeline.consumer_release(state)
        else:
            with cute.arch.elect_one():
                for peer in cutlass.range_constexpr(self.cluster):
                    arrive(pipeline.consumer_barrier(state), peer)
