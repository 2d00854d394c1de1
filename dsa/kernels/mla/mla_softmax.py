"""Online softmax of a 64 x 64 tile of S without swap A/B, and the data passed to the output warpgroups.

row_max and row_sum are in registers. P in 16 bits, rescale factors and barriers are in shared memory.

- P = 2^(score - row_max). The true maximum of a row can exceed row_max by up to RESCALE_THRESHOLD, in log2, so P is at
  most 2^8. row_max is raised, and O is rescaled, only if the true maximum exceeds row_max by more. So the score warps
  can compute the first exponentials of a tile before they know the tile's maximum.
- The score warps pass P of the tile's first 32 keys to the output warps before they compute P of the last 32 keys.

A lane has scores in rows lane / 4 and lane / 4 + 8 of the warp's 16 rows. Of every 8 columns (keys), the lane has
columns lane % 4 * 2 and lane % 4 * 2 + 1.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import Mbarriers, Pipeline, PipelineState, pipeline_storage
from dsa.cute.shared_memory import pack, store_matrices, swizzled
from dsa.kernels.mla.limits import TILE_M, TILE_N

P_STAGES, P_PARTS = 2, 2
RESCALE_THRESHOLD = 8.0  # the true maximum can exceed row_max by this much, in log2
NO_MAX = -3e38  # initial row_max; finite, so that -inf (a masked score) minus row_max is not NaN
HALF = TILE_N // 4  # scores per lane, of two rows, in one half of the keys


@dataclass(frozen=True)
class Exchange:
    """Shared memory between the score and output warpgroups.

    p           [TILE_M, TILE_N, P_STAGES] in q's dtype
    p_pipeline  pipeline of p, with one full barrier per half of a stage's keys
    rescale     [TILE_M, P_STAGES] fp32: factor by which each row of O is multiplied before the tile's P V is added;
                written before the first half of P
    scored      mbarrier; a phase completes when S of a tile is computed
    inverse     [TILE_M] fp32: factor by which each row of O is multiplied at the end of a work tile: 1 / (sum of P), or
                0 for a row without keys. The sum includes the attention sink, if there is one and the work tile is not
                a split
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
        """Initialize the barriers; called by one thread. The producers are four score warps, the consumers eight output
        warps."""
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


@cute.jit
def raise_row_max(row_max: cute.Tensor, row_sum: cute.Tensor, factor: cute.Tensor, tile_max):
    """Raise row_max to tile_max, and rescale row_sum, in the rows where tile_max exceeds row_max by more than
    RESCALE_THRESHOLD. All arguments have one element for each of the lane's two rows.

    Set `factor` to the factors by which O must be multiplied: 1 in rows whose row_max is unchanged. Return whether
    row_max rose in any row of the warp.
    """
    factor.fill(1.0)
    rose = cute.arch.vote_any_sync(
        tile_max[0] > row_max[0] + RESCALE_THRESHOLD or tile_max[1] > row_max[1] + RESCALE_THRESHOLD
    )
    if rose:
        for r in cutlass.range_constexpr(2):
            if tile_max[r] > row_max[r] + RESCALE_THRESHOLD:
                factor[r] = cute.math.exp2(row_max[r] - tile_max[r], fastmath=True)
                row_max[r] = tile_max[r]
                row_sum[r] *= factor[r]
    return rose


@dataclass(frozen=True)
class SoftmaxState:
    """Softmax state of a lane's two rows: tensors with one element per row. A score is scale * log2(e) * q . k.

    limits      number of keys that the row sees; only set in dense decoding
    row_max     P = 2^(score - row_max); NO_MAX before the first tile. It can be below the true maximum
    row_sum     sum of P over the lane's columns of all tiles so far
    max_logits  true maximum of the scores so far; only kept if the kernel writes the maximum logits
    """

    limits: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    max_logits: cute.Tensor

    @cute.jit
    def reset(self):
        self.row_max.fill(NO_MAX)
        self.row_sum.fill(0.0)
        self.max_logits.fill(-float("inf"))

    @cute.jit
    def whole_sum(self, r: cutlass.Constexpr):
        """Return the sum of P in the lane's r-th row, over the four lanes that share the row."""
        row_sum = self.row_sum[r] + cute.arch.shuffle_sync_bfly(self.row_sum[r], offset=1)
        return row_sum + cute.arch.shuffle_sync_bfly(row_sum, offset=2)


@cute.jit
def write_p(
    scores,
    state: SoftmaxState,
    exchange: Exchange,
    p_state: PipelineState,
    scale,
    warp,
    lane,
    with_max_logits: cutlass.Constexpr,
):
    """Write P of a tile to shared memory, and the factors by which O must be multiplied before P V is added.

    scores: the tile's S with -inf for masked keys. scale: softmax scale * log2(e). p_state: the stage of P to write.
    with_max_logits: also update `state.max_logits`.
    """
    row_max, row_sum = state.row_max, state.row_sum
    p = cute.make_rmem_tensor((HALF,), Float32)
    # Compute the first half of P with the row_max of the previous tiles, and again below if row_max rises.
    powers(p, scores, 0, row_max, scale)
    tile_max, rescale = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
    for r in cutlass.range_constexpr(2):
        value = scores[2 * r]
        for i in cutlass.range_constexpr(1, HALF):
            value = cute.arch.fmax(value, scores[i // 2 * 4 + 2 * r + i % 2])
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1))
        tile_max[r] = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2)) * scale
        if const_expr(with_max_logits):
            state.max_logits[r] = cute.arch.fmax(state.max_logits[r], tile_max[r])
    if raise_row_max(row_max, row_sum, rescale, tile_max):
        powers(p, scores, 0, row_max, scale)

    if lane % 4 == 0:
        exchange.rescale[warp * 16 + lane // 4, p_state.stage] = rescale[0]
        exchange.rescale[warp * 16 + lane // 4 + 8, p_state.stage] = rescale[1]
    start = Int32(exchange.p.iterator.toint()) + p_state.stage * (TILE_M * TILE_N * 2)
    row = warp * 16 + lane % 16
    for half in cutlass.range_constexpr(P_PARTS):
        if const_expr(half == 1):
            powers(p, scores, half, row_max, scale)
        for i in cutlass.range_constexpr(TILE_N // 32):
            words = [pack(p[8 * i + 2 * j], p[8 * i + 2 * j + 1], exchange.p.element_type) for j in range(4)]
            vector = half * (TILE_N // 16) + 2 * i + lane // 16
            store_matrices(start + 2 * swizzled(row, vector), words)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        exchange.p_pipeline.producer_commit(p_state, half)
        for i in cutlass.range_constexpr(HALF):
            row_sum[i // 2 % 2] += p[i]


@cute.jit
def powers(p, scores, half: cutlass.Constexpr, row_max, scale):
    """Compute p = 2^(scale * scores - row_max) for one half of the keys."""
    for i in cutlass.range_constexpr(HALF):
        p[i] = cute.math.exp2(cute.math.fma(scores[half * HALF + i], scale, -row_max[i // 2 % 2]), fastmath=True)
