"""Gradients of the indexer's queries and weights: with g_h[t] = sum_j dI[t, j] [q_h[t] . k[j] > 0] k[j],
dq_h[t] = w[t, h] g_h[t] in bf16 and dw[t, h] = q_h[t] . g_h[t] in fp32.

Plan
- Rows of a product are flat (query, head) pairs, 64 at a time, its inner dimension are keys, its columns channels. A
  math warpgroup has `held` such groups of 64 rows in registers, HELD x 64 x D, while all keys that they see pass by
  through shared memory, 128 at a time, read by all warpgroups as the operand B.
- The operand A, dI where a head is active, is made in registers. A lane reads the words of bits of two neighbouring
  keys (indexer_bits.py), takes the bytes of its row out of both, and spreads signs to masks of 16 bits; pairs
  of dI, the same for all heads of a query, come by ldmatrix.
- While a warpgroup makes one group's operand, its other group's wgmma runs, or another warpgroup's.
- A unit's own q waits in shared memory, put there by each warp for its rows when the unit begins, for dw; dq leaves by
  the same way. dw needs no products again, as sum_j dI relu(q . k) = q . g.
- One warp loads k by TMA, dI and bits by bulk copies. Keys behind a sequence's last are another's: they are overwritten
  by zeros, as 0 * NaN would be NaN.
- Persistent CTAs; a unit of work is the queries of all warpgroups' groups (indexer_units.py).
Shared memory: STAGES of 128 x D x 2 bytes of k, 256 a query of dI, 1 KiB a group of bits; 128 x D a group for q and dq.
Registers: HELD x D / 2 sums, HELD x 16 of operands, 8 or 16 of dI, of 232 (two warpgroups) or 112; 40 or 32 for the
others.
Roofline: tensor cores, 256 clocks for 64 rows x 64 keys at D 128; beside them 52 instructions of a warp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.copies import bulk_load, gather_16
from dsa.cute.pipeline import advance
from dsa.cute.score_tile import REGISTERS, SHARED_BYTES, WARPGROUP, init_ring, tile_load
from dsa.cute.shared_memory import load_16, load_matrices, pack, store_4, store_matrices
from dsa.kernels.training.indexer_bits import permute
from dsa.kernels.training.indexer_slots import BLOCK, GROUP, SLOT_ROWS, fake_gradients, fake_slots, gradients_of
from dsa.kernels.training.indexer_units import Units, fake_tickets
from dsa.kernels.training.masked_operands import load_pairs, load_word_pair

TILE = 2 * BLOCK  # keys of a stage
WORDS = 4 * WARPGROUP  # bytes of the bits of 64 keys x 64 columns
ROWS = 16  # of a warp


@dataclass(frozen=True)
class IndexerQueryGradConfig:
    """groups: math warpgroups; held: groups of 64 rows of each; stages: of 128 keys."""

    groups: int
    held: int
    stages: int

    @property
    def columns(self) -> int:
        """Groups of 64 (query, head) pairs of a unit."""
        return self.groups * self.held

    @property
    def threads(self) -> int:
        return (self.groups + 1) * WARPGROUP

    def stage_bytes(self, heads: int, dim: int) -> tuple[int, int, int]:
        """Of k, dI and bits."""
        return TILE * dim * 2, self.columns * GROUP // heads * TILE * 2, self.columns * 2 * WORDS

    def shared(self, heads: int, dim: int) -> int:
        return self.stages * (sum(self.stage_bytes(heads, dim)) + 32) + self.columns * GROUP * dim * 2 + 3 * 1024


class IndexerQueryGradSm90:
    def __init__(self, heads: int, dim: int, cfg: IndexerQueryGradConfig):
        self.heads, self.dim, self.groups, self.held, self.stages = heads, dim, cfg.groups, cfg.held, cfg.stages
        self.columns, self.threads, self.math_warps = cfg.columns, cfg.threads, 4 * cfg.groups
        self.math_registers, self.other_registers = REGISTERS[cfg.groups]
        self.k_bytes, self.di_bytes, self.word_bytes = cfg.stage_bytes(heads, dim)
        self.block_q = cfg.columns * GROUP // heads
        self.units = Units(self.block_q)
        self.chunks = dim // 8  # of 16 bytes of a row
        self.staged = ROWS * dim * 2  # bytes of a warp's rows of a group

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        w: cute.Tensor,
        slots: cute.Tensor,
        di: cute.Tensor,
        active: cute.Tensor,
        dq: cute.Tensor,
        dw: cute.Tensor,
        tickets: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        k_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (BLOCK, TILE, self.dim), BFloat16, self.stages)
        k_atom, k_tma = tile_load(k, k_layout, (TILE, self.dim))
        mma = sm90.make_trivial_tiled_mma(
            *(BFloat16, BFloat16, cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN, Float32),
            *((1, 1, 1), (BLOCK, self.dim), cute.nvgpu.warpgroup.OperandSource.RMEM),
        )

        @cute.struct
        class Storage:
            # The last one tells the loading warp itself of what it is to change.
            full: cute.struct.MemRange[Int64, self.stages + 1]
            empty: cute.struct.MemRange[Int64, self.stages]
            units: self.units.storage()
            di: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.di_bytes], 128]
            words: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.word_bytes], 128]
            q: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, 4 * self.columns * self.staged], 128]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(k_layout)], 1024]

        self.storage = Storage
        self.kernel(q, k_atom, k_tma, w, slots, di, active, dq, dw, tickets, mma, k_layout).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k_atom: cute.CopyAtom,
        mk: cute.Tensor,
        w: cute.Tensor,
        slots: cute.Tensor,
        di: cute.Tensor,
        active: cute.Tensor,
        dq: cute.Tensor,
        dw: cute.Tensor,
        tickets: cute.Tensor,
        mma: cute.TiledMma,
        k_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        k_memory, di_memory, word_memory = storage.k.data_ptr(), storage.di.data_ptr(), storage.words.data_ptr()
        if warp == self.math_warps:
            cute.nvgpu.cpasync.prefetch_descriptor(k_atom)
        if tid == 0:
            init_ring(full, empty, self.stages, self.math_warps)
            cute.arch.mbarrier_init(full + self.stages, 1)
            self.units.init(storage.units, self.math_warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp >= self.math_warps:
            cute.arch.setmaxregister_decrease(self.other_registers)
            if warp == self.math_warps:
                memory = (k_memory, di_memory, word_memory)
                self.produce(k_atom, mk, slots, tickets, storage.units, di, active, sk, memory, full, empty, lane)
        else:
            cute.arch.setmaxregister_increase(self.math_registers)
            staged = storage.q.data_ptr() + warp * (self.held * self.staged)
            math_memory = (Int32(di_memory.toint()), Int32(word_memory.toint()), staged)
            self.math(q, w, dq, dw, mma, storage.units, sk, math_memory, full, empty, tid, warp, lane)

    @cute.jit
    def produce(self, k_atom, mk, slots, tickets, storage, di, active, sk, memory, full, empty, lane):
        k_memory, di_memory, word_memory = memory
        one = cute.make_layout(1)
        stage, phase, landed_phase = Int32(0), Int32(0), Int32(0)
        number, unit_place = Int32(0), (Int32(0), Int32(0))
        while number >= 0:
            number, slot, row, unit_place = self.units.name(storage, tickets, slots, unit_place, lane)
            if number >= 0:
                first = row * self.heads // GROUP
                gk = cute.local_tile(cute.domain_offset((slot.first_k, 0), mk), (TILE, self.dim), (None, 0))
                tks, tkg = cute.nvgpu.cpasync.tma_partition(
                    k_atom, 0, one, cute.group_modes(sk, 0, 2), cute.group_modes(gk, 0, 2)
                )
                for tile in cutlass.range(cute.ceil_div(slot.seen_by(row, self.block_q), TILE), unroll=1):
                    keys = cutlass.min(slot.keys - tile * TILE, TILE)
                    cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                    barrier = full + (stage if keys == TILE else self.stages)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.k_bytes + self.di_bytes + self.word_bytes)
                        source = gradients_of(di, number, tile, row)
                        bulk_load(di_memory + stage * self.di_bytes, source, Int32(self.di_bytes), barrier)
                        for i in cutlass.range_constexpr(self.columns):
                            source = active[number, first + i, 2 * tile, None].iterator
                            target = word_memory + (stage * self.word_bytes + i * (2 * WORDS))
                            bulk_load(target, source, Int32(2 * WORDS), barrier)
                    cute.copy(k_atom, tkg[None, tile], tks[None, stage], tma_bar_ptr=barrier)
                    if keys < TILE:
                        # The last keys are another sequence's.
                        cute.arch.mbarrier_wait(barrier, landed_phase)
                        landed_phase ^= 1
                        address = Int32(k_memory.toint()) + stage * self.k_bytes
                        for key in cutlass.range(keys, TILE, unroll=1):
                            for part in cutlass.range_constexpr(self.dim // 64):
                                store_4(address + part * (TILE * 128) + key * 128 + 4 * lane, Uint32(0))
                        cute.arch.fence_proxy("async.shared", space="cta")
                        cute.arch.sync_warp()
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive(full + stage)
                    stage, phase = advance(stage, phase, self.stages)

    @cute.jit
    def math(self, q, w, dq, dw, mma, storage, sk, memory, full, empty, tid, warp, lane):
        di_memory, word_memory, staged = memory
        thr = mma.get_slice(tid % WARPGROUP)
        channels = cute.make_tensor(sk.iterator, cute.select(sk.layout, mode=[1, 0, 2]))
        rb = mma.make_fragment_B(thr.partition_B(channels))
        shape = thr.partition_shape_A((BLOCK, GROUP))
        operands = [cute.make_rmem_tensor(shape, BFloat16) for _ in range(self.held)]
        words = [cute.recast_tensor(cute.make_tensor(x.iterator, cute.make_layout(32)), Uint32) for x in operands]
        accs = [cute.make_rmem_tensor(thr.partition_shape_C((BLOCK, self.dim)), Float32) for _ in range(self.held)]
        flats = [cute.make_tensor(x.iterator, cute.make_layout(self.dim // 2)) for x in accs]
        weights = cute.make_rmem_tensor((2 * self.held,), Float32)
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        own_warp, side = warp % 4, warp // 4
        # Of the unit's rows: the first of this warp, in the first of its groups.
        own = side * (self.held * GROUP) + own_warp * ROWS
        di_at = di_memory + own // self.heads * (TILE * 2) + (lane >> 3) * 16
        word_at = word_memory + side * (self.held * 2 * WORDS) + (lane & 3) * 32 + (lane >> 3) * 8
        # The bytes of two keys' words that have this lane's columns, and where in a byte the warp's are.
        taken = Uint32(0x6420) + Uint32(0x1111) * Uint32((lane >> 2) & 1)
        shift = Uint32(2 * own_warp)
        stage, phase = Int32(0), Int32(0)
        number, unit_place = Int32(0), (Int32(0), Int32(0))
        while number >= 0:
            unit, unit_place = self.units.read(storage, unit_place)
            number = unit.slot
            if number >= 0:
                flat_row = (unit.first_q + unit.row) * self.heads + own
                end = (unit.first_q + unit.rows) * self.heads
                self.request(q, flat_row, end, staged, lane)
                for i in cutlass.range_constexpr(2 * self.held):
                    weights[i] = w[cutlass.min(flat_row + i // 2 * GROUP + i % 2 * 8 + (lane >> 2), end - 1)]
                for acc in flats:
                    acc.fill(0.0)
                visible = unit.visible
                for tile in cutlass.range(cute.ceil_div(visible, TILE), unroll=1):
                    cute.arch.mbarrier_wait(full + stage, phase)
                    for b in cutlass.range_constexpr(2):
                        if tile * TILE + b * BLOCK < visible:
                            di_here = di_at + (stage * self.di_bytes + b * 128)
                            word_here = word_at + (stage * self.word_bytes + b * WORDS)
                            self.add(mma, accs, operands, words, rb, stage, b, di_here, word_here, taken, shift)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(empty + stage)
                    stage, phase = advance(stage, phase, self.stages)
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_warp()
                self.finish(flats, weights, dq, dw, flat_row, end, staged, lane)

    @cute.jit
    def add(self, mma, accs, operands, words, rb, stage, b: cutlass.Constexpr, di_here, word_here, taken, shift):
        """Add the products with 64 keys of a stage to this warpgroup's groups."""
        halves = 2 if self.heads < 16 else 1
        for i in cutlass.range_constexpr(self.held):
            own = words[i]
            pairs = []
            for half in cutlass.range_constexpr(halves):
                address = di_here + (i * GROUP + 8 * half) // self.heads * (TILE * 2)
                pairs.append([*load_pairs(address), *load_pairs(address + 64)])
            for step in cutlass.range_constexpr(BLOCK // 16):
                low, high = load_word_pair(word_here + (i * 2 * WORDS + step * 128))
                upper = permute(low, high, taken) << shift
                of_rows = [upper, upper << 1]
                for half in cutlass.range_constexpr(2):
                    for eight in cutlass.range_constexpr(2):
                        mask = permute(of_rows[half], of_rows[half], 0xBB99 if eight else 0xAA88)
                        own[4 * step + 2 * eight + half] = pairs[half % halves][2 * step + eight] & mask
            cute.nvgpu.warpgroup.fence()
            for step in cutlass.range_constexpr(BLOCK // 16):
                keys = rb[None, None, b * (BLOCK // 16) + step, stage]
                cute.gemm(mma, accs[i], operands[i][None, None, step], keys, accs[i])
            cute.nvgpu.warpgroup.commit_group()
        cute.nvgpu.warpgroup.wait_group(0)

    @cute.jit
    def place(self, row, chunk):
        """Where the 16 bytes number `chunk` of a row of 16 are, in bytes: eight rows' in different banks."""
        return row * (self.dim * 2) + (chunk ^ (row & 7)) * 16

    @cute.jit
    def own_place(self, first: cutlass.Constexpr, lane):
        """The same of a lane's 16 bytes, number first + lane of all rows'."""
        return self.place(first // self.chunks + lane // self.chunks, lane % self.chunks)

    @cute.jit
    def request(self, q, flat_row, end, staged, lane):
        """Start loading this warp's rows of q, zeros where there is none: 16 heads of a query, or 8 of two."""
        source = Int64(q[flat_row, None].iterator.toint()) + lane * 16
        for i in cutlass.range_constexpr(self.held):
            for first in cutlass.range_constexpr(0, ROWS * self.chunks, 32):
                row = flat_row + i * GROUP
                if const_expr(self.heads < ROWS):
                    row += first // self.chunks + lane // self.chunks
                target = Int32(staged.toint()) + (i * self.staged + self.own_place(first, lane))
                gather_16(target, source + (i * GROUP * self.dim * 2 + first * 16), row < end)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def finish(self, flats, weights, dq, dw, flat_row, end, staged, lane):
        """dw and dq of this warp's rows."""
        for i in cutlass.range_constexpr(self.held):
            if flat_row + i * GROUP < end:
                self.finish_group(flats[i], weights, dq, dw, i, flat_row, end, staged, lane)

    @cute.jit
    def finish_group(self, flat, weights, dq, dw, i: cutlass.Constexpr, flat_row, end, staged, lane):
        memory = Int32(staged.toint()) + i * self.staged
        sums = [Float32(0.0), Float32(0.0)]
        for n in cutlass.range_constexpr(self.dim // 16):
            address = memory + self.place(lane & 15, 2 * n + (lane >> 4))
            loaded = load_matrices(address)
            results = []
            for m in cutlass.range_constexpr(4):
                half, at = m % 2, 4 * (2 * n + m // 2) + 2 * (m % 2)
                low, high = as_float(loaded[m] << 16), as_float(loaded[m] & Uint32(0xFFFF0000))
                sums[half] = cute.math.fma(low, flat[at], sums[half])
                sums[half] = cute.math.fma(high, flat[at + 1], sums[half])
                weight = weights[2 * i + half]
                results.append(pack(flat[at] * weight, flat[at + 1] * weight, BFloat16))
            store_matrices(address, results)
        cute.arch.sync_warp()
        target = dq[flat_row, None].iterator + lane * 8
        for first in cutlass.range_constexpr(0, ROWS * self.chunks, 32):
            vector = load_16(memory + self.own_place(first, lane))
            place = target + (i * GROUP * self.dim + first * 8)
            if const_expr(self.heads >= ROWS):
                store_global_16(place, vector)
            else:
                if flat_row + (i * GROUP + first // self.chunks) + lane // self.chunks < end:
                    store_global_16(place, vector)
        for half in cutlass.range_constexpr(2):
            total = sums[half] + cute.arch.shuffle_sync_bfly(sums[half], offset=1)
            total += cute.arch.shuffle_sync_bfly(total, offset=2)
            row = flat_row + (i * GROUP + 8 * half) + (lane >> 2)
            if (lane & 3) == 0 and row < end:
                dw[row] = total
        cute.arch.sync_warp()


@cute.jit
def store_global_16(target: cute.Pointer, words):
    """Four words to the 16 bytes at a multiple of 16."""
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {" + "{$r1}, {$r2}, {$r3}, {$r4}" + "};",
        read_only_args=[Int64(target.toint()), *words],
    )


@cute.jit
def as_float(bits: Uint32) -> Float32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


@cached
def compile_indexer_query_grad(heads: int, dim: int, config: IndexerQueryGradConfig):
    """-> f(q [Tq * H, D] bf16, k [Tk, D] bf16, w [Tq * H] fp32, slots [S, 8], di bf16 [S, N, 2, 64, 128],
    active uint32 [S, 2 H, 2 N, 128], dq [Tq * H, D] bf16, dw [Tq * H] fp32, tickets int32 [1] of 0, ctas); rows of q, k
    and dq begin at multiples of 16 bytes."""
    rows, count, blocks = (cute.sym_int() for _ in range(3))

    def fake(dtype, shape, stride, align):
        return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)

    # Offsets in q may pass 32 bits.
    q, k, dq = (fake(BFloat16, (n, dim), (cute.sym_int64(divisibility=8), 1), 16) for n in (rows, cute.sym_int(), rows))
    w, dw = fake(Float32, (rows,), (1,), 4), fake(Float32, (rows,), (1,), 4)
    strides = cute.sym_int64(divisibility=WARPGROUP), cute.sym_int64(divisibility=WARPGROUP), WARPGROUP, 1
    active = fake(Uint32, (count, SLOT_ROWS * heads // GROUP, blocks, WARPGROUP), strides, 16)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = IndexerQueryGradSm90(heads, dim, config)
    return compile_sm90(
        kernel, q, k, w, fake_slots(), fake_gradients(), active, dq, dw, fake_tickets(), Int32(1), stream
    )


def choose_config(heads: int, dim: int) -> IndexerQueryGradConfig:
    """The measured winner: four warpgroups hide what lies between two wgmma best, if their registers suffice. As many
    stages as there is room for, 8 at most."""
    groups, held = (2, 2) if dim == 128 else (4, 1)
    return max(
        (c for n in range(2, 9) if (c := IndexerQueryGradConfig(groups, held, n)).shared(heads, dim) <= SHARED_BYTES),
        key=lambda config: config.stages,
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_indexer_query_grad, (heads, dim, choose_config(heads, dim)))
        for heads in (8, 16, 32, 64)
        for dim in (64, 128)
    ]
