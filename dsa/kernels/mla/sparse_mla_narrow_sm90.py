"""Sparse MLA for narrow keys: 16-bit keys of `dim` channels, of which the first `dim_v` are the value (A.X-K2-Light:
160 and 128).

o[h] = sum_j softmax_j(scale * q[h] . k[j]) k[j, :dim_v] over the keys j that a query selects

Plan
- Work tile: HEADS heads of a query. A CTA computes one work tile. Its warps divide the query's keys in tiles of KEYS
  keys: warp w computes tiles w, w + WARPS, and so on, for all heads, and keeps its own maxima, sums and O.
- A warp loads its own keys: lane i reads the index of the tile's key i, and all lanes copy the keys' rows to the warp's
  ring by cp.async, 16 bytes each. While a tile is computed, the copies of the warp's next tile are in flight. No warp
  waits for another warp in the mainloop.
- Products: mma.sync m16n8k16 with fp32 accumulators. M is heads, in two blocks of 16 that share the loads of a key
  tile; N is keys for S = Q K^T and value channels for O = P V. P stays in registers: accumulators of S are operand A of
  P V.
- Epilogue: the warps write maxima and sums, and then O, to shared memory, and each thread adds the warps' O of its
  channels in the order of the warps. So a result depends only on the query and the number of warps.
Shared memory: Q, and per warp STAGES stages of KEYS keys. Rows are padded by 16 bytes, so the eight rows of an ldmatrix
matrix are in different banks. O of the warps reuses the rings. Maxima and sums: 8 bytes per warp and head.
Registers: O takes HEADS * dim_v / 32 per thread, S HEADS, and masks and pointers about 60.
Constraints: dim_v = 128, dim a multiple of 32 up to 192; rows of q and keys aligned to 16 bytes.
Roofline: decoding reads each selected key once, 2 * dim bytes. Prefill: with 160 and 128 channels, a key tile takes 144
mma and 56 ldmatrix of 512 bytes. At 128 bytes per cycle and SM the loads take as long as the mma.
Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.copies import gather_16
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_contiguous, fake_stream, strides
from dsa.cute.registers import filled
from dsa.cute.shared_memory import load_16, load_matrices, load_matrices_transposed, pack
from dsa.cute.sm90 import LN2, LOG2E, SHARED_BYTES, WARP, warp_and_lane
from dsa.kernels.mla.limits import DTYPES, NARROW_DIMS, NARROW_WARPS
from dsa.kernels.mla.topk_gather import Selection
from dsa.runtime.compile_cache import cached, compile_sm90

HEADS, KEYS, STAGES = 32, 32, 2
M_BLOCKS = HEADS // 16
VECTOR = 16  # bytes of a copy
PAD = 16  # bytes after each row in shared memory


class NarrowSparseMlaSm90:
    """Compiled, this is f(q [B, s_q, h, dim], cache [pages, P, dim], indices [B * s_q, K], counts [n], counted,
    sink [m], has_sink, out [B, s_q, h, dim_v], lse [B, h, s_q] fp32, max_logits [B, s_q, h] fp32 or None,
    scale * log2(e)).

    With counted > 0, n is B and counts has the numbers of valid indices; otherwise counts is not read. With
    has_sink > 0, m is h; otherwise sink, fp32, is not read. B, s_q, h, pages and P are above 0.
    warps: number of warps per CTA. More warps compute a query faster; fewer let two CTAs share an SM. The grid's x
    dimension is the queries, because its y dimension is limited to 65535.
    """

    def __init__(self, dtype: type[cutlass.Numeric], dim: int, dim_v: int, warps: int):
        self.dtype, self.dim, self.dim_v, self.warps = dtype, dim, dim_v, warps
        self.pitch = 2 * dim + PAD  # bytes per row
        self.chunks = 2 * dim // VECTOR
        self.stage_bytes = KEYS * self.pitch
        # A row of O in shared memory has 8 floats of padding. A warp stores 8 floats to each of four consecutive rows
        # at a time, and with the padding all are in different banks.
        self.sum_pitch = dim_v + 8
        self.ring_bytes = max(STAGES * self.stage_bytes, HEADS * self.sum_pitch * 4)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        cache: cute.Tensor,
        indices: cute.Tensor,
        counts: cute.Tensor,
        counted: Int32,
        sink: cute.Tensor,
        has_sink: Int32,
        out: cute.Tensor,
        lse: cute.Tensor,
        max_logits: cute.Tensor | None,
        scale: Float32,
        stream,
    ):
        @cute.struct
        class Storage:
            statistics: cute.struct.Align[cute.struct.MemRange[Float32, 2 * self.warps * HEADS], 16]
            q: cute.struct.Align[cute.struct.MemRange[Uint8, HEADS * self.pitch], 128]
            rings: cute.struct.Align[cute.struct.MemRange[Uint8, self.warps * self.ring_bytes], 128]

        assert Storage.size_in_bytes() <= SHARED_BYTES
        self.storage = Storage
        page_size = cute.fast_divmod_create_divisor_v2(cache.shape[1])
        keys = Selection(cache, indices, counts, counted, page_size)
        group = cute.fast_divmod_create_divisor_v2(q.shape[1])
        self.kernel(q, keys, group, sink, has_sink, out, lse, max_logits, scale).launch(
            grid=(q.shape[0] * q.shape[1], cute.ceil_div(q.shape[2], HEADS), 1),
            block=(self.warps * WARP, 1, 1),
            min_blocks_per_mp=8 // self.warps,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        keys: Selection,
        group: cute.FastDivmodDivisorV2,
        sink: cute.Tensor,
        has_sink: Int32,
        out: cute.Tensor,
        lse: cute.Tensor,
        max_logits: cute.Tensor | None,
        scale: Float32,
    ):
        query, head_tile, _ = cute.arch.block_idx()
        warp, lane = warp_and_lane()
        storage = SmemAllocator().allocate(self.storage)
        q_at, ring = Int32(storage.q.data_ptr().toint()), Int32(storage.rings.data_ptr().toint())
        sequence, of_sequence = divmod(query, group)
        first_head = head_tile * HEADS
        wait_for_prerequisite_grids()
        self.load_q(q[sequence, of_sequence, None, None], first_head, q_at, warp, lane)
        count = keys.count(query, group)
        highest = filled((2 * M_BLOCKS,), -Float32.inf)
        total = filled((2 * M_BLOCKS,), 0.0)
        o = filled((4, self.dim_v // 8, M_BLOCKS), 0.0)
        self.mainloop(keys, query, count, q_at, ring + warp * self.ring_bytes, scale, highest, total, o, warp, lane)
        self.exchange(storage, highest, total, o, warp, lane)
        results = out[sequence, of_sequence, None, None], lse[sequence, None, of_sequence]
        maxima = None if const_expr(max_logits is None) else max_logits[sequence, of_sequence, None]
        self.store(storage, *results, maxima, sink, has_sink, first_head, warp, lane)

    @cute.jit
    def load_q(self, rows: cute.Tensor, first_head, q_at, warp, lane):
        """Copy rows `first_head` to `first_head` + HEADS - 1 of Q [h, dim] to shared memory. Missing rows are zeros."""
        for i in cutlass.range_constexpr(-(-HEADS * self.chunks // (WARP * self.warps))):
            at = i * (WARP * self.warps) + warp * WARP + lane
            row, chunk = at // self.chunks, at % self.chunks
            if row < HEADS:
                head = first_head + row
                source = Int64(rows[cutlass.min(head, rows.shape[0] - 1), None].iterator.toint())
                gather_16(q_at + row * self.pitch + chunk * VECTOR, source + chunk * VECTOR, head < rows.shape[0])
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    @cute.jit
    def load_keys(self, keys: Selection, query, count, tile, target, lane) -> Uint32:
        """Start the copies of a key tile to the stage at `target`. Return a mask with one bit per key: whether the key
        is valid. Rows of invalid keys are zeros."""
        place = tile * KEYS + lane
        index = Int32(-1)
        if place < count:
            index = keys.indices[query, place]
        page, offset = divmod(cutlass.max(index, 0), keys.page_size)
        valid = index >= 0 and page < keys.cache.shape[0]
        address = Int64(keys.cache.iterator.toint())
        if valid:
            address = Int64(keys.cache[page, offset, None].iterator.toint())
        mask = Uint32(cute.arch.vote_ballot_sync(valid))
        low, high = Int32(address & 0xFFFFFFFF), Int32(address >> 32)
        for i in cutlass.range_constexpr(self.chunks):
            at = i * KEYS + lane
            key, chunk = at // self.chunks, at % self.chunks
            own_low, own_high = cute.arch.shuffle_sync(low, key), cute.arch.shuffle_sync(high, key)
            source = (Int64(own_high) << 32) + Int64(Uint32(own_low)) + chunk * VECTOR
            gather_16(target + key * self.pitch + chunk * VECTOR, source, (mask >> Uint32(key)) & 1 != 0)
        return mask

    @cute.jit
    def mainloop(self, keys: Selection, query, count, q_at, ring, scale, highest, total, o, warp, lane):
        tiles = (count + KEYS - 1) // KEYS
        mask = Uint32(0)
        if warp < tiles:
            mask = self.load_keys(keys, query, count, warp, ring, lane)
        cute.arch.cp_async_commit_group()
        stage = Int32(0)
        for tile in cutlass.range(warp, tiles, self.warps, unroll=1):
            following = Uint32(0)
            if tile + self.warps < tiles:
                target = ring + (1 - stage) * self.stage_bytes
                following = self.load_keys(keys, query, count, tile + self.warps, target, lane)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(1)
            cute.arch.sync_warp()
            if mask != 0:
                self.add_tile(q_at, ring + stage * self.stage_bytes, mask, scale, highest, total, o, lane)
            cute.arch.sync_warp()
            mask = following
            stage = 1 - stage

    @cute.jit
    def add_tile(self, q_at, key_at, mask: Uint32, scale, highest, total, o, lane):
        """Add a tile's keys to a warp's maxima, sums and O. At least one key is valid."""
        s = filled((4, KEYS // 8, M_BLOCKS), 0.0)
        # Row and column of the 8 x 8 matrix row that this lane's address selects, for operand A and for operand B.
        row_a, column_a = lane % 16, lane // 16 * VECTOR
        row_b, column_b = lane // 16 * 8 + lane % 8, lane // 8 % 2 * VECTOR
        # Registers spill if this loop is unrolled completely.
        for step in cutlass.range(self.dim // 16, unroll=5):
            a = [load_matrices(q_at + (16 * m + row_a) * self.pitch + 32 * step + column_a) for m in range(M_BLOCKS)]
            for n in cutlass.range_constexpr(KEYS // 16):
                b = load_matrices(key_at + (16 * n + row_b) * self.pitch + 32 * step + column_b)
                for m in cutlass.range_constexpr(M_BLOCKS):
                    for half in cutlass.range_constexpr(2):
                        multiply_add(s[None, 2 * n + half, m], a[m], b[2 * half : 2 * half + 2], self.dtype)
        if mask != 0xFFFFFFFF:
            for n in cutlass.range_constexpr(KEYS // 8):
                for i in cutlass.range_constexpr(2):
                    if (mask >> Uint32(8 * n + lane % 4 * 2 + i)) & 1 == 0:
                        for m in cutlass.range_constexpr(M_BLOCKS):
                            s[i, n, m], s[2 + i, n, m] = -Float32.inf, -Float32.inf
        p = cute.make_rmem_tensor((2, KEYS // 8, M_BLOCKS), Uint32)
        for m in cutlass.range_constexpr(M_BLOCKS):
            for half in cutlass.range_constexpr(2):
                self.softmax(s, p, half, m, scale, highest, total, o)
        row_v, column_v = lane % 16, lane // 16 * VECTOR
        for step in cutlass.range_constexpr(KEYS // 16):
            for n in cutlass.range_constexpr(self.dim_v // 16):
                b = load_matrices_transposed(key_at + (16 * step + row_v) * self.pitch + 32 * n + column_v)
                for m in cutlass.range_constexpr(M_BLOCKS):
                    a = [p[0, 2 * step, m], p[1, 2 * step, m], p[0, 2 * step + 1, m], p[1, 2 * step + 1, m]]
                    for half in cutlass.range_constexpr(2):
                        multiply_add(o[None, 2 * n + half, m], a, b[2 * half : 2 * half + 2], self.dtype)

    @cute.jit
    def softmax(self, s, p, half: cutlass.Constexpr, m: cutlass.Constexpr, scale, highest, total, o):
        """Compute P of a row of S from the logits: p[half, n, m] has the two columns of key block n. Rescale the row of
        O and the sum if the row's maximum rises."""
        row = 2 * m + half
        most = highest[row]
        for n in cutlass.range_constexpr(KEYS // 8):
            for i in cutlass.range_constexpr(2):
                most = cute.arch.fmax(most, s[2 * half + i, n, m] * scale)
        for log in cutlass.range_constexpr(2):
            most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=1 << log))
        factor = cute.math.exp2(highest[row] - most, fastmath=True)
        highest[row] = most
        own = total[row] * factor
        for n in cutlass.range_constexpr(KEYS // 8):
            values = []
            for i in cutlass.range_constexpr(2):
                x = cute.math.exp2(s[2 * half + i, n, m] * scale - most, fastmath=True)
                own += x
                values.append(x)
            p[half, n, m] = pack(*values, self.dtype)
        total[row] = own
        for n in cutlass.range_constexpr(self.dim_v // 8):
            for i in cutlass.range_constexpr(2):
                o[2 * half + i, n, m] = o[2 * half + i, n, m] * factor

    @cute.jit
    def exchange(self, storage, highest, total, o, warp, lane):
        """Write this warp's maxima, sums and O to shared memory. O [HEADS, dim_v] fp32 goes to the warp's ring."""
        statistics = storage.statistics.get_tensor(cute.make_layout((2, HEADS, self.warps)))
        for row in cutlass.range_constexpr(2 * M_BLOCKS):
            own = total[row]
            for log in cutlass.range_constexpr(2):
                own += cute.arch.shuffle_sync_bfly(own, offset=1 << log)
            if lane % 4 == 0:
                statistics[0, 8 * row + lane // 4, warp] = highest[row]
                statistics[1, 8 * row + lane // 4, warp] = own
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        place = self.sums_at(storage, warp) + (lane // 4 * self.sum_pitch + lane % 4 * 2) * 4
        for m in cutlass.range_constexpr(M_BLOCKS):
            for half in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(self.dim_v // 8):
                    at = place + ((16 * m + 8 * half) * self.sum_pitch + 8 * n) * 4
                    store_pair(at, o[2 * half, n, m], o[2 * half + 1, n, m])
        cute.arch.sync_threads()

    @cute.jit
    def sums_at(self, storage, warp) -> Int32:
        """Return the address of a warp's O in shared memory: HEADS rows of `sum_pitch` fp32 numbers."""
        return Int32(storage.rings.data_ptr().toint()) + warp * self.ring_bytes

    @cute.jit
    def store(self, storage, out, lse, max_logits, sink, has_sink, first_head, warp, lane):
        """Add the warps' O in order, and write the results of the CTA's heads. A warp writes whole rows; a lane has
        dim_v / 32 adjacent channels."""
        statistics = storage.statistics.get_tensor(cute.make_layout((2, HEADS, self.warps)))
        channels = self.dim_v // WARP  # 4
        acc = cute.make_rmem_tensor((channels,), Float32)
        rounded = cute.make_rmem_tensor((channels,), self.dtype)
        for i in cutlass.range(warp, HEADS, self.warps, unroll=1):
            head = first_head + i
            if head < out.shape[0]:
                most = statistics[0, i, 0]
                for w in cutlass.range_constexpr(1, self.warps):
                    most = cute.arch.fmax(most, statistics[0, i, w])
                found = most > -Float32.inf
                reference = most if found else Float32(0.0)
                total = Float32(0.0)
                acc.fill(0.0)
                for w in cutlass.range_constexpr(self.warps):
                    factor = cute.math.exp2(statistics[0, i, w] - reference, fastmath=True)
                    total += statistics[1, i, w] * factor
                    part = load_16(self.sums_at(storage, w) + (i * self.sum_pitch + lane * channels) * 4)
                    for c in cutlass.range_constexpr(channels):
                        acc[c] = acc[c] + part[c].bitcast(Float32) * factor
                divisor = total
                if has_sink > 0:
                    divisor = total + cute.math.exp2(sink[head] * LOG2E - reference)
                inverse = Float32(1.0) / divisor if found else Float32(0.0)
                for c in cutlass.range_constexpr(channels):
                    acc[c] = acc[c] * inverse
                rounded.store(acc.load().to(self.dtype))
                cute.autovec_copy(rounded, cute.local_tile(out[head, None], (channels,), (lane,)))
                if lane == 0:
                    lse[head] = (most + cute.math.log2(total)) * LN2 if found else Float32.inf
                    if const_expr(max_logits is not None):
                        max_logits[head] = most * LN2


@cute.jit
def store_pair(address: Int32, low: Float32, high: Float32):
    """Store two adjacent fp32 numbers at a shared-memory address that is a multiple of 8."""
    cute.arch.inline_ptx("st.shared.v2.f32 [{$r0}], {" + "{$r1}, {$r2}" + "};", read_only_args=[address, low, high])


@cute.jit
def multiply_add(acc: cute.Tensor, a, b, dtype: cutlass.Constexpr):
    """acc += A B: A is 16 x 16 in four words, B 16 x 8 in two words, acc 16 x 8 in four fp32 numbers."""
    kind = "bf16" if const_expr(dtype is BFloat16) else "f16"
    made = cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        + "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        + "{{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, acc[0], acc[1], acc[2], acc[3]],
    )
    for i in cutlass.range_constexpr(4):
        acc[i] = made[i]


@cached
def compile_narrow_sparse_mla(dtype: str, dim: int, dim_v: int, warps: int, with_max_logits: bool):
    """Compile f, see `NarrowSparseMlaSm90`; max_logits is None unless with_max_logits."""
    kind = cute_dtype(dtype)
    batch, s_q, heads, pages, size = (cute.sym_int() for _ in range(5))
    return compile_sm90(
        NarrowSparseMlaSm90(kind, dim, dim_v, warps),
        fake(kind, (batch, s_q, heads, dim), (*strides(3, 8), 1)),
        fake(kind, (pages, size, dim), (*strides(2, 8), 1)),
        fake(Int32, (cute.sym_int(), cute.sym_int()), (*strides(1), 1), 4),
        fake_contiguous(Int32, cute.sym_int()),
        Int32(0),
        fake_contiguous(Float32, cute.sym_int()),
        Int32(0),
        fake(kind, (batch, s_q, heads, dim_v), (*strides(2, 8), dim_v, 1)),
        fake(Float32, (batch, heads, s_q), strides(3), 4),
        fake(Float32, (batch, s_q, heads), (*strides(2), 1), 4) if with_max_logits else None,
        Float32(1.0),
        fake_stream(),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the ops can ask for."""
    return [
        (compile_narrow_sparse_mla, (dtype, *dims, warps, with_max_logits))
        for dims in NARROW_DIMS
        for dtype in DTYPES
        for warps in NARROW_WARPS
        for with_max_logits in (False, True)
    ]
