"""The warm-up's target and loss. The target is the attention's distribution, averaged over heads. The loss compares the
indexer's distribution with the target.

p[t, s] = mean_h exp(scale q_h[t] . k[s] - lse_h);   kl[t] = sum_s p (ln p - (I - lse_I))
dI[t, s] = g[t] (exp(I - lse_I) - p)

lse_h[t] is the LSE of attention head h, I[t, s] are the indexer's scores, lse_I[t] is their LSE over s, and g[t] is the
gradient of kl[t].

Plan
- A work tile is the 128 queries of a q tile (q_tiles.py) x 128 keys. The scheduler is static and persistent, over the
  key tiles of all q tiles. Per head, wgmma computes S = Q K^T, and the consumers add the exponentials of S to sums in
  registers. No other result of a head is kept.
- With up to 128 channels there are two accumulators. A head's exponentials overlap the next head's wgmma and the other
  warpgroup's wgmma. With 192 and 576 channels there is one accumulator, and the product is computed in chunks of 64
  channels. The wgmma of one warpgroup overlaps the exponentials of the other.
- One producer warp loads by TMA: Q of every head, and K once for all heads that share it. It also prefetches the tile's
  scores into the L2 cache for the epilogue. With up to 128 channels the consumers load the scores during the last
  head's wgmma.
- The epilogue masks the pairs (query, key) in which the query does not see the key, so garbage never mixes with valid
  values.
- dI overwrites the scores, in bf16. A warpgroup's 64 rows of dI use the memory of the same rows' scores. The
  warpgroup reads all of these scores before it writes any dI, so it need not wait for the other warpgroup.
Constraints: bf16; 64, 128, 192 or 576 channels per head. Any number of heads.
Shared memory: 192 or 208 KiB of stages. Registers: a consumer thread has 240, including 64 sums and one or two
accumulators of 64.
Roofline: per work tile and head of 128 channels, wgmma takes 1024 cycles, and so do the exponentials on the MUFU.
Measured: 1750 to 1900 cycles.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.copies import prefetch_to_l2, tile_load
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream
from dsa.cute.pipeline import Pipeline, pipeline_storage, start
from dsa.cute.shared_memory import pack
from dsa.cute.sm90 import LN2, LOG2E, SHARED_BYTES, WARP, WARPGROUP, opaque
from dsa.cute.work_tile import static_persistent_scheduler
from dsa.kernels.training.fake_tensors import ShippedVariants, fake_line, fake_q_tiles, fake_rows, fake_tiles
from dsa.kernels.training.limits import K_TILE, Q_TILE, WARMUP_CHANNELS
from dsa.kernels.training.mainloop import (
    accumulator,
    finish_prologue,
    flatten,
    load_stage,
    release,
    smem_layout,
    thread_indices,
    tiled_mma,
    tma_tiles,
)
from dsa.kernels.training.q_tiles import load_q_tile
from dsa.runtime.compile_cache import cached, compile_sm90

# (channels per stage, stages of queries, stages of keys), keyed by the number of channels of a head. A stage is 128
# queries or 128 keys. With 576 channels a tile of keys of one KV head fills all nine stages of keys.
STAGES = {64: (64, 8, 5), 128: (128, 3, 3), 192: (64, 7, 6), 576: (64, 4, 9)}
CONSUMER_WARPS, THREADS = 8, 3 * WARPGROUP  # two consumer warpgroups, then one whose first warp is the producer
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
SCORES_READ_BARRIER = 1  # consumer warpgroup i uses named barrier SCORES_READ_BARRIER + i
TINY = 1.2e-38  # about the smallest normal fp32


class WarmupTargetSm90:
    def __init__(self, dtype: type[cutlass.Numeric], dim: int):
        self.dtype = dtype
        self.chunk, self.query_stages, self.key_stages = STAGES[dim]
        self.chunks = dim // self.chunk

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        lse: cute.Tensor,
        lse_idx: cute.Tensor,
        upstream: cute.Tensor,
        q_tiles: cute.Tensor,
        key_tiles: cute.Tensor,
        scores: cute.Tensor,
        kl_parts: cute.Tensor,
        scale: Float32,
        group: Int32,
        ctas: Int32,
        stream,
    ):
        q_layout = smem_layout(Q_TILE, self.chunk, self.dtype, self.query_stages)
        k_layout = smem_layout(K_TILE, self.chunk, self.dtype, self.key_stages)
        # Make heads the last dimension, so that the TMA tiles are rows x channels.
        q, k = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1])) for x in (q, k))
        q_atom, q_tma = tile_load(q, q_layout, (Q_TILE, self.chunk))
        k_atom, k_tma = tile_load(k, k_layout, (K_TILE, self.chunk))

        @cute.struct
        class Storage:
            q_barriers: pipeline_storage(self.query_stages)
            k_barriers: pipeline_storage(self.key_stages)
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]

        assert Storage.size_in_bytes() <= SHARED_BYTES
        self.storage = Storage
        heads = lse.shape[0]
        self.kernel(
            *(q_atom, q_tma, k_atom, k_tma, lse, lse_idx, upstream, q_tiles, key_tiles, scores, kl_parts),
            *(scale * LOG2E, cute.fast_divmod_create_divisor_v2(group), heads, q_layout, k_layout),
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

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
        q_tiles: cute.Tensor,
        key_tiles: cute.Tensor,
        scores: cute.Tensor,
        kl_parts: cute.Tensor,
        scale: Float32,
        group: cute.FastDivmodDivisorV2,
        heads: Int32,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
    ):
        tid, warp, lane = thread_indices()
        storage = SmemAllocator().allocate(self.storage)
        pipelines = (
            Pipeline.of(storage.q_barriers, self.query_stages),
            Pipeline.of(storage.k_barriers, self.key_stages),
        )
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        if warp == CONSUMER_WARPS:
            cute.nvgpu.cpasync.prefetch_descriptor(q_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(k_atom)
        if tid == 0:
            for pipeline in pipelines:
                pipeline.init(CONSUMER_WARPS)
        finish_prologue()
        if warp >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == CONSUMER_WARPS:
                self.produce(q_atom, mq, k_atom, mk, q_tiles, key_tiles, scores, group, heads, sq, sk, *pipelines, lane)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(
                *(
                    lse,
                    lse_idx,
                    upstream,
                    q_tiles,
                    key_tiles,
                    scores,
                    kl_parts,
                    scale,
                    group,
                    heads,
                    sq,
                    sk,
                    *pipelines,
                ),
                *(warp, lane),
            )

    @cute.jit
    def work_tile(self, index, q_tile, key_tiles, lane):
        """Find work tile `index`, starting the search at q tile `q_tile`. Called by a whole warp. -> (index of the q
        tile, index of the key tile in the q tile)."""
        count = key_tiles.shape[0] - 1
        steps = Int32(WARP)
        while steps == WARP:
            passed = key_tiles[cutlass.min(q_tile + 1 + lane, count)] <= index
            steps = cute.arch.popc(cute.arch.vote_ballot_sync(passed))
            q_tile += steps
        return q_tile, index - key_tiles[q_tile]

    @cute.jit
    def produce(
        self,
        q_atom,
        mq,
        k_atom,
        mk,
        q_tiles,
        key_tiles,
        scores,
        group,
        heads,
        sq,
        sk,
        queries: Pipeline,
        keys: Pipeline,
        lane,
    ):
        scheduler = static_persistent_scheduler()
        size = Q_TILE * self.chunk * self.dtype.width // 8
        q_state, k_state, number = start(), start(), Int32(0)
        begin, end = key_tiles[0], key_tiles[key_tiles.shape[0] - 1]
        for index in cutlass.range(begin + scheduler.first, end, scheduler.step, unroll=1):
            number, key_tile = self.work_tile(index, number, key_tiles, lane)
            q_tile = load_q_tile(q_tiles, number)
            with cute.arch.elect_one():
                prefetch_to_l2(Int64(scores[number, key_tile, None, None].iterator.toint()), Int32(Q_TILE * K_TILE * 4))
            key = q_tile.first_k + key_tile * K_TILE
            tqs, tqg = tma_tiles(q_atom, sq, mq, (Q_TILE, self.chunk), (q_tile.first_q, 0, 0), (0, None, None))
            tks, tkg = tma_tiles(k_atom, sk, mk, (K_TILE, self.chunk), (key, 0, 0), (0, None, None))
            loaded = Int32(-1)
            for h in cutlass.range(heads + (heads & 1 if const_expr(self.chunks == 1) else 0), unroll=1):
                head = cutlass.min(h, heads - 1)
                key_head = head // group
                for chunk in cutlass.range(self.chunks, unroll=1):
                    q_state = load_stage(queries, q_state, size, q_atom, tqg[None, chunk, head], tqs)
                    if key_head != loaded:
                        k_state = load_stage(keys, k_state, size, k_atom, tkg[None, chunk, key_head], tks)
                loaded = key_head

    @cute.jit
    def consume(
        self,
        lse,
        lse_idx,
        upstream,
        q_tiles,
        key_tiles,
        scores,
        kl_parts,
        scale,
        group,
        heads,
        sq,
        sk,
        queries: Pipeline,
        keys: Pipeline,
        warp,
        lane,
    ):
        mma = tiled_mma(self.dtype, (64, K_TILE), warpgroups=2)
        # Get the slice by the warpgroup's first thread instead of this thread. So the compiler knows that operand
        # addresses are uniform in a warp.
        thr = mma.get_slice(cute.arch.make_warp_uniform(warp // 4) * WARPGROUP)
        rq = mma.make_fragment_A(thr.partition_A(sq))
        rk = mma.make_fragment_B(thr.partition_B(sk))
        accs = [accumulator(thr, (Q_TILE, K_TILE))[0] for _ in range(2 if self.chunks == 1 else 1)]
        sums = cute.make_rmem_tensor((K_TILE // 2,), Float32)
        own_row = warp * 16 + (lane >> 2)
        scheduler = static_persistent_scheduler()
        q_state, k_state, number = start(), start(), Int32(0)
        begin, end = key_tiles[0], key_tiles[key_tiles.shape[0] - 1]
        for index in cutlass.range(begin + scheduler.first, end, scheduler.step, unroll=1):
            number, _ = self.work_tile(index, number, key_tiles, lane)
            q_tile = load_q_tile(q_tiles, number)
            rows = [q_tile.first_q + cutlass.min(own_row + 8 * r, q_tile.rows - 1) for r in range(2)]
            sums.fill(0.0)
            if const_expr(self.chunks > 1):
                at = rows
                for h in cutlass.range(heads, unroll=1):
                    less, at = self.load_lse(lse, at, h, heads)
                    q_state, k_state = self.multiply_chunks(
                        accs[0], rq, rk, queries, keys, q_state, k_state, h, group, heads
                    )
                    self.add(sums, accs[0], less, scale)
            else:
                q_state, k_state, less = self.add_overlapped(
                    sums, accs, lse, rq, rk, queries, keys, q_state, k_state, rows, scale, group, heads
                )
            number = opaque(number)  # so the compiler recomputes values derived from `number`, which saves registers
            own = self.load_tile(scores, lse_idx, upstream, q_tiles, key_tiles, number, index, rows, own_row, lane)
            if const_expr(self.chunks == 1):
                last = heads - 1 + (heads & 1)
                q_state, k_state = self.finish_product(queries, keys, q_state, k_state, last, group, heads)
                if heads & 1 == 0:
                    self.add(sums, accs[1], less, scale)
            self.epilogue(sums, own, kl_parts, heads, own_row, lane)

    @cute.jit
    def add_overlapped(
        self, sums, accs, lse, rq, rk, queries: Pipeline, keys: Pipeline, q_state, k_state, rows, scale, group, heads
    ):
        """Issue the products Q K^T of all heads, and add the exponentials of all heads but the last one. A head's
        exponentials overlap the next head's product. If the number of heads is odd, a padding head follows as the last
        one; its product is not used. At the return the last product, in accs[1], is still in flight. -> (the state of
        `queries`, the state of `keys`, the last head's LSEs of the lane's two rows)."""
        padded = heads + (heads & 1)
        less, at = self.load_lse(lse, rows, Int32(0), heads)
        self.wait(queries, keys, q_state, k_state)
        self.multiply(accs[0], rq, rk, q_state.stage, k_state.stage)
        q_state, k_state = self.finish_product(queries, keys, q_state, k_state, Int32(0), group, heads)
        self.wait(queries, keys, q_state, k_state)
        for h in cutlass.range(0, padded - 2, 2, unroll=1):
            for i in cutlass.range_constexpr(2):
                self.multiply(accs[1 - i], rq, rk, q_state.stage, k_state.stage)
                # Load the LSE one head ahead, because the load takes longer than a product.
                ahead, at = self.load_lse(lse, at, h + i + 1, heads)
                self.add(sums, accs[i], less, scale)
                less = ahead
                q_state, k_state = self.finish_product(queries, keys, q_state, k_state, h + i + 1, group, heads)
                self.wait(queries, keys, q_state, k_state)
        self.multiply(accs[1], rq, rk, q_state.stage, k_state.stage)
        ahead, at = self.load_lse(lse, at, padded - 1, heads)
        self.add(sums, accs[0], less, scale)
        return q_state, k_state, ahead

    @cute.jit
    def load_tile(self, scores, lse_idx, upstream, q_tiles, key_tiles, number, index, rows, own_row, lane):
        """Load the epilogue's inputs. -> ((pointer for dI, index of the q tile, index of the key tile), scores [2
        adjacent keys, 16 groups of 8 keys, 2 rows], lse_I of the lane's two rows, g of the two rows, numbers of the
        tile's keys that the two rows see)."""
        key_tile = index - key_tiles[number]
        of_tile = scores[number, key_tile, None, None]
        pairs = cute.make_rmem_tensor((2, K_TILE // 8, 2), Float32)
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(K_TILE // 8):
                offset = (own_row + 8 * r) * K_TILE + 8 * j + lane % 4 * 2
                pairs[0, j, r], pairs[1, j, r] = load_pair(of_tile.iterator + offset)
        # Wait until the whole warpgroup has read its scores, because its dI overwrites them. The barrier also keeps the
        # compiler from moving the loads of the scores down to their uses.
        cute.arch.barrier(barrier_id=SCORES_READ_BARRIER + (opaque(own_row) >> 6), number_of_threads=WARPGROUP)
        q_tile = load_q_tile(q_tiles, number)
        limits = []
        for r in cutlass.range_constexpr(2):
            row = own_row + 8 * r
            limit = cutlass.min(q_tile.seen + q_tile.step * row, q_tile.keys) - key_tile * K_TILE
            limits.append(limit if row < q_tile.rows else Int32(0))
        numbers = [lse_idx[row] for row in rows], [upstream[row] for row in rows]
        # The pointer to which `epilogue` adds the offset of row own_row + 8 r of dI. The warpgroup's 64 rows of dI
        # begin where the fp32 scores of these rows began.
        target = of_tile.iterator + (opaque(own_row) >> 6) * (Q_TILE * K_TILE // 4)
        return (target, number, key_tile), pairs, *numbers, limits

    @cute.jit
    def wait(self, queries: Pipeline, keys: Pipeline, q_state, k_state):
        queries.consumer_wait(q_state)
        keys.consumer_wait(k_state)

    @cute.jit
    def multiply(self, acc, rq, rk, q_stage, k_stage):
        """Issue a head's product acc = Q K^T."""
        # A new TiledMma per call, because a TiledMma whose field is set inside a loop is unusable after that loop.
        mma = tiled_mma(self.dtype, (64, K_TILE), warpgroups=2)
        cute.nvgpu.warpgroup.fence()
        for step in cutlass.range_constexpr(self.chunk // 16):
            if const_expr(step % 4 == 0):  # `opaque` limits how many descriptors are live; all at once would spill
                q_stage, k_stage = opaque(q_stage), opaque(k_stage)
            mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, step > 0)
            cute.gemm(mma, acc, rq[None, None, step, q_stage], rk[None, None, step, k_stage], acc)
        cute.nvgpu.warpgroup.commit_group()

    @cute.jit
    def finish_product(self, queries: Pipeline, keys: Pipeline, q_state, k_state, h, group, heads):
        """Wait for the product of head h. Release the head's Q. Release the head's K, too, if the next head uses
        another KV head or if this head is the last one. group: query heads per KV head. -> the pipelines' next
        states."""
        cute.nvgpu.warpgroup.wait_group(0)
        q_state = release(queries, q_state)
        # A padding head uses the last head's keys, so they are released after the padding head.
        last = h == heads - 1 + (heads & 1)
        if h < heads - 1:
            last = h // group != (h + 1) // group
        if last:
            k_state = release(keys, k_state)
        return q_state, k_state

    @cute.jit
    def multiply_chunks(self, acc, rq, rk, queries: Pipeline, keys: Pipeline, q_state, k_state, h, group, heads):
        """Compute the product acc = Q K^T of head h, chunk by chunk, and wait for it. -> the pipelines' next states."""
        mma = tiled_mma(self.dtype, (64, K_TILE), warpgroups=2)
        last = h == heads - 1
        if h < heads - 1:
            last = h // group != (h + 1) // group
        before, k_chunk = q_state, k_state
        for chunk in cutlass.range_constexpr(self.chunks):
            queries.consumer_wait(q_state)
            keys.consumer_wait(k_chunk)
            cute.nvgpu.warpgroup.fence()
            for step in cutlass.range_constexpr(self.chunk // 16):
                mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, chunk > 0 or step > 0)
                a, b = rq[None, None, step, q_state.stage], rk[None, None, step, k_chunk.stage]
                cute.gemm(mma, acc, a, b, acc)
            cute.nvgpu.warpgroup.commit_group()
            if const_expr(chunk > 0):
                cute.nvgpu.warpgroup.wait_group(1)
                queries.consumer_release(before)
            before = q_state
            q_state = queries.advance(q_state)
            k_chunk = keys.advance(k_chunk)
        cute.nvgpu.warpgroup.wait_group(0)
        queries.consumer_release(before)
        if last:
            k_state = release(keys, k_state, self.chunks)
        return q_state, k_state

    @cute.jit
    def load_lse(self, lse, at, h, heads):
        """-> (the LSEs of a head at the offsets `at`, the offsets for the next head). at: offsets of the lane's two
        rows in the flat lse [H, Tq], for head h. After the last head the offsets stay the same."""
        step = lse.shape[1] if h < heads - 1 else 0
        return [flatten(lse)[offset] for offset in at], [offset + step for offset in at]

    @cute.jit
    def add(self, sums, acc, less, scale):
        """Compute sums += 2^(scale S - lse log2 e) for one head. scale includes the factor log2 e. acc: S. less: the
        LSEs of the lane's two rows."""
        more = [x * -LOG2E for x in less]
        flat = flatten(acc)
        for i in cutlass.range_constexpr(K_TILE // 2):
            sums[i] = add_power(sums[i], flat[i], scale, more[i // 2 % 2])

    @cute.jit
    def epilogue(self, sums, own, kl_parts, heads, own_row, lane):
        """Store the KL part of each row of the work tile, and overwrite the work tile's scores with dI. sums: the
        exponentials, summed over heads. own: from `load_tile`."""
        share = 1.0 / Float32(heads)
        (di, number, key_tile), pairs, lse_idx, upstream, limits = own
        target = cute.recast_ptr(di, dtype=Uint32)
        for r in cutlass.range_constexpr(2):
            row, limit, own_lse, factor = own_row + 8 * r, limits[r], lse_idx[r], upstream[r]
            kl = Float32(0.0)
            for j in cutlass.range_constexpr(K_TILE // 8):
                both = []
                for c in cutlass.range_constexpr(2):
                    p = sums[4 * j + 2 * r + c] * share
                    over = pairs[c, j, r] - own_lse
                    d = factor * (cute.math.exp2(over * LOG2E, fastmath=True) - p)
                    term = p * (cute.math.log2(p, fastmath=True) * LN2 - over)
                    visible = 8 * j + lane % 4 * 2 + c < limit
                    both.append(d if visible else Float32(0.0))
                    # log2 treats p below TINY as 0, so the term would be infinite or NaN. A NaN p is not below TINY and
                    # enters the loss.
                    nothing = p < TINY or not visible
                    kl += Float32(0.0) if nothing else term
                (target + (row * (K_TILE // 2) + 4 * j + lane % 4)).store(pack(both[0], both[1], BFloat16))
            kl += cute.arch.shuffle_sync_bfly(kl, offset=1)
            kl += cute.arch.shuffle_sync_bfly(kl, offset=2)
            if lane % 4 == 0:
                kl_parts[number, key_tile, row] = kl


@cute.jit
def add_power(total: Float32, x: Float32, scale: Float32, more: Float32):
    """Return total + 2^(x * scale + more). The code is inline PTX, because the compiler would move separate
    instructions after the wait for the wgmma that they should overlap."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 e; fma.rn.ftz.f32 e, {$r1}, {$r2}, {$r3}; ex2.approx.ftz.f32 e, e; add.ftz.f32 {$w0}, {$r0}, e; }",
        write_only_types=[Float32],
        read_only_args=[total, x, scale, more],
    )


@cute.jit
def load_pair(address):
    return cute.arch.inline_ptx(
        "ld.global.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32, Float32],
        read_only_args=[address.toint()],
    )


@cached
def compile_warmup_target(dtype: str, dim: int):
    """-> f(q [Tq, H, d], k [Tk, Hk, d], lse [H, Tq], lse_idx [Tq], upstream [Tq], q_tiles [S, 8], key_tiles [S + 1],
    scores [S, N, 128, 128], kl_parts [S, N, 128], scale, H / Hk, ctas), for S q tiles of 128 queries (q_tiles.py) and N
    key tiles of 128 keys per q tile. key_tiles[s] - key_tiles[0]: number of key tiles in this launch's q tiles before
    s. The kernel writes kl_parts, and overwrites scores with dI. q and k are of `dtype`, q_tiles and key_tiles are
    int32, and the other tensors are fp32."""
    kind, queries = cute_dtype(dtype), cute.sym_int()
    q, k = (fake_rows(kind, tokens, cute.sym_int(), dim) for tokens in (queries, cute.sym_int()))
    return compile_sm90(
        *(WarmupTargetSm90(kind, dim), q, k, fake(Float32, (cute.sym_int(), queries), (queries, 1), 4)),
        *(fake_line(Float32, queries), fake_line(Float32, queries), fake_q_tiles(), fake_line(Int32)),
        *(fake_tiles(Q_TILE, K_TILE), fake_tiles(Q_TILE)),
        *(Float32(0.0), Int32(1), Int32(1), fake_stream()),
    )


def shipped_variants() -> ShippedVariants:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [(compile_warmup_target, ("bfloat16", dim)) for dim in WARMUP_CHANNELS]
