"""Search for the r-th largest of many numbers by counting digits. The numbers are a list in shared memory, or are in
the registers of a CTA's threads.

`find_floor` searches a list. The bits of an fp32 number are three digits: 11 bits (sign, exponent, 2 of the mantissa),
11 bits and 10 bits. The first pass counts the first digits of all numbers. A scan from the largest digit finds the
digit of the r-th largest number. The next pass counts the second digits of the numbers that have this first digit, and
so on. The digits found so far are a prefix. The search ends early if at most r + `slack` numbers have this prefix or
are larger; the caller accepts up to `slack` numbers too many. It ends at the latest after the third digit, because
numbers with three equal digits are equal. Two passes suffice for most lists, three for any list. bf16 numbers are
converted to fp32.

`RankMemory.find` searches registers. A register contains a number's order, an integer that sorts like the number
(`order_of`), or LOWEST if it is empty. The range from a lower bound to the largest order is divided into up to 2048
ranges of equal width. A scan from the largest range finds the range of the r-th largest number. The next pass divides
that range, and so on. The search ends when at most r + `slack` numbers are in this range or above it, when the range
has few numbers, or when the range is a single order. Orders have 32 bits, so three passes are enough for any input.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from dsa.cute.reductions import block_exclusive_scan
from dsa.cute.sm90 import WARP
from dsa.kernels.indexer.candidate_lists import BATCH

LOG_DIGITS = 11
BINS = 1 << LOG_DIGITS
LOWEST = -(2**31)  # order of NaN, below that of -inf
HIGHEST = 2**31 - 1
VECTOR_BYTES = 16
MINUS_INFINITY = 0xFF800000  # bits of the fp32 number -inf


@dataclass(frozen=True)
class SelectMemory:
    """Shared memory, int32. `clear` zeroes counts and sums before their first use.

    counts  [BINS + 4]: the digit counts. Element BINS counts numbers without a digit, and is not read
    sums    [2, 32]: memory of block scans. Two consecutive scans need no barrier between them if they use different
            rows
    found   [4]: the result of `find_digit`, which one thread passes to all
    """

    counts: cute.Tensor
    sums: cute.Tensor
    found: cute.Tensor

    @staticmethod
    def allocate(smem) -> "SelectMemory":
        return SelectMemory(
            smem.allocate_tensor(Int32, cute.make_layout(BINS + 4), 16),
            smem.allocate_tensor(Int32, cute.make_layout((2, 32), stride=(32, 1)), 16),
            smem.allocate_tensor(Int32, cute.make_layout(4), 16),
        )

    @cute.jit
    def clear(self, tid, threads: cutlass.Constexpr):
        zero = cute.make_rmem_tensor((4,), Int32)
        zero.fill(0)
        for i in cutlass.range(tid, BINS // 4, threads, unroll=2):
            cute.autovec_copy(zero, cute.local_tile(self.counts, (4,), (i,)))
        if tid < 64:
            self.sums[tid // WARP, tid % WARP] = Int32(0)


def vector_width(dtype: type[cutlass.Numeric]) -> int:
    return VECTOR_BYTES * 8 // dtype.width


@cute.jit
def bits_of(x: Float32) -> Uint32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[x])


@cute.jit
def from_bits(bits: Uint32) -> Float32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


@cute.jit
def order_of(x: Float32) -> Int32:
    """Return the order of x, an integer that sorts like x. Both zeros have the same order, and NaN has LOWEST."""
    bits = cute.arch.inline_ptx("add.f32 {$w0}, {$r0}, 0f00000000;", write_only_types=[Int32], read_only_args=[x])
    order = bits ^ ((bits >> 31) & HIGHEST)
    return order if x == x else Int32(LOWEST)


@cute.jit
def number_of(order: Int32) -> Float32:
    """Return the number that has this order."""
    bits = order ^ ((order >> 31) & HIGHEST)
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


@cute.jit
def _canonical(x: Float32) -> Uint32:
    """Return the bits of x, with -0.0 as 0.0 and any NaN as 0x7FFFFFFF: the addition of 0.0 converts both."""
    return cute.arch.inline_ptx("add.f32 {$w0}, {$r0}, 0f00000000;", write_only_types=[Uint32], read_only_args=[x])


@cute.jit
def _count(bits: Uint32, shift: Int32, first: Uint32, counts: cute.Pointer):
    """Count a number in `counts` (shared memory) by the digit (bits >> shift) - `first`. If the digit is outside [0,
    BINS), the number is counted in bin BINS, which is cheaper than a branch."""
    cute.arch.inline_ptx(
        "{{ .reg .b32 d; shr.u32 d, {$r0}, {$r1}; sub.u32 d, d, {$r2}; "
        f"min.u32 d, d, {BINS}; "
        "mad.lo.u32 d, d, 4, {$r3}; red.shared::cta.add.u32 [d], 1; }}",
        read_only_args=[bits, shift, first, Int32(counts.toint())],
    )


@cute.jit
def next_above(x: Float32) -> Float32:
    """Return the least number above x, which must not be -0.0. For x = infinity the result is NaN, and a comparison
    number >= NaN is always false."""
    bits = bits_of(x)
    return from_bits(bits - 1 if Int32(bits) < 0 else bits + 1)


@cute.jit
def load_vector(numbers: cute.Tensor, i) -> cute.Tensor:
    width = vector_width(numbers.element_type)
    raw = cute.make_rmem_tensor((width,), numbers.element_type)
    cute.autovec_copy(cute.local_tile(numbers, (width,), (i,)), raw)
    out = cute.make_rmem_tensor((width,), Float32)
    out.store(raw.load().to(Float32))
    return out


@cute.jit
def find_digit(
    rank: Int32,
    flip: Int32,
    memory: SelectMemory,
    tid,
    threads: cutlass.Constexpr,
    first_pass: cutlass.Constexpr,
):
    """-> (digit of the rank-th largest number, the number's rank within the digit, count of this digit, whether at
    least `rank` numbers were counted). If fewer were counted, the first three results mean nothing. The caller has
    counted the numbers' digits in `memory.counts`. Ranks begin with 1, the largest.

    The p-th digit from the largest, p = 0, 1, ..., is digit p ^ flip. first_pass: ignore the numbers with NaN's digit.
    Begins and ends with a barrier, and zeroes the digit counts.
    """
    own = BINS // threads
    first = tid * own
    width = min(own, 4)
    vectors = own // width
    at = (first ^ flip) // own * vectors
    # With 32 bytes per thread, every second group of four threads reads its upper half first, to avoid bank conflicts.
    turn = (tid >> 2) & 1 if vectors == 2 else 0
    mine = cute.make_rmem_tensor((width,), Int32)
    total = Int32(0)
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(vectors):
        cute.autovec_copy(cute.local_tile(memory.counts, (width,), (at + (i ^ turn),)), mine)
        for j in cutlass.range_constexpr(width):
            total += mine[j]
    if const_expr(first_pass):
        if tid == 0:  # position 0 has the digit of NaN (1023), and NaN is never selected
            total -= memory.counts[flip]
            memory.counts[flip] = Int32(0)
    before, all_counted = block_exclusive_scan(total, memory.sums[0, None], tid % WARP, tid // WARP)
    if before < rank and rank <= before + total:
        position = first
        for j in cutlass.range_constexpr(own - 1):
            up_to = before + memory.counts[(first + j) ^ flip]
            if position == first + j and up_to < rank:
                before = up_to
                position += 1
        memory.found[0] = position ^ flip
        memory.found[1] = rank - before
        memory.found[2] = memory.counts[position ^ flip]
    mine.fill(0)
    for i in cutlass.range_constexpr(vectors):
        cute.autovec_copy(mine, cute.local_tile(memory.counts, (width,), (at + (i ^ turn),)))
    cute.arch.sync_threads()
    return Uint32(memory.found[0]), memory.found[1], memory.found[2], all_counted >= rank


@cute.jit
def _least(prefix: Uint32, shift: Int32) -> Float32:
    """Return the least number whose upper 32 - shift bits are `prefix`, but at least -inf."""
    low = prefix << Uint32(shift)
    if Int32(low) < 0:
        low = cutlass.min(low + ((Uint32(1) << Uint32(shift)) - 1), Uint32(MINUS_INFINITY))
    return from_bits(low)


@cute.jit
def find_floor(
    numbers: cute.Tensor,
    vectors: Int32,
    rank: Int32,
    slack: Int32,
    memory: SelectMemory,
    tid,
    threads: cutlass.Constexpr,
):
    """-> (floor, equal, excess): `rank` + excess of the numbers are at least floor.

    excess is 0, or at most `slack` if that saves a pass. A larger excess means that more numbers than needed tie with
    (are equal to) the rank-th largest. Then floor is that number, and `equal` of the tied numbers are needed. But if
    fewer than `rank` numbers are not NaN, floor is -inf, excess is 0, and only these fewer numbers are at least floor.

    numbers  fp32 or bf16 in shared memory; a barrier must separate the writes from this call. NaN is never at least
             floor
    vectors  number of 16-byte vectors in `numbers`
    rank     at least 1, and at most the number of numbers in the vectors
    """
    width = vector_width(numbers.element_type)
    for i in cutlass.range(tid, vectors, threads, unroll=2):
        x = load_vector(numbers, i)
        for j in cutlass.range_constexpr(width):
            digit = Int32(_canonical(x[j]) >> 21)
            cute.arch.atomic_add(memory.counts.iterator + digit, Int32(1), scope="cta")
    # In descending order, the numbers have the digits 1023 to 0 (positive numbers), then 1024 to 2047 (negative
    # numbers).
    flip = Int32(1023) if tid * (BINS // threads) < 1024 else Int32(0)
    prefix, rank, inside, enough = find_digit(rank, flip, memory, tid, threads, True)
    shift = Int32(21)
    if not enough:  # fewer than `rank` numbers are not NaN: select all numbers from -inf on
        prefix, inside = Uint32(MINUS_INFINITY >> 21), rank
    while shift > 0 and inside - rank > slack:
        digits = cutlass.min(shift, 11)
        shift -= digits
        first = prefix << Uint32(digits)
        for i in cutlass.range(tid, vectors, threads, unroll=2):
            x = load_vector(numbers, i)
            for j in cutlass.range_constexpr(width):
                _count(_canonical(x[j]), shift, first, memory.counts.iterator)
        flip = (1 << digits) - 1
        if prefix >> Uint32(31 - shift - digits) != 0:  # negative numbers: digit 0 is the largest
            flip = Int32(0)
        digit, rank, inside, _ = find_digit(rank, flip, memory, tid, threads, False)
        prefix = first + digit
    return _least(prefix, shift), rank, inside - rank


@cute.jit
def mask_from(
    numbers: cute.Tensor, vectors: Int32, own: Int32, floor: Float32, tid, unroll: cutlass.Constexpr = 2
) -> Uint32:
    """Return this thread's mask. Bit j says whether number tid * own * width + j of the list is at least floor. Numbers
    past the first `vectors` vectors have the bit 0.

    own  vectors per thread, together at most 32 numbers. If it is a power of two, adjacent threads read their vectors
         in different orders, which avoids bank conflicts
    """
    width = vector_width(numbers.element_type)
    begin, end = tid * own, cutlass.max(vectors - 1, 0)
    turn = ((tid & 7) * own) >> 3 if (own & (own - 1)) == 0 else Int32(0)
    mask = Uint32(0)
    for i in cutlass.range(own, unroll=unroll):
        v = i ^ turn
        x = load_vector(numbers, cutlass.min(begin + v, end))
        part = Uint32(0)
        for j in cutlass.range_constexpr(width):
            if x[j] >= floor:
                part |= Uint32(1 << j)
        mask |= part << Uint32(v * width)
    # Clear the bits past the end, where the loop read the last vector again.
    exist = cutlass.min(vectors - begin, own) * width
    if exist <= 0:
        mask = Uint32(0)
    elif exist < 32:
        mask &= (Uint32(1) << Uint32(exist)) - 1
    return mask


@cute.jit
def lowest_bits(mask: Uint32, keep: Int32) -> Uint32:
    """Return the lowest `keep` of the set bits of the mask."""
    for _ in cutlass.range(Int32(cute.arch.popc(mask)) - keep, unroll=1):
        mask ^= Uint32(1) << Uint32(cute.arch.bfind(mask))
    return mask


class RankFound(NamedTuple):
    """A digit: the orders [low, low + (1 << shift)). `inside` numbers have an order in this range. The search looks for
    the `rank`-th largest of them."""

    low: Int32
    shift: Int32
    rank: Int32
    inside: Int32


@dataclass(frozen=True)
class RankMemory:
    """Shared memory. digits: its digit counts are zero before and after a search. largest [32]: each warp's largest
    order."""

    digits: SelectMemory
    largest: cute.Tensor

    @staticmethod
    def allocate(smem) -> "RankMemory":
        return RankMemory(SelectMemory.allocate(smem), smem.allocate_tensor(Int32, cute.make_layout(WARP), 16))

    @cute.jit
    def find(
        self,
        orders: cute.Tensor,
        count: Int32,
        low: Int32,
        rank: Int32,
        slack: Int32,
        few: cutlass.Constexpr,
        tid,
        threads: cutlass.Constexpr,
    ) -> RankFound:
        """Find a digit that contains the rank-th largest order (1: the largest) of all threads. If there are fewer than
        `rank` orders, the result's `low` is the argument `low`.

        The search ends at a digit in one of three cases: the digit and all higher digits contain at most `rank` +
        `slack` numbers; the digit contains at most `few` numbers; or the digit is a single order.

        orders  this thread's orders, LOWEST in empty registers
        count   number of orders in all threads, or the result of `from_warp` for it. Let b be the first register of a
                batch. If `count` <= b * `threads`, this warp's registers from b on must be empty
        low     at least the order of -inf, and at most that of +inf; orders below `low` are not counted
        rank    at least 1
        The caller may call `digits.clear` right before, without a barrier. Contains a barrier before the first use of
        `digits`, and ends with a barrier.
        """
        assert cute.size(orders) % BATCH == 0
        span, inside = self.span(orders, count, low, tid, threads), Int32(0)
        shift = cutlass.max(32 - LOG_DIGITS - Int32(cute.arch.clz(span)), 0)
        searching = Int32(1)
        while searching > 0:
            # Orders below `low` (LOWEST, and possibly others) must go to bin BINS. The unsigned subtraction wraps them
            # to more than `span`. The test compares digits of 2^shift orders, so an order must also be outside the last
            # digit. In the first pass no order is above the range. No order exceeds that of +inf, 2^31 - 2^23, so
            # wrapped orders are at least 2^23 past the end of the range, and a digit is at most 2^21 wide. In later
            # passes the range is one digit of the pass before, and consists of whole digits.
            last = span >> Uint32(shift)
            for base in cutlass.range_constexpr(0, cute.size(orders), BATCH):
                if base * threads < count:
                    for i in cutlass.range_constexpr(base, base + BATCH):
                        above = (Uint32(orders[i]) - Uint32(low)) >> Uint32(shift)
                        at = Int32(above) if above <= last else Int32(BINS)
                        cute.arch.inline_ptx(
                            "red.shared::cta.add.u32 [{$r0}], 1;",
                            read_only_args=[Int32(self.digits.counts.iterator.toint()) + 4 * at],
                        )
            digit, higher, here, enough = find_digit(rank, Int32(BINS - 1), self.digits, tid, threads, False)
            inside = rank
            if enough:
                low, rank, inside = low + (Int32(digit) << shift), higher, here
            if inside - rank <= slack or inside <= few or shift == 0:
                searching = Int32(0)
            else:
                span = (Uint32(1) << Uint32(shift)) - 1
                shift = cutlass.max(shift - LOG_DIGITS, 0)
        return RankFound(low, shift, rank, inside)

    @cute.jit
    def span(self, orders: cute.Tensor, count: Int32, low: Int32, tid, threads: cutlass.Constexpr) -> Uint32:
        """Return the CTA's largest order minus `low`, or 0 if no order is above `low`. Contains a barrier."""
        largest = low
        for base in cutlass.range_constexpr(0, cute.size(orders), BATCH):
            if base * threads < count:
                for i in cutlass.range_constexpr(base, base + BATCH):
                    largest = cutlass.max(largest, orders[i])
        largest = cute.arch.warp_redux_sync(largest, "max")
        lane = tid % WARP
        if lane == 0:
            self.largest[tid // WARP] = largest
        cute.arch.sync_threads()
        largest = self.largest[cutlass.min(lane, threads // WARP - 1)]
        return Uint32(cute.arch.warp_redux_sync(largest, "max")) - Uint32(low)
