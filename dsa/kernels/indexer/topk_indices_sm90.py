"""Exact, deterministic top-k selection of index scores.

out[r] = the columns of the k largest scores of scores[r, lo : hi], in ascending order. `find_row` computes lo and hi
from starts and lengths. Ties (equal scores) go to the lowest columns. Columns are relative to the row's start; with
`PAGED`, they are converted to cache slots.

Plan
- One CTA per row. A row that fits into shared memory ("resident") is loaded by one bulk copy and searched there.
- Streaming: a longer row goes through a pipeline of tiles in shared memory, which one thread fills by bulk copies
  (`collect`). Scores that are not below a threshold are appended to a list of candidates, with their columns and in
  ascending order of the columns. A row that fits the list needs no threshold.
- Threshold: it comes from a sample of at most one number in 16. The sample consists of pairs of vectors (32 bytes) at
  jittered positions. The threshold is about the sample's (r + 4.5 sqrt r)-th largest number, where r is the rank in the
  sample that the row's k-th largest number is expected to have. About 1.4 k candidates remain.
- Exactness: a full list is cut to its k largest. Later scores must then exceed the least of these, because a tie would
  go to the earlier, lower column. If fewer than k candidates remain at the end, the threshold was too high. The CTA
  then reads the row again with a lower threshold, and finally without a threshold. So the result is exact for any
  input, and only the time depends on the sample.
- If there are at most as many rows as SMs, a cluster of up to 8 CTAs processes each long row (topk_config.py). Each CTA
  lists the candidates of a part of the row, all with one threshold. The CTA appends its list to those of the earlier
  CTAs, in the shared memory of the first CTA. The first CTA then continues alone.
- Selection (radix_select.py): two or three passes that count digits find the k-th largest of the row or list. If more
  scores tie with the k-th largest than are needed, those with the lowest columns are selected.
- Order: a thread owns up to 32 consecutive numbers of the row or list, and has a mask with a bit for each number that
  is selected. A scan over the threads' numbers of set bits gives the output positions. Candidates of a tile are
  appended to the list in the same way.
- With `BY_VALUE`, a bitonic sort then orders the selected columns by descending score, ties by ascending column.
Shared memory: 8 CAPACITY bytes for the row or the list (scores, then columns), the tiles, 8 KiB of digit counts.
Constraints: a row's columns are contiguous. Rows may start at any element: numbers before the first and after the last
multiple of 16 bytes are copied one by one. k is at most CAPACITY in configurations for resident rows, and at most
CAPACITY / 2 in others. Launch: programmatic, so that the prologue overlaps the end of the previous kernel.
Roofline: bound by memory: the scores are read once. At 128K columns, where a number takes 14 thread instructions, the
kernel reaches 80% of the copy bandwidth. A number takes 20 instructions at 32K columns and 34 at 8K, because fewer
numbers share a row's fixed cost. At 8K columns, 60% of the issue slots and of the shared-memory cycles are used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.copies import bulk_load
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.pipeline import Mbarriers, arrive, expect_bytes, start
from dsa.cute.reductions import block_exclusive_scan
from dsa.cute.sm90 import SHARED_BYTES, WARP, cluster_sync
from dsa.kernels.indexer.limits import BY_VALUE, LENGTHS, PAGED, STARTS, TOPK_DTYPES, VALUES
from dsa.kernels.indexer.radix_select import (
    VECTOR_BYTES,
    SelectMemory,
    bits_of,
    find_floor,
    lowest_bits,
    mask_from,
    next_above,
    vector_width,
)
from dsa.kernels.indexer.selected_slots import Paging, fake_selection, fill_rest
from dsa.kernels.indexer.topk_config import CONFIGS, TopkConfig
from dsa.runtime.compile_cache import cached, compile_sm90

MINUS_INFINITY, NAN = Float32(float("-inf")), Float32(float("nan"))
ITEMS_AT_ONCE = 4  # candidates per thread and round when a list is cut
SAMPLE = 4096  # largest number of scores in a sample; a list of any configuration has room for them
MARGIN = 4.5  # in standard deviations: how far the threshold's rank in the sample exceeds the expected rank
MAX_ATTEMPTS = 3  # a row is read at most three times: twice with a threshold, then without


@dataclass(frozen=True)
class Row:
    """scores [cols]: a row of the matrix. The selection uses its columns [lo, lo + n). They lie in `vectors` aligned
    vectors of 16 bytes. The first vector begins `ahead` numbers before column lo."""

    scores: cute.Tensor
    lo: Int32
    n: Int32
    ahead: Int32
    vectors: Int32


@dataclass(frozen=True)
class Candidates:
    """A resident row, or a list of candidates: the scores and, for a list, their columns relative to lo."""

    scores: cute.Tensor
    columns: cute.Tensor


class TopkIndicesSm90:
    def __init__(self, dtype: type[cutlass.Numeric], cfg: TopkConfig):
        self.dtype, self.cfg = dtype, cfg
        self.threads, self.capacity, self.cluster, self.stages = cfg.threads, cfg.capacity, cfg.cluster, cfg.stages
        self.width = vector_width(dtype)
        self.tile_vectors = cfg.threads * cfg.tile // self.width
        self.shared = 8 * cfg.capacity + cfg.stages * VECTOR_BYTES * self.tile_vectors + 10 * 1024

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,
        starts: cute.Tensor,
        lengths: cute.Tensor,
        block_table: cute.Tensor,
        row_to_seq: cute.Tensor,
        indices: cute.Tensor,
        values: cute.Tensor,
        page_size: Int32,
        options: Int32,
        stream,
    ):
        divisor = cute.fast_divmod_create_divisor_v2(page_size)
        self.kernel(
            scores, starts, lengths, block_table, row_to_seq, indices, values, divisor, page_size, options
        ).launch(
            grid=(scores.shape[0] * self.cluster, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=min(SHARED_BYTES // self.shared, 1536 // self.threads),
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        scores: cute.Tensor,
        starts: cute.Tensor,
        lengths: cute.Tensor,
        block_table: cute.Tensor,
        row_to_seq: cute.Tensor,
        indices: cute.Tensor,
        values: cute.Tensor,
        divisor: cute.FastDivmodDivisorV2,
        page_size: Int32,
        options: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index, rank = block // self.cluster, block % self.cluster
        k = indices.shape[1]

        smem = SmemAllocator()
        columns = smem.allocate_tensor(Int32, cute.make_layout(2 * self.capacity), 128)
        tiles = smem.allocate_tensor(
            self.dtype, cute.make_layout((max(self.tile_vectors, 1) * self.width, self.stages)), 128
        )
        memory = SelectMemory.allocate(smem)
        loaded = Mbarriers(smem.allocate_tensor(Int64, cute.make_layout(self.stages), 8).iterator, self.stages)
        list_sizes = smem.allocate_tensor(Int32, cute.make_layout(4), 16)
        candidates = Candidates(
            cute.make_tensor(
                cute.recast_ptr(columns.iterator, dtype=self.dtype),
                cute.make_layout(2 * self.capacity * 32 // self.dtype.width),
            ),
            cute.make_tensor(columns.iterator + self.capacity, cute.make_layout(self.capacity)),
        )
        if tid == 0:
            loaded.init(2)
        cute.arch.mbarrier_init_fence()

        memory.clear(tid, self.threads)
        wait_for_prerequisite_grids()

        start, row = find_row(scores, starts, lengths, index, options)
        resident = True
        if const_expr(self.cfg.tile > 0):
            resident = row.vectors <= self.cfg.resident_vectors(self.dtype.width)
        if resident and tid == 0:
            load_row(row, Int32(0), row.vectors, candidates.scores, loaded.barrier())
        cute.arch.sync_threads()

        length = row.vectors
        if const_expr(self.cfg.tile > 0):
            if not resident:
                count = self.collect(row, rank, k, candidates, tiles, memory, loaded, list_sizes, tid)
                length = (count + self.width - 1) // self.width
        if resident:
            loaded.wait(0)
        if rank == 0:
            found = self.select(row, candidates, columns, length, k, resident, memory, tid)
            if options & BY_VALUE:
                self.sort(row, columns, found, tid)
            to_index = row.lo - start
            if options & VALUES:
                for i in cutlass.range(tid, found, self.threads, unroll=4):
                    values[index, i] = Float32(row.scores[row.lo + columns[i]])
            if options & PAGED:
                paging = Paging(block_table, row_to_seq, divisor, page_size)
                self.to_slots(paging, paging.sequence(index, options), columns, found, to_index, tid)
                if options & VALUES:
                    for i in cutlass.range(tid, found, self.threads, unroll=1):
                        if columns[i] < 0:
                            values[index, i] = MINUS_INFINITY
                to_index = Int32(0)
                cute.arch.sync_threads()
            self.store(indices[index, None], columns, found, to_index, tid)
            fill_rest(indices, values, index, found, options, tid, self.threads)

    @cute.jit
    def collect(
        self, row: Row, rank, k, candidates: Candidates, tiles, memory: SelectMemory, loaded: Mbarriers, list_sizes, tid
    ):
        """List the row's candidates. With a cluster, the list is in the shared memory of the cluster's first CTA. ->
        number of candidates. NaN pads the list to whole vectors of 16 bytes.

        loaded  a full barrier for each stage of `tiles`. Empty barriers are not needed: the scan over a tile's counts
                is a barrier, after which all threads are done with the previous tile"""
        lane, warp = tid % WARP, tid // WARP
        each = (row.vectors + self.cluster - 1) // self.cluster
        first = cutlass.min(rank * each, row.vectors)
        past_last = cutlass.min(first + each, row.vectors)
        number_of_tiles = (past_last - first + self.tile_vectors - 1) // self.tile_vectors
        count, total, list_size, threshold = Int32(0), Int32(0), Int32(0), MINUS_INFINITY
        state, attempt = start(), Int32(0)
        while attempt < MAX_ATTEMPTS:
            sampled = row.n > self.capacity and attempt < MAX_ATTEMPTS - 1
            # Issue the sample's few loads before the tiles' many loads, so that the threshold is known early.
            if sampled:
                self.load_sample(row, candidates.scores, tid)
            if tid == 0:
                stage = state.stage
                for t in cutlass.range(cutlass.min(number_of_tiles, self.stages), unroll=1):
                    self.load_tile(row, first, past_last, t, stage, tiles, loaded)
                    stage = 0 if stage == self.stages - 1 else stage + 1
            threshold, count = MINUS_INFINITY, Int32(0)
            if sampled:
                threshold = self.find_threshold(row.n, k, attempt, candidates.scores, memory, tid)
            for t in cutlass.range(number_of_tiles, unroll=1):
                tile = tiles[None, state.stage]
                loaded.wait(state.phase, state.stage)
                begin = first + t * self.tile_vectors
                length = cutlass.min(past_last - begin, self.tile_vectors)
                own = self.cfg.tile // self.width
                place = tid * self.cfg.tile
                column = begin * self.width + place - row.ahead
                mask = mask_from(tile, length, Int32(own), threshold, tid)
                here = Int32(cute.arch.popc(mask))
                before, found = block_exclusive_scan(here, memory.sums[t & 1, None], lane, warp)
                last = self.stages - 1
                if tid == 0 and t > 0 and t + last < number_of_tiles:
                    # After the barrier in the scan, all threads are done with the previous tile, so its stage is free.
                    stage_before = last if state.stage == 0 else state.stage - 1
                    self.load_tile(row, first, past_last, t + last, stage_before, tiles, loaded)
                while count + found > self.capacity:
                    fits = cutlass.max(cutlass.min(self.capacity - count - before, here), 0)
                    these = lowest_bits(mask, fits)
                    self.append(tile, place, column, these, count + before, candidates)
                    threshold = self.cut(candidates, Int32(self.capacity), k, memory, tid)
                    count = k
                    mask = (mask ^ these) & mask_from(tile, length, Int32(own), threshold, tid)
                    here = Int32(cute.arch.popc(mask))
                    before, found = block_exclusive_scan(here, memory.sums[t & 1, None], lane, warp)
                    cute.arch.sync_threads()
                self.append(tile, place, column, mask, count + before, candidates)
                count += found
                state = state.advance(self.stages)
            total, list_size = count, Int32(0)
            if const_expr(self.cluster > 1):
                total, list_size = self.all_list_sizes(list_sizes, attempt, count, tid)
            attempt += 1
            if total >= k or threshold == MINUS_INFINITY:
                attempt = Int32(MAX_ATTEMPTS)
            cute.arch.sync_threads()
        if const_expr(self.cluster > 1):
            count = self.gather(candidates, count, total, list_size, k, memory, list_sizes, rank, tid)
        self.fill_vector(candidates, count, tid)
        return count

    @cute.jit
    def fill_vector(self, candidates: Candidates, count, tid):
        """Pad a list of `count` scores with NaN to whole vectors of 16 bytes. Begins and ends with a barrier."""
        cute.arch.sync_threads()
        if tid < (0 - count) & (self.width - 1):
            candidates.scores[count + tid] = self.dtype(float("nan"))
        cute.arch.sync_threads()

    @cute.jit
    def load_tile(self, row: Row, first, past_last, t, stage, tiles: cute.Tensor, loaded: Mbarriers):
        begin = first + t * self.tile_vectors
        end = cutlass.min(begin + self.tile_vectors, past_last)
        load_row(row, begin, end, tiles[None, stage], loaded.barrier(stage))

    @cute.jit
    def load_sample(self, row: Row, target: cute.Tensor, tid):
        """Start asynchronous copies of pairs of vectors, spread over the whole row, to `target`. The caller waits for
        the copies of all threads by `cp_async_wait_group(0)` and a barrier."""
        whole = 1 if row.ahead > 0 else 0
        pairs = ((row.n + row.ahead) // self.width - whole) // 2
        samples = self.samples(row.n)
        step = pairs // (samples // 2)
        for i in cutlass.range(tid, samples, self.threads, unroll=1):
            pair = i // 2
            jitter = Int32(cute.arch.mul_hi(Uint32(pair) * Uint32(2654435761), Uint32(step)))
            column = (whole + 2 * (pair * step + jitter) + i % 2) * self.width - row.ahead
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16; cp.async.commit_group;",
                read_only_args=[
                    Int32((target.iterator + i * self.width).toint()),
                    Int64((row.scores.iterator + (row.lo + column)).toint()),
                ],
            )

    @cute.jit
    def samples(self, n) -> Int32:
        """Return the number of vectors to sample from n numbers. It is even, because pairs are sampled."""
        return cutlass.min(n // 16, SAMPLE) // (2 * self.width) * 2

    @cute.jit
    def find_threshold(self, n, k, attempt, numbers: cute.Tensor, memory: SelectMemory, tid) -> Float32:
        """Return a threshold that is likely to be slightly below the row's k-th largest score. The second attempt
        doubles the threshold's rank. The search can stop at a lower number to save a pass, if the row is still expected
        to fill at most 0.8 of the list."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        samples = self.samples(n)
        each = Float32(samples * self.width) * cute.arch.rcp_approx(Float32(n))
        expected = Float32(k) * each
        rank = Int32(expected + MARGIN * cute.math.sqrt(expected, fastmath=True)) + 2 << attempt
        slack = cutlass.max(Int32(Float32(0.8 * self.capacity) * each) - rank, 0)
        return find_floor(numbers, samples, rank, slack, memory, tid, self.threads)[0]

    @cute.jit
    def append(self, tile: cute.Tensor, place, column, mask: Uint32, at, candidates: Candidates):
        """For each set bit j of the mask, append tile[place + j] and its column, `column` + j, to the list. The first
        appended number becomes entry `at`."""
        entry = at + Int32(cute.arch.popc(mask))
        while mask != 0:
            j = Int32(cute.arch.bfind(mask))
            mask ^= Uint32(1) << Uint32(j)
            entry -= 1
            candidates.scores[entry] = tile[place + j]
            candidates.columns[entry] = column + j

    @cute.jit
    def cut(self, candidates: Candidates, count, k, memory: SelectMemory, tid) -> Float32:
        """Keep the k largest scores of the list, by ascending column. -> the least score that later candidates must
        have: the next number above the k-th largest, because ties go to the lower columns, which the list already has.

        The list is compacted in place, a few entries per thread at a time. No entry moves to a higher index, and the
        scan's barrier comes between a round's reads and writes. So every entry is read before it is overwritten. Begins
        and ends with a barrier.
        """
        self.fill_vector(candidates, count, tid)
        length = (count + self.width - 1) // self.width
        floor, equal, excess = find_floor(candidates.scores, length, k, Int32(0), memory, tid, self.threads)
        limit = equal if excess > 0 else self.capacity  # keep at most this many entries that equal the floor
        above = next_above(floor)
        kept, equals = Int32(0), Int32(0)
        x = cute.make_rmem_tensor((ITEMS_AT_ONCE,), Float32)
        column = cute.make_rmem_tensor((ITEMS_AT_ONCE,), Int32)
        for base in cutlass.range(0, count, ITEMS_AT_ONCE * self.threads, unroll=1):
            i = base + ITEMS_AT_ONCE * tid
            # One scan adds up two counts: entries above the floor and, in the upper 16 bits, entries that tie with it.
            here = Int32(0)
            for j in cutlass.range_constexpr(ITEMS_AT_ONCE):
                x[j] = NAN
                if i + j < count:
                    x[j], column[j] = Float32(candidates.scores[i + j]), candidates.columns[i + j]
                here += Int32(1) if x[j] >= above else (Int32(1 << 16) if x[j] >= floor else Int32(0))
            turn = (base // (ITEMS_AT_ONCE * self.threads)) & 1
            before, total = block_exclusive_scan(here, memory.sums[turn, None], tid % WARP, tid // WARP)
            same = equals + (before >> 16)
            entry = kept + (before & 0xFFFF) + cutlass.min(same, limit) - cutlass.min(equals, limit)
            for j in cutlass.range_constexpr(ITEMS_AT_ONCE):
                larger = x[j] >= above
                if larger or (x[j] >= floor and same < limit):
                    candidates.scores[entry] = self.dtype(x[j])
                    candidates.columns[entry] = column[j]
                    entry += 1
                if x[j] >= floor and not larger:
                    same += 1
            kept += (total & 0xFFFF) + cutlass.min(equals + (total >> 16), limit) - cutlass.min(equals, limit)
            equals += total >> 16
        cute.arch.sync_threads()
        return above

    @cute.jit
    def all_list_sizes(self, list_sizes: cute.Tensor, place, count, tid):
        """-> (sum of the list lengths of the cluster's CTAs, list length of CTA tid % cluster). Each call must use
        another element `place` of list_sizes, because no barrier follows the reads."""
        if tid == 0:
            list_sizes[place] = count
        cluster_sync()
        at = cute.arch.map_dsmem_ptr(list_sizes.iterator + place, tid % self.cluster).toint()
        list_size = cute.arch.inline_ptx(
            "ld.shared::cluster.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[Int32(at)]
        )
        return cute.arch.warp_redux_sync(list_size if tid % WARP < self.cluster else Int32(0), "add"), list_size

    @cute.jit
    def gather(self, candidates: Candidates, count, total, list_size, k, memory: SelectMemory, list_sizes, rank, tid):
        """Append the other CTAs' lists to the first CTA's list, in order. total, list_size: from `all_list_sizes`. ->
        length of the first CTA's list. Ends with a barrier."""
        if total <= self.capacity:
            before = cute.arch.warp_redux_sync(list_size if tid % WARP < rank else Int32(0), "add")
            if rank > 0:
                self.copy_list(candidates, count, before, tid)
            cluster_sync()
            count = total
        else:
            # Too many entries: cut each list to at most k, and append one CTA's list after the other. Before an append
            # that does not fit, cut the first CTA's list to k. Then it fits, because k is at most half of the capacity.
            if count > k:
                self.cut(candidates, count, k, memory, tid)
                count = k
            list_size = self.all_list_sizes(list_sizes, Int32(MAX_ATTEMPTS), count, tid)[1]
            listed = cute.arch.shuffle_sync(list_size, 0)
            for peer in cutlass.range(1, self.cluster, unroll=1):
                more = cute.arch.shuffle_sync(list_size, peer)
                if listed + more > self.capacity:
                    if rank == 0:
                        self.cut(candidates, listed, k, memory, tid)
                    listed = k
                cluster_sync()
                if rank == peer:
                    self.copy_list(candidates, count, listed, tid)
                cluster_sync()
                listed += more
            count = listed
        return count

    @cute.jit
    def copy_list(self, candidates: Candidates, count, at, tid):
        """Copy this CTA's list into the list of the cluster's first CTA, from entry `at` on."""
        number_at = cute.arch.map_dsmem_ptr(candidates.scores.iterator, 0).toint()
        column_at = cute.arch.map_dsmem_ptr(candidates.columns.iterator, 0).toint()
        size = self.dtype.width // 8
        bits = cute.make_tensor(
            cute.recast_ptr(candidates.scores.iterator, dtype=Uint16 if size == 2 else Int32),
            cute.make_layout(self.capacity),
        )
        for i in cutlass.range(tid, count, self.threads, unroll=2):
            cute.arch.inline_ptx(
                f"st.shared::cluster.b{8 * size} [{{$r0}}], {{$r1}}; st.shared::cluster.b32 [{{$r2}}], {{$r3}};",
                read_only_args=[
                    Int32(number_at) + (at + i) * size,
                    bits[i],
                    Int32(column_at) + (at + i) * 4,
                    candidates.columns[i],
                ],
            )

    @cute.jit
    def store(self, out: cute.Tensor, columns: cute.Tensor, found, to_index, tid):
        """Store out[i] = columns[i] + to_index for i < found, with 16-byte stores if `out` is aligned to 16 bytes."""
        whole = Int32(0)
        if Int32(out.iterator.toint()) & 15 == 0:
            whole = found // 4
            four = cute.make_rmem_tensor((4,), Int32)
            aligned = cute.make_tensor(out.iterator.align(16), cute.make_layout(4 * whole))
            for i in cutlass.range(tid, whole, self.threads, unroll=2):
                cute.autovec_copy(cute.local_tile(columns, (4,), (i,)), four)
                for j in cutlass.range_constexpr(4):
                    four[j] += to_index
                cute.autovec_copy(four, cute.local_tile(aligned, (4,), (i,)))
        for i in cutlass.range(4 * whole + tid, found, self.threads, unroll=1):
            out[i] = columns[i] + to_index

    @cute.jit
    def select(
        self, row: Row, candidates: Candidates, columns: cute.Tensor, length, k, resident, memory: SelectMemory, tid
    ):
        """Write the columns of the k largest of the row or list, which has `length` vectors, to `columns` in ascending
        order. Ties go to the lowest columns. -> number of columns, less than k if fewer scores are not NaN."""
        floor, equal, excess = MINUS_INFINITY, Int32(0), Int32(0)
        if length * self.width > k:
            floor, equal, excess = find_floor(candidates.scores, length, k, Int32(0), memory, tid, self.threads)
        own = (length + self.threads - 1) // self.threads
        mask = mask_from(candidates.scores, length, own, floor, tid, 4 if self.cfg.tile == 0 else 2)
        if excess > 0:
            # More numbers than needed tie with the k-th largest: take the first `equal` of them, which have the lowest
            # columns.
            above = mask_from(candidates.scores, length, own, next_above(floor), tid)
            equals = mask ^ above
            here = Int32(cute.arch.popc(equals))
            before, _ = block_exclusive_scan(here, memory.sums[1, None], tid % WARP, tid // WARP)
            mask = above | lowest_bits(equals, cutlass.max(cutlass.min(equal - before, here), 0))
        here = Int32(cute.arch.popc(mask))
        before, found = block_exclusive_scan(here, memory.sums[0, None], tid % WARP, tid // WARP)
        # After the scan's barrier all threads have computed `mask`, and the numbers are no longer needed. So the
        # columns can overwrite the numbers.
        at = before + here
        place = tid * own * self.width
        while mask != 0:
            j = Int32(cute.arch.bfind(mask))
            mask ^= Uint32(1) << Uint32(j)
            at -= 1
            column = place + j - row.ahead
            if const_expr(self.cfg.tile > 0):
                if not resident:
                    column = candidates.columns[place + j]
            columns[at] = column
        cute.arch.sync_threads()
        return found

    @cute.jit
    def sort(self, row: Row, columns: cute.Tensor, count, tid):
        """Sort columns[:count] by their scores, the largest first. Ties are sorted by ascending column."""
        log = 32 - Int32(cute.arch.clz(Uint32(cutlass.max(count, 1) - 1)))
        size = 1 << log
        # The sort keys are in columns[size:] and ascend as the scores descend. The padding to a power of two has the
        # largest key.
        for i in cutlass.range(tid, size, self.threads, unroll=2):
            key = Int32(2**31 - 1)
            if i < count:
                bits = Int32(bits_of(Float32(row.scores[row.lo + columns[i]]) + 0.0))
                key = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
            else:
                columns[i] = Int32(2**31 - 1)
            columns[size + i] = key
        for run in cutlass.range(1, log + 1, unroll=1):
            for step in cutlass.range(run, unroll=1):
                distance = 1 << (run - 1 - step)
                cute.arch.sync_threads()
                for i in cutlass.range(tid, size // 2, self.threads, unroll=1):
                    a = ((i & ~(distance - 1)) << 1) | (i & (distance - 1))
                    b = a | distance
                    key_a, key_b, column_a, column_b = columns[size + a], columns[size + b], columns[a], columns[b]
                    greater = key_a > key_b or (key_a == key_b and column_a > column_b)
                    if greater != ((a >> run) & 1 == 1):
                        columns[size + a] = key_b
                        columns[size + b] = key_a
                        columns[a] = column_b
                        columns[b] = column_a
        cute.arch.sync_threads()

    @cute.jit
    def to_slots(self, paging: Paging, sequence, columns: cute.Tensor, found, to_index, tid):
        """Replace columns[:found] by cache slots of the sequence, or by -1 for keys without a slot. A thread replaces
        elements `tid`, `tid` + threads, ..., and can read these without a barrier."""
        if paging.exists(sequence):
            for i in cutlass.range(tid, found, self.threads, unroll=4):
                index = columns[i] + to_index  # column - start; it overflows for a start far below 0: then no slot
                columns[i] = paging.slot(sequence, cutlass.max(index, 0), index >= 0)
        else:
            for i in cutlass.range(tid, found, self.threads, unroll=1):
                columns[i] = Int32(-1)


@cute.jit
def find_row(scores: cute.Tensor, starts: cute.Tensor, lengths: cute.Tensor, index: Int32, options: Int32):
    """-> (the row's start as given, or 0; the `Row`, which excludes columns outside the matrix)."""
    start, cols = Int32(0), scores.shape[1]
    if options & STARTS:
        start = starts[index]
    end = Int64(cols)
    if options & LENGTHS:
        end = cutlass.min(end, Int64(start) + lengths[index])
    lo = cutlass.min(cutlass.max(start, 0), cols)
    n = Int32(cutlass.max(end - lo, Int64(0)))
    own, width = scores[index, None], vector_width(scores.element_type)
    ahead = (Int32((own.iterator + lo).toint()) & 15) // (scores.element_type.width // 8)
    return start, Row(own, lo, n, ahead, (n + ahead + width - 1) // width)


@cute.jit
def load_row(row: Row, first, past_last, target: cute.Tensor, barrier: cute.Pointer):
    """Start to load the row's vectors [first, past_last) into `target`. One thread calls this and arrives twice: once
    with the bytes of the bulk copy, and once after its own stores.

    If the first or last vector also contains numbers outside the row, it is copied number by number, with NaN for those
    outside.
    """
    width = vector_width(row.scores.element_type)
    cute.arch.fence_proxy("async.shared", space="cta")
    whole = first + 1 if first * width < row.ahead else first
    whole_end = past_last - 1 if past_last * width > row.ahead + row.n else past_last
    size = cutlass.max(whole_end - whole, 0) * VECTOR_BYTES
    expect_bytes(barrier, size)
    if size > 0:
        bulk_load(
            target.iterator + (whole - first) * width,
            row.scores.iterator + (row.lo + whole * width - row.ahead),
            size,
            barrier,
        )
    if whole > first and past_last > first:
        load_one_by_one(row, first, target, Int32(0))
    if whole_end < past_last and (past_last - first > 1 or whole == first):
        load_one_by_one(row, past_last - 1, target, past_last - 1 - first)
    arrive(barrier)


@cute.jit
def load_one_by_one(row: Row, vector, target: cute.Tensor, at):
    dtype = row.scores.element_type
    width = vector_width(dtype)
    for j in cutlass.range(width, unroll=1):
        column = vector * width - row.ahead + j
        x = dtype(float("nan"))
        if column >= 0 and column < row.n:
            x = row.scores[row.lo + column]
        target[at * width + j] = x


@cached
def compile_topk_indices(dtype: str, cfg: TopkConfig):
    """-> f(scores [rows, cols] dtype, starts, lengths [rows], block_table [B, pages], row_to_seq [rows], indices [rows,
    k] (all int32), values [rows, k] fp32, page_size, options); rows, cols, k > 0, and cfg.takes(k). The bits of
    `options` say which optional tensors are used; the others may have any size."""
    element = cute_dtype(dtype)
    rows = cute.sym_int()
    scores = fake(element, (rows, cute.sym_int()), (*strides(1), 1), element.width // 8)
    starts, lengths = (fake(Int32, (cute.sym_int(),), strides(1), 4) for _ in range(2))
    results = fake_selection(rows)
    return compile_sm90(
        TopkIndicesSm90(element, cfg), scores, starts, lengths, *results, Int32(1), Int32(0), fake_stream()
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [(compile_topk_indices, (dtype, cfg)) for dtype in TOPK_DTYPES for cfg in CONFIGS]
