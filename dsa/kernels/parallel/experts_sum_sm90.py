"""Weighted sums of the experts' rows for a few tokens, and their all-reduce. Each GPU computes the weighted sums of its
experts' rows, as combine_experts_sm90.py does; then the sums are sent and added as in one_shot_sum_sm90.py:
out[t] = round(sum over the ranks, in order, of round(sum_j weights[t, j] * y[rows[t, j]] + shared[t])),
where weights, rows, y and shared (0 if None) are those of the rank.

Plan
- The plan of one_shot_sum_sm90.py, but a thread computes the places (8 bytes each) of this rank's part instead of
  loading them. This saves the kernel combine_experts_sm90.py, and the part does not pass through global memory.
- For each place, a thread reads the row indices and weights, then issues the copies of BATCH rows at once by cp.async
  (dsa/cute/weighted_rows.py). This repeats for the next BATCH rows.
- Products are rounded to fp32 and added in the order of j, and `shared` is added last. So a part has the bits of
  combine_experts_sm90.py.
Constraints: those of one_shot_sum_sm90.py; H a multiple of 8, innermost stride 1, rows aligned to 16 bytes.
Shared memory: BATCH * THREADS * 8 bytes, 16 KiB.
Roofline: the bounds of one_shot_sum_sm90.py, plus the latency of loading the row indices.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsa.cute.fake_tensors import cute_dtype, fake, fake_rows, fake_stream, strides
from dsa.cute.registers import filled, loaded
from dsa.cute.weighted_rows import add_weighted_rows, scratch_of_thread
from dsa.kernels.parallel.limits import DTYPES, PART, RANKS
from dsa.kernels.parallel.one_shot_sum_sm90 import THREADS, OneShotSumSm90, fake_memory, fake_numbers
from dsa.runtime.compile_cache import Variants, cached, compile_sm90


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
        self.launch((y, rows, weights, shared), out, memory, memories, turns, rank, ctas, patience, lost, stream)

    @cute.jit
    def scratch(self, tid: Int32) -> Int32:
        """Reserve shared memory for `load`. -> this thread's address in it."""
        return scratch_of_thread(PART, THREADS, tid)

    @cute.jit
    def load(self, source, i: Int32, part: cute.Tensor, scratch: Int32):
        """Compute place i (8 bytes) of this rank's part. source: (y [M, H], rows [T, k], weights [T, k], shared [T, H]
        or None)."""
        y, rows, weights, shared = source
        vectors = y.shape[1] // self.width
        token, vector = i // vectors, i % vectors
        if const_expr(shared is not None):
            own = loaded(cute.local_tile(shared[token, None], (self.width,), (vector,)))
        acc = filled((self.width,), 0.0)
        add_weighted_rows(acc, y, rows, weights, scratch, PART, THREADS, token, vector)
        if const_expr(shared is not None):
            for c in cutlass.range_constexpr(self.width):
                acc[c] += own[c].to(Float32)
        part.store(acc.load().to(self.dtype))


@cached
def compile_experts_sum(dtype: str, ranks: int, shared: bool):
    """-> f(y [M, H] dtype, rows [T, k] int32, weights [T, k] fp32, shared [T, H] dtype or None, out [T * H] dtype, then
    `memory` and all later arguments of `compile_one_shot_sum`). H is a multiple of 8, M > 0; rows of y and shared start
    at multiples of 16 bytes."""
    kind = cute_dtype(dtype)
    sources, tokens, top_k, channels = cute.sym_int(), cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8)

    return compile_sm90(
        ExpertsSumSm90(kind, ranks),
        fake_rows(kind, sources, channels),
        fake(Int32, (tokens, top_k), strides(2), 4),
        fake(Float32, (tokens, top_k), strides(2), 4),
        fake_rows(kind, tokens, channels) if shared else None,
        fake_rows(kind, cute.sym_int(divisibility=8)),
        *(*fake_memory(ranks), *fake_numbers(), fake_stream()),
    )


def shipped_variants() -> Variants:
    return [
        (compile_experts_sum, (dtype, ranks, shared)) for dtype in DTYPES for ranks in RANKS for shared in (False, True)
    ]
