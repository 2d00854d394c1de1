"""Sort entries by expert: a stable counting sort.

Plan
- One CTA per expert, and one for entries without an expert, which come last. The warps of every CTA read all entries,
  each warp one contiguous part. First the warp counts, in this part, the entries of lower experts and those of the
  CTA's expert. If there are entries of the CTA's expert, the warp reads the part again, and writes `order` and `rows`
  for these entries. No CTA waits for another.
Shared memory: two numbers per warp.
Roofline: bound by L2: each of E + 1 CTAs reads N entries up to twice, 8 (E + 1) N bytes in all with int32 numbers; for
few entries, by the latency of two loads.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake_contiguous, fake_stream
from dsa.cute.sm90 import WARP, thread_and_cta
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

WARPS = 8
AHEAD = 8  # loads in flight per lane


class SortByExpertSm90:
    @cute.jit
    def __call__(self, experts: cute.Tensor, order: cute.Tensor, rows: cute.Tensor, ends: cute.Tensor, stream):
        self.kernel(experts, order, rows, ends).launch(
            grid=(ends.shape[0] + 1, 1, 1), block=(WARP * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, experts: cute.Tensor, order: cute.Tensor, rows: cute.Tensor, ends: cute.Tensor):
        tid, own = thread_and_cta()
        warp, lane = tid // WARP, tid % WARP
        smem = cutlass.memory.SmemAllocator()
        lowers, equals = (smem.allocate_tensor(Int32, cute.make_layout(WARPS)) for _ in range(2))
        count, entries = ends.shape[0], experts.shape[0]
        each = cute.ceil_div(cute.ceil_div(entries, WARPS), 32) * 32
        begin, end = warp * each, cutlass.min((warp + 1) * each, entries)
        wait_for_prerequisite_grids()

        lower, equal = Int32(0), Int32(0)
        for first in cutlass.range(begin, end, 32 * AHEAD, unroll=1):
            found = self.read(experts, count, first + lane, end)
            for i in cutlass.range_constexpr(AHEAD):
                lower += Int32(found[i] < own)
                equal += Int32(found[i] == own)
        lower = cute.arch.warp_redux_sync(lower, "add")
        equal = cute.arch.warp_redux_sync(equal, "add")
        if lane == 0:
            lowers[warp], equals[warp] = lower, equal
        cute.arch.sync_threads()
        row, total = Int32(0), Int32(0)
        for w in cutlass.range_constexpr(WARPS):
            row += lowers[w]
            total += equals[w]
        if own < count and tid == 0:
            ends[own] = row + total
        for w in cutlass.range_constexpr(WARPS):
            row += equals[w] if w < warp else Int32(0)
        if equal > 0:
            for first in cutlass.range(begin, end, 32 * AHEAD, unroll=1):
                found = self.read(experts, count, first + lane, end)
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
    def read(self, experts, count, first, end):
        """Return the experts of the AHEAD entries `first` + 32 i: `count` for an entry without an expert, and `count` +
        1 for entries from `end` on."""
        found = cute.make_rmem_tensor((AHEAD,), Int32)
        raw = cute.make_rmem_tensor((AHEAD,), experts.element_type)
        for i in cutlass.range_constexpr(AHEAD):
            raw[i] = experts[cutlass.min(first + 32 * i, end - 1)]
        for i in cutlass.range_constexpr(AHEAD):
            e = Int32(raw[i]) if raw[i] >= 0 and raw[i] < count else count
            found[i] = e if first + 32 * i < end else count + 1
        return found


@cached
def compile_sort_by_expert(dtype: str):
    """-> f(experts [N] int32 or int64, order int32 [N], rows int32 [N], ends int32 [E]); N > 0, E > 0, all tensors
    contiguous. order: the entries sorted by expert. rows: each entry's index in `order`, or -1 if the entry has no
    expert. ends: end of each expert's entries in `order`."""
    entries = cute.sym_int()
    return compile_sm90(
        SortByExpertSm90(),
        fake_contiguous(cute_dtype(dtype), entries),
        fake_contiguous(Int32, entries),
        fake_contiguous(Int32, entries),
        fake_contiguous(Int32, cute.sym_int()),
        fake_stream(),
    )


def shipped_variants() -> Variants:
    return [(compile_sort_by_expert, (dtype,)) for dtype in ("int32", "int64")]
