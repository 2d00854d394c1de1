"""The partial results of queries whose keys were cut, combined: the end of sparse MLA attention.

lse = log sum_i e^lse_i;   out = sum_i e^(lse_i - lse) out_i e^lse / (e^lse + e^sink) over a query's pieces i, in order

As mla_combine_sm90.py does it; which pieces there are follows from the shares (gathered_tiles.py), not from a plan.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.fake_tensors import cute_dtype, fake_stream
from dsa.kernels.mla.mla_combine_sm90 import FEW, MANY, MOST_SPLITS, SOME, WARPS, MlaCombineConfig, MlaCombineSm90
from dsa.kernels.mla.mla_tiles import VALUE
from dsa.kernels.mla.sparse_arguments import fake_results, fake_sink
from dsa.kernels.mla.topk_gather import Share


class SparseMlaCombineSm90(MlaCombineSm90):
    @cute.jit
    def place(self, out, sequence, row, kv_head, kv_heads):
        return sequence // out.shape[1], sequence % out.shape[1], row

    @cute.jit
    def slot(self, first, split):
        return 2 * (first + split) + (1 if split == 0 else 0)

    @cute.jit
    def __call__(
        self,
        sink: cute.Tensor,
        has_sink: Int32,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_parts: cute.Tensor,
        lse_parts: cute.Tensor,
        parts: Int32,
        rounds: Int32,
        tiles: Int32,
        cut: Int32,
        stream,
    ):
        rows, queries = lse_parts.shape[2], out.shape[0] * out.shape[1]
        share = Share(Int32(0), parts, rounds, queries, tiles, cut)
        row_blocks = (rows + self.rows - 1) // self.rows * (VALUE // self.columns)
        self.kernel(sink, has_sink, out, lse, out_parts, lse_parts, share, row_blocks).launch(
            grid=((queries - rounds * parts) * row_blocks, 1, 1), block=(WARPS * 32, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        sink: cute.Tensor,
        has_sink: Int32,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_parts: cute.Tensor,
        lse_parts: cute.Tensor,
        share: Share,
        row_blocks: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = tid // 32, tid % 32
        blocks = VALUE // self.columns
        number, place = block // row_blocks, block % row_blocks
        row = place // blocks * self.rows + warp // self.groups
        column = place % blocks * self.columns
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((self.columns, self.groups, self.rows)), 16)
        weights = smem.allocate_tensor(Float32, cute.make_layout((MOST_SPLITS, WARPS)), 16)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        # The shares that have the query's first tile and its last.
        first = share.owner(number * share.tiles)
        splits = share.owner((number + 1) * share.tiles - 1) - first + 1
        query = share.rounds * share.parts + number
        inside = cutlass.min(row, lse_parts.shape[2] - 1)
        if splits > 1:
            own_sink = -Float32(float("inf"))
            if has_sink > 0:
                own_sink = sink[inside]
            self.combine(
                *(out, lse, out_parts, lse_parts, sums, weights, Int32(0), query, row, column, first, splits),
                *(own_sink, warp, lane),
            )


@cached
def compile_sparse_mla_combine(dtype: str, config: MlaCombineConfig):
    """-> f(sink [m], has_sink, out [T / s_q, s_q, h, 512], lse [T / s_q, h, s_q], out_parts [slots, 1, h, 512],
    lse_parts [slots, 1, h], parts, rounds, tiles, cut), as `compile_sparse_mla`; rounds * parts < T"""
    kind = cute_dtype(dtype)
    return compile_sm90(
        SparseMlaCombineSm90(kind, config),
        *fake_sink(),
        *fake_results(kind, cute.sym_int()),
        *(Int32(0), Int32(0), Int32(0), Int32(0)),
        fake_stream(),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the ops can ask for."""
    return [
        (compile_sparse_mla_combine, (dtype, config))
        for dtype in ("bfloat16", "float16")
        for config in (FEW, SOME, MANY)
    ]
