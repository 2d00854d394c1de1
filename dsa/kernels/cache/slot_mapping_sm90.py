"""Computation of the cache slots of packed tokens (the tokens of all sequences, one sequence after another).

slots[t] = block_table[b, r // page_size] * page_size + r % page_size, where r = (position of token t in sequence b) //
ratio. So `ratio` tokens share a cache row. The last of these tokens gets the row's slot, and the others get -1. If the
pages are a ring buffer, the column of block_table is (r // page_size) modulo the number of columns, and only the
sequence's last rows, as many as the pages can contain, get slots. The slot is -1 if no sequence contains the token, if
block_table does not have the token's column, or if the page in this column is negative.

Plan
- One thread per token. The thread searches cu_seqlens, the boundaries of the sequences, for the token's sequence. The
  lanes of a warp mostly load the same address, and loads hit L1.
- With more than AT_ONCE sequences, the threads of a CTA first check together that the boundaries ascend. If they do,
  each thread finds its sequence by binary search. Otherwise each thread compares its token with all boundaries, because
  with a single wrong boundary a binary search would give wrong results for tokens of other sequences, too.
- Positions are computed in 64 bits, so that they do not overflow, whatever cu_seqlens and cache_seqlens contain. A
  position that has a slot fits in int32. Slots are int64.
Warp roles: none, all threads do the same. Shared memory: none. Constraints: at most MAX_MAPPED tokens, rows per page
and tokens per row.
Launch: programmatic dependent launch.
Roofline: bound by memory, 8 bytes per token; in decode, which has few tokens, by latency.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_contiguous, fake_stream, strides
from dsa.cute.sm90 import thread_and_cta
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

THREADS = 128
AT_ONCE = 16  # boundaries that a thread loads at once in `scan`
PAIRS = 4  # pairs of boundaries that a thread loads at once in `ascends`
LOWEST, HIGHEST = -(2**31), 2**31 - 1


class SlotMappingSm90:
    """cached_tokens: whether sequence b has cache_seqlens[b] tokens, the last of which are packed; otherwise all tokens
    are packed. ring: whether a sequence's pages are a ring buffer with the sequence's last rows; otherwise they contain
    all rows."""

    def __init__(self, cached_tokens: bool, ring: bool):
        self.cached_tokens, self.ring = cached_tokens, ring

    @cute.jit
    def __call__(
        self,
        block_table: cute.Tensor,
        starts: cute.Tensor,
        lengths: cute.Tensor | None,
        slots: cute.Tensor,
        page_size: Int32,
        ratio: Int32,
        stream,
    ):
        divisors = [cute.fast_divmod_create_divisor_v2(x) for x in (ratio, page_size, block_table.shape[1])]
        self.kernel(block_table, starts, lengths, slots, *divisors, page_size, ratio).launch(
            grid=(cute.ceil_div(slots.shape[0], THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        block_table: cute.Tensor,
        starts: cute.Tensor,
        lengths: cute.Tensor | None,
        slots: cute.Tensor,
        ratios: cute.FastDivmodDivisorV2,
        page_sizes: cute.FastDivmodDivisorV2,
        rings: cute.FastDivmodDivisorV2,
        page_size: Int32,
        ratio: Int32,
    ):
        tid, block = thread_and_cta()
        wait_for_prerequisite_grids()
        t = block * THREADS + tid
        ascends = self.ascends(starts, tid)
        if t < slots.shape[0]:
            slot = Int64(-1)
            b = self.search(starts, t) if ascends else self.scan(starts, t)
            if b >= 0:
                end = Int64(starts[b + 1])
                length = Int64(lengths[b]) if const_expr(self.cached_tokens) else end - starts[b]
                position = length - (end - t)
                if position >= 0 and length <= HIGHEST:
                    row, token = divmod(Int32(position), ratios)
                    place, offset = divmod(row, page_sizes)
                    known = token == ratio - 1
                    if const_expr(self.ring):
                        last = Int64(Int32(length) // ratios) - 1
                        known = known and last - row < Int64(block_table.shape[1]) * page_size
                        place = place % rings
                    else:
                        known = known and place < block_table.shape[1]
                    page = block_table[b, place if known else 0]
                    if known and page >= 0:
                        slot = Int64(page) * page_size + offset
            slots[t] = slot

    @cute.jit
    def ascends(self, starts: cute.Tensor, tid):
        """Whether the boundaries ascend. For at most AT_ONCE sequences the result is always False, because `scan` is
        then fast. All threads of the CTA call this."""
        count, ordered = starts.shape[0] - 1, Boolean(False)
        if count > AT_ONCE:
            ordered = Boolean(True)
            pairs = cute.make_rmem_tensor((2, PAIRS), Int32)
            for first in cutlass.range(tid, count, PAIRS * THREADS, unroll=1):
                for j in cutlass.range_constexpr(PAIRS):
                    i = cutlass.min(first + j * THREADS, count - 1)
                    pairs[0, j], pairs[1, j] = starts[i], starts[i + 1]
                for j in cutlass.range_constexpr(PAIRS):
                    ordered &= pairs[0, j] <= pairs[1, j]
            own = Int32(1) if ordered else Int32(0)
            every = cute.arch.inline_ptx(
                "{{ .reg .pred p, q; setp.ne.s32 q, {$r0}, 0; barrier.cta.red.and.pred p, 0, q; "
                "selp.s32 {$w0}, 1, 0, p; }}",
                write_only_types=[Int32],
                read_only_args=[own],
            )
            ordered = every != 0
        return ordered

    @cute.jit
    def search(self, starts: cute.Tensor, t):
        """Return the sequence of token t, or -1 if no sequence contains t. The boundaries must ascend."""
        low, high = Int32(-1), starts.shape[0] - 1
        while low + 1 < high:
            middle = (low + high) >> 1
            begun = starts[middle] <= t
            low, high = middle if begun else low, high if begun else middle
        if low >= 0 and t >= starts[low + 1]:
            low = Int32(-1)
        return low

    @cute.jit
    def scan(self, starts: cute.Tensor, t):
        """Return the sequence of token t, or -1 if no sequence contains t. If several sequences contain t, return the
        one that begins last. So a sequence with a wrong end gets no tokens of later sequences."""
        own, begins, low = Int32(-1), Int32(LOWEST), starts[0]
        count = starts.shape[0] - 1
        ends = cute.make_rmem_tensor((AT_ONCE,), Int32)
        for first in cutlass.range(0, count, AT_ONCE):
            for i in cutlass.range_constexpr(AT_ONCE):
                ends[i] = starts[cutlass.min(first + i + 1, count)]
            for i in cutlass.range_constexpr(AT_ONCE):
                better = low <= t and t < ends[i] and low >= begins
                own, begins = first + i if better else own, low if better else begins
                low = ends[i]
        return own


def _int32(*shape):
    return fake(Int32, shape, strides(len(shape)), 4)


@cached
def compile_slot_mapping(cached_tokens: bool, ring: bool):
    """-> f(block_table [B, max_pages], cu_seqlens [B + 1], cache_seqlens [B] (None without cached_tokens), slots [T]
    int64, page_size, ratio), which writes slots. slots is contiguous. All other arguments are int32. B, max_pages > 0;
    T, page_size and ratio are from 1 to MAX_MAPPED."""
    batch = cute.sym_int()
    return compile_sm90(
        SlotMappingSm90(cached_tokens, ring),
        _int32(batch, cute.sym_int()),
        _int32(cute.sym_int()),
        _int32(batch) if cached_tokens else None,
        fake_contiguous(Int64, cute.sym_int()),
        *(Int32(1), Int32(1), fake_stream()),
    )


def shipped_variants() -> Variants:
    return [(compile_slot_mapping, (cached_tokens, ring)) for cached_tokens in (True, False) for ring in (False, True)]
