"""List the keys of a sliding window for sparse attention: indices of packed keys, or slots of a cache.

indices[t] = k0 + max(0, p - window + 1), ..., k0 + p;  slots[b, i] = the slots of these positions

The query is at position p of a sequence whose first key is k0; the last query of a sequence is at the position of the
last key. In indices[t] the query is query t of the packed sequences; in slots[b, i] it is query i of sequence b.
Columns after the last key are -1.

The cache is paged with a block table, or it is a ring. In a ring, page b belongs to sequence b, and position p is at
offset p modulo the page size.

Work
- A warp handles one query. It computes the window's first and last position, and its lanes write adjacent columns.
- To find the sequence of a packed query, the warp compares the query's index with all boundaries in cu_seqlens_q, 32 at
  a time, from the L1 cache. With hundreds of boundaries a binary search would need fewer comparisons. But then one
  wrong boundary could give wrong results for queries of other sequences, too.
- A lane loads the page numbers of several keys without a branch, so that these loads are in flight together.
- Positions and slots are computed in 64 bits, so that no content of cu_seqlens or cache_seqlens overflows. A slot
  that does not fit in int32 becomes -1.
Warp roles: none, all warps do the same. Shared memory: none.
Constraints: at most MAX_WINDOW queries, MAX_WINDOW columns and MAX_WINDOW keys per page; rings with at most 2^31 slots
in total.
Launch: programmatic dependent launch.
Roofline: bound by memory, 4 bytes per entry of the result; for few queries, as in decoding, bound by latency.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.cute.limits import MAX_SLOTS
from dsa.cute.sm90 import WARP
from dsa.runtime.compile_cache import cached, compile_sm90

WARPS = 4
UNROLL = 4
LOWEST = -(2**31)


@cute.jit
def _my_query():
    """Wait for the previous kernel. Return (this warp's query, the lane)."""
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    wait_for_prerequisite_grids()
    return block * WARPS + tid // WARP, tid % WARP


def _launch(kernel, queries: Int32, stream) -> None:
    kernel.launch(grid=(cute.ceil_div(queries, WARPS), 1, 1), block=(WARPS * WARP, 1, 1), stream=stream, use_pdl=True)


@cute.jit
def _seen(lowest: Int64, last: Int64, window: Int32):
    """Return (first position, number of positions) of the window of `window` positions that ends at `last`. Positions
    below `lowest` or below 0 are left out."""
    first = cutlass.max(cutlass.max(last - window + 1, lowest), Int64(0))
    return Int32(first), Int32(cutlass.max(last - first + 1, Int64(0)))


class WindowIndicesSm90:
    @cute.jit
    def __call__(self, q_starts: cute.Tensor, k_starts: cute.Tensor, indices: cute.Tensor, stream):
        _launch(self.kernel(q_starts, k_starts, indices), indices.shape[0], stream)

    @cute.kernel
    def kernel(self, q_starts: cute.Tensor, k_starts: cute.Tensor, indices: cute.Tensor):
        t, lane = _my_query()
        if t < indices.shape[0]:
            window = indices.shape[1]
            b = self.sequence(q_starts, t, lane)
            first, count = Int32(0), Int32(0)
            if b >= 0:
                last = Int64(k_starts[b + 1]) - (Int64(q_starts[b + 1]) - t)
                first, count = _seen(Int64(k_starts[b]), last, window)
            for column in cutlass.range(lane, window, WARP, unroll=UNROLL):
                indices[t, column] = first + column if column < count else Int32(-1)

    @cute.jit
    def sequence(self, q_starts: cute.Tensor, t, lane):
        """Return the index of the sequence that contains query t, or -1 if no sequence does.

        Take the non-empty sequence that begins last among those that begin at or before t. If it ends at or before t,
        return -1. So a sequence that ends too late takes no queries from later sequences.
        """
        own, begins = Int32(-1), Int32(LOWEST)
        for b in cutlass.range(lane, q_starts.shape[0] - 1, WARP, unroll=UNROLL):
            low, high = q_starts[b], q_starts[b + 1]
            better = low <= t and low < high and low >= begins
            own, begins = b if better else own, low if better else begins
        latest = cute.arch.warp_redux_sync(begins, "max")
        own = cute.arch.warp_redux_sync(own if begins == latest else Int32(-1), "max")
        return own if own >= 0 and t < q_starts[own + 1] else Int32(-1)


class WindowSlotsSm90:
    """Slots of window keys in a paged cache, with a block table or as a ring. ring: page b belongs to sequence b, and
    the kernel uses no block table."""

    def __init__(self, ring: bool):
        self.ring = ring

    @cute.jit
    def __call__(
        self, block_table: cute.Tensor | None, lengths: cute.Tensor, slots: cute.Tensor, page_size: Int32, stream
    ):
        queries = cute.fast_divmod_create_divisor_v2(slots.shape[1])
        pages = cute.fast_divmod_create_divisor_v2(page_size)
        _launch(
            self.kernel(block_table, lengths, slots, queries, pages, page_size),
            *(slots.shape[0] * slots.shape[1], stream),
        )

    @cute.kernel
    def kernel(
        self,
        block_table: cute.Tensor | None,
        lengths: cute.Tensor,
        slots: cute.Tensor,
        queries: cute.FastDivmodDivisorV2,
        pages: cute.FastDivmodDivisorV2,
        page_size: Int32,
    ):
        row, lane = _my_query()
        s_q, window = slots.shape[1], slots.shape[2]
        if row < slots.shape[0] * s_q:
            b, i = divmod(row, queries)
            first, count = _seen(Int64(0), Int64(lengths[b]) - (s_q - i), window)
            found = cute.make_rmem_tensor((UNROLL,), Int32)
            for start in cutlass.range(lane, window, WARP * UNROLL, unroll=1):
                for u in cutlass.range_constexpr(UNROLL):
                    found[u] = self.slot(block_table, b, first, count, start + u * WARP, pages, page_size)
                for u in cutlass.range_constexpr(UNROLL):
                    if start + u * WARP < window:
                        slots[b, i, start + u * WARP] = found[u]

    @cute.jit
    def slot(self, block_table, b, first, count, column, pages, page_size):
        """Return the cache slot of the window's key number `column`, or -1 for a missing key or a key without a
        page."""
        # For columns past the last key, use the last key's position again, or 0 if the window has no keys. So the load
        # of the page number below needs no branch.
        position = first + cutlass.min(column, cutlass.max(count - 1, 0))
        place, offset = divmod(position, pages)
        page, exists = b, column < count
        if const_expr(not self.ring):
            known = place < block_table.shape[1]
            page = block_table[b, place if known else 0]
            exists = exists and known and page >= 0
        slot = Int64(page) * page_size + offset
        return Int32(slot) if exists and slot < Int64(MAX_SLOTS) else Int32(-1)


def _int32(*shape, contiguous=False):
    stride = strides(len(shape))
    return fake(Int32, shape, (*stride[:-1], 1) if contiguous else stride, 4)


@cached
def compile_window_indices():
    """Compile f(cu_seqlens_q [B + 1], cu_seqlens_k [B + 1], indices [T, window]), all int32. Rows of `indices` are
    contiguous.

    T and window are 1 to MAX_WINDOW; B >= 0.
    """
    boundaries = cute.sym_int()
    return compile_sm90(
        WindowIndicesSm90(),
        *(_int32(boundaries), _int32(boundaries)),
        _int32(cute.sym_int(), cute.sym_int(), contiguous=True),
        fake_stream(),
    )


@cached
def compile_window_slots(ring: bool):
    """Compile f(block_table [B, max_pages] or None for a ring, cache_seqlens [B], slots [B, s_q, window],
    page_size), all int32. The last dimension of `slots` is contiguous.

    A slot is page * page_size + offset in the page. B, s_q, max_pages > 0; B * s_q, window and page_size are 1 to
    MAX_WINDOW. For a ring B * page_size is at most 2^31.
    """
    batch = cute.sym_int()
    return compile_sm90(
        WindowSlotsSm90(ring),
        None if ring else _int32(batch, cute.sym_int()),
        _int32(batch),
        _int32(batch, cute.sym_int(), cute.sym_int(), contiguous=True),
        *(Int32(1), fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the ops can ask for."""
    return [(compile_window_indices, ()), *((compile_window_slots, (ring,)) for ring in (False, True))]
