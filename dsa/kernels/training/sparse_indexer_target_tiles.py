"""Definitions that the roles of the sparse stage's target kernel share: inputs, shared memory, pipelines and
helpers."""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.pipeline import Pipeline, PipelineState
from dsa.cute.shared_memory import load_matrices, swizzled
from dsa.cute.sm90 import WARPGROUP
from dsa.kernels.training.topk_gather import CHUNK

THREADS = 4 * WARPGROUP
STEPS = CHUNK // 16  # wgmma instructions per chunk
INDEX_STAGES, SUM_STAGES = 2, 4
ATTENTION_WARPS, INDEX_WARPS = 8, 4


class WarpRole(IntEnum):
    """The first warp of each role. The roles have two, one and one warpgroups."""

    ATTENTION = 0
    INDEX = ATTENTION_WARPS
    PRODUCER = ATTENTION_WARPS + INDEX_WARPS


class Barrier(IntEnum):
    """Named barriers, one per warpgroup."""

    INDEX = 1
    ATTENTION = 2  # + the attention warpgroup's number


@dataclass(frozen=True)
class Pipelines:
    """keys: chunks of q or kv rows. index: tiles of index rows. sums: the attention's sums of exponentials per tile."""

    keys: Pipeline
    index: Pipeline
    sums: Pipeline


@dataclass(frozen=True)
class SharedTensors:
    """
    sums            [64 keys, 8 warps, SUM_STAGES]: a tile's sums of exponentials over each attention warp's heads
    own_sums        [64 keys, 4 warps, 2]: a tile's weighted scores, summed over each index warp's heads
    target, scores  [MAX_SPARSE_KEYS]: p before normalisation, and I
    parts           [12]: partial results that the index warps exchange in a query's epilogue
    """

    sums: cute.Tensor
    own_sums: cute.Tensor
    target: cute.Tensor
    scores: cute.Tensor
    parts: cute.Tensor


@dataclass(frozen=True)
class Inputs:
    """q [T, H, d], kv [Tk, d], q_idx [T, Hi, di], k_idx [Tk, di], w_idx [T, Hi], indices [T, K], lse [T, H]"""

    q: cute.Tensor
    kv: cute.Tensor
    q_idx: cute.Tensor
    k_idx: cute.Tensor
    w_idx: cute.Tensor
    indices: cute.Tensor
    lse: cute.Tensor


def sums_state(tile: Int32) -> PipelineState:
    """State of the pipeline of sums at key tile `tile`, counted over all queries of the CTA."""
    return PipelineState(tile & (SUM_STAGES - 1), (tile >> SUM_STAGES.bit_length() - 1) & 1)


@cute.jit
def load_q_rmem(words, chunk: cutlass.Constexpr, source: cute.Pointer, warp, lane):
    """Load a warp's part of a chunk of 64 rows from shared memory as operand A: words [4, STEPS, chunks]."""
    for step in cutlass.range_constexpr(STEPS):
        address = source + swizzled(warp * 16 + (lane & 15), 2 * step + (lane >> 4))
        for i, word in enumerate(load_matrices(Int32(address.toint()))):
            words[i, step, chunk] = word


@cute.jit
def sum_rows(values, lane):
    """Sums over a warp's 16 rows of a wgmma accumulator tile of 64 columns.

    values[2 j + e]: the lane's value of column 8 j + 2 (lane % 4) + e. -> the sums of columns 2 lane and 2 lane + 1. A
    reduce-scatter of 14 shuffles: each step halves the number of columns per lane.
    """
    for log in cutlass.range_constexpr(4, 1, -1):
        upper = (lane >> log) & 1 != 0
        half = len(values) // 2
        kept = [values[half + i] if upper else values[i] for i in range(half)]
        sent = [values[i] if upper else values[half + i] for i in range(half)]
        values = [keep + cute.arch.shuffle_sync_bfly(send, offset=1 << log) for keep, send in zip(kept, sent)]
    return values
