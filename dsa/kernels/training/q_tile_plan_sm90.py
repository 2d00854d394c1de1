"""Split ragged sequences into q tiles of 128 queries on the device, for the kernels of the indexer's warm-up.

Plan
- One CTA. It turns cu_queries and cu_keys (cu_seqlens) into valid `bounds`, which ascend and lie within the tensors of
  queries and keys, so the other kernels need no checks. If an entry is outside the tensor or below the previous bound,
  the previous bound replaces the entry (0 replaces the first entry). An entry outside the tensor changes only the two
  sequences that it separates.
- The CTA computes the prefix sum of the sequences' numbers of q tiles. Then each thread finds the sequence of its q
  tile by binary search in these sums, and the CTA computes the prefix sum of the q tiles' numbers of key tiles.
Constraints: any number of sequences. Roofline: bound by latency, 2 us for four sequences of 2048 queries.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream
from dsa.cute.reductions import block_exclusive_scan
from dsa.cute.sm90 import WARP
from dsa.kernels.training.fake_tensors import ShippedVariants, fake_line, fake_q_tiles
from dsa.kernels.training.limits import K_TILE, Q_TILE
from dsa.kernels.training.q_tiles import QTile, store_q_tile
from dsa.runtime.compile_cache import cached, compile_sm90

THREADS = 1024


class QTilePlanSm90:
    @cute.jit
    def __call__(
        self,
        cu_queries: cute.Tensor,
        cu_keys: cute.Tensor,
        bounds: cute.Tensor,
        before: cute.Tensor,
        q_tiles: cute.Tensor,
        key_tiles: cute.Tensor,
        causal: Int32,
        queries: Int32,
        keys: Int32,
        most: Int32,
        stream,
    ):
        self.kernel(cu_queries, cu_keys, bounds, before, q_tiles, key_tiles, causal, queries, keys, most).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        cu_queries: cute.Tensor,
        cu_keys: cute.Tensor,
        bounds: cute.Tensor,
        before: cute.Tensor,
        q_tiles: cute.Tensor,
        key_tiles: cute.Tensor,
        causal: Int32,
        queries: Int32,
        keys: Int32,
        most: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % WARP, tid // WARP
        sums = SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARP), 16)
        wait_for_prerequisite_grids()
        batch, count = before.shape[0], q_tiles.shape[0]
        self.ascend(cu_queries, bounds[0, None], queries, sums, tid, lane, warp)
        self.ascend(cu_keys, bounds[1, None], keys, sums, tid, lane, warp)
        total = Int32(0)
        for base in cutlass.range(0, batch, THREADS, unroll=1):
            own = Int32(0)
            if base + tid < batch:
                own = (bounds[0, base + tid + 1] - bounds[0, base + tid] + Q_TILE - 1) // Q_TILE
            earlier, here = block_exclusive_scan(own, sums, lane, warp)
            if base + tid < batch:
                before[base + tid] = total + earlier
            total += here
            cute.arch.sync_threads()

        used, total = cutlass.min(total, count), Int32(0)
        for base in cutlass.range(0, count, THREADS, unroll=1):
            number = base + tid
            own = Int32(0)
            if number < used:
                low, high = Int32(0), batch
                while high - low > 1:
                    middle = (low + high) // 2
                    is_later = before[middle] > number
                    high = middle if is_later else high
                    low = low if is_later else middle
                q_tile = self.q_tile(bounds, number, low, before[low], causal, most)
                store_q_tile(q_tiles, number, q_tile)
                own = q_tile.key_tiles
            elif number < count:
                store_q_tile(q_tiles, number, QTile.unused())
            earlier, here = block_exclusive_scan(own, sums, lane, warp)
            if number < count:
                key_tiles[number] = total + earlier
            total += here
            cute.arch.sync_threads()
        if tid == 0:
            key_tiles[count] = total

    @cute.jit
    def ascend(self, cu_seqlens, bounds, end, maxima, tid, lane, warp):
        """Set bounds[i] to the largest number in cu_seqlens[: i + 1] that is in [0, end], or to 0 if there is none."""
        highest, count = Int32(0), bounds.shape[0]
        for base in cutlass.range(0, count, THREADS, unroll=1):
            own = Int32(0)
            if base + tid < count:
                own = cu_seqlens[base + tid]
            if own < 0 or own > end:
                own = Int32(0)
            so_far, here = block_inclusive_max(own, maxima, lane, warp)
            if base + tid < count:
                bounds[base + tid] = cutlass.max(highest, so_far)
            highest = cutlass.max(highest, here)
            cute.arch.sync_threads()

    @cute.jit
    def q_tile(self, bounds, number, sequence, first_number, causal, most) -> QTile:
        """Return q tile `number`, in a sequence whose first q tile is `first_number`."""
        begin, end = bounds[0, sequence], bounds[0, sequence + 1]
        first_key = bounds[1, sequence]
        own_keys = bounds[1, sequence + 1] - first_key
        offset = (number - first_number) * Q_TILE
        rows = cutlass.min(end - begin - offset, Q_TILE)
        seen = own_keys
        if causal > 0:
            seen = own_keys - (end - begin) + offset + 1
        visible = cutlass.min(cutlass.max(seen + causal * (rows - 1), 0), own_keys)
        key_tiles = cutlass.min((visible + K_TILE - 1) // K_TILE, most)
        return QTile(begin + offset, rows, first_key, own_keys, seen, causal, key_tiles, sequence)


@cute.jit
def block_inclusive_max(own, maxima: cute.Tensor, lane, warp):
    """-> (maximum of `own` over the threads up to and including this one, at least 0; maximum of `own` over the CTA).
    Called by all threads of the CTA. Another barrier must come before `maxima` is reused.

    maxima  Int32 [32] scratch in shared memory, one number per warp
    """
    scanned = own
    for log in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(scanned, offset=1 << log)
        if lane >= 1 << log:
            scanned = cutlass.max(scanned, other)
    if lane == 31:
        maxima[warp] = scanned
    cute.arch.sync_threads()
    of_lane = maxima[lane]
    before = cute.arch.warp_redux_sync(of_lane if lane < warp else Int32(0), "max")
    return cutlass.max(before, scanned), cute.arch.warp_redux_sync(of_lane, "max")


@cached
def compile_q_tile_plan():
    """-> f(cu_queries [B + 1], cu_keys [B + 1], bounds [2, B + 1], before [B], q_tiles [S, 8], key_tiles [S + 1],
    causal, queries, keys, most), all int32 and contiguous. B > 0; S is at least queries // 128 + B. bounds, before,
    q_tiles and key_tiles are results. bounds: row 0 has the bounds of queries, row 1 has those of keys. before[b]:
    number of q tiles in the sequences before b. key_tiles[s]: number of key tiles in the q tiles before s; the last
    entry is the total. causal: 0 or 1. queries, keys: numbers of rows of the packed queries and keys. most: upper limit
    on the number of key tiles per q tile.
    """
    bounds = cute.sym_int()
    return compile_sm90(
        QTilePlanSm90(),
        *(fake_line(Int32, bounds), fake_line(Int32, bounds), fake(Int32, (2, bounds), (cute.sym_int(), 1), 4)),
        *(fake_line(Int32), fake_q_tiles(), fake_line(Int32)),
        *(Int32(0), Int32(0), Int32(0), Int32(0), fake_stream()),
    )


def shipped_variants() -> ShippedVariants:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [(compile_q_tile_plan, ())]
