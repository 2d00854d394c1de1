"""The work tile of FP8 products of a few rows: 32 or 64 columns of the result, which are the rows of the wgmma, by 8 to
64 rows. What both of its kernels have in common."""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.sm90 import SHARED_BYTES, WARP, WARPGROUP
from dsa.kernels.gemm.limits import GROUP

COLUMNS = 64  # the rows of a wgmma: columns of most work tiles
SCALES = 4  # blocks whose scales are loaded together: 16 bytes, which is the least that TMA loads
CONSUMER_WARPS = 4
THREADS = WARPGROUP + WARP
SPLIT_SPAN = 2  # blocks of a stage where a cluster splits the channels
SM_BYTES = 233472  # of shared memory of an SM; a CTA takes 1 KiB more than it asks for
MAX_SPLIT_BLOCKS = 64  # that a cluster splits: what its shared memory has room for


@dataclass(frozen=True)
class FewRowsConfig:
    """rows: of a work tile, 8, 16, 32 or 64; stages: of the ring; ctas: that split the channels of a work tile between
    them, 1, 2, 4 or 8; columns: of a work tile, 32 or 64."""

    rows: int
    stages: int
    ctas: int = 1
    columns: int = COLUMNS

    @property
    def span(self) -> int:
        """Blocks of 128 channels of a stage."""
        return SCALES if self.ctas == 1 else SPLIT_SPAN

    def shared_bytes(self) -> int:
        """What a CTA takes, with room for alignment."""
        ring = self.stages * (self.span * (COLUMNS + self.rows) * GROUP + 16)
        if self.ctas == 1:
            scales, results = self.stages * SCALES * 4 * (self.rows + 1), CONSUMER_WARPS * self.rows * 32
        else:
            scales = (self.rows + 1) * (MAX_SPLIT_BLOCKS + 4) * 4
            results = MAX_SPLIT_BLOCKS * COLUMNS * self.rows * 4 // self.ctas
        return ring + scales + results + 2 * 1024

    def ctas_per_sm(self) -> int:
        return SM_BYTES // (self.shared_bytes() + 1024)

    def fits(self) -> bool:
        """Whether shared memory holds it."""
        return self.shared_bytes() <= SHARED_BYTES


def operand_layouts(rows: int, blocks: int) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
    """The shared memory of `blocks` blocks of a and of b."""
    tile = (COLUMNS, rows, GROUP)
    a_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, blocks)
    return a_layout, sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, blocks)


def tiles_of(atom: cute.CopyAtom, shared: cute.Tensor, x: cute.Tensor, shape: tuple[int, int], row):
    """What a TMA load of x copies: -> its stages in shared memory, and blocks [shape] of x from row `row` on."""
    blocks = cute.local_tile(cute.domain_offset((row, 0), x), shape, (0, None))
    one = cute.make_layout(1)
    return cute.nvgpu.cpasync.tma_partition(
        atom, 0, one, cute.group_modes(shared, 0, 2), cute.group_modes(blocks, 0, 2)
    )


def fragments(rows: int, together: int, sb: cute.Tensor, sa: cute.Tensor):
    """-> the wgmma, accumulators of `together` blocks, and its operands, b and a."""
    major = cute.nvgpu.OperandMajorMode.K
    mma = sm90.make_trivial_tiled_mma(Float8E4M3FN, Float8E4M3FN, major, major, Float32, (1, 1, 1), (COLUMNS, rows))
    thr_mma = mma.get_slice(0)
    shape = thr_mma.partition_shape_C((COLUMNS, rows))
    acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(together)]
    return mma, acc, mma.make_fragment_A(thr_mma.partition_A(sb)), mma.make_fragment_B(thr_mma.partition_B(sa))


@cute.jit
def load_blocks(atom, source: cute.Tensor, target: cute.Tensor, group, stage, span: cutlass.Constexpr, barrier):
    """Load the `span` blocks of a group to a stage."""
    for i in cutlass.range_constexpr(span):
        cute.copy(atom, source[None, span * group + i], target[None, span * stage + i], tma_bar_ptr=barrier)


def expected_tiles(rows: int, matrices: int, each: int) -> float:
    """Of `each` rows, that a matrix has if `rows` find theirs at random: the sum over j of P(more than j * each)."""
    mean = rows / matrices
    if matrices == 1 or mean > 8 * each:
        return math.ceil(mean / each)
    chance, at_most, tiles = math.exp(-mean), 0.0, 0.0
    for i in range(16 * each):
        at_most += chance
        if i % each == 0:
            tiles += 1 - at_most
        chance *= mean / (i + 1)
    return tiles
