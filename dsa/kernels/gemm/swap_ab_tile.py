"""Work tiles with few rows and swapped operands (swap A/B): rows of the weight matrix `b` are M of the wgmma, rows of
`a` are N.

The last work tile of a matrix has the remaining rows. For 1 to 32 rows a wgmma without swapped operands would still
multiply 64 rows, and one of the two warpgroups would do all the work. With swapped operands, each of two warpgroups
multiplies 64 of the 128 rows of a part of b by 16 or 32 rows of a. A work tile has one part; with SwiGLU it has two,
gate and up. The order of a sum is the same with and without swapping, so the bits are equal. Both operands have the
same layout in shared memory as without swapping; only the number of loaded rows of `a` differs. For more than 32 rows,
swapping saves no time: both warpgroups then read all rows of a, and together they read more from shared memory than one
warpgroup does without swapping.
The sums are transposed: four consecutive sums of a thread are two adjacent rows of the result in column c, then the
same two rows in column c + 8.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from dsa.cute.pipeline import Pipeline
from dsa.cute.shared_memory import load_16, load_registers, pack, store_transposed
from dsa.cute.sm90 import WARPGROUP
from dsa.cute.wgmma import multiply
from dsa.kernels.gemm.fp8_gemm_config import SCALES
from dsa.kernels.gemm.limits import GROUP
from dsa.kernels.gemm.operand_loads import tiled_mma

GROUPS = 2  # warpgroups; each has 64 columns of each part of a work tile
SCALE_BYTES = 4 * SCALES


@cute.jit
def swap_ab_blocks(
    count: cutlass.Constexpr, sums, operands, scales, blocks, slots: cutlass.Constexpr, pipeline: Pipeline, state, slot
):
    """Compute `sums`, one tensor per part, of a work tile of up to `count` rows. -> (pipeline state, scale slot) after
    the tile's blocks.

    operands  (a [rows, 128, stages] and b [columns, 128, stages] in shared memory, index of this warpgroup)
    scales    (of_a, of_b, a_slot, b_slot, b_part). of_a: shared address, in slot 0, of the scales of this lane's first
              row of `a`. of_b: the same for the scales of the first part of `b`. a_slot, b_slot: bytes of a slot with
              scales of a and of b. b_part: bytes from the scales of a part of b to those of the next part
    slots     number of slots of scales
    """
    sa, sb, group = operands
    stages = sb.shape[2]
    mma = tiled_mma(GROUPS, GROUP // GROUPS, count)
    thr_mma = mma.get_slice(group * WARPGROUP)
    parts = [cute.local_tile(sb, (GROUP, GROUP, stages), (i, 0, 0)) for i in range(len(sums))]
    rb = [mma.make_fragment_A(thr_mma.partition_A(part)) for part in parts]
    ra = mma.make_fragment_B(thr_mma.partition_B(cute.local_tile(sa, (count, GROUP, stages), (0, 0, 0))))
    shape = thr_mma.partition_shape_C((GROUP, count))
    acc = [cute.make_rmem_tensor(shape, Float32) for _ in sums]
    of_a, of_b, a_slot, b_slot, b_part = scales
    for own in sums:
        own.fill(0.0)
    for _ in cutlass.range(blocks // SCALES, unroll=1):
        of_rows, of_parts = None, None
        for i in cutlass.range_constexpr(SCALES):
            pipeline.consumer_wait(state)
            for part in cutlass.range_constexpr(len(sums)):
                multiply(mma, acc[part], rb[part], ra, state.stage, state.stage)
            if const_expr(i == 0):
                at = of_a + slot * a_slot
                of_rows = [load_floats(at + (j // 2 * 8 + j % 2) * SCALE_BYTES) for j in range(count // 4)]
                of_parts = [load_floats(of_b + slot * b_slot + part * b_part) for part in range(len(sums))]
            for part in cutlass.range_constexpr(len(sums)):
                cute.nvgpu.warpgroup.wait_group(len(sums) - 1 - part)
                if const_expr(part == len(sums) - 1):
                    if const_expr(i == 0):
                        # All lanes must have read the scales, because releasing this stage also frees the slot of the
                        # scales.
                        cute.arch.sync_warp()
                    pipeline.consumer_release(state)
                add_scaled(sums[part], acc[part], [row[i] * of_parts[part][i] for row in of_rows])
            state = pipeline.advance(state)
        slot = 0 if slot == slots - 1 else slot + 1
    return state, slot


@cute.jit
def add_scaled(sums, acc, scales):
    """sums += acc, scaled per row of the result. scales: one factor per row of this thread."""
    products = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
    for i in cutlass.range_constexpr(cute.size(acc)):
        sums[i] += products[i] * scales[i // 4 * 2 + i % 2]


@cute.jit
def store_16_bytes(address: Int32, row: cute.Tensor, vector):
    values = cute.recast_tensor(load_registers(address), row.element_type)
    cute.autovec_copy(values, cute.local_tile(row, (cute.size(values),), (vector,)))


@cute.jit
def load_floats(address):
    return [word.bitcast(Float32) for word in load_16(Int32(address))]


@cute.jit
def store_swap_ab(sums, out, row, end, column, staged, lane):
    """Store the transposed sums of a warp's 16 columns from `column` on, for the rows from `row` to `end` - 1. 16-bit
    results pass through shared memory at `staged`, 32 bytes per row."""
    if const_expr(out.element_type.width == 16):
        _store_16_bits(sums, out, row, end, column, staged, lane)
    else:
        for i in cutlass.range_constexpr(cute.size(sums)):
            r, at = row + i // 4 * 8 + lane % 4 * 2 + i % 2, column + i // 2 % 2 * 8 + lane // 4
            if r < end and at < out.shape[1]:
                out[r, at] = sums[i]


@cute.jit
def _store_16_bits(sums, out, row, end, column, staged, lane):
    count = cute.size(sums) * 2
    matrices = min(4, count // 4)
    for first in cutlass.range_constexpr(0, count // 4, matrices):
        # Matrix i of stmatrix has 8 rows from i // 2 * 8 on, and 8 columns from i % 2 * 8 on.
        words = [pack(sums[2 * i], sums[2 * i + 1], out.element_type) for i in range(first, first + matrices)]
        matrix = first + lane // 8 % matrices
        store_transposed(staged + (matrix // 2 * 8 + lane % 8) * 32 + matrix % 2 * 16, words)
    cute.arch.sync_warp()
    for first in cutlass.range_constexpr(0, 2 * count, 32):
        r, chunk = (first + lane) // 2, lane % 2
        at = column + 8 * chunk
        if r < cutlass.min(count, end - row) and at < out.shape[1]:
            store_16_bytes(staged + r * 32 + chunk * 16, out[row + r, None], at // 8)
    cute.arch.sync_warp()
