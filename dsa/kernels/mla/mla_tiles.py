"""Tiles of 16-bit latent keys in shared memory: the parts of a tile, and the pipelines through which the parts pass.

A tile has TILE_N keys. The first 512 channels of a key are also its value; they are four v chunks of 128 channels. The
last 64 channels of a key of HEAD_DIM channels are its rope part. There are two rings of stages: a stage of one ring
contains one v chunk of a tile, and a stage of the other ring contains a tile's rope part. So the load warps can load
the first v chunks of a tile before there is room for the whole tile.

A v chunk is two k chunks of 64 channels, and a rope part is one k chunk. A row of a k chunk has 128 bytes, the swizzle
width. S = Q K^T is computed one k chunk at a time.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import Pipeline, PipelineState, arrive, pipeline_storage, start
from dsa.cute.work_tile import WorkTilePipeline, work_tile_storage
from dsa.kernels.mla.limits import HEAD_DIM_V, TILE_N
from dsa.kernels.mla.mla_roles import WorkTileInfo

K_CHUNK, V_CHUNK = 64, 128  # channels
K_PER_V, V_CHUNKS = V_CHUNK // K_CHUNK, HEAD_DIM_V // V_CHUNK
ROPE_CHUNK = HEAD_DIM_V // K_CHUNK  # index of the rope part among the k chunks
# The order in which a tile's v chunks are loaded and multiplied by Q. Output warpgroup 0 reads v chunks 0 and then 1,
# output warpgroup 1 reads v chunks 2 and then 3. So v chunks 0 and 2 are loaded first.
V_CHUNK_ORDER = (0, 2, 1, 3)
ROPE_AFTER = 2  # number of v chunks that are loaded and multiplied by Q before the rope part
MASK_WORDS = 4
K16 = 16  # K of a wgmma instruction with 16-bit operands


def k_chunk_order(head_dim: int) -> list[int]:
    """Return the indices of a key's k chunks in the order in which they are loaded. ROPE_CHUNK is among them if the key
    has a rope part."""
    order = [v_chunk * K_PER_V + c for v_chunk in V_CHUNK_ORDER for c in range(K_PER_V)]
    if head_dim > HEAD_DIM_V:
        order.insert(ROPE_AFTER * K_PER_V, ROPE_CHUNK)
    return order


def tiled_mma(
    dtype: type[cutlass.Numeric], majors: str, shape: tuple[int, int], a_in_registers: bool = False, warpgroups: int = 1
) -> cute.TiledMma:
    """Return the tiled MMA of a wgmma with `shape` (M, N) per warpgroup and fp32 accumulators. majors: the major modes
    of A and B, such as "K MN"."""
    a_major, b_major = (getattr(cute.nvgpu.OperandMajorMode, major) for major in majors.split())
    sources = cute.nvgpu.warpgroup.OperandSource
    source = sources.RMEM if a_in_registers else sources.SMEM
    return sm90.make_trivial_tiled_mma(dtype, dtype, a_major, b_major, Float32, (warpgroups, 1, 1), shape, source)


class KvState(NamedTuple):
    """A thread's positions in the ring of v chunks and in the ring of rope parts."""

    v: PipelineState
    rope: PipelineState


@dataclass(frozen=True)
class KvPipeline:
    """The barriers of the rings of keys, and the valid masks and work tiles that the load warps write.

    v           ring of v chunks; each stage has one full barrier per k chunk
    rope        ring of rope parts and valid masks; for keys without a rope part, it passes only the masks
    valid_mask  [MASK_WORDS, rope stages] uint32: which keys of the tile are valid. Paged loads use one bit per TMA box
                in the first word. Top-k gathers use the lower 16 bits of each word, one per key: word i has the keys
                that load warp i gathers. Gathers for query groups have MASK_WORDS words per query of the group: a bit
                says whether this query has selected the key
    work        pipeline of work tiles
    """

    v: Pipeline
    rope: Pipeline
    valid_mask: cute.Tensor
    work: WorkTilePipeline

    def start(self) -> KvState:
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
    """The rings of keys of a CTA: `v_stages` stages of v chunks and `rope_stages` stages of rope parts.

    cluster         number of CTAs that load into each other's shared memory by multicast; 1: no multicast
    v_producers     number of arrivals at the full barrier of a k chunk
    rope_producers  number of arrivals at the full barrier of a rope stage
    """

    has_rope = True
    masks = 1  # valid masks per tile; query groups have one per query
    v_producers, rope_producers = 1, 1

    def __init__(self, dtype: type[cutlass.Numeric], v_stages: int, rope_stages: int, cluster: int = 1):
        self.dtype, self.v_stages, self.rope_stages, self.cluster = dtype, v_stages, rope_stages, cluster

    def v_layout(self) -> cute.ComposedLayout:
        """Return the layout [keys, channels, stage]."""
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE_N, TILE_N, V_CHUNK), self.dtype, self.v_stages)

    def rope_layout(self) -> cute.ComposedLayout:
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE_N, TILE_N, K_CHUNK), self.dtype, self.rope_stages)

    def storage(self) -> type:
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
        """Return the struct of the stages. If keys have no rope part, `rope` is a placeholder."""
        rope_size = cute.cosize(self.rope_layout()) if self.has_rope else 8

        @cute.struct
        class TensorStorage:
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(self.v_layout())], 1024]
            rope: cute.struct.Align[cute.struct.MemRange[self.dtype, rope_size], 1024]

        return TensorStorage

    def tensors(self, storage) -> KvTensors:
        v_layout, rope_layout = self.v_layout(), self.rope_layout()
        return KvTensors(
            storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner),
            storage.rope.get_tensor(rope_layout.outer, swizzle=rope_layout.inner),
        )

    @cute.jit
    def init(self, pipeline: KvPipeline, consumers: cutlass.Constexpr):
        """Initialize the barriers; called by one thread.

        In every CTA of the cluster, the four warps of one warpgroup release a stage. A score warpgroup releases rope
        parts, and the stages in which a work tile's Q arrives. An output warpgroup releases the v chunks of keys after
        it has received the tile's P. Score warpgroups read these chunks, too, but before they send P. `consumers` warps
        read each work tile.
        """
        pipeline.v.init(4 * self.cluster, self.v_producers)
        pipeline.rope.init(4 * self.cluster, self.rope_producers)
        pipeline.work.init(consumers)

    def tile_is_loaded(self, pipeline: KvPipeline, last: KvState) -> cutlass.Boolean | bool:
        """Whether the whole tile has arrived. If so, the caller does not wait for each chunk, and calls no `fence`.

        last: the states of the tile's last v chunk and of the tile's rope part.

        Always False here. One wait for the whole tile would save only fences, and data from TMA need no fence.
        """
        return False

    @cute.jit
    def fence(self):
        """Make keys that this thread has waited for visible to wgmma. A no-op here, because TMA writes and wgmma
        reads through the async proxy.
        """

    @cute.jit
    def release(self, pipeline: Pipeline, state: PipelineState):
        """Release a stage of `pipeline`, one of the two rings; called by a warp. Each CTA of the cluster loads a part
        of this CTA's stage, so one lane arrives at the empty barrier in every CTA.
        """
        if const_expr(self.cluster == 1):
            pipeline.consumer_release(state)
        else:
            with cute.arch.elect_one():
                for peer in cutlass.range_constexpr(self.cluster):
                    arrive(pipeline.consumer_barrier(state), peer)
