"""The warm-up's target and loss: what the heads attend to together, beside the indexer's distribution.

p[t, s] = mean_h exp(scale q_h[t] . k[s] - lse_h[t]);   kl[t] = sum_s p (ln p - (I - lse_I))
dI[t, s] = g[t] (exp(I - lse_I) - p)

Plan
- A tile has 128 queries of a slot and 128 keys; CTAs take those that exist in turns. Per head: S = Q K^T by wgmma, then
  its powers are added up in registers. Nothing of a head is kept.
- Up to 128 channels: two accumulators. While a head's powers are computed, the next one's product is under way, and
  another warpgroup's. 192 and 576 channels: one, in parts of 64 channels, beside the other warpgroup's powers.
- One warp loads by TMA: Q of every head, K once for all heads that share it. It also asks for the tile's scores, which
  are wanted at the end, to be brought to the L2 cache; the others load them beside the last head's product.
- What a row must not see is taken out at the end, of the sum: whatever lies there, it meets nothing else.
- dI replaces the scores in place, in bf16, a warpgroup's 64 rows those of the same rows: it reads all of them before it
  writes any, and begins the next tile while the other one is still at this one.
Constraints: bf16; RINGS has the numbers of channels. Any number of heads.
Shared memory: 192 or 208 KiB of rings. Registers: 64 sums and 2 x 64 accumulators of 240.
Roofline: of a head of 128 channels wgmma takes 1024 clocks, the powers 1024 of the special function units; measured
1750 to 1900.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.fake_tensors import cute_dtype
from dsa.cute.pipeline import advance
from dsa.cute.score_tile import SHARED_BYTES, WARPGROUP, init_ring, tile_load
from dsa.cute.shared_memory import pack
from dsa.cute.sm90 import opaque
from dsa.kernels.training.add_power import add_power
from dsa.kernels.training.indexer_slots import SLOT_ROWS, fake_slots, fake_tiles, load_slot

# By the heads' channels: those of a stage, and stages of queries and of keys. Keys of 576 channels are there once.
RINGS = {64: (64, 8, 5), 128: (128, 3, 3), 192: (64, 7, 6), 576: (64, 4, 9)}
MATH_WARPS = 8
THREADS = 3 * WARPGROUP
REGISTERS = 240, 24
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
TINY = 1.2e-38
READ_BARRIER = 1  # and 2, of the second warpgroup


class WarmupTargetSm90:
    def __init__(self, dtype: type[cutlass.Numeric], dim: int):
        self.dtype = dtype
        self.unit, self.query_stages, self.key_stages = RINGS[dim]
        self.parts = dim // self.unit

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        lse: cute.Tensor,
        lse_idx: cute.Tensor,
        upstream: cute.Tensor,
        slots: cute.Tensor,
        tiles: cute.Tensor,
        scores: cute.Tensor,
        kl_parts: cute.Tensor,
        scale: Float32,
        group: Int32,
        ctas: Int32,
        stream,
    ):
        tile = (SLOT_ROWS, SLOT_ROWS, self.unit)
        q_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.dtype, self.query_stages)
        k_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.dtype, self.key_stages)
        # Heads last: a tile is of rows and channels.
        q, k = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1])) for x in (q, k))
        q_atom, q_tma = tile_load(q, q_layout, (SLOT_ROWS, self.unit))
        k_atom, k_tma = tile_load(k, k_layout, (SLOT_ROWS, self.unit))

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[cutlass.Int64, self.query_stages]
            q_empty: cute.struct.MemRange[cutlass.Int64, self.query_stages]
            k_full: cute.struct.MemRange[cutlass.Int64, self.key_stages]
            k_empty: cute.struct.MemRange[cutlass.Int64, self.key_stages]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]

        assert Storage.size_in_bytes() <= SHARED_BYTES
        self.storage = Storage
        heads = lse.shape[0]
        self.kernel(
            *(q_atom, q_tma, k_atom, k_tma, lse, lse_idx, upstream, slots, tiles, scores, kl_parts),
            *(scale * LOG2E, cute.fast_divmod_create_divisor_v2(group), heads, q_layout, k_layout),
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        mq: cute.Tensor,
        k_atom: cute.CopyAtom,
        mk: cute.Tensor,
        lse: cute.Tensor,
        lse_idx: cute.Tensor,
        upstream: cute.Tensor,
        slots: cute.Tensor,
        tiles: cute.Tensor,
        scores: cute.Tensor,
        kl_parts: cute.Tensor,
        scale: Float32,
        group: cute.FastDivmodDivisorV2,
        heads: Int32,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.storage)
        barriers = [x.data_ptr() for x in (storage.q_full, storage.q_empty, storage.k_full, storage.k_empty)]
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        if warp == MATH_WARPS:
            cute.nvgpu.cpasync.prefetch_descriptor(q_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(k_atom)
        if tid == 0:
            init_ring(barriers[0], barriers[1], self.query_stages, MATH_WARPS)
            init_ring(barriers[2], barriers[3], self.key_stages, MATH_WARPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp >= MATH_WARPS:
            cute.arch.setmaxregister_decrease(REGISTERS[1])
            if warp == MATH_WARPS:
                self.produce(q_atom, mq, k_atom, mk, slots, tiles, scores, group, heads, sq, sk, barriers, lane)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[0])
            self.math(
                *(lse, lse_idx, upstream, slots, tiles, scores, kl_parts, scale, group, heads, sq, sk, barriers),
                *(tid, warp, lane),
            )

    @cute.jit
    def find(self, index, slot, tiles, lane):
        """The slot of tile `index`, not before `slot`, and which tile of its keys it is."""
        count = tiles.shape[0] - 1
        steps = Int32(32)
        while steps == 32:
            behind = cutlass.min(slot + 1 + lane, count)
            steps = cute.arch.popc(cute.arch.vote_ballot_sync(tiles[behind] <= index))
            slot += steps
        return slot, index - tiles[slot]

    @cute.jit
    def produce(self, q_atom, mq, k_atom, mk, slots, tiles, scores, group, heads, sq, sk, barriers, lane):
        q_full, q_empty, k_full, k_empty = barriers
        one = cute.make_layout(1)
        first, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        bytes_ = SLOT_ROWS * self.unit * self.dtype.width // 8
        q_stage, q_phase, k_stage, k_phase, slot = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        for index in cutlass.range(tiles[0] + first, tiles[tiles.shape[0] - 1], ctas, unroll=1):
            slot, key_tile = self.find(index, slot, tiles, lane)
            whose = load_slot(slots, slot)
            with cute.arch.elect_one():
                prefetch(scores[slot, key_tile, None, None].iterator, SLOT_ROWS * SLOT_ROWS * 4)
            key = whose.first_k + key_tile * SLOT_ROWS
            gq = cute.local_tile(cute.domain_offset((whose.first_q, 0, 0), mq), (SLOT_ROWS, self.unit), (0, None, None))
            gk = cute.local_tile(cute.domain_offset((key, 0, 0), mk), (SLOT_ROWS, self.unit), (0, None, None))
            tqs, tqg = cute.nvgpu.cpasync.tma_partition(
                q_atom, 0, one, cute.group_modes(sq, 0, 2), cute.group_modes(gq, 0, 2)
            )
            tks, tkg = cute.nvgpu.cpasync.tma_partition(
                k_atom, 0, one, cute.group_modes(sk, 0, 2), cute.group_modes(gk, 0, 2)
            )
            loaded = Int32(-1)
            for h in cutlass.range(heads + (heads & 1 if const_expr(self.parts == 1) else 0), unroll=1):
                head = cutlass.min(h, heads - 1)
                key_head = head // group
                for part in cutlass.range(self.parts, unroll=1):
                    cute.arch.mbarrier_wait(q_empty + q_stage, q_phase ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(q_full + q_stage, bytes_)
                    cute.copy(q_atom, tqg[None, part, head], tqs[None, q_stage], tma_bar_ptr=q_full + q_stage)
                    q_stage, q_phase = advance(q_stage, q_phase, self.query_stages)
                    if key_head != loaded:
                        cute.arch.mbarrier_wait(k_empty + k_stage, k_phase ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(k_full + k_stage, bytes_)
                        cute.copy(k_atom, tkg[None, part, key_head], tks[None, k_stage], tma_bar_ptr=k_full + k_stage)
                        k_stage, k_phase = advance(k_stage, k_phase, self.key_stages)
                loaded = key_head

    def tiled_mma(self) -> cute.TiledMma:
        major = cute.nvgpu.OperandMajorMode.K
        return sm90.make_trivial_tiled_mma(self.dtype, self.dtype, major, major, Float32, (2, 1, 1), (64, SLOT_ROWS))

    @cute.jit
    def math(
        self,
        lse,
        lse_idx,
        upstream,
        slots,
        tiles,
        scores,
        kl_parts,
        scale,
        group,
        heads,
        sq,
        sk,
        barriers,
        tid,
        warp,
        lane,
    ):
        mma = self.tiled_mma()
        # The same for all of a warpgroup, and known to be: operands' addresses are then uniform.
        thr = mma.get_slice(cute.arch.make_warp_uniform(warp // 4) * WARPGROUP)
        rq = mma.make_fragment_A(thr.partition_A(sq))
        rk = mma.make_fragment_B(thr.partition_B(sk))
        shape = thr.partition_shape_C((SLOT_ROWS, SLOT_ROWS))
        accs = [cute.make_rmem_tensor(shape, Float32) for _ in range(2 if self.parts == 1 else 1)]
        sums = cute.make_rmem_tensor((SLOT_ROWS // 2,), Float32)
        own_row = warp * 16 + (lane >> 2)
        first, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        # Stage and phase of Q, and of the first part of K that this head has.
        ring = (Int32(0), Int32(0), Int32(0), Int32(0))
        slot = Int32(0)
        for index in cutlass.range(tiles[0] + first, tiles[tiles.shape[0] - 1], ctas, unroll=1):
            slot, _ = self.find(index, slot, tiles, lane)
            whose = load_slot(slots, slot)
            rows = [whose.first_q + cutlass.min(own_row + 8 * r, whose.rows - 1) for r in range(2)]
            sums.fill(0.0)
            if const_expr(self.parts > 1):
                at = rows
                for h in cutlass.range(heads, unroll=1):
                    less, at = self.load_lse(lse, at, h, heads)
                    ring = self.multiply_parts(accs[0], rq, rk, barriers, ring, h, group, heads)
                    self.add(sums, accs[0], less, scale)
                slot = opaque(slot)  # what follows from it is found again: registers are short in between
                own = self.load_tile(scores, lse_idx, upstream, slots, tiles, slot, index, rows, own_row, lane)
            else:
                ring, less = self.add_overlapped(sums, accs, lse, rq, rk, barriers, ring, rows, scale, group, heads)
                slot = opaque(slot)  # what follows from it is found again: registers are short in between
                own = self.load_tile(scores, lse_idx, upstream, slots, tiles, slot, index, rows, own_row, lane)
                ring = self.done(barriers, ring, heads - 1 + (heads & 1), group, heads)
                if heads & 1 == 0:
                    self.add(sums, accs[1], less, scale)
            self.finish(sums, own, kl_parts, heads, own_row, lane)

    @cute.jit
    def add_overlapped(self, sums, accs, lse, rq, rk, barriers, ring, rows, scale, group, heads):
        """All heads but the last, one's powers beside the next one's product. An odd number of them is padded. What is
        left: the last product is under way; its LSE is returned."""
        padded = heads + (heads & 1)
        less, at = self.load_lse(lse, rows, Int32(0), heads)
        self.ready(barriers, ring)
        self.multiply(accs[0], rq, rk, ring)
        ring = self.done(barriers, ring, Int32(0), group, heads)
        self.ready(barriers, ring)
        for h in cutlass.range(0, padded - 2, 2, unroll=1):
            for i in cutlass.range_constexpr(2):
                self.multiply(accs[1 - i], rq, rk, ring)
                # A head ahead: the load's latency is longer than a product.
                ahead, at = self.load_lse(lse, at, h + i + 1, heads)
                self.add(sums, accs[i], less, scale)
                less = ahead
                ring = self.done(barriers, ring, h + i + 1, group, heads)
                self.ready(barriers, ring)
        self.multiply(accs[1], rq, rk, ring)
        ahead, at = self.load_lse(lse, at, padded - 1, heads)
        self.add(sums, accs[0], less, scale)
        return ring, ahead

    @cute.jit
    def load_tile(self, scores, lse_idx, upstream, slots, tiles, slot, index, rows, own_row, lane):
        """What the tile's end needs: where dI goes, slot and tile, pairs of scores [2, 16, 2 (row)], and of both
        rows their LSE, g, and how many of the tile's keys they see."""
        key_tile = index - tiles[slot]
        of_tile = scores[slot, key_tile, None, None]
        pairs = cute.make_rmem_tensor((2, SLOT_ROWS // 8, 2), Float32)
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(SLOT_ROWS // 8):
                place = (own_row + 8 * r) * SLOT_ROWS + 8 * j + lane % 4 * 2
                pairs[0, j, r], pairs[1, j, r] = load_pair(of_tile.iterator + place)
        # The warpgroup has read: what is written lies where others' scores were. Also, no load is put off until it is
        # needed, as what else the rows need is loaded behind the barrier.
        cute.arch.barrier(barrier_id=READ_BARRIER + (opaque(own_row) >> 6), number_of_threads=WARPGROUP)
        whose = load_slot(slots, slot)
        limits = []
        for r in cutlass.range_constexpr(2):
            row = own_row + 8 * r
            limit = cutlass.min(whose.seen + whose.step * row, whose.keys) - key_tile * SLOT_ROWS
            limits.append(limit if row < whose.rows else Int32(0))
        numbers = [lse_idx[rows[r]] for r in range(2)], [upstream[rows[r]] for r in range(2)]
        # Where dI of row 0 would lie if all rows' followed on these of the warpgroup's.
        target = of_tile.iterator + (opaque(own_row) >> 6) * (SLOT_ROWS * SLOT_ROWS // 4)
        return (target, slot, key_tile), pairs, *numbers, limits

    @cute.jit
    def ready(self, barriers, ring):
        """Wait for a head's rows."""
        cute.arch.mbarrier_wait(barriers[0] + ring[0], ring[1])
        cute.arch.mbarrier_wait(barriers[2] + ring[2], ring[3])

    @cute.jit
    def multiply(self, acc, rq, rk, ring):
        """Start a head's product."""
        mma = self.tiled_mma()  # one that is set inside of a loop cannot be used behind it
        q_stage, k_stage = ring[0], ring[2]
        cute.nvgpu.warpgroup.fence()
        for step in cutlass.range_constexpr(self.unit // 16):
            if const_expr(step % 4 == 0):  # descriptors of a few steps at a time: all of them would be spilled
                q_stage, k_stage = opaque(q_stage), opaque(k_stage)
            mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, step > 0)
            cute.gemm(mma, acc, rq[None, None, step, q_stage], rk[None, None, step, k_stage], acc)
        cute.nvgpu.warpgroup.commit_group()

    @cute.jit
    def done(self, barriers, ring, h, group, heads):
        """Wait for the product of head h. What it has read may be overwritten, the keys if the next head has others."""
        q_stage, q_phase, k_stage, k_phase = ring
        cute.nvgpu.warpgroup.wait_group(0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barriers[1] + q_stage)
        q_stage, q_phase = advance(q_stage, q_phase, self.query_stages)
        # A padding head has the keys of the last one.
        last = h == heads - 1 + (heads & 1)
        if h < heads - 1:
            last = h // group != (h + 1) // group
        if last:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers[3] + k_stage)
            k_stage, k_phase = advance(k_stage, k_phase, self.key_stages)
        return q_stage, q_phase, k_stage, k_phase

    @cute.jit
    def multiply_parts(self, acc, rq, rk, barriers, ring, h, group, heads):
        """The product of a head whose rows do not fit: a part behind the other, and wait."""
        mma = self.tiled_mma()
        q_stage, q_phase, k_stage, k_phase = ring
        last = h == heads - 1
        if h < heads - 1:
            last = h // group != (h + 1) // group
        before, at, turn = q_stage, k_stage, k_phase
        for part in cutlass.range_constexpr(self.parts):
            cute.arch.mbarrier_wait(barriers[0] + q_stage, q_phase)
            cute.arch.mbarrier_wait(barriers[2] + at, turn)
            cute.nvgpu.warpgroup.fence()
            for step in cutlass.range_constexpr(self.unit // 16):
                mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, part > 0 or step > 0)
                cute.gemm(mma, acc, rq[None, None, step, q_stage], rk[None, None, step, at], acc)
            cute.nvgpu.warpgroup.commit_group()
            if const_expr(part > 0):
                cute.nvgpu.warpgroup.wait_group(1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(barriers[1] + before)
            before = q_stage
            q_stage, q_phase = advance(q_stage, q_phase, self.query_stages)
            at, turn = advance(at, turn, self.key_stages)
        cute.nvgpu.warpgroup.wait_group(0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barriers[1] + before)
        if last:
            for _ in cutlass.range_constexpr(self.parts):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(barriers[3] + k_stage)
                k_stage, k_phase = advance(k_stage, k_phase, self.key_stages)
        return q_stage, q_phase, k_stage, k_phase

    @cute.jit
    def load_lse(self, lse, at, h, heads):
        """The LSE of head h at the places `at`, and the next head's places, or again these of the last one."""
        step = lse.shape[1] if h < heads - 1 else 0
        flat = cute.make_tensor(lse.iterator, cute.make_layout(cute.size(lse)))
        return [flat[place] for place in at], [place + step for place in at]

    @cute.jit
    def add(self, sums, acc, less, scale):
        """sums += exp(scale S - lse) of a head."""
        more = [x * -LOG2E for x in less]
        flat = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        for i in cutlass.range_constexpr(SLOT_ROWS // 2):
            sums[i] = add_power(sums[i], flat[i], scale, more[i // 2 % 2])

    @cute.jit
    def finish(self, sums, own, kl_parts, heads, own_row, lane):
        """The loss of a tile's rows, and the scores' gradient in their place."""
        share = 1.0 / Float32(heads)
        (place, slot, key_tile), pairs, lse_idx, upstream, limits = own
        target = cute.recast_ptr(place, dtype=Uint32)
        for r in cutlass.range_constexpr(2):
            row, limit, own_lse, factor = own_row + 8 * r, limits[r], lse_idx[r], upstream[r]
            kl = Float32(0.0)
            for j in cutlass.range_constexpr(SLOT_ROWS // 8):
                both = []
                for c in cutlass.range_constexpr(2):
                    p = sums[4 * j + 2 * r + c] * share
                    over = pairs[c, j, r] - own_lse
                    d = factor * (cute.math.exp2(over * LOG2E, fastmath=True) - p)
                    term = p * (cute.math.log2(p, fastmath=True) * LN2 - over)
                    visible = 8 * j + lane % 4 * 2 + c < limit
                    both.append(d if visible else Float32(0.0))
                    # The logarithm takes the smallest numbers for 0; NaN is not one of them.
                    nothing = p < TINY or not visible
                    kl += Float32(0.0) if nothing else term
                (target + (row * (SLOT_ROWS // 2) + 4 * j + lane % 4)).store(pack(both[0], both[1], BFloat16))
            kl += cute.arch.shuffle_sync_bfly(kl, offset=1)
            kl += cute.arch.shuffle_sync_bfly(kl, offset=2)
            if lane % 4 == 0:
                kl_parts[slot, key_tile, row] = kl


@cute.jit
def prefetch(address, size: cutlass.Constexpr):
    """Into the L2 cache: `size` bytes, which are wanted when all heads are through."""
    cute.arch.inline_ptx(
        f"cp.async.bulk.prefetch.L2.global [{{$r0}}], {size};",
        read_only_args=[address.toint()],
    )


@cute.jit
def load_pair(address):
    """Two neighbouring numbers."""
    return cute.arch.inline_ptx(
        "ld.global.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32, Float32],
        read_only_args=[address.toint()],
    )


@cached
def compile_warmup_target(dtype: str, dim: int):
    """-> f(q [Tq, H, d], k [Tk, Hk, d], lse [H, Tq], lse_idx [Tq], upstream [Tq], slots [S, 8], tiles [S + 1], scores
    [S, N, 128, 128], kl_parts [S, N, 128], scale, H / Hk, ctas); numbers fp32 unless they are q's and k's."""
    kind = cute_dtype(dtype)
    queries = cute.sym_int()

    def fake(element, shape, stride, align):
        return cute.runtime.make_fake_tensor(element, shape, stride, assumed_align=align)

    def rows_of_heads(length):
        strides = cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1
        return fake(kind, (length, cute.sym_int(), dim), strides, 16)

    return compile_sm90(
        WarmupTargetSm90(kind, dim),
        *(rows_of_heads(queries), rows_of_heads(cute.sym_int())),
        fake(Float32, (cute.sym_int(), queries), (queries, 1), 4),
        *(fake(Float32, (queries,), (1,), 4) for _ in range(2)),
        fake_slots(),
        fake(Int32, (cute.sym_int(),), (1,), 4),
        fake_tiles(Float32, SLOT_ROWS, SLOT_ROWS),
        fake_tiles(Float32, SLOT_ROWS),
        *(Float32(0.0), Int32(1), Int32(1)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_warmup_target, ("bfloat16", dim)) for dim in RINGS]
