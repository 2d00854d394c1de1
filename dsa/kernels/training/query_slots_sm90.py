"""Packed sequences cut into slots of 128 queries, on the device: what the kernels of the indexer's warm-up walk over.

Plan
- One CTA. Of cu_seqlens, whatever they hold, it makes `bounds`, which ascend inside the tensors and which the other
  kernels of these ops trust: a number outside the tensor counts as the one before it, and so does one that is below an
  earlier one. A number outside changes only the two sequences that it is between.
- The threads scan the sequences' counts of slots; then each looks its slots up, by halving, and they scan the slots'
  counts of key tiles.
Constraints: any number of sequences. Roofline: latency, 2 us for four sequences of 2048.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.reductions import before_and_all, highest_so_far
from dsa.kernels.training.indexer_slots import SLOT_FIELDS, SLOT_ROWS, fake_slots

THREADS = 1024


class QuerySlotsSm90:
    @cute.jit
    def __call__(
        self,
        cu_queries: cute.Tensor,
        cu_keys: cute.Tensor,
        bounds: cute.Tensor,
        before: cute.Tensor,
        slots: cute.Tensor,
        tiles: cute.Tensor,
        causal: Int32,
        queries: Int32,
        keys: Int32,
        most: Int32,
        stream,
    ):
        self.kernel(cu_queries, cu_keys, bounds, before, slots, tiles, causal, queries, keys, most).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        cu_queries: cute.Tensor,
        cu_keys: cute.Tensor,
        bounds: cute.Tensor,
        before: cute.Tensor,
        slots: cute.Tensor,
        tiles: cute.Tensor,
        causal: Int32,
        queries: Int32,
        keys: Int32,
        most: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % 32, tid // 32
        sums = SmemAllocator().allocate_tensor(Int32, cute.make_layout(32), 16)
        batch, count = before.shape[0], slots.shape[0]
        self.ascend(cu_queries, bounds[0, None], queries, sums, tid, lane, warp)
        self.ascend(cu_keys, bounds[1, None], keys, sums, tid, lane, warp)
        total = Int32(0)
        for base in cutlass.range(0, batch, THREADS, unroll=1):
            own = Int32(0)
            if base + tid < batch:
                own = (bounds[0, base + tid + 1] - bounds[0, base + tid] + SLOT_ROWS - 1) // SLOT_ROWS
            earlier, here = before_and_all(own, sums, lane, warp)
            if base + tid < batch:
                before[base + tid] = total + earlier
            total += here
            cute.arch.sync_threads()

        used, total = cutlass.min(total, count), Int32(0)
        for base in cutlass.range(0, count, THREADS, unroll=1):
            slot = base + tid
            own = Int32(0)
            if slot < used:
                low, high = Int32(0), batch
                while high - low > 1:
                    middle = (low + high) // 2
                    behind = before[middle] > slot
                    high = middle if behind else high
                    low = low if behind else middle
                own = self.describe(bounds, slots, slot, low, before[low], causal, most)
            elif slot < count:
                for i in cutlass.range_constexpr(SLOT_FIELDS):
                    slots[slot, i] = -1 if i == SLOT_FIELDS - 1 else 0
            earlier, here = before_and_all(own, sums, lane, warp)
            if slot < count:
                tiles[slot] = total + earlier
            total += here
            cute.arch.sync_threads()
        if tid == 0:
            tiles[count] = total

    @cute.jit
    def ascend(self, cu_seqlens, bounds, end, tops, tid, lane, warp):
        """bounds[i]: the highest number of cu_seqlens up to number i that is from 0 to `end`; 0 if there is none."""
        highest, count = Int32(0), bounds.shape[0]
        for base in cutlass.range(0, count, THREADS, unroll=1):
            own = Int32(0)
            if base + tid < count:
                own = cu_seqlens[base + tid]
            if own < 0 or own > end:
                own = Int32(0)
            so_far, here = highest_so_far(own, tops, lane, warp)
            if base + tid < count:
                bounds[base + tid] = cutlass.max(highest, so_far)
            highest = cutlass.max(highest, here)
            cute.arch.sync_threads()

    @cute.jit
    def describe(self, bounds, slots, slot, sequence, first_slot, causal, most):
        """Write a slot down; returns its key tiles."""
        begin, end = bounds[0, sequence], bounds[0, sequence + 1]
        first_key, end_key = bounds[1, sequence], bounds[1, sequence + 1]
        own_keys = end_key - first_key
        offset = (slot - first_slot) * SLOT_ROWS
        rows = cutlass.min(end - begin - offset, SLOT_ROWS)
        seen = own_keys
        if causal > 0:
            seen = own_keys - (end - begin) + offset + 1
        visible = cutlass.min(cutlass.max(seen + causal * (rows - 1), 0), own_keys)
        key_tiles = cutlass.min((visible + SLOT_ROWS - 1) // SLOT_ROWS, most)
        for i, value in enumerate((begin + offset, rows, first_key, own_keys, seen, causal, key_tiles, sequence)):
            slots[slot, i] = value
        return key_tiles


@cached
def compile_query_slots():
    """-> f(cu_queries [B + 1], cu_keys [B + 1], bounds [2, B + 1], before [B], slots [S, 8], tiles [S + 1], causal,
    queries, keys, most); int32, contiguous; B > 0, S at least queries // 128 + B. bounds: of queries and of keys;
    before: slots of the sequences before; tiles: key tiles of the slots before, `most` of a slot at most."""
    batch, bounds = cute.sym_int(), cute.sym_int()

    def fake(*shape):
        return cute.runtime.make_fake_tensor(Int32, shape, (1,), assumed_align=4)

    return compile_sm90(
        QuerySlotsSm90(),
        *(fake(bounds), fake(bounds)),
        cute.runtime.make_fake_tensor(Int32, (2, bounds), (cute.sym_int(), 1), assumed_align=4),
        *(fake(batch), fake_slots(), fake(cute.sym_int())),
        *(Int32(0), Int32(0), Int32(0), Int32(0)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_query_slots, ())]
