"""Gradients of sparse MLA attention over selected latents, for training.

P[h, j] = exp(scale * q[h] . k[j] - l[h])          dS[h, j] = P[h, j] * (scale * (dO[h] . k[j, :512]) + e[h])
dQ[h] = sum_j dS[h, j] k[j]                        dKV[j] = sum_h dS[h, j] q[h] + P[h, j] dO[h]

The sums run over a query's selected keys j (dQ) and over the heads h of the queries that select j (dKV). dS includes
the factor `scale` of the logits. l[h] is the head's LSE including the attention sink, and e[h] = scale * (dlse[h] /
share[h] - out[h] . dO[h]), where share[h] is the part of the softmax that the sink leaves to the keys (1 without a
sink). The kernels of sparse_mla_backward_sums_sm90.py compute l and e before this kernel, and convert the sums of dKV
to the result after it.

Warp roles
- Two consumer warpgroups alternate key tiles; the warpgroup that computes the scores of a tile is the tile's owner. The
  producer warpgroup gathers keys, loads Q and dO by TMA, and takes work tiles (sparse_mla_backward_producer.py). A work
  tile is 64 heads of a query with all of the query's keys.
- The scheduler is dynamic and persistent: a CTA takes its next work tile from a tile counter while it still computes
  the current one. L2 reductions are not equally fast from all SMs: with a static schedule the fastest SMs finish 5%
  before the slowest.
Pipeline
- Q and dO of a work tile stay in shared memory, together with one tile of 64 keys.
- The owner of a key tile has keys as rows: S^T = K Q^T and dP^T = K dO^T. So P^T is in the owner's registers in the
  layout of operand A of dKV = P^T dO + dS^T Q. The owner passes dS to both consumers through shared memory. Each
  consumer keeps half of the channels of dQ += dS K in registers for the whole work tile.
- After dQ += dS K the consumers release the keys, and the producer gathers the next tile. Meanwhile, the owner computes
  one strip of dKV's channels (`BackwardConfig.strip`) at a time and adds it to global memory by vector reductions from
  registers. The other consumer computes the next tile's scores.
- In a work tile's last key tile, the owner releases each chunk of Q and dO as soon as the chunk's dKV is computed. So
  the other consumer can start the scores of the next work tile's first key tile.
Sums of dKV
- The sums are in fp32, in the threads' register order: of each 16 channels, lane q of a quad has channels 2q, 2q + 1,
  2q + 8, 2q + 9, which it adds as 16 adjacent bytes. With `ordered` the owner stores each tile's dKV to separate
  rows, in the same order of channels, and another kernel sums these rows in a fixed order.
- Vector reductions are fastest on whole lines of 128 bytes. So lanes exchange numbers until eight lanes have a line.
- For an invalid index the key is a row of zeros in shared memory and P = 0. Without `ordered`, its dKV is added to a
  padding row. There is one per CTA, after the rows of the keys.
Shared memory at d = 576: Q 72 KiB, dO 64, K 72, dS 8 per consumer warpgroup. The epilogue stages dQ in the memory of
dS.
Registers: a consumer thread has 232. It needs
- d = 576: 144 for dQ. For dKV, 16 more each for P^T, dS^T and a strip of dKV. For the scores, 32 more for S and 16 for
  dP, which is computed in two parts.
- d = 512: 128 for dQ. For dKV, 16 more for P^T and 32 for a strip of dKV. For the scores, 32 more each for S and dP.
Roofline: bound by L2 reductions, 144 KiB per tile of 576 channels: 8800 cycles at 3.8 TB/s, the rate at which the L2
cache adds (for plain stores the rate is 4.6 TB/s). wgmma takes 5504 cycles, and shared memory takes about 6000 cycles
to deliver wgmma's operands.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.copies import tile_load
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream
from dsa.cute.pipeline import Mbarriers, Pipeline, arrive, pipeline_storage
from dsa.cute.shared_memory import pack, store_matrices, swizzled
from dsa.cute.sm90 import SHARED_BYTES, WARPGROUP, opaque
from dsa.cute.tile_counter import fake_tile_counter
from dsa.cute.work_tile import WorkTilePipeline, work_tile_storage
from dsa.kernels.training.fake_tensors import ShippedVariants, fake_head_terms, fake_indices, fake_rows
from dsa.kernels.training.global_sums import add_4, store_4
from dsa.kernels.training.limits import MLA_CHANNELS, SPARSE_DTYPES
from dsa.kernels.training.mainloop import (
    K_MAJOR,
    MN_MAJOR,
    accumulator,
    finish_prologue,
    smem_layout,
    swap_modes,
    thread_indices,
    tiled_mma,
    words_of,
)
from dsa.kernels.training.sparse_mla_backward_producer import (
    CHUNK,
    CHUNKS,
    CONSUMER_WARPS,
    HALF,
    HALF_CHUNKS,
    HEADS,
    KEY_ROW_STAGES,
    ROPE_HALF,
    THREADS,
    TILE,
    VALUE,
    BackwardConfig,
    BackwardPipelines,
    BackwardProducer,
    SharedTensors,
    TileScheduler,
    WorkTileInfo,
    k_state,
    next_key_tile,
    next_work_tile,
    q_state,
    work_tile_state,
)
from dsa.kernels.training.topk_gather import wait_for_wgmma
from dsa.runtime.compile_cache import cached, compile_sm90

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
STAGED_CHANNELS = 32  # channels of dQ that a warp stages at a time


class SparseMlaBackwardSm90:
    def __init__(self, cfg: BackwardConfig):
        self.cfg, self.dtype, self.channels, self.ordered = cfg, cfg.dtype, cfg.channels, cfg.ordered
        self.rope, self.strip = cfg.rope, cfg.strip
        # Number of parts into which the 64 heads are divided for dP. With a rope part, S and dQ leave too few registers
        # for all of dP.
        self.dp_parts = 2 if cfg.rope else 1

    def product(self, a_major, b_major, columns: int, from_registers: bool = False) -> cute.TiledMma:
        """Return a tiled MMA of 64 rows x `columns`. Each use makes a new TiledMma: after a loop or branch that sets a
        field of a TiledMma, this TiledMma is unusable."""
        return tiled_mma(self.dtype, (TILE, columns), (a_major, b_major), from_registers)

    def chunks_layout(self, columns: int, count: int) -> cute.ComposedLayout:
        return smem_layout(64, columns, self.dtype, count)

    def load_atom(self, x: cute.Tensor, layout: cute.ComposedLayout):
        """-> (the TMA atom that loads 64 heads x a strip of x [T, H, d], its TMA tensor [H, d, T])."""
        tokens_last = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 2, 0]))
        return tile_load(tokens_last, layout, (HEADS, self.strip))

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        dout: cute.Tensor,
        head_terms: cute.Tensor,
        indices: cute.Tensor,
        dq: cute.Tensor,
        dkv: cute.Tensor,
        tile_counter: cute.Tensor,
        scale: Float32,
        scale_log2: Float32,
        ctas: Int32,
        stream,
    ):
        layout, rope_layout = self.chunks_layout(CHUNK, CHUNKS), self.chunks_layout(ROPE_HALF, 2)
        q_layout, do_layout = (self.chunks_layout(self.strip, d // self.strip) for d in (self.channels, VALUE))
        half_layout = self.chunks_layout(HALF, 2)
        ds_layout = self.chunks_layout(CHUNK, 2)
        rope_size = cute.cosize(rope_layout) if self.rope else 8

        @cute.struct
        class Storage:
            work_tiles: work_tile_storage(WorkTileInfo)
            q_barriers: pipeline_storage(len(self.cfg.query_chunks))
            k_barriers: pipeline_storage(2, self.cfg.k_parts)
            ds_full: cute.struct.MemRange[Int64, 1]
            key_rows: cute.struct.Align[cute.struct.MemRange[Int32, TILE * KEY_ROW_STAGES], 16]
            head_terms: cute.struct.Align[cute.struct.MemRange[Float32, HEADS * 2], 16]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]
            k_rope: cute.struct.Align[cute.struct.MemRange[self.dtype, rope_size], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            do: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(do_layout)], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(ds_layout)], 1024]

        assert Storage.size_in_bytes() <= SHARED_BYTES
        self.storage = Storage
        q_atom, q_tma = self.load_atom(q, q_layout)
        do_atom, do_tma = self.load_atom(dout, do_layout)
        head_tiles = cute.ceil_div(q.shape[1], HEADS)
        scheduler = TileScheduler(
            *(q.shape[0] * head_tiles, cute.ceil_div(indices.shape[1], TILE), ctas),
            cute.fast_divmod_create_divisor_v2(head_tiles),
        )
        self.kernel(
            *((q_atom, do_atom), (q_tma, do_tma)),
            *(q, kv, dout, head_terms, indices, dq, dkv, tile_counter, scale, scale_log2, scheduler),
            *((layout, rope_layout, half_layout, q_layout, do_layout, ds_layout),),
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        atoms: tuple[cute.CopyAtom, cute.CopyAtom],
        sources: tuple[cute.Tensor, cute.Tensor],
        q: cute.Tensor,
        kv: cute.Tensor,
        dout: cute.Tensor,
        head_terms: cute.Tensor,
        indices: cute.Tensor,
        dq: cute.Tensor,
        dkv: cute.Tensor,
        tile_counter: cute.Tensor,
        scale: Float32,
        scale_log2: Float32,
        scheduler: TileScheduler,
        layouts: tuple[cute.ComposedLayout, ...],
    ):
        tid, warp, lane = thread_indices()
        storage = SmemAllocator().allocate(self.storage)
        layout, rope_layout, half_layout, q_layout, do_layout, ds_layout = layouts
        shared = SharedTensors(
            storage.k.get_tensor(layout.outer, swizzle=layout.inner),
            storage.k_rope.get_tensor(rope_layout.outer, swizzle=rope_layout.inner),
            storage.k.get_tensor(half_layout.outer, swizzle=half_layout.inner),
            storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner),
            storage.do.get_tensor(do_layout.outer, swizzle=do_layout.inner),
            storage.ds.get_tensor(ds_layout.outer, swizzle=ds_layout.inner),
            Int32(storage.head_terms.data_ptr().toint()),
            storage.key_rows.get_tensor(cute.make_layout((TILE, KEY_ROW_STAGES))),
        )
        pipelines = BackwardPipelines(
            WorkTilePipeline.of(storage.work_tiles, WorkTileInfo),
            Pipeline.of(storage.q_barriers, len(self.cfg.query_chunks)),
            Pipeline.of(storage.k_barriers, 2, self.cfg.k_parts),
            Mbarriers(storage.ds_full.data_ptr(), 1),
        )
        if tid == 0:
            pipelines.init()
        finish_prologue()

        if warp >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            BackwardProducer(self.cfg).run(
                *(atoms, sources, (q, kv, dout, head_terms, indices, tile_counter), scheduler, shared, pipelines),
                *(warp - CONSUMER_WARPS, lane),
            )
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(
                *(kv.shape[0], dq, dkv, scale, scale_log2, scheduler, shared, pipelines),
                *(tid & (WARPGROUP - 1), warp & 3, lane, warp >> 2),
            )

    @cute.jit
    def consume(
        self,
        keys,
        dq,
        dkv,
        scale,
        scale_log2,
        scheduler: TileScheduler,
        shared: SharedTensors,
        pipelines: BackwardPipelines,
        tid,
        warp,
        lane,
        side,
    ):
        flat = cute.make_rmem_tensor((HALF // 2,), Float32)
        flat_rope = cute.make_rmem_tensor((ROPE_HALF // 2,), Float32)
        p_shape = (
            self.product(K_MAJOR, MN_MAJOR, CHUNK, from_registers=True).get_slice(tid).partition_shape_A((TILE, HEADS))
        )
        work_tiles = pipelines.work_tiles
        count = Int32(0)
        while work_tiles.current(work_tile_state(count)).number < scheduler.work_tiles:
            flat.fill(0.0)
            flat_rope.fill(0.0)
            if (count & 1) != side:
                # Here the other warpgroup owns the work tile's first key tile. `score` waits for Q and dO only in that
                # tile, so this warpgroup waits for them now.
                for chunk in self.cfg.query_chunks:
                    pipelines.q_chunk(chunk).consumer_wait(q_state(count))
            for tile in cutlass.range(scheduler.key_tiles, unroll=1):
                # The two consumers alternate key tiles, also across work tiles.
                p, ds = (cute.make_rmem_tensor(p_shape, self.dtype) for _ in range(2))
                if (count & 1) == side:
                    self.score(p, ds, scale, scale_log2, shared, pipelines, count, tile, tid, warp, lane, side)
                self.add_dq(flat, flat_rope, shared, pipelines, count, tid, side)
                if (count & 1) == side:
                    tile_index = Int32(0)
                    if const_expr(self.ordered):
                        tile_index = work_tiles.read(work_tile_state(count)).number * scheduler.key_tiles + tile
                    self.add_dkv(
                        *(p, ds, dkv, keys, tile_index, shared, pipelines, count, tile == scheduler.key_tiles - 1),
                        *(tid, warp, lane, side),
                    )
                count = next_key_tile(count)
            if (count & 1) != side:
                # This warpgroup owned the last key tile, and `store_dq` overwrites the tile's dS. So wait until both
                # halves of the keys are released: each consumer releases its half after it has read dS.
                for half in cutlass.range_constexpr(2):
                    pipelines.k_half(half).producer_wait(k_state(count))
            else:
                with cute.arch.elect_one():
                    for chunk in self.cfg.query_chunks:
                        arrive(pipelines.q_chunk(chunk).consumer_barrier(q_state(count)))
            query, first = scheduler.coordinates(work_tiles.read(work_tile_state(count)).number)
            work_tiles.release(work_tile_state(count))
            self.store_dq(flat, flat_rope, dq, query, first, shared, side, warp, lane)
            count = next_work_tile(count)

    @cute.jit
    def score(
        self,
        p,
        ds,
        scale,
        scale_log2,
        shared: SharedTensors,
        pipelines: BackwardPipelines,
        count,
        tile,
        tid,
        warp,
        lane,
        side,
    ):
        """Compute P^T and dS^T of a key tile, for the tile's owner. Put P^T into p, a 16-bit operand A in registers.
        Store dS to shared memory; with a rope part, also put dS^T into ds, another operand A in registers."""
        mma = self.product(K_MAJOR, K_MAJOR, HEADS)
        thr = mma.get_slice(tid)
        rk, rq = mma.make_fragment_A(thr.partition_A(shared.k)), mma.make_fragment_B(thr.partition_B(shared.q))
        rk_rope = mma.make_fragment_A(thr.partition_A(shared.k_rope))
        s, flat_s = accumulator(thr, (TILE, HEADS))
        # An index offset of 0 that ptxas cannot fold. If ptxas knew the addresses, it would keep the descriptors of all
        # chunks in registers from S until dP.
        zero = opaque(count & 1) >> 1
        for half in cutlass.range_constexpr(2):
            for part in cutlass.range_constexpr(self.cfg.k_parts):
                is_rope = part == HALF_CHUNKS
                chunk = CHUNKS if is_rope else half * HALF_CHUNKS + part
                if const_expr(not is_rope or half == 0):  # one chunk of Q serves both halves of the keys' rope part
                    if tile == 0:
                        pipelines.q_chunk(chunk).consumer_wait(q_state(count))
                wait_for_wgmma(pipelines.k_half(half), k_state(count), part)
                if const_expr(is_rope):
                    first = VALUE + half * ROPE_HALF
                    pairs = [
                        (rk_rope[None, None, i, half], self.step_of(rq, zero, first + 16 * i))
                        for i in range(ROPE_HALF // 16)
                    ]
                else:
                    own = zero + chunk
                    pairs = [
                        (rk[None, None, i, own], self.step_of(rq, zero, chunk * CHUNK + 16 * i))
                        for i in range(CHUNK // 16)
                    ]
                if const_expr(half + part == 0):
                    cute.nvgpu.warpgroup.fence()
                for i, (a, b) in enumerate(pairs):
                    mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, half + part + i > 0)
                    cute.gemm(mma, s, a, b, s)
        cute.nvgpu.warpgroup.commit_group()

        heads = HEADS // self.dp_parts
        part_mma = self.product(K_MAJOR, K_MAJOR, heads)
        thr_part = part_mma.get_slice(tid)
        rv = part_mma.make_fragment_A(thr_part.partition_A(shared.k))
        dp, flat_dp = accumulator(thr_part, (TILE, heads))
        self.issue_dp(part_mma, dp, rv, shared, thr_part, count, 0)
        lane = opaque(lane)
        own = warp * 16 + (lane >> 2)
        invalid = [shared.key_rows[own + 8 * r, count & (KEY_ROW_STAGES - 1)] < 0 for r in range(2)]
        cute.nvgpu.warpgroup.wait_group(1)
        if cute.arch.vote_any_sync(invalid[0] or invalid[1]):
            for i in cutlass.range_constexpr(HEADS // 2):
                if invalid[i // 2 % 2]:
                    flat_s[i] = -Float32(float("inf"))
        p_words, ds_words = (words_of(x, HEADS // 4) for x in (p, ds))
        start = Int32(shared.ds.iterator.toint()) + side * (2 * TILE * HEADS)
        row = warp * 16 + (lane & 15)
        for part in cutlass.range_constexpr(self.dp_parts):
            for j in cutlass.range_constexpr(part * heads // 8, (part + 1) * heads // 8):
                lse = self.head_terms_of(shared, j, lane)
                for i in cutlass.range_constexpr(4):
                    at = 4 * j + i
                    flat_s[at] = cute.math.exp2(cute.math.fma(flat_s[at], scale_log2, -lse[i % 2 * 2]), fastmath=True)
            cute.nvgpu.warpgroup.wait_group(0)
            for i in cutlass.range_constexpr(part * heads // 16, (part + 1) * heads // 16):
                words = []
                for j in cutlass.range_constexpr(2 * i, 2 * i + 2):
                    terms = self.head_terms_of(shared, j, lane)
                    for r in cutlass.range_constexpr(2):
                        weights, slopes = [], []
                        for b in cutlass.range_constexpr(2):
                            at = 4 * j + 2 * r + b
                            slopes.append(
                                flat_s[at] * cute.math.fma(flat_dp[at - part * heads // 2], scale, terms[2 * b + 1])
                            )
                            weights.append(flat_s[at])
                        p_words[2 * j + r] = pack(*weights, self.dtype)
                        words.append(pack(*slopes, self.dtype))
                        if const_expr(self.rope):
                            ds_words[2 * j + r] = words[-1]
                store_matrices(start + 2 * swizzled(row, 2 * i + (lane >> 4)), words)
            if const_expr(part + 1 < self.dp_parts):
                self.issue_dp(part_mma, dp, rv, shared, thr_part, count, part + 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        pipelines.ds_full.arrive()

    @cute.jit
    def issue_dp(self, mma, dp, rv, shared: SharedTensors, thr, count, part: cutlass.Constexpr):
        """Issue dP^T = K dO^T for part `part` of the heads (see `dp_parts`), without waiting."""
        shape = HEADS // self.dp_parts, self.strip, VALUE // self.strip
        rdo = mma.make_fragment_B(thr.partition_B(cute.local_tile(shared.do, shape, (part, 0, 0))))
        zero = opaque(count & 1) >> (2 + part)
        cute.nvgpu.warpgroup.fence()
        for chunk in range(CHUNKS):
            for i in range(CHUNK // 16):
                mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, chunk + i > 0)
                cute.gemm(mma, dp, rv[None, None, i, zero + chunk], self.step_of(rdo, zero, chunk * CHUNK + 16 * i), dp)
        cute.nvgpu.warpgroup.commit_group()

    def step_of(self, fragment, zero, channel: int):
        """Return the part of an operand's fragment for channels `channel` to `channel` + 15. The operand is stored in
        strips. zero: a 0 that ptxas cannot fold (see `score`), so that ptxas does not keep the descriptors in
        registers."""
        return fragment[None, None, channel % self.strip // 16, zero + channel // self.strip]

    @cute.jit
    def head_terms_of(self, shared: SharedTensors, j: cutlass.Constexpr, lane):
        """Return (l / ln 2, e, l / ln 2, e) of the lane's two heads among the heads 8 j to 8 j + 7."""
        return cute.arch.inline_ptx(
            "ld.shared.v4.f32 {" + "{$w0}, {$w1}, {$w2}, {$w3}" + "}, [{$r0}];",
            write_only_types=[Float32] * 4,
            read_only_args=[shared.head_terms + (8 * j + 2 * (lane & 3)) * 8],
        )

    @cute.jit
    def add_dq(self, flat, flat_rope, shared: SharedTensors, pipelines: BackwardPipelines, count, tid, side):
        """Compute dQ += dS K for this warpgroup's half of the channels. Then release this half of the keys."""
        mma, rope = self.product(MN_MAJOR, MN_MAJOR, HALF), self.product(MN_MAJOR, MN_MAJOR, ROPE_HALF)
        thr, thr_rope = mma.get_slice(tid), rope.get_slice(tid)
        ds = swap_modes(shared.ds)
        rds = mma.make_fragment_A(thr.partition_A(ds))
        rk = mma.make_fragment_B(thr.partition_B(swap_modes(shared.k_half)))
        rope_ds = rope.make_fragment_A(thr_rope.partition_A(ds))
        rk_rope = rope.make_fragment_B(thr_rope.partition_B(swap_modes(shared.k_rope)))
        acc = cute.make_tensor(flat.iterator, cute.make_layout(thr.partition_shape_C((HEADS, HALF))))
        acc_rope = cute.make_tensor(
            flat_rope.iterator, cute.make_layout(thr_rope.partition_shape_C((HEADS, ROPE_HALF)))
        )
        pipelines.ds_full.wait(count & 1)
        cute.nvgpu.warpgroup.fence()
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        rope.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        for step in cutlass.range_constexpr(TILE // 16):
            cute.gemm(mma, acc, rds[None, None, step, count & 1], rk[None, None, step, side], acc)
            if const_expr(self.rope):
                a, b = rope_ds[None, None, step, count & 1], rk_rope[None, None, step, side]
                cute.gemm(rope, acc_rope, a, b, acc_rope)
        cute.nvgpu.warpgroup.commit_group()
        cute.nvgpu.warpgroup.wait_group(0)
        pipelines.k_half(side).consumer_release(k_state(count))

    @cute.jit
    def add_dkv(
        self,
        p,
        ds,
        dkv,
        keys,
        tile_index,
        shared: SharedTensors,
        pipelines: BackwardPipelines,
        count,
        last,
        tid,
        warp,
        lane,
        side,
    ):
        """Compute dKV += P^T dO + dS^T Q for the keys of a tile, strip by strip, for the tile's owner. tile_index: with
        `ordered`, index of the tile among the key tiles of all work tiles. last: whether this is the work tile's last
        key tile; then release the chunks of Q and dO."""
        lane = opaque(lane)
        # Lanes l and l ^ 4 have adjacent rows (keys). After an exchange, the eight lanes of their two quads add 128
        # adjacent bytes to one of the two rows at a time (`add_columns`).
        odd = (lane >> 2) & 1
        pair = warp * 16 + (lane >> 3) * 2
        start, stride = Int64(dkv.iterator.toint()) + ((lane & 3) * 16), 4 * self.channels
        targets = []
        stage = count & (KEY_ROW_STAGES - 1)
        block, _, _ = cute.arch.block_idx()
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                if const_expr(self.ordered):
                    number = Int64(tile_index) * TILE + (pair + 8 * r + i)
                else:
                    row = shared.key_rows[pair + 8 * r + i, stage]
                    number = Int64(row if row >= 0 else keys + block)
                # Of each 32 numbers of a row, a lane adds to the first 16 in the row of the lane's quad, and to the
                # last 16 in the other quad's row.
                targets.append(start + (number * stride + (odd ^ i) * 64))
        with_p = with_ds = self.product(K_MAJOR, MN_MAJOR, self.strip, from_registers=True)
        if const_expr(not self.rope):
            with_ds = self.product(K_MAJOR, MN_MAJOR, self.strip)
        thr = with_ds.get_slice(tid)
        rdo, rq = (with_ds.make_fragment_B(thr.partition_B(swap_modes(x))) for x in (shared.do, shared.q))
        rds = with_ds.make_fragment_A(thr.partition_A(shared.ds)) if not self.rope else None
        acc, flat = accumulator(thr, (TILE, self.strip))
        zero = opaque(stage) >> 2
        # Start with the rope part, because the producer reloads the chunks of Q and dO in the order of `query_chunks`.
        for first in [*range(VALUE, self.channels, self.strip), *range(0, VALUE, self.strip)]:
            strip, valued = zero + first // self.strip, first < VALUE
            cute.nvgpu.warpgroup.fence()
            if const_expr(valued):
                for step in cutlass.range_constexpr(HEADS // 16):
                    with_p.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, step > 0)
                    cute.gemm(with_p, acc, p[None, None, step], rdo[None, None, step, strip], acc)
            for step in cutlass.range_constexpr(HEADS // 16):
                with_ds.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, valued or step > 0)
                weights = ds[None, None, step] if const_expr(self.rope) else rds[None, None, step, side]
                cute.gemm(with_ds, acc, weights, rq[None, None, step, strip], acc)
            cute.nvgpu.warpgroup.commit_group()
            cute.nvgpu.warpgroup.wait_group(0)
            if const_expr((first + self.strip) % CHUNK == 0):
                with cute.arch.elect_one():
                    if last:  # inside elect_one this becomes the arrive's predicate; outside it would be a branch
                        arrive(pipelines.q_chunk(first // CHUNK).consumer_barrier(q_state(count)))
            self.add_columns(flat, first, targets, odd)

    @cute.jit
    def add_columns(self, flat, first: cutlass.Constexpr, targets, odd):
        """Add a strip of dKV, from channel `first` on, to the rows (keys) of this lane and of lane ^ 4. With `ordered`,
        store it there. targets: addresses in these rows. odd: whether this lane's row is the second of the two."""
        for line in cutlass.range_constexpr(self.strip // 32):
            for r in cutlass.range_constexpr(2):
                even_row, odd_row = [], []
                for n in cutlass.range_constexpr(4):
                    at = 16 * line + 4 * (n // 2) + 2 * r + n % 2
                    own, other = flat[at], cute.arch.shuffle_sync_bfly(flat[at + 8], offset=4)
                    even_row.append(other if odd > 0 else own)
                    odd_row.append(own if odd > 0 else other)
                for i, numbers in enumerate((even_row, odd_row)):
                    target = targets[2 * r + i] + 4 * (first + 32 * line)
                    if const_expr(self.ordered):
                        store_4(target, numbers)
                    else:
                        add_4(target, numbers)
                cute.arch.sync_warp()

    @cute.jit
    def store_dq(self, flat, flat_rope, dq, query, first, shared: SharedTensors, side, warp, lane):
        """Store dQ of this warp's 16 heads and its warpgroup's half of the channels. The warp stages dQ, 1 KiB at a
        time, in the warpgroup's dS: in the rows of the 16 keys that this warp writes in `score`. The warp must not use
        other rows: another warp can still read its own rows for dKV, or already write them for the next work tile."""
        staging = cute.recast_ptr(shared.ds.iterator, cute.make_swizzle(0, 4, 3), dtype=self.dtype)
        lane, warp = opaque(lane), opaque(warp)
        staging += side * (TILE * HEADS) + warp * (16 * HEADS)
        vector = cute.make_rmem_tensor((8,), self.dtype)
        for i in cutlass.range_constexpr(HALF // STAGED_CHANNELS + (1 if self.rope else 0)):
            source, base = flat, i * 16
            channel = side * HALF + i * STAGED_CHANNELS
            if const_expr(i == HALF // STAGED_CHANNELS):
                source, base, channel = flat_rope, 0, VALUE + side * ROPE_HALF
            for j in cutlass.range_constexpr(2):
                at = base + 8 * j
                words = [pack(source[at + 2 * n], source[at + 2 * n + 1], self.dtype) for n in range(4)]
                offset = self.staging_offset(lane & 15, 2 * j + (lane >> 4))
                store_matrices(Int32((staging + offset).toint()), words)
            cute.arch.sync_warp()
            for r in cutlass.range_constexpr(2):
                row = (lane >> 2) + 8 * r
                cute.autovec_copy(
                    cute.make_tensor(staging + self.staging_offset(row, lane & 3), cute.make_layout(8)), vector
                )
                head = first + warp * 16 + row
                if head < dq.shape[1]:
                    target = cute.local_tile(dq[query, head, None], (8,), (channel // 8 + (lane & 3),))
                    cute.autovec_copy(vector, target)
            cute.arch.sync_warp()

    @cute.jit
    def staging_offset(self, row, vector):
        """Return the offset, in elements, of vector `vector` (8 elements) in a row of the 16 x 32 staging buffer. The
        swizzle avoids bank conflicts."""
        return row * STAGED_CHANNELS + (vector ^ ((row >> 1) & 3)) * 8


@cached
def compile_sparse_mla_backward(dtype: str, channels: int, ordered: bool):
    """-> f(q [T, H, d], kv [Tk, d], dout [T, H, 512], head_terms [T, ceil(H / 64), 128] fp32, indices [T, K] int32,
    dq [T, H, d], dkv [Tk + ctas, d] fp32, tile_counter [1] int32, initially 0, scale, scale / ln 2, ctas). The tensors
    without a dtype here are of `dtype`. dq is a result; the kernel adds to dkv, whose last `ctas` rows are padding.
    With `ordered` it stores to dkv, which then has K rows per work tile, rounded up to whole key tiles.
    ctas: number of persistent CTAs."""
    kind = cute_dtype(dtype)
    queries, heads = cute.sym_int(), cute.sym_int()
    q, dout, dq = (fake_rows(kind, queries, heads, width) for width in (channels, VALUE, channels))
    dkv = fake(Float32, (cute.sym_int(), channels), (channels, 1))
    return compile_sm90(
        SparseMlaBackwardSm90(BackwardConfig(kind, channels, ordered)),
        *(q, fake_rows(kind, cute.sym_int(), channels), dout, fake_head_terms(queries), fake_indices(queries), dq, dkv),
        *(fake_tile_counter(), Float32(0.0), Float32(0.0), Int32(1), fake_stream()),
    )


def shipped_variants() -> ShippedVariants:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [
        (compile_sparse_mla_backward, (dtype, channels, ordered))
        for dtype in SPARSE_DTYPES
        for channels in MLA_CHANNELS
        for ordered in (False, True)
    ]
