"""Row reductions of the warm-up. lse_I[t] = ln sum_s exp(I[t, s]) over the keys s that query t sees, where I are the
indexer's scores. kl[t] is the sum of the KL parts of query t over key tiles; warmup_target_sm90.py computes the parts.

Plan
- LSE: one warp per row. A lane reads four keys per tile and keeps the maximum and the sum of exponentials of its keys.
  The warp merges the lanes' results after the last tile.
- KL: one thread per row. It adds the parts in the order of the keys.
Roofline: the LSE is bound by memory, 4 bytes per (query, key) pair.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake_stream
from dsa.cute.reductions import warp_reduce_sum
from dsa.cute.sm90 import LN2, LOG2E, WARP
from dsa.kernels.training.fake_tensors import ShippedVariants, fake_line, fake_q_tiles, fake_tiles
from dsa.kernels.training.limits import K_TILE, Q_TILE
from dsa.kernels.training.q_tiles import load_q_tile
from dsa.runtime.compile_cache import cached, compile_sm90

WARPS = 8
NOTHING = -3e38  # finite, so that NOTHING - NOTHING is not NaN


class WarmupLseSm90:
    @cute.jit
    def __call__(self, scores: cute.Tensor, q_tiles: cute.Tensor, lse_idx: cute.Tensor, stream):
        self.kernel(scores, q_tiles, lse_idx).launch(
            grid=(q_tiles.shape[0], Q_TILE // WARPS, 1), block=(WARP * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, scores: cute.Tensor, q_tiles: cute.Tensor, lse_idx: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        index, part, _ = cute.arch.block_idx()
        lane, row = tid % WARP, part * WARPS + tid // WARP
        wait_for_prerequisite_grids()
        q_tile = load_q_tile(q_tiles, index)
        if row < q_tile.rows:
            limit = cutlass.min(q_tile.seen + q_tile.step * row, q_tile.keys)
            row_max, row_sum = Float32(NOTHING), Float32(0.0)
            four = cute.make_rmem_tensor((4,), Float32)
            for tile in cutlass.range(
                cutlass.min((cutlass.max(limit, 0) + K_TILE - 1) // K_TILE, q_tile.key_tiles), unroll=2
            ):
                cute.autovec_copy(cute.local_tile(scores[index, tile, row, None], (4,), (lane,)), four)
                values = []
                for i in cutlass.range_constexpr(4):
                    key = tile * K_TILE + 4 * lane + i
                    values.append(four[i] * LOG2E if key < limit else Float32(NOTHING))
                new_max = cute.arch.fmax(cute.arch.fmax(values[0], values[1]), cute.arch.fmax(values[2], values[3]))
                new_max = cute.arch.fmax(new_max, row_max)
                row_sum *= cute.math.exp2(row_max - new_max, fastmath=True)
                for i in cutlass.range_constexpr(4):
                    power = cute.math.exp2(values[i] - new_max, fastmath=True)
                    # A NaN does not enter row_max, because fmax ignores NaN. But the comparison is false for NaN, so
                    # NaN enters the sum and the LSE is NaN.
                    row_sum += Float32(0.0) if values[i] <= NOTHING else power
                row_max = new_max
            new_max = row_max
            for log in cutlass.range_constexpr(5):
                new_max = cute.arch.fmax(new_max, cute.arch.shuffle_sync_bfly(new_max, offset=1 << log))
            row_sum = warp_reduce_sum(row_sum * cute.math.exp2(row_max - new_max, fastmath=True))
            if lane == 0:
                lse = (new_max + cute.math.log2(row_sum)) * LN2
                # If the sequence is longer than the caller's maximum length, some scores of the row were not computed,
                # so the LSE is NaN.
                lse_idx[q_tile.first_q + row] = Float32(float("nan")) if limit > scores.shape[1] * K_TILE else lse


class WarmupKlSm90:
    @cute.jit
    def __call__(self, kl_parts: cute.Tensor, q_tiles: cute.Tensor, kl: cute.Tensor, stream):
        self.kernel(kl_parts, q_tiles, kl).launch(
            grid=(q_tiles.shape[0], 1, 1), block=(Q_TILE, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, kl_parts: cute.Tensor, q_tiles: cute.Tensor, kl: cute.Tensor):
        row, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        wait_for_prerequisite_grids()
        q_tile = load_q_tile(q_tiles, index)
        if row < q_tile.rows:
            total = Float32(0.0)
            for tile in cutlass.range(q_tile.key_tiles, unroll=4):
                total += kl_parts[index, tile, row]
            kl[q_tile.first_q + row] = total


@cached
def compile_warmup_lse():
    """-> f(scores [S, N, 128, 128] fp32, q_tiles [S, 8] int32, lse_idx [Tq] fp32), for S q tiles and N key tiles of 128
    keys per q tile. lse_idx is the result; rows in no q tile are not written."""
    return compile_sm90(WarmupLseSm90(), fake_tiles(Q_TILE, K_TILE), fake_q_tiles(), fake_line(Float32), fake_stream())


@cached
def compile_warmup_kl():
    """-> f(kl_parts [S, N, 128] fp32, q_tiles [S, 8] int32, kl [Tq] fp32), for S q tiles and N key tiles per q tile. kl
    is the result; rows in no q tile are not written."""
    return compile_sm90(WarmupKlSm90(), fake_tiles(Q_TILE), fake_q_tiles(), fake_line(Float32), fake_stream())


def shipped_variants() -> ShippedVariants:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [(compile_warmup_lse, ()), (compile_warmup_kl, ())]
