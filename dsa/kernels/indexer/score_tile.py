"""Tile of index scores: an FP8 wgmma of 64 keys by N columns (heads of queries), and the sum over the heads."""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.sm90 import REGISTERS

TILE = 64  # keys


def registers_fit(columns: int, groups: int) -> bool:
    """Whether a thread of `groups` consumer warpgroups has registers for its accumulators, its weights and two dozen
    other numbers."""
    return columns // 2 + columns // 4 + 24 <= REGISTERS[groups][0]


def score_mma(columns: int, accumulators: type[cutlass.Numeric] = Float32) -> cute.TiledMma:
    """Keys [64, D] times queries [columns, D], both e4m3 in shared memory, into fp32 or fp16."""
    major, e4m3 = cute.nvgpu.OperandMajorMode.K, Float8E4M3FN
    return sm90.make_trivial_tiled_mma(e4m3, e4m3, major, major, accumulators, (1, 1, 1), (TILE, columns))


def key_layout(rows: int, columns: int, dim: int, stages: int) -> cute.ComposedLayout:
    """Shared memory of `stages` blocks of keys [rows, dim]. Rows are consecutive in memory, whatever the size of a
    block."""
    return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, columns, dim), Float8E4M3FN, stages)


def query_layout(columns: int, dim: int, stages: int) -> cute.ComposedLayout:
    """Shared memory of `stages` blocks of queries [columns, dim]."""
    return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE, columns, dim), Float8E4M3FN, stages)


@cute.jit
def head_sum(acc, weights, query: cutlass.Constexpr, heads: cutlass.Constexpr):
    """sum_h w[h] relu(acc[key, query * heads + h]) over this lane's heads, for the keys [row, row + 8].

    acc      this thread's accumulators, flat: [column / 8][key half][2 neighbouring columns]
    weights  w / 2 of this lane's columns, flat: [column / 8][2]
    """
    sums = [Float32(0.0), Float32(0.0)]
    for j in cutlass.range_constexpr(heads // 8):
        column = query * (heads // 8) + j
        for c in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                # x + |x| = 2 relu(x) exactly, and w is halved. The addition runs on the FMA pipe, at twice the rate of
                # a maximum, and propagates NaN.
                x = acc[4 * column + 2 * half + c]
                sums[half] = cute.math.fma(x + cute.math.absf(x), weights[2 * column + c], sums[half])
    return sums


@cute.jit
def quad_pair(a, b, upper):
    """Sum over a quad: of a in its lanes 0 and 1, of b in its lanes 2 and 3. It takes two shuffles, and adds in the
    same order as `quad_reduce_scatter`."""
    keep = b if upper else a
    send = a if upper else b
    value = keep + cute.arch.shuffle_sync_bfly(send, offset=2)
    return value + cute.arch.shuffle_sync_bfly(value, offset=1)
