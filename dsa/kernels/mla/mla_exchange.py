"""What the score and the output warpgroups share where rows of Q are rows of the products: P, rescale factors,
barriers."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import Mbarriers, Pipeline, pipeline_storage
from dsa.kernels.mla.limits import TILE_M, TILE_N

P_STAGES, P_PARTS = 2, 2


@dataclass(frozen=True)
class Exchange:
    """p         [TILE_M, TILE_N, P_STAGES]
    p_pipeline  its barriers; each half of a stage's keys is a part of its own
    rescale     [TILE_M, P_STAGES]: what the rows of O are multiplied by before a tile; there with the first half of P
    scored      a barrier: the scores of another tile are there
    inverse     [TILE_M]: what O is multiplied by at the end of a work tile
    end         of inverse: one stage
    """

    p: cute.Tensor
    p_pipeline: Pipeline
    rescale: cute.Tensor
    scored: Mbarriers
    inverse: cute.Tensor
    end: Pipeline

    @cute.jit
    def init(self):
        """Make the barriers: four score warps tell eight output warps. One thread's work."""
        self.p_pipeline.init(consumers=8, producers=4)
        self.scored.init(4)
        self.end.init(consumers=8, producers=4)


class ExchangeMemory:
    """The shared memory of an Exchange, with P in `dtype`."""

    def __init__(self, dtype: type[cutlass.Numeric]):
        self.dtype = dtype

    def p_layout(self) -> cute.ComposedLayout:
        return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (TILE_M, TILE_N, TILE_N), self.dtype, P_STAGES)

    def storage(self) -> type:
        @cute.struct
        class ExchangeStorage:
            p_pipeline: pipeline_storage(P_STAGES, parts=P_PARTS)
            scored: cute.struct.MemRange[Int64, 1]
            end: pipeline_storage(1)
            rescale: cute.struct.MemRange[Float32, TILE_M * P_STAGES]
            inverse: cute.struct.MemRange[Float32, TILE_M]
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(self.p_layout())], 1024]

        return ExchangeStorage

    def exchange(self, storage) -> Exchange:
        layout = self.p_layout()
        return Exchange(
            p=storage.p.get_tensor(layout.outer, swizzle=layout.inner),
            p_pipeline=Pipeline.of(storage.p_pipeline, P_STAGES, P_PARTS),
            rescale=storage.rescale.get_tensor(cute.make_layout((TILE_M, P_STAGES))),
            scored=Mbarriers(storage.scored.data_ptr(), 1),
            inverse=storage.inverse.get_tensor(cute.make_layout(TILE_M)),
            end=Pipeline.of(storage.end, 1),
        )
