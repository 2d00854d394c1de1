"""What score warpgroups pass to output warpgroups without swap A/B: P, rescale factors, barriers."""

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
    """Shared memory between the score and output warpgroups.

    p           [TILE_M, TILE_N, P_STAGES]
    p_pipeline  pipeline of p, with one full barrier per half of a stage's keys
    rescale     [TILE_M, P_STAGES]: factors for the rows of O, to apply before a tile; written before the
                first half of P
    scored      mbarrier: S of one more tile is done
    inverse     [TILE_M]: factors for the rows of O at the end of a work tile
    end         pipeline of inverse, one stage
    """

    p: cute.Tensor
    p_pipeline: Pipeline
    rescale: cute.Tensor
    scored: Mbarriers
    inverse: cute.Tensor
    end: Pipeline

    @cute.jit
    def init(self):
        """Initialize the barriers; called by one thread. Four score warps signal eight output warps."""
        self.p_pipeline.init(consumers=8, producers=4)
        self.scored.init(4)
        self.end.init(consumers=8, producers=4)


class ExchangeMemory:
    """The layout of an Exchange in shared memory, with P in `dtype`."""

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
