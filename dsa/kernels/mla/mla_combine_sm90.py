"""The partial results of split sequences, combined: the end of MLA decoding.

lse = log sum_i e^lse_i;   out = sum_i e^(lse_i - lse) out_i over the splits i of a sequence, in their order

Plan
- A CTA has ROWS rows of one sequence and KV head, and COLUMNS of the 512 channels. Its warps are GROUPS for each row,
  which take the splits in turns; with more than one, their sums are added in shared memory, in order.
- Weights: a warp reads its row's LSEs, while the first partial results are on their way.
- With a plan, CTA row i looks for the i-th split sequence; without one, for sequence i.
Launch: programmatic, behind the decoding kernel: the CTAs of sequences that were not split end at once.
Shared memory: a row's sums of every group, and its weights. Constraints: at most MOST_SPLITS splits.
Roofline: memory (L2), 2 KiB a row and split.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.fake_tensors import cute_dtype
from dsa.kernels.mla.mla_tiles import MAX_SPLITS, SPLIT_TILES, TILE, VALUE

WARPS = 8
LSES = 5  # of a lane
MOST_SPLITS = 32 * LSES


@dataclass(frozen=True)
class MlaCombineConfig:
    """groups: warps that share a row's splits; columns: channels of a CTA."""

    groups: int
    columns: int


