"""Merge attention branches over disjoint keys: window and compressed keys, or context and new tokens.

lse = log sum_i e^lse_i;  out = sum_i e^(lse_i - lse) out_i, times e^lse / (e^lse + e^sink) with a sink

out_i and lse_i are the result of branch i; the sums run over the N branches.

Work
- A warp merges a row of D channels, chunk by chunk. In a chunk a lane has `unroll` vectors of 16 bytes of every branch,
  so up to 8 loads per lane are in flight. The vectors stay in registers from load to store: each branch is read once
  and the result is written once.
- While the first chunk loads, every lane computes all N weights of the row: N exponentials cost less than
  shuffles. Weights are relative to the largest LSE. So without a sink, if only one branch has keys, the weight of this
  branch is exactly 1.
- The lanes load the values of a branch without keys (infinite LSE), too, because the LSE arrives no sooner than the
  values. They replace these values by zeros, because the values can be NaN.
- Results are [A, B, H, D] with contiguous rows, LSEs [A, B, H]. The other strides are arbitrary, because decoding
  stores LSEs as [B, H, s_q].
- A warp computes its row's coordinates (a, b, h) once, by divisors that the host precomputes. Offsets are 64-bit.
Warp roles: none, all warps do the same. Shared memory: none.
Constraints: 1 to MAX_BRANCHES branches of one dtype; rows start at multiples of 16 bytes.
Launch: programmatic dependent launch.
Roofline: bound by memory: N * D elements read and D elements written per row.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.sm90 import WARP
from dsa.kernels.mla.limits import MAX_BRANCHES, MERGE_CHANNEL_MULTIPLE, MERGE_DTYPES
from dsa.runtime.compile_cache import cached, compile_sm90

WARPS = 4
VECTOR_BITS = 128
INFINITY = float("inf")


def unroll_of(width: int, branches: int) -> int:
    """Return the number of 16-byte vectors that a lane loads per chunk and branch. `width`: elements per vector.

    A chunk has 512 channels. It has 256 if a lane would otherwise load more than 8 vectors of all branches together.
    """
    return 4 if width == 4 and branches <= 2 else 2


class MergeAttentionSm90:
    def __init__(self, dtype: type[cutlass.Numeric], branches: int):
        self.dtype, self.branches, self.width = dtype, branches, VECTOR_BITS // dtype.width
        self.unroll = unroll_of(self.width, branches)

    @cute.jit
    def __call__(
        self,
        outs: list[cute.Tensor],
        lses: list[cute.Tensor],
        attn_sink: cute.Tensor | None,
        out: cute.Tensor,
        lse: cute.Tensor,
        stream,
    ):
        rows = out.shape[0] * out.shape[1] * out.shape[2]
        heads, inner = (cute.fast_divmod_create_divisor_v2(size) for size in (out.shape[2], out.shape[1]))
        self.kernel(outs, lses, attn_sink, out, lse, heads, inner, rows).launch(
            grid=(cute.ceil_div(rows, WARPS), 1, 1), block=(WARPS * WARP, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        outs: list[cute.Tensor],
        lses: list[cute.Tensor],
        attn_sink: cute.Tensor | None,
        out: cute.Tensor,
        lse: cute.Tensor,
        heads: cute.FastDivmodDivisorV2,
        inner: cute.FastDivmodDivisorV2,
        rows: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, lane = block * WARPS + tid // WARP, tid % WARP
        wait_for_prerequisite_grids()
        if row < rows:
            outer, h = divmod(row, heads)
            a, b = divmod(outer, inner)
            vectors = out.shape[3] // self.width
            raw = cute.make_rmem_tensor((self.width, self.branches, self.unroll), self.dtype)
            self.read(raw, outs, a, b, h, lane, vectors)
            logs = cute.make_rmem_tensor((self.branches,), Float32)
            for n in cutlass.range_constexpr(self.branches):
                logs[n] = lses[n][a, b, h]
            sink = attn_sink[h] if const_expr(attn_sink is not None) else None
            weights = cute.make_rmem_tensor((self.branches,), Float32)
            whole = self.weigh(weights, logs, sink)
            if lane == 0:
                lse[a, b, h] = whole
            target = out[a, b, h, None]
            for start in cutlass.range(lane, vectors, WARP * self.unroll, unroll=1):
                if start > lane:
                    self.read(raw, outs, a, b, h, start, vectors)
                for u in cutlass.range_constexpr(self.unroll):
                    packed = self.add(raw[None, None, u], logs, weights)
                    if start + WARP * u < vectors:
                        cute.autovec_copy(packed, cute.local_tile(target, (self.width,), (start + WARP * u,)))

    @cute.jit
    def read(self, raw, outs, a, b, h, start, vectors):
        """Load the lane's vectors of a chunk from all branches. start: index of the lane's first vector in the row."""
        for u in cutlass.range_constexpr(self.unroll):
            # Past the end, load the last vector again.
            vector = cutlass.min(start + WARP * u, vectors - 1)
            for n in cutlass.range_constexpr(self.branches):
                source = cute.local_tile(outs[n][a, b, h, None], (self.width,), (vector,))
                cute.autovec_copy(source, raw[None, n, u])

    @cute.jit
    def weigh(self, weights, logs, sink):
        """Set `weights` to the branches' weights in the row. Return the merged LSE, +inf if no branch has keys.

        logs: the branches' LSEs. A branch without keys has LSE +inf or -inf. It gets weight 0, and its element of
        `logs` becomes -inf. sink: the sink of the row's head, or None.
        """
        max_lse, lse_sum = -Float32(INFINITY), Float32(0.0)
        for n in cutlass.range_constexpr(self.branches):
            logs[n] = -Float32(INFINITY) if logs[n] == INFINITY else logs[n]
            max_lse = cute.arch.fmax(max_lse, logs[n])
        relative = max_lse if max_lse > -Float32(INFINITY) else Float32(0.0)
        for n in cutlass.range_constexpr(self.branches):
            weights[n] = cute.math.exp(logs[n] - relative)
            lse_sum += weights[n]
        # Use no jumps here. Otherwise ptxas moves the load of the sink down to here, and the warp waits for that load.
        whole, factor = relative + cute.math.log(lse_sum), lse_sum
        if const_expr(sink is not None):
            factor *= Float32(1.0) + cute.math.exp(sink - whole)
        inverse = cute.arch.rcp_approx(factor) if lse_sum != 0.0 else Float32(0.0)
        for n in cutlass.range_constexpr(self.branches):
            weights[n] *= inverse
        return whole if lse_sum != 0.0 else Float32(INFINITY)

    @cute.jit
    def add(self, raw, logs, weights):
        """Return the sum of `raw` [width, branches] over the branches, weighted and rounded to `dtype`. Branches
        without keys count as zeros."""
        acc = cute.make_rmem_tensor((self.width,), Float32)
        acc.fill(0.0)
        for n in cutlass.range_constexpr(self.branches):
            own = cute.make_rmem_tensor((self.width,), self.dtype)
            own.store(raw[None, n].load())
            words = cute.recast_tensor(own, Uint32)
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = Uint32(0) if logs[n] == -Float32(INFINITY) else words[i]
            for i in cutlass.range_constexpr(self.width):
                acc[i] = cute.math.fma(weights[n], own[i].to(Float32), acc[i])
        packed = cute.make_rmem_tensor((self.width,), self.dtype)
        packed.store(acc.load().to(self.dtype))
        return packed


@cached
def compile_merge_attention(dtype: str, branches: int, sink: bool):
    """Compile f(outs, lses, attn_sink [H] fp32 or None, out [A, B, H, D], lse [A, B, H]).

    outs and lses are lists of `branches` tensors: [A, B, H, D] in dtype and [A, B, H] in fp32; out has `dtype`, lse is
    fp32. A * B * H is 1 to 2^31 - 8; D is a positive multiple of 8. Rows of D start at multiples of 16 bytes.
    """
    element = cute_dtype(dtype)
    outer, dim = [cute.sym_int() for _ in range(3)], cute.sym_int(divisibility=MERGE_CHANNEL_MULTIPLE)

    def rows():
        return fake(element, (*outer, dim), (*strides(3, VECTOR_BITS // element.width), 1))

    def numbers(shape):
        return fake(Float32, tuple(shape), strides(len(shape)), 4)

    return compile_sm90(
        MergeAttentionSm90(element, branches),
        [rows() for _ in range(branches)],
        [numbers(outer) for _ in range(branches)],
        numbers(outer[2:]) if sink else None,
        *(rows(), numbers(outer)),
        fake_stream(),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the op can ask for."""
    return [
        (compile_merge_attention, (dtype, branches, sink))
        for dtype in MERGE_DTYPES
        for branches in range(1, MAX_BRANCHES + 1)
        for sink in (False, True)
    ]
