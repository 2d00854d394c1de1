"""Exact, deterministic top-k selection of index scores.

out[r] = the columns of the k largest of scores[r, lo : hi], of equal ones the lowest, in ascending order

Plan
- A CTA a row. A row that fits comes into shared memory by one bulk copy and is selected from there ("resident").
- A longer row streams through a ring of tiles in shared memory by bulk copies. What is not below a threshold is
  appended, with its column and in order, to a list. The threshold is found in a sample of every 16th number or less
  (pairs of vectors at jittered positions: 32 bytes), as its (r + 4.5 sqrt r)-th largest, r the expected rank of the
  k-th: about 1.4 k numbers are left. A list that is full is cut to its k largest, and what follows must be above the
  least of these: its columns are higher. A threshold that leaves less than k was too high: the row is read again with
  a lower one, and then without. So the result is exact for any input, and an unlucky one takes longer. A row that fits
  the list needs no threshold.
- Few rows: a cluster a row. Each CTA lists a part of the row, with the same threshold, and writes its list behind that
  of the CTAs before it into the first one's shared memory, which goes on alone.
- Selection (radix_select.py): two or three passes that count digits find the k-th largest of the row or list.
- Order: a thread owns up to 32 neighbours of the list and has a bit for each that is selected; a scan over the threads'
  bit counts says where its columns go. Tiles are appended to the list so, too.
- By value: the selected are sorted by (value, column) behind that, bitonically.
Shared memory: 8 CAPACITY bytes for the row or the list (values, then columns), the tiles, 8 KiB of digit counts.
Constraints: a row's columns next to each other, rows anywhere (the ends of a row that are not at multiples of 16 bytes
are copied one by one); k at most CAPACITY where rows are resident, else half of it.
Launch: programmatic, so that the preparations run under the end of the kernel before.
Roofline: memory, one read of the scores: 80% of the copy bandwidth at 128K columns, where 14 instructions a number are
executed. At 32K they are 20 and at 8K 34 (what a row costs anyway is shared by fewer), and 60% of the issue slots and
of the shared memory's cycles are used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.copies import async_load_16, bulk_load
from dsa.cute.fake_tensors import cute_dtype
from dsa.cute.pipeline import start
from dsa.cute.reductions import before_and_all
from dsa.kernels.indexer.radix_select import (
    VECTOR_BYTES,
    SelectMemory,
    bits_of,
    find_floor,
    lowest_bits,
    mask_from,
    next_above,
)

LOWEST, NOTHING = Float32(float("-inf")), Float32(float("nan"))
ITEMS = 32  # numbers of a list that a thread has bits for
CUT = 4  # entries a thread looks at, at a time, in cutting a list
SAMPLE = 4096  # numbers at most; any list has room for them
MARGIN = 4.5  # standard deviations of independent numbers
SLOT_LIMIT = 2**31  # what int32 cannot hold
READINGS = 3  # of a row, at most: two with a threshold, one without
# What the caller gives, as bits of `options`.
STARTS, LENGTHS, PAGED, ROW_TO_SEQ, BY_VALUE, VALUES = (1 << i for i in range(6))


@dataclass(frozen=True)
class TopkConfig:
    """threads of a CTA; capacity: entries of its list; tile: numbers a thread has of a tile, 0: rows are resident;
    stages: tiles; cluster: CTAs a row."""

    threads: int
    capacity: int
    tile: int = 0
    stages: int = 1
    cluster: int = 1

    def resident_vectors(self, width: int) -> int:
        """The longest resident row of numbers of `width` bits, in the 16-byte vectors that it touches."""
        return min(self.threads * ITEMS * width // 128, self.capacity // 2) if self.cluster == 1 else 0

    def takes(self, k: int) -> bool:
        return k <= (self.capacity // 2 if self.tile else self.capacity)


@dataclass(frozen=True)
class Row:
    """numbers [cols] of the matrix's row, of which [lo, lo + n) count. They touch `vectors` vectors of 16 bytes, of
    which the first begins `ahead` numbers before lo."""

    numbers: cute.Tensor
    lo: Int32
    n: Int32
    ahead: Int32
    vectors: Int32


@dataclass(frozen=True)
class Entries:
    """A resident row, or a list: numbers, and for a list their columns, counted from lo."""

    numbers: cute.Tensor
    columns: cute.Tensor


class TopkIndicesSm90:
    def __init__(self, dtype: type[cutlass.Numeric], cfg: TopkConfig):
        self.dtype, self.cfg = dtype, cfg
        self.threads, self.capacity, self.cluster = cfg.threads, cfg.capacity, cfg.cluster
        self.width = VECTOR_BYTES * 8 // dtype.width
        self.tile_vectors = cfg.threads * cfg.tile // self.width
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
            min_blocks_per_mp=min(232448 // self.shared, 1536 // self.threads),
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
        line, part = block // self.cluster, block % self.cluster
        k = indices.shape[1]

        smem = SmemAllocator()
        words = smem.allocate_tensor(Int32, cute.make_layout(2 * self.capacity), 128)
        tile_numbers = max(self.tile_vectors, 1) * self.width
        tiles = smem.allocate_tensor(self.dtype, cute.make_layout((tile_numbers, self.stages)), 128)
        memory = SelectMemory.allocate(smem)
        barriers = smem.allocate_tensor(Int64, cute.make_layout(self.stages), 8).iterator
        outcome = smem.allocate_tensor(Int32, cute.make_layout(4), 16)
        entries = Entries(
            cute.make_tensor(
                cute.recast_ptr(words.iterator, dtype=self.dtype),
                cute.make_layout(2 * self.capacity * 32 // self.dtype.width),
            ),
            cute.make_tensor(words.iterator + self.capacity, cute.make_layout(self.capacity)),
        )
        if tid == 0:
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(barriers + i, 2)
        cute.arch.mbarrier_init_fence()

        memory.clear(tid, self.threads)
        # What is behind this point touches global memory: the kernels before must be done with it. The next kernel may
        # begin up to this point of its own.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        start, row = self.find_row(scores, starts, lengths, line, options)
        resident = True
        if const_expr(self.cfg.tile > 0):
            resident = row.vectors <= self.cfg.resident_vectors(self.dtype.width)
        if resident and tid == 0:
            self.load(row, Int32(0), row.vectors, entries.numbers, barriers)
        cute.arch.sync_threads()

        length = row.vectors
        if const_expr(self.cfg.tile > 0):
            if not resident:
                count = self.stream(row, part, k, entries, tiles, memory, barriers, outcome, tid)
                length = (count + self.width - 1) // self.width
        if resident:
            cute.arch.mbarrier_wait(barriers, 0)
        if part == 0:
            found = self.select(row, entries, words, length, k, resident, memory, tid)
            if options & BY_VALUE:
                self.sort(row, words, found, tid)
            to_index = row.lo - start
            if options & VALUES:
                for i in cutlass.range(tid, found, self.threads, unroll=4):
                    values[line, i] = Float32(row.numbers[row.lo + words[i]])
            if options & PAGED:
                sequence = line
                if options & ROW_TO_SEQ:
                    sequence = row_to_seq[line]
                self.to_slots(block_table, sequence, words, found, to_index, divisor, page_size, tid)
                if options & VALUES:
                    for i in cutlass.range(tid, found, self.threads, unroll=1):
                        if words[i] < 0:
                            values[line, i] = LOWEST
                to_index = Int32(0)
                cute.arch.sync_threads()
            self.store(indices[line, None], words, found, to_index, tid)
            for i in cutlass.range(found + tid, k, self.threads, unroll=1):
                indices[line, i] = Int32(-1)
                if options & VALUES:
                    values[line, i] = LOWEST

    @cute.jit
    def store(self, out: cute.Tensor, words: cute.Tensor, found, to_index, tid):
        """out[i] = words[i] + to_index, by 16 bytes where out allows that."""
        whole = Int32(0)
        if Int32(out.iterator.toint()) & 15 == 0:
            whole = found // 4
            four = cute.make_rmem_tensor((4,), Int32)
            aligned = cute.make_tensor(out.iterator.align(16), cute.make_layout(4 * whole))
            for i in cutlass.range(tid, whole, self.threads, unroll=2):
                cute.autovec_copy(cute.local_tile(words, (4,), (i,)), four)
                for j in cutlass.range_constexpr(4):
                    four[j] += to_index
                cute.autovec_copy(four, cute.local_tile(aligned, (4,), (i,)))
        for i in cutlass.range(4 * whole + tid, found, self.threads, unroll=1):
            out[i] = words[i] + to_index

    @cute.jit
    def select(self, row: Row, entries: Entries, words: cute.Tensor, length, k, resident, memory: SelectMemory, tid):
        """Put the columns of the k largest of the row or list, `length` vectors, to `words` in order. -> how many."""
        floor, equal, excess = LOWEST, Int32(0), Int32(0)
        if length * self.width > k:
            floor, equal, excess = find_floor(entries.numbers, length, k, Int32(0), memory, tid, self.threads)
        own = (length + self.threads - 1) // self.threads
        mask = mask_from(entries.numbers, length, own, floor, tid, 4 if self.cfg.tile == 0 else 2)
        if excess > 0:
            # More than needed equal the least: the first of them.
            above = mask_from(entries.numbers, length, own, next_above(floor), tid)
            equals = mask ^ above
            here = Int32(cute.arch.popc(equals))
            before, _ = before_and_all(here, memory.sums[1, None], tid % 32, tid // 32)
            mask = above | lowest_bits(equals, cutlass.max(cutlass.min(equal - before, here), 0))
        here = Int32(cute.arch.popc(mask))
        before, found = before_and_all(here, memory.sums[0, None], tid % 32, tid // 32)
        # All have their bits, and the numbers are no longer needed: the columns go to their place.
        at = before + here
        place = tid * own * self.width
        while mask != 0:
            j = Int32(cute.arch.bfind(mask))
            mask ^= Uint32(1) << Uint32(j)
            at -= 1
            column = place + j - row.ahead
            if const_expr(self.cfg.tile > 0):
                if not resident:
                    column = entries.columns[place + j]
            words[at] = column
        cute.arch.sync_threads()
        return found

    @cute.jit
    def find_row(self, scores: cute.Tensor, starts: cute.Tensor, lengths: cute.Tensor, line: Int32, options: Int32):
        """(the row's start, the row). Columns outside the matrix are no numbers of it."""
        start, cols = Int32(0), scores.shape[1]
        if options & STARTS:
            start = starts[line]
        end = Int64(cols)
        if options & LENGTHS:
            end = cutlass.min(end, Int64(start) + lengths[line])
        lo = cutlass.min(cutlass.max(start, 0), cols)
        n = Int32(cutlass.max(end - lo, Int64(0)))
        numbers = scores[line, None]
        ahead = (Int32((numbers.iterator + lo).toint()) & 15) // (self.dtype.width // 8)
        return start, Row(numbers, lo, n, ahead, (n + ahead + self.width - 1) // self.width)

    @cute.jit
    def load(self, row: Row, first, behind, target: cute.Tensor, barrier: cute.Pointer):
        """Start loading the row's vectors [first, behind) to `target`. One thread's work.

        The row's first and last vector, where they hold numbers of others, are copied one by one, with NaN for those.
        """
        cute.arch.fence_proxy("async.shared", space="cta")
        whole = first + 1 if first * self.width < row.ahead else first
        whole_end = behind - 1 if behind * self.width > row.ahead + row.n else behind
        size = cutlass.max(whole_end - whole, 0) * VECTOR_BYTES
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        if size > 0:
            bulk_load(
                target.iterator + (whole - first) * self.width,
                row.numbers.iterator + (row.lo + whole * self.width - row.ahead),
                size,
                barrier,
            )
        if whole > first and behind > first:
            self.load_one_by_one(row, first, target, Int32(0))
        if whole_end < behind and (behind - first > 1 or whole == first):
            self.load_one_by_one(row, behind - 1, target, behind - 1 - first)
        cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def load_one_by_one(self, row: Row, vector, target: cute.Tensor, at):
        for j in cutlass.range(self.width, unroll=1):
            column = vector * self.width - row.ahead + j
            x = self.dtype(float("nan"))
            if column >= 0 and column < row.n:
                x = row.numbers[row.lo + column]
            target[at * self.width + j] = x

    @cute.jit
    def stream(
        self,
        row: Row,
        part,
        k,
        entries: Entries,
        tiles: cute.Tensor,
        memory: SelectMemory,
        barriers: cute.Pointer,
        outcome: cute.Tensor,
        tid,
    ):
        """List the row's candidates; those of a cluster in its first CTA. -> how many. NaN follows up to a vector."""
        lane, warp = tid % 32, tid // 32
        each = (row.vectors + self.cluster - 1) // self.cluster
        first = cutlass.min(part * each, row.vectors)
        behind = cutlass.min(first + each, row.vectors)
        number_of_tiles = (behind - first + self.tile_vectors - 1) // self.tile_vectors
        count, total, theirs, threshold = Int32(0), Int32(0), Int32(0), LOWEST
        state, reading = start(), Int32(0)
        while reading < READINGS:
            sampled = row.n > self.capacity and reading < READINGS - 1
            # The sample's few loads first: they would wait long behind those of the tiles.
            if sampled:
                self.load_sample(row, entries.numbers, tid)
            if tid == 0:
                stage = state.stage
                for t in cutlass.range(cutlass.min(number_of_tiles, self.stages), unroll=1):
                    self.load_tile(row, first, behind, t, stage, tiles, barriers)
                    stage = 0 if stage == self.stages - 1 else stage + 1
            threshold, count = LOWEST, Int32(0)
            if sampled:
                threshold = self.find_threshold(row.n, k, reading, entries.numbers, memory, tid)
            for t in cutlass.range(number_of_tiles, unroll=1):
                tile = tiles[None, state.stage]
                cute.arch.mbarrier_wait(barriers + state.stage, state.phase)
                begin = first + t * self.tile_vectors
                length = cutlass.min(behind - begin, self.tile_vectors)
                own = self.cfg.tile // self.width
                place = tid * self.cfg.tile
                column = begin * self.width + place - row.ahead
                mask = mask_from(tile, length, Int32(own), threshold, tid)
                here = Int32(cute.arch.popc(mask))
                before, found = before_and_all(here, memory.sums[t & 1, None], lane, warp)
                last = self.stages - 1
                if tid == 0 and t > 0 and t + last < number_of_tiles:
                    # All are done with the tile before: the ring's next takes its place.
                    before_it = last if state.stage == 0 else state.stage - 1
                    self.load_tile(row, first, behind, t + last, before_it, tiles, barriers)
                while count + found > self.capacity:
                    # Fill the list, cut it, and go on with what is left of the tile.
                    fits = cutlass.max(cutlass.min(self.capacity - count - before, here), 0)
                    these = lowest_bits(mask, fits)
                    self.append(tile, place, column, these, count + before, entries)
                    threshold = self.cut(entries, Int32(self.capacity), k, memory, tid)
                    count = k
                    mask = (mask ^ these) & mask_from(tile, length, Int32(own), threshold, tid)
                    here = Int32(cute.arch.popc(mask))
                    before, found = before_and_all(here, memory.sums[t & 1, None], lane, warp)
                    cute.arch.sync_threads()
                self.append(tile, place, column, mask, count + before, entries)
                count += found
                state = state.advance(self.stages)
            total, theirs = count, Int32(0)
            if const_expr(self.cluster > 1):
                total, theirs = self.all_counts(outcome, reading, count, tid)
            reading += 1
            if total >= k or threshold == LOWEST:
                reading = Int32(READINGS)
            cute.arch.sync_threads()
        if const_expr(self.cluster > 1):
            count = self.gather(entries, count, total, theirs, k, memory, outcome, part, tid)
        self.fill_vector(entries, count, tid)
        return count

    @cute.jit
    def fill_vector(self, entries: Entries, count, tid):
        """NaN behind a list, up to a whole vector. Begins and ends with a barrier."""
        cute.arch.sync_threads()
        if tid < (0 - count) & (self.width - 1):
            entries.numbers[count + tid] = self.dtype(float("nan"))
        cute.arch.sync_threads()

    @cute.jit
    def load_tile(self, row: Row, first, behind, t, stage, tiles: cute.Tensor, barriers: cute.Pointer):
        begin = first + t * self.tile_vectors
        end = cutlass.min(begin + self.tile_vectors, behind)
        self.load(row, begin, end, tiles[None, stage], barriers + stage)

    @cute.jit
    def load_sample(self, row: Row, target: cute.Tensor, tid):
        """Copy pairs of vectors from all over the row to `target`. They arrive some time later."""
        whole = 1 if row.ahead > 0 else 0
        pairs = ((row.n + row.ahead) // self.width - whole) // 2
        samples = self.samples(row.n)
        step = pairs // (samples // 2)
        for i in cutlass.range(tid, samples, self.threads, unroll=1):
            pair = i // 2
            jitter = Int32(cute.arch.mul_hi(Uint32(pair) * Uint32(2654435761), Uint32(step)))
            column = (whole + 2 * (pair * step + jitter) + i % 2) * self.width - row.ahead
            async_load_16(target.iterator + i * self.width, row.numbers.iterator + (row.lo + column))

    @cute.jit
    def samples(self, n) -> Int32:
        """How many vectors are sampled of n numbers."""
        return cutlass.min(n // 16, SAMPLE) // (2 * self.width) * 2

    @cute.jit
    def find_threshold(self, n, k, reading, numbers: cute.Tensor, memory: SelectMemory, tid) -> Float32:
        """A number that is likely to be a little below the row's k-th largest, and far below it in a second reading. A
        few more candidates than needed do not hurt."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        samples = self.samples(n)
        each = Float32(samples * self.width) * cute.arch.rcp_approx(Float32(n))
        expected = Float32(k) * each
        rank = Int32(expected + MARGIN * cute.math.sqrt(expected, fastmath=True)) + 2 << reading
        slack = cutlass.max(Int32(Float32(0.8 * self.capacity) * each) - rank, 0)
        return find_floor(numbers, samples, rank, slack, memory, tid, self.threads)[0]

    @cute.jit
    def append(self, tile: cute.Tensor, place, column, mask: Uint32, at, entries: Entries):
        """Copy the numbers place + j of the tile whose bit j is set to the list, from entry `at` on."""
        entry = at + Int32(cute.arch.popc(mask))
        while mask != 0:
            j = Int32(cute.arch.bfind(mask))
            mask ^= Uint32(1) << Uint32(j)
            entry -= 1
            entries.numbers[entry] = tile[place + j]
            entries.columns[entry] = column + j

    @cute.jit
    def cut(self, entries: Entries, count, k, memory: SelectMemory, tid) -> Float32:
        """Keep the k largest of the list, in order. -> what those that follow must reach.

        In place, a few entries a thread at a time: those kept never pass those read. Begins and ends with a barrier.
        """
        self.fill_vector(entries, count, tid)
        length = (count + self.width - 1) // self.width
        floor, equal, excess = find_floor(entries.numbers, length, k, Int32(0), memory, tid, self.threads)
        limit = equal if excess > 0 else self.capacity  # of those that equal the floor
        above = next_above(floor)
        kept, equals = Int32(0), Int32(0)
        x = cute.make_rmem_tensor((CUT,), Float32)
        column = cute.make_rmem_tensor((CUT,), Int32)
        for base in cutlass.range(0, count, CUT * self.threads, unroll=1):
            i = base + CUT * tid
            here = Int32(0)  # two counts in one scan
            for j in cutlass.range_constexpr(CUT):
                x[j] = NOTHING
                if i + j < count:
                    x[j], column[j] = Float32(entries.numbers[i + j]), entries.columns[i + j]
                here += Int32(1) if x[j] >= above else (Int32(1 << 16) if x[j] >= floor else Int32(0))
            turn = (base // (CUT * self.threads)) & 1
            before, total = before_and_all(here, memory.sums[turn, None], tid % 32, tid // 32)
            same = equals + (before >> 16)
            entry = kept + (before & 0xFFFF) + cutlass.min(same, limit) - cutlass.min(equals, limit)
            for j in cutlass.range_constexpr(CUT):
                larger = x[j] >= above
                if larger or (x[j] >= floor and same < limit):
                    entries.numbers[entry] = self.dtype(x[j])
                    entries.columns[entry] = column[j]
                    entry += 1
                if x[j] >= floor and not larger:
                    same += 1
            kept += (total & 0xFFFF) + cutlass.min(equals + (total >> 16), limit) - cutlass.min(equals, limit)
            equals += total >> 16
        cute.arch.sync_threads()
        return above

    @cute.jit
    def all_counts(self, outcome: cute.Tensor, slot, count, tid):
        """(entries of all the cluster's lists, those of CTA lane % cluster's). Each slot serves once."""
        if tid == 0:
            outcome[slot] = count
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        at = cute.arch.map_dsmem_ptr(outcome.iterator + slot, tid % self.cluster).toint()
        theirs = cute.arch.inline_ptx(
            "ld.shared::cluster.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[Int32(at)]
        )
        return cute.arch.warp_redux_sync(theirs if tid % 32 < self.cluster else Int32(0), "add"), theirs

    @cute.jit
    def gather(self, entries: Entries, count, total, theirs, k, memory: SelectMemory, outcome: cute.Tensor, part, tid):
        """Append the other CTAs' lists to the first one's, in their order. -> its entries. Ends with a barrier."""
        if total <= self.capacity:
            before = cute.arch.warp_redux_sync(theirs if tid % 32 < part else Int32(0), "add")
            if part > 0:
                self.copy_list(entries, count, before, tid)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            count = total
        else:
            # Too many: one CTA after the other, each list cut to k, of which two fit.
            if count > k:
                self.cut(entries, count, k, memory, tid)
                count = k
            theirs = self.all_counts(outcome, Int32(READINGS), count, tid)[1]
            listed = cute.arch.shuffle_sync(theirs, 0)
            for peer in cutlass.range(1, self.cluster, unroll=1):
                more = cute.arch.shuffle_sync(theirs, peer)
                if listed + more > self.capacity:
                    if part == 0:
                        self.cut(entries, listed, k, memory, tid)
                    listed = k
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
                if part == peer:
                    self.copy_list(entries, count, listed, tid)
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
                listed += more
            count = listed
        return count

    @cute.jit
    def copy_list(self, entries: Entries, count, at, tid):
        """Write this CTA's list into that of the cluster's first one, from entry `at` on."""
        number_at = cute.arch.map_dsmem_ptr(entries.numbers.iterator, 0).toint()
        column_at = cute.arch.map_dsmem_ptr(entries.columns.iterator, 0).toint()
        size = self.dtype.width // 8
        bits = cute.make_tensor(
            cute.recast_ptr(entries.numbers.iterator, dtype=Uint16 if size == 2 else Int32),
            cute.make_layout(self.capacity),
        )
        for i in cutlass.range(tid, count, self.threads, unroll=2):
            cute.arch.inline_ptx(
                f"st.shared::cluster.b{8 * size} [{{$r0}}], {{$r1}}; st.shared::cluster.b32 [{{$r2}}], {{$r3}};",
                read_only_args=[
                    Int32(number_at) + (at + i) * size,
                    bits[i],
                    Int32(column_at) + (at + i) * 4,
                    entries.columns[i],
                ],
            )

    @cute.jit
    def sort(self, row: Row, words: cute.Tensor, count, tid):
        """Put the columns words[:count] in the order of their numbers, the largest first, equal ones by column."""
        log = 32 - Int32(cute.arch.clz(Uint32(cutlass.max(count, 1) - 1)))
        size = 1 << log
        # Keys ascend where numbers descend; what fills up to a power of two comes last.
        for i in cutlass.range(tid, size, self.threads, unroll=2):
            key = Int32(2**31 - 1)
            if i < count:
                bits = Int32(bits_of(Float32(row.numbers[row.lo + words[i]]) + 0.0))
                key = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
            else:
                words[i] = Int32(2**31 - 1)
            words[size + i] = key
        for run in cutlass.range(1, log + 1, unroll=1):
            for step in cutlass.range(run, unroll=1):
                distance = 1 << (run - 1 - step)
                cute.arch.sync_threads()
                for i in cutlass.range(tid, size // 2, self.threads, unroll=1):
                    a = ((i & ~(distance - 1)) << 1) | (i & (distance - 1))
                    b = a | distance
                    key_a, key_b, column_a, column_b = words[size + a], words[size + b], words[a], words[b]
                    greater = key_a > key_b or (key_a == key_b and column_a > column_b)
                    if greater != ((a >> run) & 1 == 1):
                        words[size + a] = key_b
                        words[size + b] = key_a
                        words[a] = column_b
                        words[b] = column_a
        cute.arch.sync_threads()

    @cute.jit
    def to_slots(
        self,
        block_table: cute.Tensor,
        sequence,
        words: cute.Tensor,
        found,
        to_index,
        divisor: cute.FastDivmodDivisorV2,
        page_size,
        tid,
    ):
        """Turn the columns words[:found] into the sequence's cache slots, or -1. Each thread has its own."""
        last = block_table.shape[1] - 1
        known = sequence >= 0 and sequence < block_table.shape[0] and last >= 0
        if known:
            for i in cutlass.range(tid, found, self.threads, unroll=4):
                # A start far below 0 makes the sum wrap. No branch around the load, so that several are under way.
                index = words[i] + to_index
                page, offset = divmod(cutlass.max(index, 0), divisor)
                physical = block_table[sequence, cutlass.min(page, last)]
                slot = Int64(physical) * page_size + offset
                exists = index >= 0 and page <= last and physical >= 0 and slot < Int64(SLOT_LIMIT)
                words[i] = Int32(slot) if exists else Int32(-1)
        else:
            for i in cutlass.range(tid, found, self.threads, unroll=1):
                words[i] = Int32(-1)


@cached
def compile_topk_indices(dtype: str, cfg: TopkConfig):
    """-> f(scores [rows, cols] dtype, starts, lengths [rows], block_table [B, pages], row_to_seq [rows],
    indices [rows, k] int32, values [rows, k] fp32, page_size, options); rows, cols, k > 0 and cfg takes k. `options`
    says which of the tensors are given; the others may be of any size."""

    def fake(kind, shape, stride, align=4):
        return cute.runtime.make_fake_tensor(kind, shape, stride, assumed_align=align)

    element = cute_dtype(dtype)
    rows, k = cute.sym_int(), cute.sym_int()
    scores = fake(element, (rows, cute.sym_int()), (cute.sym_int64(), 1), element.width // 8)
    starts, lengths, row_to_seq = (fake(Int32, (cute.sym_int(),), (cute.sym_int64(),)) for _ in range(3))
    block_table = fake(Int32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1))
    indices = fake(Int32, (rows, k), (cute.sym_int64(), 1))
    values = fake(Float32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = TopkIndicesSm90(element, cfg)
    return compile_sm90(
        kernel, scores, starts, lengths, block_table, row_to_seq, indices, values, Int32(1), Int32(0), stream
    )


RESIDENT = (TopkConfig(256, 4096), TopkConfig(512, 8192))
STREAMING = (TopkConfig(256, 4096, 32, 2), TopkConfig(512, 8192, 16, 2))
# Few rows: eight, four, two CTAs a row, one.
CLUSTERS = (*(TopkConfig(512, 8192, 16, 3, c) for c in (8, 4, 2)), TopkConfig(1024, 8192, 8, 3))
CONFIGS = RESIDENT + STREAMING + CLUSTERS


def choose_config(rows: int, vectors: int, k: int, width: int, multiprocessors: int) -> TopkConfig:
    """For scores of `width` bits whose rows touch up to `vectors` vectors of 16 bytes, as measured."""
    if rows > multiprocessors:
        candidates = RESIDENT + STREAMING
    elif vectors <= 2048:
        candidates = RESIDENT[1:]
    else:
        candidates = tuple(c for c in CLUSTERS if c.cluster * rows <= multiprocessors)
        candidates = tuple(c for c in candidates if c.cluster == 1 or vectors >= 1024 * c.cluster)
    return next(c for c in candidates if c.takes(k) and (c.tile or vectors <= c.resident_vectors(width)))


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_topk_indices, (dtype, cfg)) for dtype in ("float32", "bfloat16") for cfg in CONFIGS]