class MlaCombineSm90:
    def __init__(self, dtype: type[cutlass.Numeric], cfg: MlaCombineConfig):
        self.dtype, self.groups, self.columns = dtype, cfg.groups, cfg.columns
        self.rows = WARPS // cfg.groups
        self.vectors = cfg.columns // 128  # of 4 channels, a lane
        self.unroll = 16 // self.vectors  # splits at a time

    @cute.jit
    def place(self, out, sequence, row, kv_head, kv_heads):
        """(sequence, query, head) of a row, in the results."""
        heads = out.shape[2] // kv_heads
        return sequence, row // heads, kv_head * heads + row % heads

    @cute.jit
    def slot(self, first, split):
        """Which partial result a split is."""
        return first + split

    @cute.jit
    def __call__(
        self,
        lengths: cute.Tensor,
        plan: cute.Tensor,
        num_splits: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_parts: cute.Tensor,
        lse_parts: cute.Tensor,
        capacity: Int32,
        fixed_splits: Int32,
        stream,
    ):
        rows = lse_parts.shape[2]
        sequences = cutlass.min(plan.shape[0], lengths.shape[0])
        if fixed_splits > 0:
            sequences = lengths.shape[0]
        row_blocks = (rows + self.rows - 1) // self.rows * (VALUE // self.columns)
        self.kernel(
            lengths, plan, num_splits, out, lse, out_parts, lse_parts, capacity, fixed_splits, row_blocks
        ).launch(
            grid=(sequences * row_blocks, lse_parts.shape[1], 1),
            block=(WARPS * 32, 1, 1),
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
        out_parts: cute.Tensor,
        lse_parts: cute.Tensor,
        capacity: Int32,
        fixed_splits: Int32,
        row_blocks: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, kv_head, _ = cute.arch.block_idx()
        warp, lane = tid // 32, tid % 32
        blocks = VALUE // self.columns
        number, place = block // row_blocks, block % row_blocks
        row = place // blocks * self.rows + warp // self.groups
        column = place % blocks * self.columns
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((self.columns, self.groups, self.rows)), 16)
        weights = smem.allocate_tensor(Float32, cute.make_layout((MOST_SPLITS, WARPS)), 16)
        # The plan may be from the kernel before the last, which the last has waited for.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        sequence, first, splits = number, Int32(0), Int32(0)
        if fixed_splits > 0:
            tiles = (cutlass.max(cutlass.min(lengths[sequence], capacity), 0) + TILE - 1) // TILE
            each = cutlass.max(SPLIT_TILES, (tiles + MAX_SPLITS - 1) // MAX_SPLITS)
            first, splits = sequence * fixed_splits, (tiles + each - 1) // each
        else:
            sequence = plan[number, 5]
            if sequence >= 0 and sequence < lengths.shape[0]:
                first = cutlass.max(num_splits[sequence], 0)
                splits = cutlass.max(cutlass.min(num_splits[sequence + 1], out_parts.shape[0]), 0) - first
        splits = cutlass.min(splits, MOST_SPLITS)
        if splits > 1:
            self.combine(
                *(out, lse, out_parts, lse_parts, sums, weights, kv_head, sequence, row, column, first, splits),
                *(-Float32(float("inf")), warp, lane),
            )

    @cute.jit
    def combine(
        self,
        out,
        lse,
        out_parts,
        lse_parts,
        sums,
        weights,
        kv_head,
        sequence,
        row,
        column,
        first,
        splits,
        sink,
        warp,
        lane,
    ):
        """sink: of the row, in powers of e; minus infinity: none."""
        rows, group = lse_parts.shape[2], warp % self.groups
        inside = cutlass.min(row, rows - 1)
        values = cute.make_rmem_tensor((4, self.vectors, self.unroll), Float32)
        values.fill(0.0)
        # The first partial results are on their way while the weights are found.
        self.read(values, out_parts, kv_head, inside, column, first, group, splits, lane)
        own = cute.make_rmem_tensor((LSES,), Float32)
        highest, amount = -Float32(float("inf")), Float32(0.0)
        for i in cutlass.range_constexpr(LSES):
            own[i] = -Float32(float("inf"))
            if 32 * i + lane < splits:
                own[i] = lse_parts[self.slot(first, 32 * i + lane), kv_head, inside]
        for i in cutlass.range_constexpr(LSES):
            highest = cute.arch.fmax(highest, own[i])
        for log in cutlass.range_constexpr(5):
            highest = cute.arch.fmax(highest, cute.arch.shuffle_sync_bfly(highest, offset=1 << log))
        relative = highest if highest > -Float32(float("inf")) else Float32(0.0)
        for i in cutlass.range_constexpr(LSES):
            amount += cute.math.exp(own[i] - relative)
        for log in cutlass.range_constexpr(5):
            amount += cute.arch.shuffle_sync_bfly(amount, offset=1 << log)
        whole, kept = Float32(float("inf")), Float32(0.0)
        if amount != 0.0:
            whole = relative + cute.math.log(amount)
            kept = 1.0 / (1.0 + cute.math.exp(sink - whole))
        for i in cutlass.range_constexpr(LSES):
            weights[32 * i + lane, warp] = cute.math.exp(own[i] - whole) * kept
        cute.arch.sync_warp()

        acc = cute.make_rmem_tensor((4, self.vectors), Float32)
        acc.fill(0.0)
        for start in cutlass.range(group, splits, self.unroll * self.groups, unroll=1):
            if start > group:
                self.read(values, out_parts, kv_head, inside, column, first, start, splits, lane)
            for u in cutlass.range_constexpr(self.unroll):
                split = start + u * self.groups
                if split < splits:
                    for v in cutlass.range_constexpr(self.vectors):
                        for i in cutlass.range_constexpr(4):
                            acc[i, v] = cute.math.fma(weights[split, warp], values[i, v, u], acc[i, v])
        if const_expr(self.groups > 1):
            for v in cutlass.range_constexpr(self.vectors):
                shared = cute.local_tile(sums[None, group, warp // self.groups], (4,), (v * 32 + lane,))
                cute.autovec_copy(acc[None, v], shared)
            cute.arch.sync_threads()
            if group == 0:
                for g in cutlass.range_constexpr(1, self.groups):
                    for v in cutlass.range_constexpr(self.vectors):
                        other = cute.local_tile(sums[None, g, warp // self.groups], (4,), (v * 32 + lane,))
                        cute.autovec_copy(other, values[None, v, 0])
                        for i in cutlass.range_constexpr(4):
                            acc[i, v] += values[i, v, 0]
        if group == 0 and row < rows:
            whose, query, head = self.place(out, sequence, row, kv_head, lse_parts.shape[1])
            target = out[whose, query, head, None]
            packed = cute.make_rmem_tensor((4,), self.dtype)
            for v in cutlass.range_constexpr(self.vectors):
                for i in cutlass.range_constexpr(4):
                    packed[i] = acc[i, v].to(self.dtype)
                cute.autovec_copy(packed, cute.local_tile(target, (4,), (column // 4 + v * 32 + lane,)))
            if lane == 0 and column == 0:
                lse[whose, head, query] = whole

    @cute.jit
    def read(self, values, out_parts, kv_head, row, column, first, start, splits, lane):
        """Splits start, start + GROUPS and so on."""
        for u in cutlass.range_constexpr(self.unroll):
            split = start + u * self.groups
            if split < splits:
                source = out_parts[self.slot(first, split), kv_head, row, None]
                for v in cutlass.range_constexpr(self.vectors):
                    vector = cute.local_tile(source, (4,), (column // 4 + v * 32 + lane,))
                    cute.autovec_copy(vector, values[None, v, u])


@cached
def compile_mla_combine(dtype: str, config: MlaCombineConfig):
    """-> f(lengths [B], plan [parts, 8], num_splits [B + 1], out [B, s_q, h_q, 512], lse [B, h_q, s_q], out_parts
    [slots, h_k, rows, 512], lse_parts [slots, h_k, rows], capacity, fixed_splits)"""
    kind = cute_dtype(dtype)

    def fake(dtype, shape, stride, align):
        return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)

    def strides(count, divisibility):
        return tuple(cute.sym_int64(divisibility=divisibility) for _ in range(count))

    batch, queries, heads, kv_heads, slots, rows = (cute.sym_int() for _ in range(6))
    return compile_sm90(
        MlaCombineSm90(kind, config),
        fake(Int32, (batch,), strides(1, 1), 4),
        fake(Int32, (cute.sym_int(), 8), (8, 1), 4),
        fake(Int32, (cute.sym_int(),), (1,), 4),
        fake(kind, (batch, queries, heads, VALUE), (*strides(2, 8), VALUE, 1), 16),
        fake(Float32, (batch, heads, queries), (*strides(2, 1), 1), 4),
        fake(Float32, (slots, kv_heads, rows, VALUE), (*strides(2, 4), VALUE, 1), 16),
        fake(Float32, (slots, kv_heads, rows), (*strides(2, 1), 1), 4),
        *(Int32(0), Int32(0)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


FEW, SOME, MANY = MlaCombineConfig(1, VALUE), MlaCombineConfig(4, 256), MlaCombineConfig(8, 128)


def choose_config(splits: int, rows: int) -> MlaCombineConfig:
    """`splits`: what a sequence has of them, at a guess; `rows`: of all sequences together. About two CTAs a
    multiprocessor are best."""
    if splits < 8 or rows > 512:
        return FEW
    return MANY if rows <= 64 else SOME


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_mla_combine, (dtype, config)) for dtype in ("bfloat16", "float16") for config in (FEW, SOME, MANY)]
