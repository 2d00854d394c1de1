"""Exact, deterministic top-k selection of index scores.

out[r] = the columns of the k largest of scores[r, lo : hi], of equal ones the lowest, in ascending order

Plan
- One CTA per row. A row that fits into shared memory arrives by one bulk copy and is selected from there ("resident").
- Streaming: a longer row goes through a pipeline of tiles in shared memory, which one thread fills by bulk copies
  (topk_candidates.py). Scores that are not below a threshold are appended to a list of candidates, with their columns
  and in order. A row that fits the list needs no threshold.
- Threshold: it is found in a sample of at most every 16th number (pairs of vectors at jittered positions: 32 bytes). It
  is the sample's (r + 4.5 sqrt r)-th largest, where r is the expected rank of the k-th. About 1.4 k candidates remain.
- Exactness: a full list is cut to its k largest. Later scores must then exceed the least of these, because their
  columns are higher. If fewer than k candidates remain, the threshold was too high. The row is then read again with a
  lower threshold, and finally without one. So the result is exact for any input, and only the time depends on luck.
- Few rows: a cluster per row. Each CTA lists a part of the row, with the same threshold. It appends its list to those
  of the earlier CTAs, in the shared memory of the first CTA. The first CTA then continues alone.
- Selection (radix_select.py): two or three passes that count digits find the k-th largest of the row or list.
- Order: a thread owns up to 32 neighbouring numbers of the list and has a bit for each that is selected. A scan over
  the threads' bit counts gives the positions of its columns. Tiles are appended to the list in the same way.
- By value: a bitonic sort then orders the selected by (value, column).
Shared memory: 8 CAPACITY bytes for the row or the list (values, then columns), the tiles, 8 KiB of digit counts.
Constraints: a row's columns are contiguous. Rows may start anywhere: the ends that are not at multiples of 16 bytes are
copied number by number. k is at most CAPACITY if rows are resident, and at most half of it otherwise.
Launch: programmatic, so that the prologue overlaps the end of the previous kernel.
Roofline: memory, one read of the scores: 80% of the copy bandwidth at 128K columns, where a number takes 14
instructions. A number takes 20 instructions at 32K columns and 34 at 8K, because fewer numbers share a row's fixed
cost. Then 60% of the issue slots and of the shared-memory cycles are used.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.limits import MAX_SLOTS
from dsa.cute.pipeline import Mbarriers
from dsa.cute.reductions import block_exclusive_scan
from dsa.cute.sm90 import SHARED_BYTES, WARP
from dsa.kernels.indexer.limits import BY_VALUE, PAGED, ROW_TO_SEQ, TOPK_DTYPES, VALUES
from dsa.kernels.indexer.radix_select import (
    VECTOR_BYTES,
    SelectMemory,
    bits_of,
    find_floor,
    lowest_bits,
    mask_from,
    next_above,
)
from dsa.kernels.indexer.topk_candidates import MINUS_INFINITY, CandidateCollector, Candidates
from dsa.kernels.indexer.topk_config import CONFIGS, TopkConfig
from dsa.kernels.indexer.topk_row import Row, find_row, load_row
from dsa.runtime.compile_cache import cached, compile_sm90


class TopkIndicesSm90:
    def __init__(self, dtype: type[cutlass.Numeric], cfg: TopkConfig):
        self.dtype, self.cfg = dtype, cfg
        self.threads, self.capacity, self.cluster = cfg.threads, cfg.capacity, cfg.cluster
        self.collector = CandidateCollector(dtype, cfg)
        self.width = VECTOR_BYTES * 8 // dtype.width
        self.tile_vectors = self.collector.tile_vectors
        self.stages = cfg.stages
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
        tile_numbers = max(self.tile_vectors, 1) * self.width
        tiles = smem.allocate_tensor(self.dtype, cute.make_layout((tile_numbers, self.stages)), 128)
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
                count = self.collector.collect(row, rank, k, candidates, tiles, memory, loaded, list_sizes, tid)
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
                sequence = index
                if options & ROW_TO_SEQ:
                    sequence = row_to_seq[index]
                self.to_slots(block_table, sequence, columns, found, to_index, divisor, page_size, tid)
                if options & VALUES:
                    for i in cutlass.range(tid, found, self.threads, unroll=1):
                        if columns[i] < 0:
                            values[index, i] = MINUS_INFINITY
                to_index = Int32(0)
                cute.arch.sync_threads()
            self.store(indices[index, None], columns, found, to_index, tid)
            for i in cutlass.range(found + tid, k, self.threads, unroll=1):
                indices[index, i] = Int32(-1)
                if options & VALUES:
                    values[index, i] = MINUS_INFINITY

    @cute.jit
    def store(self, out: cute.Tensor, columns: cute.Tensor, found, to_index, tid):
        """out[i] = columns[i] + to_index, with 16-byte stores if out is aligned."""
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
        """Write the columns of the k largest of the row or list, `length` vectors, to `columns` in order. -> their
        number."""
        floor, equal, excess = MINUS_INFINITY, Int32(0), Int32(0)
        if length * self.width > k:
            floor, equal, excess = find_floor(candidates.scores, length, k, Int32(0), memory, tid, self.threads)
        own = (length + self.threads - 1) // self.threads
        mask = mask_from(candidates.scores, length, own, floor, tid, 4 if self.cfg.tile == 0 else 2)
        if excess > 0:
            # More numbers than needed equal the k-th largest: take the first of them.
            above = mask_from(candidates.scores, length, own, next_above(floor), tid)
            equals = mask ^ above
            here = Int32(cute.arch.popc(equals))
            before, _ = block_exclusive_scan(here, memory.sums[1, None], tid % WARP, tid // WARP)
            mask = above | lowest_bits(equals, cutlass.max(cutlass.min(equal - before, here), 0))
        here = Int32(cute.arch.popc(mask))
        before, found = block_exclusive_scan(here, memory.sums[0, None], tid % WARP, tid // WARP)
        # All threads have their bits, and the numbers are no longer needed: the columns may overwrite them.
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
        """Sort columns[:count] by their numbers, the largest first, and by column among equal ones."""
        log = 32 - Int32(cute.arch.clz(Uint32(cutlass.max(count, 1) - 1)))
        size = 1 << log
        # Sort keys ascend as numbers descend. The padding to a power of two comes last.
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
    def to_slots(
        self,
        block_table: cute.Tensor,
        sequence,
        columns: cute.Tensor,
        found,
        to_index,
        divisor: cute.FastDivmodDivisorV2,
        page_size,
        tid,
    ):
        """Replace columns[:found] by the sequence's cache slots, or -1. Each thread replaces its own columns."""
        last = block_table.shape[1] - 1
        known = sequence >= 0 and sequence < block_table.shape[0] and last >= 0
        if known:
            for i in cutlass.range(tid, found, self.threads, unroll=4):
                # A start far below 0 makes the sum overflow. No branch around the load, so that several loads overlap.
                index = columns[i] + to_index
                page, offset = divmod(cutlass.max(index, 0), divisor)
                physical = block_table[sequence, cutlass.min(page, last)]
                slot = Int64(physical) * page_size + offset
                exists = index >= 0 and page <= last and physical >= 0 and slot < Int64(MAX_SLOTS)
                columns[i] = Int32(slot) if exists else Int32(-1)
        else:
            for i in cutlass.range(tid, found, self.threads, unroll=1):
                columns[i] = Int32(-1)


