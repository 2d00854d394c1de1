"""Exact, deterministic top-k selection of index scores.

out[r] = the columns of the k largest of scores[r, lo : hi], of equal ones the lowest, in ascending order

Plan
- A CTA a row, or a cluster of CTAs whose first one finishes. The row is read once, 8 numbers a thread and round, and
  those not below a threshold are appended, with their columns, to a list in shared memory.
- Threshold: a row that fits the list has none (-inf). Of a longer one a sample of every 16th number or less (jittered
  positions, at most CAPACITY) is taken first, and its (r + 3.5 sqrt r)-th largest, r the expected rank, leaves about
  1.3 k candidates.
- A list that would overflow is cut to its k largest, and what follows must be above the least of these: rows are read
  in order, so equal numbers that follow have higher columns. A threshold that left less than k was too high: the row
  is read again without one. So any input gives the exact result; an unlucky one takes longer.
- Cluster: each CTA reads its part of the row with the same sample's threshold; the first appends the others' lists
  to its own through distributed shared memory.
- The selection itself (radix_select.py), then a bitmap of the selected columns in the place of the list's values, a
  scan over its words, and the columns in order through shared memory to the result, turned into cache slots there.
- By value: the selected are sorted by (value, column) instead, bitonically.
Shared memory: CAPACITY x 8 bytes of list, 8 KiB of digit counts.
Constraints: k <= CAPACITY - 8 THREADS and k <= CAPACITY / 2; columns of a row next to each other, rows anywhere.
Roofline: memory, one read of the scores; about 10 instructions a score, and about 700 a thread and row besides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.block_scan import before_and_all, warp_scan
from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.dtypes import cute_dtype
from dsa.cute.radix_select import SelectMemory, bits_of, is_selected, select_largest

ITEMS = 8  # numbers a thread reads in a round
SAMPLE, STREAM, MERGE, DONE = range(4)
LOWEST, NOTHING = Float32(float("-inf")), Float32(float("nan"))
# What the caller gives, as bits of `options`.
STARTS, LENGTHS, PAGED, ROW_TO_SEQ, BY_VALUE, VALUES = (1 << i for i in range(6))
MAX_K = 4096


@dataclass(frozen=True)
class TopkConfig:
    """threads of a CTA, entries of its list, CTAs a row."""

    threads: int
    capacity: int
    cluster: int

    def __post_init__(self):
        assert self.capacity % self.threads == 0 and self.capacity > self.threads * ITEMS

    @property
    def most(self) -> int:
        """The largest k."""
        return min(self.capacity // 2, self.capacity - self.threads * ITEMS)


def choose_config(rows: int, cols: int, k: int, multiprocessors: int) -> TopkConfig:
    if rows > multiprocessors:
        return TopkConfig(256, 4096, 1) if k <= 2048 else TopkConfig(512, 8192, 1)
    cluster = 1
    while cluster < 8 and 2 * cluster * rows <= multiprocessors and cols > 8192 * cluster:
        cluster *= 2
    return TopkConfig(1024, 12288, cluster)


class TopkIndicesSm90:
    def __init__(self, dtype: type[cutlass.Numeric], cfg: TopkConfig):
        self.dtype = dtype
        self.threads, self.capacity, self.cluster = cfg.threads, cfg.capacity, cfg.cluster
        self.warps = cfg.threads // 32
        self.vector = 128 // dtype.width  # numbers in a load of 16 bytes
        self.round = cfg.threads * ITEMS
        self.window = 32 * cfg.threads << (cfg.capacity // cfg.threads).bit_length() - 1  # columns in a bitmap

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
            min_blocks_per_mp=1024 // self.threads,
            preferred_smem_carveout=100,
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
        row, part = block // self.cluster, block % self.cluster
        lane, warp = tid % 32, tid // 32
        k = indices.shape[1]

        smem = SmemAllocator()
        keys = smem.allocate_tensor(Int32, cute.make_layout(self.capacity), 16)
        columns = smem.allocate_tensor(Int32, cute.make_layout(self.capacity), 16)
        memory = SelectMemory.allocate(smem)
        reserved = smem.allocate_tensor(Int32, cute.make_layout(4), 16)
        outcome = smem.allocate_tensor(Int32, cute.make_layout(4), 16)
        for i in cutlass.range(tid, cute.size(memory.counts), self.threads, unroll=1):
            memory.counts[i] = Int32(0)
        if tid < 64:
            memory.sums[tid // 32, tid % 32] = Int32(0)
        if tid < 4:
            memory.found[tid] = Int32(0)
            reserved[tid] = Int32(0)
        cute.arch.sync_threads()

        # The row's numbers lie in [lo, hi); column c of the list is number lo + c.
        start, lo, hi = self.bounds(starts, lengths, row, scores.shape[1], options)
        n = hi - lo
        numbers = scores[row, None]
        # The loads of 16 bytes begin at an aligned address, up to `ahead` numbers before lo.
        address = Int32((numbers.iterator + lo).toint())
        ahead = (address & 15) // (self.dtype.width // 8)
        vectors = (n + ahead + self.vector - 1) // self.vector
        each = (vectors + self.cluster - 1) // self.cluster
        first = cutlass.min(part * each, vectors) * self.vector
        behind = cutlass.min((part + 1) * each, vectors) * self.vector
        stop = cutlass.min(n, behind - ahead)

        # Sample: position i * step + jitter.
        samples = cutlass.min(n // 16, self.capacity)
        step = Int32(1)
        if samples > 0:
            step = n // samples
        expected = Float32(k) * Float32(samples) * cute.arch.rcp_approx(Float32(cutlass.max(n, 1)))
        sample_rank = Int32(expected + 3.5 * cute.math.sqrt(expected, fastmath=True)) + 2

        threshold = LOWEST
        count, turn = Int32(0), Int32(0)
        phase, position, end = Int32(STREAM), first, behind
        if n > self.capacity:
            phase, position, end = Int32(SAMPLE), Int32(0), samples
        peer_count = Int32(0)
        top, bound, last = Int32(0), Uint32(0), Int32(0)

        value = cute.make_rmem_tensor((ITEMS,), Float32)
        while phase < DONE:
            full = False
            while position < end and not full:
                # Number j of this thread is column at + j // vector * apart + j % vector of the row.
                at, apart = position + tid * self.vector - ahead, self.threads * self.vector
                peer = Int32(0)
                if phase == STREAM:
                    self.read_row(numbers, lo, stop, at, value)
                elif phase == SAMPLE:
                    self.read_sample(numbers, lo, position + tid, samples, step, value)
                else:
                    if const_expr(self.cluster > 1):
                        # Or entry j of a peer's list. Each list is read by its share of the warps; the share of this
                        # CTA's own list has nothing to do.
                        peer = warp // (self.warps // self.cluster)
                        at = position + (warp % (self.warps // self.cluster)) * 32 * ITEMS + lane * self.vector
                        apart = 32 * self.vector
                        self.read_peer(keys, peer, peer_count, at, value)
                count, full = self.append(
                    value, at, apart, peer, threshold, count, turn, keys, columns, reserved, tid, lane
                )
                turn = 0 if turn == 2 else turn + 1
                if not full:
                    position += self.round // self.cluster if phase == MERGE else self.round
            cute.arch.sync_threads()

            # The row is read, and this CTA has what it can of it.
            if phase == STREAM and not full:
                found = count
                if const_expr(self.cluster > 1):
                    found, peer_count, end = self.exchange(outcome, count, lane, warp)
                if found < k and threshold > LOWEST:
                    # The sample misled: read the row again without a threshold.
                    threshold = LOWEST
                    count = Int32(0)
                    position, end = first, behind
                else:
                    phase = Int32(DONE)
                    if const_expr(self.cluster > 1):
                        position = Int32(0)
                        if part == 0:
                            phase = Int32(MERGE)
            elif phase == MERGE and not full:
                phase = Int32(DONE)

            if full or phase == SAMPLE or (phase == DONE and part == 0):
                need, slack = k, Int32(0)
                if phase == SAMPLE:
                    need, slack = sample_rank, sample_rank // 8
                top, bound, last = select_largest(
                    keys, columns, count, need, slack, memory, tid, self.threads
                )
                # The least of the selected, or less.
                least = bits_of(Int32(Uint32(top) - bound))
                if phase == SAMPLE:
                    if count > need:
                        threshold = self.as_float(least)
                    count = Int32(0)
                    phase, position, end = Int32(STREAM), first, behind
                    cute.arch.sync_threads()
                elif full:
                    count = self.cut(keys, columns, count, top, bound, last, reserved, tid, lane)
                    # In a row what follows has higher columns, and must be larger; in a peer's list, anything.
                    threshold = self.as_float(least)
                    if phase == STREAM:
                        threshold = self.as_float(bits_of(Int32(Uint32(top) - bound) + 1))

        if const_expr(self.cluster > 1):
            # The first CTA has read the others' lists.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if part == 0:
            if options & BY_VALUE:
                self.sort(keys, columns, count, top, bound, last, reserved, k, tid, lane)
            else:
                self.order(keys, columns, count, top, bound, last, n, memory, tid, lane, warp)
            found = cutlass.min(count, k)
            sequence = row
            if options & ROW_TO_SEQ:
                sequence = row_to_seq[row]
            for i in cutlass.range(tid, k, self.threads, unroll=4):
                index = Int32(-1)
                number = LOWEST
                if i < found:
                    at = lo + columns[i]
                    index = at - start
                    if options & VALUES:
                        number = Float32(numbers[at])
                    if options & PAGED:
                        index = self.slot(block_table, sequence, index, divisor, page_size)
                        if index < 0:
                            number = LOWEST
                indices[row, i] = index
                if options & VALUES:
                    values[row, i] = number

    @cute.jit
    def bounds(self, starts: cute.Tensor, lengths: cute.Tensor, row: Int32, cols: Int32, options: Int32):
        """(the row's start, its first column, the one behind its last), the latter two within the matrix."""
        start = Int32(0)
        if options & STARTS:
            start = starts[row]
        end = Int64(cols)
        if options & LENGTHS:
            end = cutlass.min(end, Int64(start) + lengths[row])
        lo = cutlass.min(cutlass.max(start, 0), cols)
        return start, lo, Int32(cutlass.max(end, Int64(lo)))

    @cute.jit
    def as_float(self, bits: Int32) -> Float32:
        return cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
        )

    @cute.jit
    def as_bits(self, x: Float32) -> Int32:
        return cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]
        )

    @cute.jit
    def read_row(self, numbers: cute.Tensor, lo, stop, at, value: cute.Tensor):
        """This thread's numbers of a round below column `stop` of the row, the first at column `at`."""
        for v in cutlass.range_constexpr(ITEMS // self.vector):
            here = at + v * self.threads * self.vector
            part = cute.make_rmem_tensor((self.vector,), Float32)
            part.fill(NOTHING)
            if here >= 0 and here + self.vector <= stop:
                raw = cute.make_rmem_tensor((self.vector,), self.dtype)
                source = cute.make_tensor((numbers.iterator + (lo + here)).align(16), cute.make_layout(self.vector))
                cute.autovec_copy(source, raw)
                part.store(raw.load().to(Float32))
            elif here < stop:
                for j in cutlass.range_constexpr(self.vector):
                    if here + j >= 0 and here + j < stop:
                        part[j] = Float32(numbers[lo + here + j])
            for j in cutlass.range_constexpr(self.vector):
                value[v * self.vector + j] = part[j]

    @cute.jit
    def read_sample(self, numbers: cute.Tensor, lo, at, samples, step, value: cute.Tensor):
        """Samples at, at + threads, ..."""
        for j in cutlass.range_constexpr(ITEMS):
            i = at + j * self.threads
            value[j] = NOTHING
            if i < samples:
                jitter = cute.arch.mul_hi(Uint32(i) * Uint32(2654435761), Uint32(step))
                value[j] = Float32(numbers[lo + i * step + Int32(jitter)])

    @cute.jit
    def remote(self, tensor: cute.Tensor, peer, i) -> Int32:
        """tensor[i] of another CTA of the cluster."""
        at = cute.arch.map_dsmem_ptr(tensor.iterator + i, peer).toint()
        return cute.arch.inline_ptx(
            "ld.shared::cluster.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[Uint32(at)]
        )

    @cute.jit
    def read_peer(self, keys: cute.Tensor, peer, peer_count, at, value: cute.Tensor):
        for j in cutlass.range_constexpr(ITEMS):
            i = at + j // self.vector * 32 * self.vector + j % self.vector
            value[j] = NOTHING
            if i < peer_count:
                value[j] = self.as_float(self.remote(keys, peer, i))

    @cute.jit
    def exchange(self, outcome: cute.Tensor, count, lane, warp):
        """(entries of all lists, of the list that this warp merges, the most of any)."""
        if lane == 0 and warp == 0:
            outcome[0] = count
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        peer = lane % self.cluster
        theirs = self.remote(outcome, peer, 0)
        # Nobody may count again before all have read.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        total = cute.arch.warp_redux_sync(theirs if lane < self.cluster else Int32(0), "add")
        merged = warp // (self.warps // self.cluster)
        longest = cute.arch.warp_redux_sync(theirs if peer > 0 else Int32(0), "max")
        peer_count = cute.arch.shuffle_sync(theirs, merged)
        if merged == 0:
            peer_count = Int32(0)
        return total, peer_count, longest

    @cute.jit
    def append(
        self,
        value: cute.Tensor,
        at,
        apart,
        peer,
        threshold,
        count,
        turn,
        keys: cute.Tensor,
        columns: cute.Tensor,
        reserved: cute.Tensor,
        tid,
        lane,
    ):
        """Append what is not below the threshold, if all of it fits. -> (entries of the list, whether it did not fit).

        Three counters take turns, so that one barrier a round is enough: the one that is zeroed was read before the
        last barrier, and is counted with behind the next.
        """
        own = Int32(0)
        for j in cutlass.range_constexpr(ITEMS):
            if value[j] >= threshold:
                own += 1
        scanned = warp_scan(own, lane)
        base = Int32(0)
        if lane == 31:
            base = cute.arch.atomic_add(reserved.iterator + turn, scanned, scope="cta")
        entry = count + cute.arch.shuffle_sync(base, 31) + scanned - own
        cute.arch.sync_threads()
        total = count + reserved[turn]
        if tid == 0:
            free = 2 if turn == 0 else turn - 1
            reserved[free] = Int32(0)
        full = total > self.capacity
        if not full:
            count = total
            for j in cutlass.range_constexpr(ITEMS):
                if value[j] >= threshold:
                    column = at + j // self.vector * apart + j % self.vector
                    if const_expr(self.cluster > 1):
                        if peer > 0:
                            column = self.remote(columns, peer, column)
                    keys[entry] = self.as_bits(value[j])
                    columns[entry] = column
                    entry += 1
        return count, full

    @cute.jit
    def cut(
        self,
        keys: cute.Tensor,
        columns: cute.Tensor,
        count,
        top,
        bound,
        last,
        reserved: cute.Tensor,
        tid,
        lane,
    ):
        """Keep the selected entries only, their keys as bits again. -> how many there are.

        In place, `threads` entries at a time: those kept so far are never more than those read.
        """
        if tid == 0:
            reserved[3] = Int32(0)
        cute.arch.sync_threads()
        for base in cutlass.range(0, count, self.threads, unroll=1):
            key, column, keep = Int32(0), Int32(0), Int32(0)
            if base + tid < count:
                key, column = keys[base + tid], columns[base + tid]
                if is_selected(key, column, top, bound, last):
                    keep = Int32(1)
            scanned = warp_scan(keep, lane)
            at = Int32(0)
            if lane == 31:
                at = cute.arch.atomic_add(reserved.iterator + 3, scanned, scope="cta")
            at = cute.arch.shuffle_sync(at, 31) + scanned - keep
            cute.arch.sync_threads()
            if keep == 1:
                keys[at] = bits_of(key)
                columns[at] = column
        cute.arch.sync_threads()
        return reserved[3]

    @cute.jit
    def order(
        self,
        keys: cute.Tensor,
        columns: cute.Tensor,
        count,
        top,
        bound,
        last,
        n,
        memory: SelectMemory,
        tid,
        lane,
        warp,
    ):
        """Leave the selected columns in ascending order at the front of `columns`."""
        selected = cute.make_rmem_tensor((self.capacity // self.threads,), Int32)
        for j in cutlass.range_constexpr(self.capacity // self.threads):
            i = j * self.threads + tid
            selected[j] = Int32(-1)
            if i < count:
                c = columns[i]
                if is_selected(keys[i], c, top, bound, last):
                    selected[j] = c
        # A window of columns at a time has its bitmap in `keys`. A thread's words of it lie `threads` apart, so that
        # a warp's reads fall into different banks.
        done = Int32(0)
        for begin in cutlass.range(0, n, self.window, unroll=1):
            words = (cutlass.min(n - begin, self.window) + 31) // 32
            log = 32 - Int32(cute.arch.clz(Uint32((words - 1) // self.threads)))  # a thread has 2^log words
            cute.arch.sync_threads()
            for i in cutlass.range(tid, self.threads << log, self.threads, unroll=1):
                keys[i] = Int32(0)
            cute.arch.sync_threads()
            for j in cutlass.range_constexpr(self.capacity // self.threads):
                bit = selected[j] - begin
                if selected[j] >= 0 and bit >= 0 and bit < self.window:
                    word = bit >> 5
                    thread = word >> log
                    place = (word - (thread << log)) * self.threads + thread
                    cute.arch.atomic_or(keys.iterator + place, Int32(1) << (bit & 31), scope="cta")
            cute.arch.sync_threads()
            own = Int32(0)
            for i in cutlass.range(1 << log, unroll=1):
                own += cute.arch.popc(keys[i * self.threads + tid])
            before, total = before_and_all(own, memory.sums[0, None], lane, warp)
            at = done + before
            done += total
            for i in cutlass.range(1 << log, unroll=1):
                left = Uint32(keys[i * self.threads + tid])
                word_column = begin + (((tid << log) + i) << 5)
                while left != 0:
                    lowest = left & (~left + 1)
                    columns[at] = word_column + 31 - Int32(cute.arch.clz(lowest))
                    at += 1
                    left = left ^ lowest
        cute.arch.sync_threads()

    @cute.jit
    def sort(
        self,
        keys: cute.Tensor,
        columns: cute.Tensor,
        count,
        top,
        bound,
        last,
        reserved: cute.Tensor,
        k,
        tid,
        lane,
    ):
        """Leave the selected columns at the front of `columns`, the largest value first, of equal ones by column."""
        count = self.cut(keys, columns, count, top, bound, last, reserved, tid, lane)
        log = 32 - Int32(cute.arch.clz(Uint32(cutlass.max(count, 1) - 1)))
        for i in cutlass.range(count + tid, 1 << log, self.threads, unroll=1):
            columns[i] = Int32(2**31 - 1)
        # From the largest: ~ordered ascends, and behind all of them comes what fills up to a power of two.
        for i in cutlass.range(tid, 1 << log, self.threads, unroll=1):
            keys[i] = ~bits_of(keys[i]) if i < count else Int32(2**31 - 1)
        for size in cutlass.range(1, log + 1, unroll=1):
            for step in cutlass.range(size, unroll=1):
                distance = 1 << (size - 1 - step)
                cute.arch.sync_threads()
                for i in cutlass.range(tid, (1 << log) // 2, self.threads, unroll=1):
                    a = ((i & ~(distance - 1)) << 1) | (i & (distance - 1))
                    b = a | distance
                    upward = (a >> size) & 1
                    key_a, key_b, col_a, col_b = keys[a], keys[b], columns[a], columns[b]
                    greater = key_a > key_b or (key_a == key_b and col_a > col_b)
                    if greater != (upward == 1):
                        keys[a] = key_b
                        keys[b] = key_a
                        columns[a] = col_b
                        columns[b] = col_a
        cute.arch.sync_threads()

    @cute.jit
    def slot(self, block_table: cute.Tensor, sequence, index, divisor: cute.FastDivmodDivisorV2, page_size):
        """The cache slot of a sequence's index, or -1 if it has none."""
        slot = Int32(-1)
        page, offset = divmod(index, divisor)
        if sequence >= 0 and sequence < block_table.shape[0] and page < block_table.shape[1]:
            physical = block_table[sequence, page]
            if physical >= 0:
                slot = physical * page_size + offset
        return slot


@cached
def compile_topk_indices(dtype: str, cfg: TopkConfig):
    """-> f(scores [rows, cols] dtype, starts, lengths [rows], block_table [B, pages], row_to_seq [rows],
    indices [rows, k] int32, values [rows, k] fp32, page_size, options); rows, cols, k > 0, k <= cfg.most. `options`
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
    return compile_sm90(
        TopkIndicesSm90(element, cfg),
        scores,
        starts,
        lengths,
        block_table,
        row_to_seq,
        indices,
        values,
        Int32(1),
        Int32(0),
        stream,
    )


CONFIGS = (TopkConfig(256, 4096, 1), TopkConfig(512, 8192, 1), *(TopkConfig(1024, 12288, c) for c in (1, 2, 4, 8)))


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_topk_indices, (dtype, cfg)) for dtype in ("float32", "bfloat16") for cfg in CONFIGS]
