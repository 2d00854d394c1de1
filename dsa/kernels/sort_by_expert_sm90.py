"""Entries in the order of their experts: a counting sort that keeps the order within an expert.

Plan
- A warp an expert, and one more for entries whose expert is none. It reads all entries twice: first it counts those of
  lower experts and its own, then it places its own behind the former. No warp waits for another.
Shared memory: none. Roofline: L2, 8 (E + 1) N bytes at int32; few entries: two latencies.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.dtypes import cute_dtype

WARPS = 4
AHEAD = 8  # loads of a lane on their way at a time


class SortByExpertSm90:
    @cute.jit
    def __call__(self, experts: cute.Tensor, order: cute.Tensor, rows: cute.Tensor, ends: cute.Tensor, stream):
        self.kernel(experts, order, rows, ends).launch(
            grid=(cute.ceil_div(ends.shape[0] + 1, WARPS), 1, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, experts: cute.Tensor, order: cute.Tensor, rows: cute.Tensor, ends: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        own, lane = block * WARPS + tid // 32, tid % 32
        count = ends.shape[0]
        if own <= count:
            entries = experts.shape[0]
            lower, equal = Int32(0), Int32(0)
            for first in cutlass.range(0, entries, 32 * AHEAD, unroll=1):
                found = self.read(experts, count, first, lane)
                for i in cutlass.range_constexpr(AHEAD):
                    lower += Int32(found[i] < own)
                    equal += Int32(found[i] == own)
            row = cute.arch.warp_redux_sync(lower, "add")
            equal = cute.arch.warp_redux_sync(equal, "add")
            if own < count and lane == 0:
                ends[own] = row + equal
            if equal > 0:
                for first in cutlass.range(0, entries, 32 * AHEAD, unroll=1):
                    found = self.read(experts, count, first, lane)
                    for i in cutlass.range_constexpr(AHEAD):
                        mine = found[i] == own
                        all_mine = cute.arch.vote_ballot_sync(mine)
                        if mine:
                            entry = first + 32 * i + lane
                            at = row + cute.arch.popc(all_mine & ((1 << lane) - 1))
                            order[at] = entry
                            rows[entry] = at if own < count else Int32(-1)
                        row += cute.arch.popc(all_mine)

    @cute.jit
    def read(self, experts, count, first, lane):
        """The experts of entries first + lane + 32 i: `count` for none, above it past the end."""
        entries = experts.shape[0]
        found = cute.make_rmem_tensor((AHEAD,), Int32)
        raw = cute.make_rmem_tensor((AHEAD,), experts.element_type)
        for i in cutlass.range_constexpr(AHEAD):
            raw[i] = experts[cutlass.min(first + 32 * i + lane, entries - 1)]
        for i in cutlass.range_constexpr(AHEAD):
            e = Int32(raw[i]) if raw[i] >= 0 and raw[i] < count else count
            found[i] = e if first + 32 * i + lane < entries else count + 1
        return found


@cached
def compile_sort_by_expert(dtype: str):
    """-> f(experts [N] int32 or int64, order int32 [N], rows int32 [N], ends int32 [E]); N > 0, E > 0, contiguous."""
    entries, count = cute.sym_int(), cute.sym_int()

    def fake(element, length):
        return cute.runtime.make_fake_tensor(element, (length,), (1,), assumed_align=element.width // 8)

    return compile_sm90(
        SortByExpertSm90(),
        *(fake(cute_dtype(dtype), entries), fake(Int32, entries), fake(Int32, entries), fake(Int32, count)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_sort_by_expert, (dtype,)) for dtype in ("int32", "int64")]