@cached
def compile_topk_indices(dtype: str, cfg: TopkConfig):
    """-> f(scores [rows, cols] dtype, starts, lengths [rows], block_table [B, pages], row_to_seq [rows],
    indices [rows, k] int32, values [rows, k] fp32, page_size, options); rows, cols, k > 0 and cfg takes k. The bits
    of `options` say which tensors are given; the others may have any size."""
    element = cute_dtype(dtype)
    rows, k = cute.sym_int(), cute.sym_int()
    scores = fake(element, (rows, cute.sym_int()), (*strides(1), 1), element.width // 8)
    starts, lengths, row_to_seq = (fake(Int32, (cute.sym_int(),), strides(1), 4) for _ in range(3))
    block_table = fake(Int32, (cute.sym_int(), cute.sym_int()), (*strides(1), 1), 4)
    indices = fake(Int32, (rows, k), (*strides(1), 1), 4)
    values = fake(Float32, (cute.sym_int(), cute.sym_int()), (*strides(1), 1), 4)
    kernel = TopkIndicesSm90(element, cfg)
    return compile_sm90(
        kernel, scores, starts, lengths, block_table, row_to_seq, indices, values, Int32(1), Int32(0), fake_stream()
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_topk_indices, (dtype, cfg)) for dtype in TOPK_DTYPES for cfg in CONFIGS]
