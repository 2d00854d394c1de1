"""All-reduce of the experts' sums of a few tokens. Each GPU computes the weighted sum of its own experts' rows, as
combine_experts_sm90.py does, and one_shot_sum_sm90.py sends and adds these sums:
out[t] = round(sum over the ranks, in order, of round(sum_j weights[t, j] * y[rows[t, j]] + shared[t]))

Plan
- As one_shot_sum_sm90.py, but a thread computes its 8 bytes of this rank's part instead of loading them. This saves a
  kernel, and the part does not pass through memory.
- A thread reads the row indices and weights, then issues BATCH rows' copies at once by cp.async into its own part of
  shared memory. Plain loads would not stay together: ptxas uses the first before it issues the next. Copies of absent
  rows write zeros and read nothing. More than BATCH rows take further rounds.
- Products are rounded and added in the order of j, shared last, so the part has the bits of combine_experts_sm90.py.
Constraints: as one_shot_sum_sm90.py; H a multiple of 8, innermost stride 1, rows aligned to 16 bytes.
Shared memory: BATCH * THREADS * 8 bytes, 16 KiB.
Roofline: as one_shot_sum_sm90.py, plus the latency of the row indices.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.copies import gather_8
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.rounded import multiply_rounded
from dsa.cute.shared_memory import load_8
from dsa.kernels.parallel.limits import DTYPES, PART, RANKS
from dsa.kernels.parallel.one_shot_sum_sm90 import THREADS, OneShotSumSm90, fake_memory, fake_numbers
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

BATCH = 8  # rows at a time


class ExpertsPart(NamedTuple):
    """The inputs of this rank's part: y [M, H], rows [T, k], weights [T, k], and shared [T, H] or None."""

    y: cute.Tensor
    rows: cute.Tensor
    weights: cute.Tensor
    shared: cute.Tensor | None


class ExpertsSumSm90(OneShotSumSm90):
    @cute.jit
    def __call__(
        self,
        y: cute.Tensor,
        rows: cute.Tensor,
        weights: cute.Tensor,
        shared: cute.Tensor | None,
        out: cute.Tensor,
        memory: cute.Tensor,
        memories: list[cute.Tensor],
        turns: cute.Tensor,
        rank: Int32,
        ctas: Int32,
        patience: Int64,
        lost: Int64,
        stream,
    ):
        source = ExpertsPart(y, rows, weights, shared)
        self.launch(source, out, memory, memories, turns, rank, ctas, patience, lost, stream)

    @cute.jit
    def scratch(self, tid: Int32) -> Int32:
        @cute.struct
        class Storage:
            gathered: cute.struct.Align[cute.struct.MemRange[Uint32, BATCH * THREADS * PART // 4], 128]

        return Int32(SmemAllocator().allocate(Storage).gathered.data_ptr().toint()) + tid * PART

    @cute.jit
    def load(self, source, i: Int32, part: cute.Tensor, scratch: Int32):
        y, rows, weights, shared = source
        vectors = y.shape[1] // self.width
        token, vector = i // vectors, i % vectors
        own = cute.make_rmem_tensor((self.width,), self.dtype)
        if const_expr(shared is not None):
            cute.autovec_copy(cute.local_tile(shared[token, None], (self.width,), (vector,)), own)
        acc = cute.make_rmem_tensor((self.width,), Float32)
        acc.fill(0.0)
        words = cute.make_rmem_tensor((PART // 4,), Uint32)
        row_bytes = Int64(y.stride[0]) * (self.dtype.width // 8)
        start = y.iterator.toint() + Int64(vector) * PART
        for first in cutlass.range(0, rows.shape[1], BATCH, unroll=1):
            numbers = cute.make_rmem_tensor((BATCH,), Int32)
            factors = cute.make_rmem_tensor((BATCH,), Float32)
            for j in cutlass.range_constexpr(BATCH):
                numbers[j], factors[j] = Int32(-1), Float32(0.0)
                if first + j < rows.shape[1]:
                    numbers[j] = rows[token, first + j]
                    factors[j] = weights[token, first + j]
            for j in cutlass.range_constexpr(BATCH):
                valid = numbers[j] >= 0 and numbers[j] < y.shape[0]
                # An absent row counts as zero, even if its weight is infinite. Its address is not computed.
                factors[j] = factors[j] if valid else Float32(0.0)
                row = Int64(numbers[j]) if valid else Int64(0)
                gather_8(scratch + j * (THREADS * PART), start + row * row_bytes, valid)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            for j in cutlass.range_constexpr(BATCH):
                words[0], words[1] = load_8(scratch + j * (THREADS * PART))
                values = cute.recast_tensor(words, self.dtype)
                for c in cutlass.range_constexpr(self.width):
                    acc[c] += multiply_rounded(factors[j], values[c].to(Float32))
        if const_expr(shared is not None):
            for c in cutlass.range_constexpr(self.width):
                acc[c] += own[c].to(Float32)
        part.store(acc.load().to(self.dtype))


@cached
def compile_experts_sum(dtype: str, ranks: int, shared: bool):
    """-> f(y [M, H], rows [T, k] int32, weights [T, k] fp32, shared [T, H] or None, out [T * H], and as
    `compile_one_shot_sum`). H a multiple of 8, M > 0, rows of H at multiples of 16 bytes."""
    kind = cute_dtype(dtype)
    sources, tokens, top_k, channels = cute.sym_int(), cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8)

    def rows_of(count):
        return fake(kind, (count, channels), (*strides(1, 128 // kind.width), 1))

    def numbers(element):
        return fake(element, (tokens, top_k), strides(2), element.width // 8)

    part = rows_of(sources), numbers(Int32), numbers(Float32), rows_of(tokens) if shared else None
    out = fake(kind, (cute.sym_int(divisibility=8),), (1,))
    arguments = *part, out, *fake_memory(ranks), *fake_numbers()
    return compile_sm90(ExpertsSumSm90(kind, ranks), *arguments, fake_stream())


def shipped_variants() -> Variants:
    """Every compile function and its arguments that the sums over GPUs can ask for."""
    return [
        (compile_experts_sum, (dtype, ranks, shared)) for dtype in DTYPES for ranks in RANKS for shared in (False, True)
    ]
