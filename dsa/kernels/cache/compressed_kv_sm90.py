"""DeepSeek-V4's compressor: turns blocks of m tokens into cache entries of d channels (softmax, norm, RoPE, rounding),
and writes new tokens to the state, which keeps the last tokens of each sequence for later calls. A token has two
projections, kv and gate. An entry is a weighted sum of kv over the entry's tokens. The weights are, per channel, a
softmax of Z = gate + ape over these tokens; ape is a bias per token of a block. With overlap, an entry is computed from
2 m tokens: those of a block and of the block before it.

Plan
- An entry's tokens are divided into parts of 4 or 8 consecutive tokens. A thread has four channels of a part. It issues
  the loads of both projections of all tokens of the part before it needs the first value, so a part costs one round
  trip to memory. Whether a token is new or in the state only decides the address and the dtype of the loads, and no
  branch waits for an earlier load.
- A thread reduces its parts, per channel, to a maximum of Z, a sum of exponentials and a weighted sum of kv. The parts
  of an entry are distributed over groups of threads. The groups exchange their results through shared memory, and the
  epilogue's threads merge them in a fixed order. So an entry's bits do not depend on which call of the kernel completes
  the entry.
- An entry of 8 tokens (m = 4) has two parts, one per block, in one CTA. The projections of an entry of 128 tokens are
  256 KiB in bf16, which a single SM reads too slowly. A cluster of 8 CTAs computes such an entry: each CTA has 64
  channels, which have one common scale, and eight groups of threads that process two parts each. The CTAs exchange only
  the norm's sums of squares.
- The first warps run the epilogue: norm, RoPE within a thread, and rounding to the cache's format. For the V4 layout,
  16 lanes compute the scale of 64 channels. For an index cache, a warp computes the Hadamard transform of 128 channels.
  The epilogue's operands are loaded together with the tokens. In a sequence's first work tile, the other warps write
  the new tokens to the state during the last entry's epilogue.
- A work tile is one entry. But the first work tile of a sequence is the first two entries that the call completes for
  this sequence, or fewer if it completes fewer. Only these two entries read tokens from the state. After that, the same
  CTA overwrites the state with the new tokens; in a cluster, each CTA overwrites its channels. A CTA finds the sequence
  of a work tile by a scan over all sequences. The grid has enough CTAs for all work tiles of disjoint sequences. If
  boundaries are wrong and sequences overlap, a CTA (or cluster) processes several work tiles (static persistent).
Shared memory: the WorkTileInfo, the number of work tiles, 2 x 8 sums of squares, and for each channel of the CTA the 3
results of each group of threads.
Constraints: m = 4 with overlap and d = 512 or 128, or m = 128 without overlap and d = 512. RoPE rotates 64 channels in
pairs of adjacent channels. Rows start at multiples of 16 bytes.
Roofline: bound by memory: both projections of each token are read once (with overlap, each of a token's two entries
reads half of the token's channels). A single new token is bound by latency: the launch, the loads of the sequence's
bounds and state slot, then the loads of the entry's tokens, and two barriers.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint32, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_contiguous, fake_rows, fake_stream, strides
from dsa.cute.indexer_page import find_slot, page_planes
from dsa.cute.quantize import hadamard, quantize, quantize_group, round_to
from dsa.cute.reductions import reduce_sum, warp_inclusive_scan
from dsa.cute.registers import converted, filled
from dsa.cute.sm90 import LOG2E, WARP, cluster_sync
from dsa.cute.work_tile import read_info, static_persistent_scheduler, write_info
from dsa.kernels.cache.kv_row import Fp8Row
from dsa.kernels.cache.limits import COMPRESSED_DTYPES, COMPRESSED_KINDS, FLOAT_DTYPES, ROPE_CHANNELS
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

CHANNELS = 4  # per thread
SQUARES = 8  # upper limit on the sums of squares per entry: one per warp, or in a cluster one per CTA
KEPT_AT_ONCE = 2  # vectors of each operand that a thread loads together and then stores to the state
MAX_POSITIONS = 2**31 - 512  # per sequence, so that positions up to two blocks past the last still fit an int32
MAX_WORK_TILES = 2**30  # of all sequences together; only overlapping sequences could have more


class WorkTileInfo(NamedTuple):
    """number: index of the work tile in the sequence, or -1 if the work tile does not exist. low: row of kv of the
    sequence's first new token. length: number of the sequence's new tokens. start: number of tokens before them.
    state_slot: the sequence's slot in the state."""

    number: Int32
    low: Int32
    length: Int32
    start: Int32
    state_slot: Int32


