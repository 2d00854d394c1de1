"""Combine the partial results of split-KV: for dense MLA decoding and for sparse MLA attention.

lse = log sum_i e^lse_i;  out = e^lse / (e^lse + e^sink) * sum_i e^(lse_i - lse) out_i

out_i and lse_i are the partial result of a row's split i. The sums run over all splits of the row, in a fixed order.
Without a sink the factor before the sum is 1.

Work: a CTA computes `columns` of the 512 channels, for `rows` rows of one sequence (dense) or query (sparse) and KV
head. Each row has `groups` warps. Warp g of a row adds the splits g, g + groups and so on, in this order. With more
than one warp per row, the row's warp 0 then adds the warps' sums in the order of the warps, through shared memory. A
warp reads all LSEs of the row while the first values of out_i are in flight.
Splits: each set of `row_blocks` adjacent CTAs combines one sequence or query, for one KV head. In dense decoding with a
plan, set i combines the i-th split sequence of the plan; in batch-invariant decoding it combines sequence i. In sparse
attention set i combines the i-th query after the full waves; the StreamKScheduler determines the query's splits.
Launch: programmatic dependent launch after the attention kernel. A CTA whose sequence or query is not split exits after
it has waited for the attention kernel.
Shared memory: the sums of each warp, and the weights of a row's splits for each warp. Constraints: at most MAX_PARTS
splits per row.
Roofline: bound by L2 bandwidth, 2 KiB (512 fp32 channels) per row and split.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.sm90 import WARP
from dsa.kernels.mla.decode_producer import PlanColumn
from dsa.kernels.mla.limits import DTYPES, FIXED_SPLIT_TILES, HEAD_DIM_V, MAX_FIXED_SPLITS, MAX_PARTS, TILE_N
from dsa.kernels.mla.sparse_mla_kernel import fake_results, fake_sink
from dsa.kernels.mla.tile_scheduler import StreamKScheduler
from dsa.runtime.compile_cache import cached, compile_sm90

WARPS = 8
LSES = MAX_PARTS // WARP  # number of LSEs that a lane loads; a row has one LSE per split, so at most MAX_PARTS


@dataclass(frozen=True)
class MlaCombineConfig:
    """Tile shape of a variant.

    groups   warps per row, among which the row's splits are divided
    columns  channels per CTA
    """

    groups: int
    columns: int


class SplitCombine:
    """The code that dense and sparse combining share.

    A kernel defines:

    coord(out, batch_idx, row, kv_head, kv_heads)  return (sequence, query, head) of a row in the results
    split_idx(first, split)                        return the index of the partial result of split `split`. `first` is
                                                   the index of the sequence's first partial result (dense), or the
                                                   worker that computes the query's first tile (sparse)
    """

    def __init__(self, dtype: type[cutlass.Numeric], cfg: MlaCombineConfig):
        self.dtype, self.groups, self.columns = dtype, cfg.groups, cfg.columns
        self.rows = WARPS // cfg.groups
        self.vectors = cfg.columns // 128  # vectors of 4 channels per lane
        self.unroll = 16 // self.vectors  # splits per warp whose loads are in flight together

    def row_blocks(self, rows):
        """Return the number of CTAs that compute one KV head of a sequence or query: all `rows` rows, all channels."""
        return (rows + self.rows - 1) // self.rows * (HEAD_DIM_V // self.columns)

    @cute.jit
    def coords(self, row_blocks):
        """Return (number, KV head, the warp's row, the CTA's first channel, warp, lane). The CTA combines the launch's
        sequence or query number `number`.
        """
        tid, _, _ = cute.arch.thread_idx()
        block, kv_head, _ = cute.arch.block_idx()
        warp, lane = tid // WARP, tid % WARP
        blocks = HEAD_DIM_V // self.columns
        number, place = block // row_blocks, block % row_blocks
        row = place // blocks * self.rows + warp // self.groups
        return number, kv_head, row, place % blocks * self.columns, warp, lane

    @cute.jit
    def combine(
        self,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        kv_head,
        batch_idx,
        row,
        column,
        first,
        splits,
        sink,
        warp,
        lane,
    ):
        """Combine the `splits` splits of row `row` and write the row's channels from `column` on. Split i has partial
        result `split_idx(first, i)`.

        sink: the attention sink of the row's head, in natural logarithm; -inf if there is none.
        """
        smem, rows, group = SmemAllocator(), lse_partial.shape[2], warp % self.groups
        sums = smem.allocate_tensor(Float32, cute.make_layout((self.columns, self.groups, self.rows)), 16)
        weights = smem.allocate_tensor(Float32, cute.make_layout((MAX_PARTS, WARPS)), 16)
        inside = cutlass.min(row, rows - 1)
        values = cute.make_rmem_tensor((4, self.vectors, self.unroll), Float32)
        values.fill(0.0)
        # Load the first values of out_i while the weights are computed.
        self.read(values, out_partial, kv_head, inside, column, first, group, splits, lane)
        lses = cute.make_rmem_tensor((LSES,), Float32)
        max_lse, row_sum = -Float32(float("inf")), Float32(0.0)
        for i in cutlass.range_constexpr(LSES):
            lses[i] = -Float32(float("inf"))
            if 32 * i + lane < splits:
                lses[i] = lse_partial[self.split_idx(first, 32 * i + lane), kv_head, inside]
        for i in cutlass.range_constexpr(LSES):
            max_lse = cute.arch.fmax(max_lse, lses[i])
        for log in cutlass.range_constexpr(5):
            max_lse = cute.arch.fmax(max_lse, cute.arch.shuffle_sync_bfly(max_lse, offset=1 << log))
        relative = max_lse if max_lse > -Float32(float("inf")) else Float32(0.0)
        for i in cutlass.range_constexpr(LSES):
            row_sum += cute.math.exp(lses[i] - relative)
        for log in cutlass.range_constexpr(5):
            row_sum += cute.arch.shuffle_sync_bfly(row_sum, offset=1 << log)
        whole, kept = Float32(float("inf")), Float32(0.0)
        if row_sum != 0.0:
            whole = relative + cute.math.log(row_sum)
            kept = 1.0 / (1.0 + cute.math.exp(sink - whole))
        for i in cutlass.range_constexpr(LSES):
            weights[32 * i + lane, warp] = cute.math.exp(lses[i] - whole) * kept
        cute.arch.sync_warp()

        acc = cute.make_rmem_tensor((4, self.vectors), Float32)
        acc.fill(0.0)
        for start in cutlass.range(group, splits, self.unroll * self.groups, unroll=1):
            if start > group:
                self.read(values, out_partial, kv_head, inside, column, first, start, splits, lane)
            for u in cutlass.range_constexpr(self.unroll):
                split = start + u * self.groups
                if split < splits:
                    for v in cutlass.range_constexpr(self.vectors):
                        for i in cutlass.range_constexpr(4):
                            acc[i, v] = cute.math.fma(weights[split, warp], values[i, v, u], acc[i, v])
        if const_expr(self.groups > 1):
            for v in cutlass.range_constexpr(self.vectors):
                cute.autovec_copy(
                    acc[None, v], cute.local_tile(sums[None, group, warp // self.groups], (4,), (v * 32 + lane,))
                )
            cute.arch.sync_threads()
            if group == 0:
                for g in cutlass.range_constexpr(1, self.groups):
                    for v in cutlass.range_constexpr(self.vectors):
                        cute.autovec_copy(
                            cute.local_tile(sums[None, g, warp // self.groups], (4,), (v * 32 + lane,)),
                            values[None, v, 0],
                        )
                        for i in cutlass.range_constexpr(4):
                            acc[i, v] += values[i, v, 0]
        if group == 0 and row < rows:
            sequence, query, head = self.coord(out, batch_idx, row, kv_head, lse_partial.shape[1])
            target = out[sequence, query, head, None]
            packed = cute.make_rmem_tensor((4,), self.dtype)
            for v in cutlass.range_constexpr(self.vectors):
                for i in cutlass.range_constexpr(4):
                    packed[i] = acc[i, v].to(self.dtype)
                cute.autovec_copy(packed, cute.local_tile(target, (4,), (column // 4 + v * 32 + lane,)))
            if lane == 0 and column == 0:
                lse[sequence, head, query] = whole

    @cute.jit
    def read(self, values, out_partial, kv_head, row, column, first, start, splits, lane):
        """Load the lane's channels of splits `start`, `start` + groups and so on, at most `unroll` of them, into
        `values`."""
        for u in cutlass.range_constexpr(self.unroll):
            split = start + u * self.groups
            if split < splits:
                source = out_partial[self.split_idx(first, split), kv_head, row, None]
                for v in cutlass.range_constexpr(self.vectors):
                    vector = cute.local_tile(source, (4,), (column // 4 + v * 32 + lane,))
                    cute.autovec_copy(vector, values[None, v, u])


class MlaCombineSm90(SplitCombine):
    @cute.jit
    def coord(self, out, batch_idx, row, kv_head, kv_heads):
        heads = out.shape[2] // kv_heads
        return batch_idx, row // heads, kv_head * heads + row % heads

    @cute.jit
    def split_idx(self, first, split):
        return first + split

    @cute.jit
    def __call__(
        self,
        lengths: cute.Tensor,
        plan: cute.Tensor,
        num_splits: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        capacity: Int32,
        fixed_splits: Int32,
        stream,
    ):
        sequences = cutlass.min(plan.shape[0], lengths.shape[0])
        if fixed_splits > 0:
            sequences = lengths.shape[0]
        row_blocks = self.row_blocks(lse_partial.shape[2])
        self.kernel(
            lengths, plan, num_splits, out, lse, out_partial, lse_partial, capacity, fixed_splits, row_blocks
        ).launch(
            grid=(sequences * row_blocks, lse_partial.shape[1], 1),
            block=(WARPS * WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        lengths: cute.Tensor,
        plan: cute.Tensor,
        num_splits: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        capacity: Int32,
        fixed_splits: Int32,
        row_blocks: Int32,
    ):
        number, kv_head, row, column, warp, lane = self.coords(row_blocks)
        # This kernel also reads the plan, which the plan kernel can have written just before the attention kernel. A
        # wait for the attention kernel covers both, because the attention kernel has waited for the plan kernel.
        wait_for_prerequisite_grids()
        sequence, first, splits = number, Int32(0), Int32(0)
        if fixed_splits > 0:
            tiles = (cutlass.max(cutlass.min(lengths[sequence], capacity), 0) + TILE_N - 1) // TILE_N
            each = cutlass.max(FIXED_SPLIT_TILES, (tiles + MAX_FIXED_SPLITS - 1) // MAX_FIXED_SPLITS)
            first, splits = sequence * fixed_splits, (tiles + each - 1) // each
        else:
            sequence = plan[number, PlanColumn.SPLIT_SEQUENCE]
            if sequence >= 0 and sequence < lengths.shape[0]:
                first = cutlass.max(num_splits[sequence], 0)
                splits = cutlass.max(cutlass.min(num_splits[sequence + 1], out_partial.shape[0]), 0) - first
        splits = cutlass.min(splits, MAX_PARTS)
        if splits > 1:
            self.combine(
                *(out, lse, out_partial, lse_partial, kv_head, sequence, row, column, first, splits),
                *(-Float32(float("inf")), warp, lane),
            )


class SparseMlaCombineSm90(SplitCombine):
    @cute.jit
    def coord(self, out, batch_idx, row, kv_head, kv_heads):
        return batch_idx // out.shape[1], batch_idx % out.shape[1], row

    @cute.jit
    def split_idx(self, first, split):
        return 2 * (first + split) + (1 if split == 0 else 0)

    @cute.jit
    def __call__(
        self,
        sink: cute.Tensor,
        has_sink: Int32,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        workers: Int32,
        full_waves: Int32,
        tiles: Int32,
        split_workers: Int32,
        stream,
    ):
        queries = out.shape[0] * out.shape[1]
        scheduler = StreamKScheduler(Int32(0), workers, full_waves, queries, tiles, split_workers)
        row_blocks = self.row_blocks(lse_partial.shape[2])
        self.kernel(sink, has_sink, out, lse, out_partial, lse_partial, scheduler, row_blocks).launch(
            grid=((queries - full_waves * workers) * row_blocks, 1, 1),
            block=(WARPS * WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        sink: cute.Tensor,
        has_sink: Int32,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        scheduler: StreamKScheduler,
        row_blocks: Int32,
    ):
        number, _, row, column, warp, lane = self.coords(row_blocks)
        wait_for_prerequisite_grids()
        # The query's splits are those of consecutive workers, who have its tiles. `first` is the first of these
        # workers.
        first = scheduler.worker_of(number * scheduler.tiles)
        splits = scheduler.worker_of((number + 1) * scheduler.tiles - 1) - first + 1
        query = scheduler.first_split() + number
        inside = cutlass.min(row, lse_partial.shape[2] - 1)
        if splits > 1:
            own_sink = -Float32(float("inf"))
            if has_sink > 0:
                own_sink = sink[inside]
            self.combine(
                *(out, lse, out_partial, lse_partial, Int32(0), query, row, column, first, splits),
                *(own_sink, warp, lane),
            )


@cached
def compile_mla_combine(dtype: str, config: MlaCombineConfig):
    """Compile f(lengths [B], plan [parts, 8], num_splits [B + 1], out [B, s_q, h_q, 512], lse [B, h_q, s_q],
    out_partial [splits, h_k, rows, 512], lse_partial [splits, h_k, rows], capacity, fixed_splits).

    out_partial and lse_partial are inputs, which `MlaDecodeSm90` has written; rows = s_q * h_q / h_k. f writes out and
    lse of the sequences that are split. For plan, num_splits, capacity and fixed_splits see `DecodeScheduler`.
    """
    kind = cute_dtype(dtype)
    batch, queries, heads, kv_heads, splits, rows = (cute.sym_int() for _ in range(6))
    return compile_sm90(
        MlaCombineSm90(kind, config),
        fake(Int32, (batch,), strides(1), 4),
        fake(Int32, (cute.sym_int(), 8), (8, 1), 4),
        fake(Int32, (cute.sym_int(),), (1,), 4),
        fake(kind, (batch, queries, heads, HEAD_DIM_V), (*strides(2, 8), HEAD_DIM_V, 1)),
        fake(Float32, (batch, heads, queries), (*strides(2), 1), 4),
        fake(Float32, (splits, kv_heads, rows, HEAD_DIM_V), (*strides(2, 4), HEAD_DIM_V, 1)),
        fake(Float32, (splits, kv_heads, rows), (*strides(2), 1), 4),
        *(Int32(0), Int32(0)),
        fake_stream(),
    )


@cached
def compile_sparse_mla_combine(dtype: str, config: MlaCombineConfig):
    """Compile f(sink [m], has_sink, out [T / s_q, s_q, h, 512], lse [T / s_q, h, s_q], out_partial
    [splits, 1, h, 512], lse_partial [splits, 1, h], workers, full_waves, tiles, split_workers).

    out_partial and lse_partial are inputs, which `SparseMlaKernel` has written. f writes out and lse of the queries
    that are split. `tiles` is the largest number of tiles of a query, as in `StreamKScheduler`; the other arguments are
    as in `SparseMlaKernel`. full_waves * workers < T.
    """
    kind = cute_dtype(dtype)
    return compile_sm90(
        SparseMlaCombineSm90(kind, config),
        *fake_sink(),
        *fake_results(kind, cute.sym_int()),
        *(Int32(0), Int32(0), Int32(0), Int32(0)),
        fake_stream(),
    )


FEW, SOME, MANY = MlaCombineConfig(1, HEAD_DIM_V), MlaCombineConfig(4, 256), MlaCombineConfig(8, 128)


def choose_config(splits: int, rows: int) -> MlaCombineConfig:
    """Choose the configuration that gives about two CTAs per SM, which is fastest.

    splits  estimated number of splits of a sequence or query
    rows    largest number of rows (query tokens x heads) that the launch combines per KV head, over all sequences or
            queries. In batch-invariant decoding only the rows of one sequence count
    """
    if splits < 8 or rows > 512:
        return FEW
    return MANY if rows <= 64 else SOME


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the ops can ask for."""
    return [
        (compile_function, (dtype, config))
        for compile_function in (compile_mla_combine, compile_sparse_mla_combine)
        for dtype in DTYPES
        for config in (FEW, SOME, MANY)
    ]
