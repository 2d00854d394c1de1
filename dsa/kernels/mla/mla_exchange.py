"""What the score and the output warpgroups share where rows of Q are rows of the products: P, rescale factors,
barriers."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import Pipeline
from dsa.kernels.mla.limits import TILE_M, TILE_N

P_STAGES = 2


@dataclass(frozen=True)
class Exchange:
    """p         [TILE_M, TILE_N, P_STAGES]
    p_pipeline  its barriers; `full` has one for each half of a stage's keys: see `p_full`
    rescale     [TILE_M, P_STAGES]: what the rows of O are multiplied by before a tile; there with the first half of P
    scored      a barrier: the scores of another tile are there
    inverse     [TILE_M]: what O is multiplied by at the end of a work tile
    end         of inverse: one stage
    """

    p: cute.Tensor
    p_pipeline: Pipeline
    rescale: cute.Tensor
    scored: cute.Pointer
    inverse: cute.Tensor
    end: Pipeline

    def p_full(self, stage, half) -> cute.Pointer:
        """The barrier of a half of the keys of a stage of P."""
        return self.p_pipeline.full + (2 * stage + half)

    @cute.jit
    def init(self):
        """Make the barriers. One thread's work."""
        for i in cutlass.range_constexpr(P_STAGES):
            cute.arch.mbarrier_init(self.p_full(i, 0), 4)
            cute.arch.mbarrier_init(self.p_full(i, 1), 4)
            cute.arch.mbarrier_init(self.p_pipeline.empty + i, 8)
        cute.arch.mbarrier_init(self.scored, 4)
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
            p_full: cute.struct.MemRange[Int64, 2 * P_STAGES]
            p_empty: cute.struct.MemRange[Int64, P_STAGES]
            scored: cute.struct.MemRange[Int64, 1]
            end_full: cute.struct.MemRange[Int64, 1]
            end_empty: cute.struct.MemRange[Int64, 1]
            rescale: cute.struct.MemRange[Float32, TILE_M * P_STAGES]
            inverse: cute.struct.MemRange[Float32, TILE_M]
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(self.p_layout())], 1024]

        return ExchangeStorage

    def exchange(self, storage) -> Exchange:
        layout = self.p_layout()
        return Exchange(
            p=storage.p.get_tensor(layout.outer, swizzle=layout.inner),
            p_pipeline=Pipeline(storage.p_full.data_ptr(), storage.p_empty.data_ptr(), P_STAGES, Int32(0)),
            rescale=storage.rescale.get_tensor(cute.make_layout((TILE_M, P_STAGES))),
            scored=storage.scored.data_ptr(),
            inverse=storage.inverse.get_tensor(cute.make_layout(TILE_M)),
            end=Pipeline(storage.end_full.data_ptr(), storage.end_empty.data_ptr(), 1, Int32(0)),
        )