class WriteCompressedKvSm90:
    """dtype: dtype of the projections. dim: d. ratio: m. layout: layout of the cache: a float dtype, "v4" (d = 512) or
    "index" (d = 128)."""

    def __init__(self, dtype: type[cutlass.Numeric], dim: int, ratio: int, overlap: bool, layout: str):
        self.dim, self.ratio, self.overlap, self.layout = dim, ratio, overlap, layout
        self.tokens = 2 * ratio if overlap else ratio  # per entry
        self.slices, self.groups, self.part = (1, 2, ratio) if overlap else (8, 8, 8)
        self.width = dim // self.slices  # channels per CTA
        self.row_threads = self.width // CHANNELS
        self.threads = self.row_threads * self.groups
        # With 64 channels per CTA, half a warp is enough for the epilogue. The other half runs it too, because shuffles
        # need all lanes.
        self.epilogue_threads = max(self.row_threads, WARP)
        self.squares = self.slices if self.slices > 1 else self.row_threads // WARP
        self.row = Fp8Row("v4", CHANNELS)
        self.launch_options = {}
        if dim == 512:
            # With overlap, three CTAs per SM leave 80 registers per thread. For bf16 that is too few, because `read`
            # loads bf16 projections to additional registers.
            least = 2 if self.slices == 1 and dtype is not Float32 else 3
            self.launch_options = {"min_blocks_per_mp": least, "preferred_smem_carveout": 20}
        if self.slices > 1:
            self.launch_options["cluster"] = (self.slices, 1, 1)

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
            grid=((starts.shape[0] + kv.shape[0] // self.ratio) * self.slices, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            **self.launch_options,
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
        smem = cutlass.memory.SmemAllocator()
        found = smem.allocate_tensor(Int32, cute.make_layout((len(WorkTileInfo._fields), 1)))
        totals = smem.allocate_tensor(Int32, cute.make_layout(1))
        squares = smem.allocate_tensor(Float32, cute.make_layout((SQUARES, 2)))
        parts = smem.allocate_tensor(Float32, cute.make_layout((self.width, 3, self.groups)), 16)
        if const_expr(self.slices > 1):
            cute.arch.cluster_arrive_relaxed()
        wait_for_prerequisite_grids()
        if const_expr(self.slices > 1):
            # From here on, the shared memory of the cluster's other CTAs may be written.
            cute.arch.cluster_wait()
        rank, buffer = scheduler.first % self.slices, Int32(0)
        index = scheduler.first // self.slices
        total = index + 1
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
                # Work tile 0 has entries 0 and 1 (counted from `start`), and work tile n > 0 has entry n + 1.
                begin, end = number + 1, cutlass.min(number + 2, count)
                if number == 0:
                    begin = Int32(0)
                for n in cutlass.range(begin, end, unroll=1):
                    self.entry(
                        *(kv, gate, ape, weight, cos, sin, cache, slots, state, squares, parts),
                        *(first + n, low, start, state_slot, page_size, divisor, state_rows, eps, rank, buffer, tid),
                    )
                    buffer = 1 - buffer
                if number == 0:
                    # All threads have read the state before the barriers of `entry`, so it may be overwritten. After an
                    # entry, only the warps without an epilogue write.
                    keeper = Int32(self.epilogue_threads if end > begin else 0)
                    self.keep(kv, gate, ape, state, low, start, length, state_slot, state_rows, rank, tid, keeper)
            index += scheduler.step // self.slices
            if index < total:
                cute.arch.sync_threads()

    @cute.jit
    def bounds(self, cu_seqlens: cute.Tensor, starts: cute.Tensor, sequence, tokens):
        """-> (a sequence's first new token, number of new tokens, number of tokens before the new tokens). With these
        numbers, later accesses stay inside the tensors, whatever the arguments contain. A sequence whose boundaries
        decrease or are out of range has no new tokens."""
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
        """Write the WorkTileInfo of work tile `index` to `found`. Write the number of work tiles of all sequences to
        `totals`. A sequence without a valid state slot has no work tiles. One warp calls this."""
        if lane == 0:
            found[0, 0] = Int32(-1)
        cute.arch.sync_warp()
        before = Int32(0)
        for chunk in cutlass.range(0, starts.shape[0], WARP, unroll=1):
            b = chunk + lane
            tiles, low, length, start, state_slot = [Int32(0) for _ in range(5)]
            if b < starts.shape[0]:
                # All four loads are issued before the first value is used.
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
        rank,
        buffer,
        tid,
    ):
        """Compute and store entry `number`, counted from the sequence's start. The new tokens begin at row `low` of kv
        and at position `start` of the sequence. buffer: 0 and 1 alternate from entry to entry of a CTA."""
        group, own = tid // self.row_threads, tid % self.row_threads
        at = rank * self.row_threads + own  # index of this thread's vector (CHANNELS channels) in the entry
        token = low + ((number + 1) * self.ratio - 1 - start)
        gain = cute.make_rmem_tensor((CHANNELS,), Float32)
        angle = cute.make_rmem_tensor((CHANNELS // 2, 2), Float32)
        slot = cute.make_rmem_tensor((2,), Int32)
        row_max, row_sum, acc = [filled((CHANNELS,), value) for value in (-3e38, 0.0, 0.0)]
        for chunk in cutlass.range(0, self.tokens, self.groups * self.part, unroll=1):
            k, z, bias = [filled((CHANNELS, self.part), value) for value in (0.0, -3e38, 0.0)]
            first = chunk + group * self.part
            self.read(kv, gate, ape, state, k, z, bias, first, number, low, start, state_slot, state_rows, at)
            if chunk == 0 and tid < self.epilogue_threads:
                self.ask(weight, cos, sin, slots, gain, angle, slot, token, kv.shape[0], at)
            for j in cutlass.range_constexpr(self.part):
                for i in cutlass.range_constexpr(CHANNELS):
                    z[i, j] = (z[i, j] + bias[i, j]) * LOG2E
            for i in cutlass.range_constexpr(CHANNELS):
                new_max = row_max[i]
                for j in cutlass.range_constexpr(self.part):
                    new_max = cute.arch.fmax(new_max, z[i, j])
                factor = exp2(row_max[i] - new_max)
                amount, value = row_sum[i] * factor, acc[i] * factor
                for j in cutlass.range_constexpr(self.part):
                    power = exp2(z[i, j] - new_max)
                    amount += power
                    value = cute.math.fma(power, k[i, j], value)
                row_max[i], row_sum[i], acc[i] = new_max, amount, value
        for n, mine in enumerate((row_max, row_sum, acc)):
            cute.autovec_copy(mine, cute.local_tile(parts[None, n, group], (CHANNELS,), (own,)))
        cute.arch.sync_threads()
        if tid < self.epilogue_threads:
            self.merge(parts, acc, own)
            self.share_square(acc, squares[None, buffer], rank, tid)
        # After this barrier the sums of squares are visible, and the next entry may overwrite `parts`. The next entry
        # writes its sums to the other buffer. The barriers of the next entry come before this buffer is used again.
        if const_expr(self.slices > 1):
            cluster_sync()
        else:
            cute.arch.sync_threads()
        if tid < self.epilogue_threads:
            square = Float32(0.0)
            for i in cutlass.range_constexpr(self.squares):
                square += squares[i, buffer]
            self.store(acc, square, gain, angle, slot, cache, slots, kv, page_size, divisor, eps, at, tid)

    @cute.jit
    def ask(self, weight, cos, sin, slots, gain, angle, slot, token, tokens, at):
        """Load the epilogue's operands: this thread's gain (from `weight`), and the angles and the slot of `token`, the
        entry's last token."""
        cute.autovec_copy(cute.local_tile(weight, (CHANNELS,), (at,)), gain)
        rotated = at - (self.dim - ROPE_CHANNELS) // CHANNELS
        if rotated >= 0:
            for n, numbers in enumerate((cos, sin)):
                source = cute.local_tile(numbers[token, None], (CHANNELS // 2,), (rotated,))
                cute.autovec_copy(source, angle[None, n])
        # The two words of an int64 slot, or an int32 slot twice.
        words = 2 if slots.shape[0] != tokens else 1
        slot[0], slot[1] = slots[words * token], slots[words * (token + 1) - 1]

    @cute.jit
    def read(self, kv, gate, ape, state, k, z, bias, first, number, low, start, state_slot, state_rows, at):
        """Load a part: the entry's tokens from `first` on. k gets kv. For new tokens, z gets gate and `bias` gets ape.
        For tokens in the state, z gets Z, their sum. For tokens before position 0, k and z keep their initial values,
        which have no weight in the softmax."""
        position, column = number * self.ratio + first, at
        if const_expr(self.overlap):
            # The first part is the previous block and uses the first half of a token's channels; the second is the
            # entry's own block and uses the second half.
            position -= self.ratio
            column = at + first // self.ratio * self.row_threads
        if position >= 0:
            new = [vector_of(x[low + (position - start), None], column) for x in (kv, gate)]
            stride = [Int64(x.stride[0]) * (x.element_type.width // 8) for x in (kv, gate)]
            old, kept = vector_of(state[state_slot, 0, 0, None], column), position % state_rows
            channels = kv.shape[1]
            rounded = [cute.make_rmem_tensor((CHANNELS, self.part), kv.element_type) for _ in range(2)]
            for j in cutlass.range_constexpr(self.part):
                is_new = position + j >= start
                for n, numbers in enumerate((k, z)):
                    before = old + Int64(kept) * (8 * channels) + n * 4 * channels
                    if const_expr(kv.element_type is Float32):
                        copy_vector(new[n] if is_new else before, numbers[None, j])
                    elif is_new:
                        copy_vector(new[n], rounded[n][None, j])
                    else:
                        copy_vector(before, numbers[None, j])
                    new[n] += stride[n]
                if is_new:
                    source = ape[(first + j) % self.ratio, None]
                    cute.autovec_copy(cute.local_tile(source, (CHANNELS,), (column,)), bias[None, j])
                kept += 1
                if kept == state.shape[1]:
                    kept = Int32(0)
            if const_expr(kv.element_type is not Float32):
                for j in cutlass.range_constexpr(self.part):
                    if position + j >= start:
                        for n, numbers in enumerate((k, z)):
                            numbers[None, j].store(rounded[n][None, j].load().to(Float32))

    @cute.jit
    def merge(self, parts, acc, own):
        """acc <- the entry's values for this thread's channels, before the norm: all groups' results in `parts`,
        merged."""
        found = cute.make_rmem_tensor((CHANNELS, 3, self.groups), Float32)
        for g in cutlass.range_constexpr(self.groups):
            for n in cutlass.range_constexpr(3):
                cute.autovec_copy(cute.local_tile(parts[None, n, g], (CHANNELS,), (own,)), found[None, n, g])
        for i in cutlass.range_constexpr(CHANNELS):
            row_max = found[i, 0, 0]
            for g in cutlass.range_constexpr(1, self.groups):
                row_max = cute.arch.fmax(row_max, found[i, 0, g])
            amount, value = Float32(0.0), Float32(0.0)
            for g in cutlass.range_constexpr(self.groups):
                factor = exp2(found[i, 0, g] - row_max)
                amount = cute.math.fma(found[i, 1, g], factor, amount)
                value = cute.math.fma(found[i, 2, g], factor, value)
            acc[i] = value * cute.arch.rcp_approx(amount)

    @cute.jit
    def share_square(self, v, squares, rank, tid):
        """Store this warp's sum of v^2, in a cluster to all CTAs."""
        square = Float32(0.0)
        for i in cutlass.range_constexpr(CHANNELS):
            square = cute.math.fma(v[i], v[i], square)
        square = reduce_sum(square, min(self.row_threads, WARP))
        if const_expr(self.slices > 1):
            if tid < self.slices:
                there = Int32(cute.arch.map_dsmem_ptr(squares.iterator + rank, tid).toint())
                cute.arch.inline_ptx("st.shared::cluster.f32 [{$r0}], {$r1};", read_only_args=[there, square])
        elif tid % WARP == 0:
            squares[tid // WARP] = square

    @cute.jit
    def store(self, v, square, gain, angle, slot, cache, slots, kv, page_size, divisor, eps, at, tid):
        """Finish this thread's channels v, and store them to the slot of the block's last token if the cache has this
        slot. square: the entry's sum of squares."""
        inverse = cute.math.rsqrt(square * Float32(1 / self.dim) + eps)
        for i in cutlass.range_constexpr(CHANNELS):
            v[i] = v[i] * inverse * gain[i]
        rotated = at - (self.dim - ROPE_CHANNELS) // CHANNELS
        if rotated >= 0:
            for i in cutlass.range_constexpr(CHANNELS // 2):
                a, b, c, s = v[2 * i], v[2 * i + 1], angle[i, 0], angle[i, 1]
                v[2 * i], v[2 * i + 1] = a * c - b * s, a * s + b * c
        round_to(v, kv.element_type)
        wanted = Int64(slot[0])
        if slots.shape[0] != kv.shape[0]:
            wanted = (Int64(slot[1]) << 32) | Int64(slot[0].bitcast(Uint32))
        exists, page, offset = find_slot(cache, wanted, cache.shape[1], divisor)
        exists = exists and tid < self.row_threads
        if const_expr(self.layout == "index"):
            hadamard(v, at, CHANNELS)
            round_to(v, kv.element_type)
            scale = quantize(v, CHANNELS, True)
            if exists:
                values, scales = page_planes(cache, page, page_size, self.dim, Float8E4M3FN)
                self.put(v, values[offset, None], at)
                if at == 0:
                    scales[offset] = scale
        elif const_expr(self.layout == "v4"):
            # Lanes with RoPE channels quantise, too, because shuffles need all lanes.
            step = converted(v, Float32)
            scale = quantize_group(step, 16, True)
            if exists:
                values, scales, rope = self.row.parts(cache, page, offset)
                if rotated < 0:
                    self.put(step, values, at)
                    if at % 16 == 0:
                        scales[at // 16] = Uint8(scale.bitcast(Uint32) >> 23)
                else:
                    self.put(v, rope, rotated)
                    if rotated == 0:
                        scales[7] = Uint8(0)
        else:
            if exists:
                self.put(v, cache[page, offset, None], at)

    @cute.jit
    def put(self, v: cute.Tensor, row: cute.Tensor, at):
        cute.autovec_copy(converted(v, row.element_type), cute.local_tile(row, (CHANNELS,), (at,)))

    @cute.jit
    def keep(self, kv, gate, ape, state, low, start, length, state_slot, state_rows, rank, tid, keeper):
        """Write kv and Z = gate + ape of a sequence's new tokens to the state: the last ones, if it has fewer rows. The
        threads from `keeper` on do this."""
        vectors = self.row_threads * (2 if self.overlap else 1)  # per token in this CTA
        first, step = cutlass.max(length - state.shape[1], 0), self.threads - keeper
        total = (length - first) * vectors
        if tid >= keeper:
            for begin in cutlass.range(tid - keeper, total, KEPT_AT_ONCE * step, unroll=1):
                numbers, weights = [cute.make_rmem_tensor((CHANNELS, KEPT_AT_ONCE), kv.element_type) for _ in range(2)]
                bias = cute.make_rmem_tensor((CHANNELS, KEPT_AT_ONCE), Float32)
                for u in cutlass.range_constexpr(KEPT_AT_ONCE):
                    i = cutlass.min(begin + u * step, total - 1)
                    row, at = first + i // vectors, rank * vectors + i % vectors
                    sources = kv[low + row, None], gate[low + row, None], ape[(start + row) % self.ratio, None]
                    for source, target in zip(sources, (numbers, weights, bias)):
                        cute.autovec_copy(cute.local_tile(source, (CHANNELS,), (at,)), target[None, u])
                for u in cutlass.range_constexpr(KEPT_AT_ONCE):
                    i = begin + u * step
                    if i < total:
                        row, at = first + i // vectors, rank * vectors + i % vectors
                        k, z = converted(numbers[None, u], Float32), converted(weights[None, u], Float32)
                        z.store(z.load() + bias[None, u].load())
                        for n, mine in enumerate((k, z)):
                            target = state[state_slot, (start + row) % state_rows, n, None]
                            cute.autovec_copy(mine, cute.local_tile(target, (CHANNELS,), (at,)))


@cute.jit
def vector_of(row: cute.Tensor, at):
    return Int64(cute.local_tile(row, (CHANNELS,), (at,)).iterator.toint())


@cute.jit
def copy_vector(address, target: cute.Tensor):
    kind = target.element_type
    pointer = cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=CHANNELS * kind.width // 8)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(CHANNELS)), target)


@cute.jit
def exp2(x: Float32) -> Float32:
    """Return 2^x, or 0 if the result is below 2^-126."""
    return cute.math.exp2(x, fastmath=True)


@cached
def compile_write_compressed_kv(dtype: str, dim: int, ratio: int, overlap: bool, layout: str):
    """-> f(kv, gate [T, c] dtype, ape [m, c] fp32, weight [d] fp32, cos, sin [T, 32] fp32, cache, slots, cu_seqlens [B
    + 1] int32, starts [B] int32, state [S, n, 2, c] fp32, state_slots [B] int32, page_size, eps); B > 0. d is `dim`, m
    is `ratio`, and c is 2 d with overlap, otherwise d. n is at least the number of tokens of an entry (2 m with
    overlap, otherwise m). slots is [T] int32, or [2 T] int32 that are the words of int64 slots.

    cache: [pages, P, d] of the dtype `layout`; for "v4", [pages, P, 576] bytes, with a page's scales after its rows;
    for "index", [pages, P, 132] bytes. Rows, pages and the state start at multiples of 16 bytes."""
    element, channels = cute_dtype(dtype), 2 * dim if overlap else dim
    tokens, sequences = cute.sym_int(), cute.sym_int()
    projections = [fake_rows(element, tokens, channels) for _ in range(2)]
    angles = [fake_rows(Float32, tokens, ROPE_CHANNELS // 2) for _ in range(2)]
    kind, width = (
        (cute_dtype(layout), dim) if layout in FLOAT_DTYPES else (Uint8, dim + 4 if layout == "index" else 576)
    )
    # A page of the index cache has all values first, then all scales. So the kernel does not use the rows of this
    # tensor, only the number of rows per page.
    page = strides(1, 128 // kind.width)
    row = (dim + 4,) if layout == "index" else strides(1, 128 // kind.width)
    return compile_sm90(
        WriteCompressedKvSm90(element, dim, ratio, overlap, layout),
        *projections,
        fake(Float32, (ratio, channels), (channels, 1)),
        fake_rows(Float32, dim),
        *angles,
        fake(kind, (cute.sym_int(), cute.sym_int(), width), (*page, *row, 1)),
        fake_contiguous(Int32, cute.sym_int()),
        fake_contiguous(Int32, cute.sym_int()),
        fake_contiguous(Int32, sequences),
        fake(Float32, (cute.sym_int(), cute.sym_int(), 2, channels), (*strides(1, 4), 2 * channels, channels, 1)),
        fake_contiguous(Int32, sequences),
        *(Int32(1), Float32(0.0)),
        fake_stream(),
    )


def shipped_variants() -> Variants:
    return [
        (compile_write_compressed_kv, (dtype, dim, ratio, overlap, layout))
        for dtype in COMPRESSED_DTYPES
        for dim, ratio, overlap in COMPRESSED_KINDS
        for layout in (*FLOAT_DTYPES, "v4" if dim == 512 else "index")
    ]
