"""The keys' gradients of the per-head warm-up loss from the parts of the heads: dk_idx[s] = sum_h parts[h, s], in this
order, to bf16.

Plan
- A part is as per_head_gradient_sm90.py leaves it: a tile of 64 keys by 64 channels in the order of wgmma's registers,
  by eight keys, then by thread, four numbers each. A thread here adds up four such numbers of all heads.
- Tiles are counted through all sequences, each of which has one more than its keys need at most; a binary search finds
  a tile's sequence. Nobody has written to the tiles of a sequence without queries. Keys of no sequence are left out.
Roofline: memory, H * Tk * di * 4 bytes.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream
from dsa.cute.sm90 import WARPGROUP
from dsa.kernels.training.limits import INDEX_CHANNELS
from dsa.kernels.training.per_head_tiles import CHUNK, KEYS
from dsa.runtime.compile_cache import cached, compile_sm90

THREADS = 256
PARTS = KEYS * CHUNK // 4 // THREADS  # CTAs of a tile's chunk
PREFETCHED = 8


class PerHeadKeySumSm90:
    @cute.jit
    def __call__(self, parts: cute.Tensor, begins_q: cute.Tensor, begins_k: cute.Tensor, dk_idx: cute.Tensor, stream):
        grid = parts.shape[1], dk_idx.shape[1] // CHUNK * PARTS, 1
        self.kernel(parts, begins_q, begins_k, dk_idx).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, parts: cute.Tensor, begins_q: cute.Tensor, begins_k: cute.Tensor, dk_idx: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        tile, part, _ = cute.arch.block_idx()
        wait_for_prerequisite_grids()
        low, high = Int32(0), Int32(begins_k.shape[0] - 2)
        while low < high:
            middle = (low + high + 1) >> 1
            if (begins_k[middle] >> 6) + middle <= tile:
                low = middle
            else:
                high = middle - 1
        first = begins_k[low]
        key = first + (tile - (first >> 6) - low) * KEYS
        end = cutlass.min(begins_k[low + 1], dk_idx.shape[0])
        if first <= key and key < end:
            sums = cute.make_rmem_tensor((4,), Float32)
            sums.fill(0.0)
            if begins_q[low + 1] > begins_q[low]:
                loaded = cute.make_rmem_tensor((4, PREFETCHED), Float32)
                heads = parts.shape[0]
                whole = heads // PREFETCHED * PREFETCHED
                for head in cutlass.range(0, whole, PREFETCHED, unroll=1):
                    for i in cutlass.range_constexpr(PREFETCHED):
                        own = cute.local_tile(parts[head + i, tile, None], (4,), (part * THREADS + tid,))
                        cute.autovec_copy(own, loaded[None, i])
                    for i in cutlass.range_constexpr(PREFETCHED):
                        for j in cutlass.range_constexpr(4):
                            sums[j] += loaded[j, i]
                for head in cutlass.range(whole, heads, unroll=1):
                    own = cute.local_tile(parts[head, tile, None], (4,), (part * THREADS + tid,))
                    cute.autovec_copy(own, loaded[None, 0])
                    for j in cutlass.range_constexpr(4):
                        sums[j] += loaded[j, 0]
            # The numbers of an accumulator: two neighbouring keys of a channel and of the one 8 further.
            place = part % PARTS * THREADS + tid
            quad, thread = place // WARPGROUP, place % WARPGROUP
            key += quad * 8 + thread % 4 * 2
            channel = part // PARTS * CHUNK + thread // 32 * 16 + thread % 32 // 4
            for j in cutlass.range_constexpr(4):
                if key + j % 2 < end:
                    dk_idx[key + j % 2, channel + j // 2 * 8] = sums[j].to(BFloat16)


@cached
def compile_per_head_key_sum(index_dim: int):
    """-> f(parts fp32 [H, Tk // 64 + B, 64 di], cu_seqlens_q and cu_seqlens_k int32 [B + 1], dk_idx bf16 [Tk, di])."""
    bounds, part = cute.sym_int(), KEYS * index_dim
    return compile_sm90(
        PerHeadKeySumSm90(),
        # A head's stride has 64 bits: 2^31 numbers are 262144 keys of 64 heads x 128.
        fake(Float32, (cute.sym_int(), cute.sym_int(), part), (cute.sym_int64(divisibility=4), part, 1)),
        *(fake(Int32, (bounds,), (1,), 4) for _ in range(2)),
        fake(BFloat16, (cute.sym_int(), index_dim), (index_dim, 1)),
        fake_stream(),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_per_head_key_sum, (index_dim,)) for index_dim in INDEX_CHANNELS]
