"""DeepSeek-V4's compressor: blocks of tokens to entries, softmax, norm, rope and rounding included, and its state.

Plan
- All threads do the same work; there are no warp roles. A thread has four channels of an entry. It reads eight of the
  entry's tokens at once, both projections, and folds them into a running maximum, sum and weighted sum (an online
  softmax). For entries of 128 tokens there are GROUPS groups of threads, which share the tokens, and whose partial
  results are merged in shared memory. Where a token's projections are, among the new ones or in the state, is the same
  for all threads.
- The epilogue is the first group's: norm by a sum over its warps, rope within a thread, and rounding as the cache has
  it. 16 lanes find the scale of 64 channels, and a warp makes the Hadamard transform.
- A work tile is an entry. The first work tile of a sequence is its first two entries, for those alone are made of
  tokens in the state, which this CTA then overwrites with the new ones. A CTA finds the sequence of its work tile by a
  scan over all sequences. There are as many CTAs as sequences in order can ask for; where boundaries are wrong and
  sequences overlap, a CTA takes several work tiles (static persistent).
Shared memory: the WorkTileInfo, the number of work tiles, 4 sums of squares, GROUPS x 3 x d numbers.
Constraints: m = 4 with overlap and d of 512 or 128, m = 128 without and d = 512; rope turns 64 channels in neighbouring
pairs; rows at multiples of 16 bytes.
Roofline: memory, two projections of a token read once (of overlapping blocks one half each).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint8, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.indexer_page import page_planes
from dsa.cute.quantize import hadamard, quantize, round_to
from dsa.cute.reductions import warp_inclusive_scan, warp_reduce_sum
from dsa.cute.sm90 import LOG2E, WARP
from dsa.cute.work_tile import read_info, static_persistent_scheduler, write_info
from dsa.kernels.cache.kv_row import Fp8Row, find_row, quantize_group
from dsa.kernels.cache.limits import COMPRESSED_DTYPES, COMPRESSED_KINDS, FLOAT_DTYPES, ROPE_CHANNELS

CHANNELS = 4  # of a thread
TOKENS_AT_ONCE = 8
MAX_POSITIONS = 2**31 - 512  # of a sequence: a block or two beyond them is still an int32
MAX_WORK_TILES = 2**30  # of all sequences, of which only overlapping ones could have more


class WorkTileInfo(NamedTuple):
    """number: the work tile's among its sequence's, -1 if there is none; low, length: the sequence's first new
    token and how many there are; start: tokens before them."""

    number: Int32
    low: Int32
    length: Int32
    start: Int32
    state_slot: Int32


class WriteCompressedKvSm90:
    """layout: a float dtype, "v4" or, for 128 channels, "index"."""

    def __init__(self, dim: int, ratio: int, overlap: bool, layout: str):
        self.dim, self.ratio, self.overlap, self.layout = dim, ratio, overlap, layout
        self.tokens = 2 * ratio if overlap else ratio  # of an entry
        self.row_threads = dim // CHANNELS
        self.groups = 4 if self.tokens > 4 * TOKENS_AT_ONCE else 1
        self.threads = self.row_threads * self.groups
        self.row = Fp8Row("v4", CHANNELS)
        # With 512 channels and four tokens a thread has to keep to 96 registers: then five CTAs fit on a multiprocessor
        # and not four, which is 7% faster. CTAs of one warp lose by such a bound, and have none.
        bounded = dim == 512 and self.groups == 1
        self.launch_bounds = {"min_blocks_per_mp": 5, "preferred_smem_carveout": 20} if bounded else {}

    @cute.jit
    def __call__(
        self,
        kv: cute.Tensor,
        gate: cute.Tensor,
        ape: cute.Tensor,
        weight: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        cache: cute.Tensor,
        slots: cute.Tensor,
        cu_seqlens: cute.Tensor,
        starts: cute.Tensor,
        state: cute.Tensor,
        state_slots: cute.Tensor,
        page_size: Int32,
        eps: Float32,
        stream,
    ):
        divisor, rows = (cute.fast_divmod_create_divisor_v2(n) for n in (page_size, state.shape[1]))
        self.kernel(
            *(kv, gate, ape, weight, cos, sin, cache, slots, cu_seqlens, starts, state, state_slots),
            *(page_size, divisor, rows, eps),
        ).launch(
            grid=(starts.shape[0] + kv.shape[0] // self.ratio, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            **self.launch_bounds,
        )

    @cute.kernel
    def kernel(
        self,
        kv: cute.Tensor,
        gate: cute.Tensor,
        ape: cute.Tensor,
        weight: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        cache: cute.Tensor,
        slots: cute.Tensor,
        cu_seqlens: cute.Tensor,
        starts: cute.Tensor,
        state: cute.Tensor,
        state_slots: cute.Tensor,
        page_size: Int32,
        divisor: cute.FastDivmodDivisorV2,
        state_rows: cute.FastDivmodDivisorV2,
        eps: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        scheduler = static_persistent_scheduler()

        @cute.struct
        class Storage:
            work_tile: cute.struct.MemRange[Int32, len(WorkTileInfo._fields)]
            total: cute.struct.MemRange[Int32, 1]
            squares: cute.struct.MemRange[Float32, 4]
            parts: cute.struct.Align[cute.struct.MemRange[Float32, self.groups * 3 * self.dim], 16]

        storage = SmemAllocator().allocate(Storage)
        found = storage.work_tile.get_tensor(cute.make_layout((len(WorkTileInfo._fields), 1)))
        totals = storage.total.get_tensor(cute.make_layout(1))
        squares = storage.squares.get_tensor(cute.make_layout(4))
        parts = storage.parts.get_tensor(cute.make_layout((self.dim, 3, self.groups)))
        wait_for_prerequisite_grids()
        index, total = scheduler.first, scheduler.first + 1
        while index < total:
            if tid < WARP:
                self.find_work_tile(
                    found, totals, cu_seqlens, starts, state_slots, kv.shape[0], state.shape[0], index, tid
                )
            cute.arch.sync_threads()
            number, low, length, start, state_slot = read_info(WorkTileInfo, found, 0)
            total = totals[0]
            if number >= 0:
                first, count = start // self.ratio, (start + length) // self.ratio - start // self.ratio
                # The first work tile is the first two entries.
                begin, end = number + 1, cutlass.min(number + 2, count)
                if number == 0:
                    begin = Int32(0)
                for n in cutlass.range(begin, end, unroll=1):
                    self.entry(
                        *(kv, gate, ape, weight, cos, sin, cache, slots, state, squares, parts),
                        *(first + n, low, start, state_slot, page_size, divisor, state_rows, eps, tid),
                    )
                if number == 0:
                    # All have read what is overwritten now.
                    cute.arch.sync_threads()
                    self.keep(kv, gate, ape, state, low, start, length, state_slot, state_rows, tid)
            index += scheduler.step
            if index < total:
                # All have read the WorkTileInfo, which is written anew now.
                cute.arch.sync_threads()

    @cute.jit
    def bounds(self, cu_seqlens: cute.Tensor, starts: cute.Tensor, sequence, tokens):
        """(first new token, how many, tokens before) of a sequence; inside the tensors, whatever the arguments say. One
        whose boundaries decrease or are outside has no new tokens, so that it takes none of the others'."""
        low, high, start = cu_seqlens[sequence], cu_seqlens[sequence + 1], starts[sequence]
        length = Int32(0) if low < 0 or low > high or high > tokens else high - low
        return low, length, cutlass.max(cutlass.min(start, MAX_POSITIONS - tokens), 0)

    @cute.jit
    def find_work_tile(
        self,
        found: cute.Tensor,
        totals: cute.Tensor,
        cu_seqlens: cute.Tensor,
        starts: cute.Tensor,
        state_slots: cute.Tensor,
        tokens,
        slot_count,
        index,
        lane,
    ):
        """Write the WorkTileInfo of work tile `index` of all to `found`, with a number of -1 if there are fewer, and
        how many there are to `totals`. Sequences without a state slot are left out. A warp's work."""
        if lane == 0:
            found[0, 0] = Int32(-1)  # stays if no lane finds it
        cute.arch.sync_warp()
        before = Int32(0)
        for chunk in cutlass.range(0, starts.shape[0], WARP, unroll=1):
            b = chunk + lane
            tiles, low, length, start, state_slot = [Int32(0) for _ in range(5)]
            if b < starts.shape[0]:
                # All four numbers are asked for before any of them is waited for.
                state_slot = state_slots[b]
                low, length, start = self.bounds(cu_seqlens, starts, b, tokens)
                if state_slot >= 0 and state_slot < slot_count:
                    tiles = cutlass.max((start + length) // self.ratio - start // self.ratio - 1, 1)
            total = warp_inclusive_scan(tiles, lane)
            own = index - before - (total - tiles)
            if own >= 0 and own < tiles:
                write_info(found, 0, WorkTileInfo(own, low, length, start, state_slot))
            before = cutlass.min(before + cute.arch.shuffle_sync(total, WARP - 1), MAX_WORK_TILES)
        if lane == 0:
            totals[0] = before

    @cute.jit
    def entry(
        self,
        kv: cute.Tensor,
        gate: cute.Tensor,
        ape: cute.Tensor,
        weight: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        cache: cute.Tensor,
        slots: cute.Tensor,
        state: cute.Tensor,
        squares: cute.Tensor,
        parts: cute.Tensor,
        number,
        low,
        start,
        state_slot,
        page_size,
        divisor,
        state_rows,
        eps,
        tid,
    ):
        """Entry `number` of a sequence whose new tokens are those from row `low` and position `start` on."""
        group, own = tid // self.row_threads, tid % self.row_threads
        row_max, row_sum, acc = [cute.make_rmem_tensor((CHANNELS,), Float32) for _ in range(3)]
        row_max.fill(-3e38)
        row_sum.fill(0.0)
        acc.fill(0.0)
        position = number * self.ratio
        if const_expr(self.overlap):
            position -= self.ratio
        for chunk in cutlass.range(group * TOKENS_AT_ONCE, self.tokens, self.groups * TOKENS_AT_ONCE, unroll=1):
            k, z = [cute.make_rmem_tensor((CHANNELS, TOKENS_AT_ONCE), Float32) for _ in range(2)]
            for j in cutlass.range_constexpr(TOKENS_AT_ONCE):
                self.read(
                    *(kv, gate, ape, state, k, z, j, chunk + j, position + chunk + j),
                    *(low, start, state_slot, state_rows, own),
                )
            for i in cutlass.range_constexpr(CHANNELS):
                new_max = row_max[i]
                for j in cutlass.range_constexpr(TOKENS_AT_ONCE):
                    new_max = cute.arch.fmax(new_max, z[i, j])
                factor = cute.math.exp2(row_max[i] - new_max)
                amount, value = row_sum[i] * factor, acc[i] * factor
                for j in cutlass.range_constexpr(TOKENS_AT_ONCE):
                    power = cute.math.exp2(z[i, j] - new_max)
                    amount += power
                    value = cute.math.fma(power, k[i, j], value)
                row_max[i], row_sum[i], acc[i] = new_max, amount, value
        if const_expr(self.groups > 1):
            # What an entry before has left there has been read by all.
            cute.arch.sync_threads()
            for n, mine in enumerate((row_max, row_sum, acc)):
                cute.autovec_copy(mine, cute.local_tile(parts[None, n, group], (CHANNELS,), (own,)))
            cute.arch.sync_threads()
            if group == 0:
                for g in cutlass.range_constexpr(1, self.groups):
                    for i in cutlass.range_constexpr(CHANNELS):
                        channel = own * CHANNELS + i
                        other = parts[channel, 0, g]
                        new_max = cute.arch.fmax(row_max[i], other)
                        mine, its = cute.math.exp2(row_max[i] - new_max), cute.math.exp2(other - new_max)
                        row_sum[i] = row_sum[i] * mine + parts[channel, 1, g] * its
                        acc[i] = acc[i] * mine + parts[channel, 2, g] * its
                        row_max[i] = new_max
        square = Float32(0.0)
        for i in cutlass.range_constexpr(CHANNELS):
            acc[i] = acc[i] / row_sum[i]
            square += acc[i] * acc[i]
        square = warp_reduce_sum(square)
        if const_expr(self.row_threads > WARP):
            cute.arch.sync_threads()
            if tid < self.row_threads and tid % WARP == 0:
                squares[tid // WARP] = square
            cute.arch.sync_threads()
            square = squares[0] + squares[1] + squares[2] + squares[3]
        token = low + ((number + 1) * self.ratio - 1 - start)
        if group == 0:
            self.store(acc, square, weight, cos, sin, cache, slots, token, kv, page_size, divisor, eps, own)

    @cute.jit
    def read(
        self,
        kv: cute.Tensor,
        gate: cute.Tensor,
        ape: cute.Tensor,
        state: cute.Tensor,
        k: cute.Tensor,
        z: cute.Tensor,
        j: cutlass.Constexpr,
        token,
        position,
        low,
        start,
        state_slot,
        state_rows,
        own,
    ):
        """KV and Z * log2(e) of an entry's token number `token`, at `position` of the sequence, to column j; one before
        the sequence's first has no weight."""
        at = own
        if const_expr(self.overlap):
            if token >= self.ratio:
                at = own + self.row_threads
        for i in cutlass.range_constexpr(CHANNELS):
            k[i, j], z[i, j] = Float32(0.0), Float32(-3e38)
        if position >= start:
            row = low + (position - start)
            numbers, weights = [cute.make_rmem_tensor((CHANNELS,), kv.element_type) for _ in range(2)]
            bias = cute.make_rmem_tensor((CHANNELS,), Float32)
            cute.autovec_copy(cute.local_tile(kv[row, None], (CHANNELS,), (at,)), numbers)
            cute.autovec_copy(cute.local_tile(gate[row, None], (CHANNELS,), (at,)), weights)
            cute.autovec_copy(cute.local_tile(ape[position % self.ratio, None], (CHANNELS,), (at,)), bias)
            for i in cutlass.range_constexpr(CHANNELS):
                k[i, j], z[i, j] = Float32(numbers[i]), (Float32(weights[i]) + bias[i]) * LOG2E
        elif position >= 0:
            both = [cute.make_rmem_tensor((CHANNELS,), Float32) for _ in range(2)]
            for n in cutlass.range_constexpr(2):
                source = state[state_slot, position % state_rows, n, None]
                cute.autovec_copy(cute.local_tile(source, (CHANNELS,), (at,)), both[n])
            for i in cutlass.range_constexpr(CHANNELS):
                k[i, j], z[i, j] = both[0][i], both[1][i] * LOG2E

    @cute.jit
    def store(self, v, square, weight, cos, sin, cache, slots, token, kv, page_size, divisor, eps, own):
        """Norm, rope and rounding of the row of which a thread has v; to the slot of the token that ends the block."""
        inverse = cute.math.rsqrt(square * Float32(1 / self.dim) + eps)
        gain = cute.make_rmem_tensor((CHANNELS,), Float32)
        cute.autovec_copy(cute.local_tile(weight, (CHANNELS,), (own,)), gain)
        for i in cutlass.range_constexpr(CHANNELS):
            v[i] = v[i] * inverse * gain[i]
        turned = own - (self.dim - ROPE_CHANNELS) // CHANNELS
        if turned >= 0:
            c, s = [cute.make_rmem_tensor((CHANNELS // 2,), Float32) for _ in range(2)]
            cute.autovec_copy(cute.local_tile(cos[token, None], (CHANNELS // 2,), (turned,)), c)
            cute.autovec_copy(cute.local_tile(sin[token, None], (CHANNELS // 2,), (turned,)), s)
            for i in cutlass.range_constexpr(CHANNELS // 2):
                a, b = v[2 * i], v[2 * i + 1]
                v[2 * i], v[2 * i + 1] = a * c[i] - b * s[i], a * s[i] + b * c[i]
        round_to(v, kv.element_type)
        exists, page, offset = find_row(cache, slots, token, kv.shape[0], divisor)
        if const_expr(self.layout == "index"):
            hadamard(v, own, CHANNELS)
            round_to(v, kv.element_type)
            scale = quantize(v, CHANNELS, True)
            if exists:
                values, scales = page_planes(cache, page, page_size, self.dim, Float8E4M3FN)
                self.put(v, values[offset, None], own)
                if own == 0:
                    scales[offset] = scale
        elif const_expr(self.layout == "v4"):
            # The rope's lanes quantise, too, so that all take part in the shuffles; what comes of it is not stored.
            step = cute.make_rmem_tensor((CHANNELS,), Float32)
            step.store(v.load())
            scale = quantize_group(step, 16, True)
            if exists:
                values, scales, rope = self.row.parts(cache, page, offset)
                if turned < 0:
                    self.put(step, values, own)
                    if own % 16 == 0:
                        scales[own // 16] = Uint8(scale.bitcast(Uint32) >> 23)
                else:
                    self.put(v, rope, turned)
                    if turned == 0:
                        scales[7] = Uint8(0)
        else:
            if exists:
                self.put(v, cache[page, offset, None], own)

    @cute.jit
    def put(self, v: cute.Tensor, row: cute.Tensor, at):
        """v as the row's numbers, from CHANNELS * at on."""
        out = cute.make_rmem_tensor((CHANNELS,), row.element_type)
        out.store(v.load().to(row.element_type))
        cute.autovec_copy(out, cute.local_tile(row, (CHANNELS,), (at,)))

    @cute.jit
    def keep(self, kv, gate, ape, state, low, start, length, state_slot, state_rows, tid):
        """The new tokens' projections to the state, the last ones if they are more than it has rows."""
        channels = kv.shape[1]
        first = cutlass.max(length - state.shape[1], 0)
        for i in cutlass.range(tid, (length - first) * (channels // CHANNELS), self.threads, unroll=1):
            row, at = first + i // (channels // CHANNELS), i % (channels // CHANNELS)
            position = start + row
            numbers, weights = [cute.make_rmem_tensor((CHANNELS,), kv.element_type) for _ in range(2)]
            bias = cute.make_rmem_tensor((CHANNELS,), Float32)
            cute.autovec_copy(cute.local_tile(kv[low + row, None], (CHANNELS,), (at,)), numbers)
            cute.autovec_copy(cute.local_tile(gate[low + row, None], (CHANNELS,), (at,)), weights)
            cute.autovec_copy(cute.local_tile(ape[position % self.ratio, None], (CHANNELS,), (at,)), bias)
            k, z = [cute.make_rmem_tensor((CHANNELS,), Float32) for _ in range(2)]
            k.store(numbers.load().to(Float32))
            z.store(weights.load().to(Float32) + bias.load())
            for n, mine in enumerate((k, z)):
                target = state[state_slot, position % state_rows, n, None]
                cute.autovec_copy(mine, cute.local_tile(target, (CHANNELS,), (at,)))


@cached
def compile_write_compressed_kv(dtype: str, dim: int, ratio: int, overlap: bool, layout: str):
    """-> f(kv, gate [T, c] dtype, ape [m, c], weight [d], cos, sin [T, 32] fp32, cache, slots [T] int32 or the words of
    int64 [2 T], cu_seqlens [B + 1], starts [B] int32, state [S, n, 2, c] fp32 with n at least the tokens of an entry,
    state_slots [B] int32, page_size, eps); B > 0.

    cache: [pages, P, d] of the dtype `layout`; "v4", [pages, P, 576] bytes, scales behind a page's rows; "index",
    [pages, P, 132]. Rows, pages and the state start at multiples of 16 bytes."""
    element, channels = cute_dtype(dtype), 2 * dim if overlap else dim
    tokens, sequences = cute.sym_int(), cute.sym_int()
    aligned = 128 // element.width
    projections = [fake(element, (tokens, channels), (*strides(1, aligned), 1)) for _ in range(2)]
    angles = [fake(Float32, (tokens, ROPE_CHANNELS // 2), (*strides(1, 4), 1)) for _ in range(2)]
    kind, width = (
        (cute_dtype(layout), dim) if layout in FLOAT_DTYPES else (Uint8, dim + 4 if layout == "index" else 576)
    )
    # Index pages are values and then scales: their rows only count.
    page = strides(1, 128 // kind.width)
    row = (dim + 4,) if layout == "index" else strides(1, 128 // kind.width)
    return compile_sm90(
        WriteCompressedKvSm90(dim, ratio, overlap, layout),
        *projections,
        fake(Float32, (ratio, channels), (channels, 1)),
        fake(Float32, (dim,), (1,)),
        *angles,
        fake(kind, (cute.sym_int(), cute.sym_int(), width), (*page, *row, 1)),
        fake(Int32, (cute.sym_int(),), (1,), 4),
        fake(Int32, (cute.sym_int(),), (1,), 4),
        fake(Int32, (sequences,), (1,), 4),
        fake(Float32, (cute.sym_int(), cute.sym_int(), 2, channels), (*strides(1, 4), 2 * channels, channels, 1)),
        fake(Int32, (sequences,), (1,), 4),
        *(Int32(1), Float32(0.0)),
        fake_stream(),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_write_compressed_kv, (dtype, dim, ratio, overlap, layout))
        for dtype in COMPRESSED_DTYPES
        for dim, ratio, overlap in COMPRESSED_KINDS
        for layout in (*FLOAT_DTYPES, "v4" if dim == 512 else "index")
    ]
