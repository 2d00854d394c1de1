"""What the warm-up needs of whole rows of scores: lse_I[t] = ln sum_s exp(I[t, s]), and kl[t], the sum of its parts.

Plan
- LSE: a warp a row, four keys a lane and tile, each lane its own maximum until the end. KL: a thread a row. Sums are in
  the order of the keys.
Roofline: memory; 4 bytes a (query, key) pair.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.kernels.training.indexer_slots import SLOT_ROWS, fake_slots, fake_tiles, load_slot

WARPS = 8
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
NOTHING = -3e38  # finite, so that a difference to it is no NaN


class WarmupLseSm90:
    @cute.jit
    def __call__(self, scores: cute.Tensor, slots: cute.Tensor, lse_idx: cute.Tensor, stream):
        self.kernel(scores, slots, lse_idx).launch(
            grid=(slots.shape[0], SLOT_ROWS // WARPS, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, scores: cute.Tensor, slots: cute.Tensor, lse_idx: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        index, part, _ = cute.arch.block_idx()
        lane, row = tid % 32, part * WARPS + tid // 32
        slot = load_slot(slots, index)
        if row < slot.rows:
            limit = cutlass.min(slot.seen + slot.step * row, slot.keys)
            top, total = Float32(NOTHING), Float32(0.0)
            four = cute.make_rmem_tensor((4,), Float32)
            for tile in cutlass.range(
                cutlass.min((cutlass.max(limit, 0) + SLOT_ROWS - 1) // SLOT_ROWS, slot.key_tiles), unroll=2
            ):
                cute.autovec_copy(cute.local_tile(scores[index, tile, row, None], (4,), (lane,)), four)
                values = []
                for i in cutlass.range_constexpr(4):
                    visible = tile * SLOT_ROWS + 4 * lane + i < limit
                    values.append(four[i] * LOG2E if visible else Float32(NOTHING))
                highest = cute.arch.fmax(cute.arch.fmax(values[0], values[1]), cute.arch.fmax(values[2], values[3]))
                highest = cute.arch.fmax(highest, top)
                total *= cute.math.exp2(top - highest, fastmath=True)
                for i in cutlass.range_constexpr(4):
                    power = cute.math.exp2(values[i] - highest, fastmath=True)
                    total += power if values[i] > NOTHING else Float32(0.0)
                top = highest
            highest = top
            for log in cutlass.range_constexpr(5):
                highest = cute.arch.fmax(highest, cute.arch.shuffle_sync_bfly(highest, offset=1 << log))
            total *= cute.math.exp2(top - highest, fastmath=True)
            for log in cutlass.range_constexpr(5):
                total += cute.arch.shuffle_sync_bfly(total, offset=1 << log)
            if lane == 0:
                lse = (highest + cute.math.log2(total)) * LN2
                # Of a sequence that is longer than was said, scores are missing.
                missing = limit > scores.shape[1] * SLOT_ROWS
                lse_idx[slot.first_q + row] = Float32(float("nan")) if missing else lse


class WarmupKlSm90:
    @cute.jit
    def __call__(self, kl_parts: cute.Tensor, slots: cute.Tensor, kl: cute.Tensor, stream):
        self.kernel(kl_parts, slots, kl).launch(grid=(slots.shape[0], 1, 1), block=(SLOT_ROWS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, kl_parts: cute.Tensor, slots: cute.Tensor, kl: cute.Tensor):
        row, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        slot = load_slot(slots, index)
        if row < slot.rows:
            total = Float32(0.0)
            for tile in cutlass.range(slot.key_tiles, unroll=4):
                total += kl_parts[index, tile, row]
            kl[slot.first_q + row] = total


def _fake_rows():
    return cute.runtime.make_fake_tensor(Float32, (cute.sym_int(),), (1,), assumed_align=4)


@cached
def compile_warmup_lse():
    """-> f(scores [S, N, 128, 128], slots [S, 8] int32, lse_idx [Tq]); fp32."""
    return compile_sm90(
        WarmupLseSm90(),
        fake_tiles(Float32, SLOT_ROWS, SLOT_ROWS),
        fake_slots(),
        _fake_rows(),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@cached
def compile_warmup_kl():
    """-> f(kl_parts [S, N, 128], slots [S, 8] int32, kl [Tq]); fp32."""
    return compile_sm90(
        WarmupKlSm90(),
        fake_tiles(Float32, SLOT_ROWS),
        fake_slots(),
        _fake_rows(),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_warmup_lse, ()), (compile_warmup_kl, ())]
