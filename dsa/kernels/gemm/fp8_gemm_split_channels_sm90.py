"""Split-K product of a few rows with a narrow block-scaled FP8 matrix; a cluster of CTAs splits the channels:
out[m, n] = sum_g (sum_{k in block g} a[m, k] b[n, k]) * a_scale[m, g] * b_scale[n // 128, g],
where block g is 128 channels.

Plan
- A matrix with few columns has fewer work tiles than there are SMs. So a cluster of C CTAs computes each work tile of
  64 columns. SPLIT_SPAN adjacent blocks of channels form a group, and CTA i multiplies the groups i, i + C and so on.
  The bits of a sum must not depend on C, so a CTA does not add the blocks that it multiplied. It sends the products of
  each block to the CTA that owns the result. The owner scales the products of all blocks and adds them in order. So the
  bits are those of the other kernels.
- CTA i owns the results of 64 / C columns of the work tile, from column 64 / C * i on. Columns are M of the wgmma (swap
  A/B). A thread sends its accumulators in pairs: two adjacent rows of the result in a column.
- Warp roles: a consumer warpgroup multiplies; a producer warp loads by TMA. The first consumer warp loads the scales of
  all blocks before its mainloop.
- Pipeline: a ring of stages, each with SPLIT_SPAN blocks of 128 channels of a and of b. A CTA has few blocks, so most
  of them are in flight at once. There are two cluster barriers. The first comes before the first product is sent: all
  CTAs must have started. The second comes after the last product is sent: all products have then arrived.
- Before a CTA waits for the previous kernel, it prefetches its blocks of b to L2. The CTA does not load them yet, since
  the previous kernel may write b.
- Epilogue: a warp adds and stores slabs of 8 columns by 8 rows. A lane has two rows of one column.
- Scheduler: one cluster per work tile.
Shared memory: barriers; stages x SPLIT_SPAN x (64 + rows) x 128 bytes of operands; MAX_SPLIT_BLOCKS x 256 x rows / C
bytes of received products; (rows + 1) x (MAX_SPLIT_BLOCKS + 4) x 4 bytes of scales.
Roofline: bound by memory: b is read once. The fixed cost is the launch, the latency of one load, two cluster barriers,
and the sums.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64

from dsa.cute.copies import bulk_load, tile_load
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.pipeline import Mbarriers, Pipeline, expect_bytes, pipeline_storage, start
from dsa.cute.sm90 import WARP, cluster_sync, warp_and_lane
from dsa.cute.wgmma import multiply
from dsa.kernels.gemm.fp8_gemm_few_rows_config import (
    COLUMNS,
    CONSUMER_WARPS,
    MAX_SPLIT_BLOCKS,
    SCALES,
    SPLIT_SPAN,
    FewRowsConfig,
)
from dsa.kernels.gemm.limits import GROUP
from dsa.kernels.gemm.operand_loads import (
    SMALL_M_THREADS,
    fragments,
    load_blocks,
    operand_layouts,
    prefetch_blocks,
    tiles_of,
)

SCALE_STRIDE = MAX_SPLIT_BLOCKS + 4  # fp32 scales from one row to the next; it puts 8 rows into different banks


@cute.jit
def remote_address(address: Int32, rank: Int32) -> Int32:
    """Translate `address`, a shared-memory address of this CTA. -> the shared::cluster address of the same place in the
    shared memory of CTA `rank` of the cluster."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


@cute.jit
def store_remote_8(address: Int32, low: Float32, high: Float32):
    """Store two numbers at `address`, a shared::cluster address (`remote_address`) and a multiple of 8."""
    cute.arch.inline_ptx(
        "st.shared::cluster.v2.f32 [{$r0}], {" + "{$r1}, {$r2}" + "};", read_only_args=[address, low, high]
    )


class Fp8GemmSplitChannelsSm90:
    def __init__(self, out_dtype: type[cutlass.Numeric], cfg: FewRowsConfig):
        self.out_dtype, self.rows, self.stages, self.ctas = out_dtype, cfg.rows, cfg.stages, cfg.ctas
        self.owned = 8 // cfg.ctas  # octets (8 columns) whose results a CTA owns; a work tile has eight octets
        self.slabs = self.owned * cfg.rows // 8

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        out: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        a_layout, b_layout = operand_layouts(self.rows, SPLIT_SPAN * self.stages)
        a_atom, a_tma = tile_load(a, a_layout, (self.rows, GROUP))
        b_atom, b_tma = tile_load(b, b_layout, (COLUMNS, GROUP))

        @cute.struct
        class Storage:
            pipeline: pipeline_storage(self.stages)
            scales_loaded: cute.struct.MemRange[Int64, 1]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, (self.rows + 1) * SCALE_STRIDE], 16]
            products: cute.struct.Align[cute.struct.MemRange[Float32, MAX_SPLIT_BLOCKS * self.slabs * 64], 128]
            a: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(b_layout)], 1024]

        self.storage = Storage
        tiles = cute.ceil_div(out.shape[1], COLUMNS) * cute.ceil_div(out.shape[0], self.rows)
        self.kernel(a_atom, a_tma, a_scale, b_atom, b_tma, b_scale, out, a_layout, b_layout).launch(
            grid=(tiles * self.ctas, 1, 1),
            block=(SMALL_M_THREADS, 1, 1),
            cluster=(self.ctas, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        ma: cute.Tensor,
        a_scale: cute.Tensor,
        b_atom: cute.CopyAtom,
        mb: cute.Tensor,
        b_scale: cute.Tensor,
        out: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
    ):
        warp, lane = warp_and_lane()
        cta, _, _ = cute.arch.block_idx()
        # Consecutive clusters have the same columns, so b is read from memory once.
        rank, of_rows = cta % self.ctas, cute.ceil_div(out.shape[0], self.rows)
        index, down = cta // self.ctas // of_rows, cta // self.ctas % of_rows
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        pipeline = Pipeline.of(storage.pipeline, self.stages)
        scales_loaded = Mbarriers(storage.scales_loaded.data_ptr(), 1)
        sa = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sb = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        # The last row, number `rows`, contains the scales of b.
        scales = storage.scales.get_tensor(
            cute.make_layout((self.rows + 1, MAX_SPLIT_BLOCKS), stride=(SCALE_STRIDE, 1))
        )
        products = storage.products.get_tensor(cute.make_layout((2, WARP, self.slabs, MAX_SPLIT_BLOCKS)))
        blocks = a_scale.shape[1]
        groups = blocks // SPLIT_SPAN

        if warp == CONSUMER_WARPS:
            with cute.arch.elect_one():
                pipeline.init(consumers=CONSUMER_WARPS)
                scales_loaded.init(1)
            cute.nvgpu.cpasync.prefetch_descriptor(b_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(a_atom)
            _, tbg = tiles_of(b_atom, sb, mb, (COLUMNS, GROUP), index * COLUMNS)
            prefetch_blocks(b_atom, tbg, rank, groups, self.ctas, SPLIT_SPAN)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.cluster_arrive_relaxed()
        wait_for_prerequisite_grids()

        if warp == CONSUMER_WARPS:
            state = start()
            tas, tag = tiles_of(a_atom, sa, ma, (self.rows, GROUP), down * self.rows)
            tbs, tbg = tiles_of(b_atom, sb, mb, (COLUMNS, GROUP), index * COLUMNS)
            for group in cutlass.range(rank, groups, self.ctas, unroll=1):
                pipeline.producer_acquire(state, SPLIT_SPAN * (COLUMNS + self.rows) * GROUP)
                full = pipeline.producer_barrier(state)
                load_blocks(b_atom, tbg, tbs, group, state.stage, SPLIT_SPAN, full)
                load_blocks(a_atom, tag, tas, group, state.stage, SPLIT_SPAN, full)
                state = pipeline.advance(state)
            cute.arch.cluster_wait()
        else:
            if warp == 0:
                of_columns = b_scale[0, index * COLUMNS // GROUP, None]
                self.load_scales(a_scale, down * self.rows, of_columns, scales, scales_loaded, lane)
            cute.arch.cluster_wait()
            self.multiply_blocks(rank, groups, sa, sb, products, pipeline, warp, lane)
        cluster_sync()
        if warp < CONSUMER_WARPS:
            scales_loaded.wait(0)
            for first in cutlass.range_constexpr(0, self.slabs, CONSUMER_WARPS):
                slab = first + warp
                if slab < self.slabs:
                    column = index * COLUMNS + rank * self.owned * 8
                    self.add_blocks(blocks, products, scales, out, down * self.rows, column, slab, lane)

    @cute.jit
    def load_scales(self, a_scale, first_row, of_columns, scales, loaded: Mbarriers, lane):
        rows, size = cutlass.min(self.rows, a_scale.shape[0] - first_row), a_scale.shape[1] * 4
        with cute.arch.elect_one():
            expect_bytes(loaded.barrier(), (rows + 1) * size)
            bulk_load(scales[self.rows, None].iterator, of_columns.iterator, size, loaded.barrier())
        for first in cutlass.range_constexpr(0, self.rows, WARP):
            row = first + lane
            if row < rows:
                bulk_load(scales[row, None].iterator, a_scale[first_row + row, None].iterator, size, loaded.barrier())

    @cute.jit
    def multiply_blocks(self, rank, groups, sa, sb, products, pipeline: Pipeline, warp, lane):
        """The mainloop of the consumer warpgroup: multiply this CTA's blocks, and send the products to their owners."""
        mma, acc, rb, ra = fragments(self.rows, SPLIT_SPAN, sb, sa)
        # A warp has products of two octets of the work tile's columns. A thread has two adjacent rows of every 8, in
        # one column per octet.
        targets = []
        for half in cutlass.range_constexpr(2):
            eight = 2 * warp + half
            own = products[None, lane, eight % self.owned * (self.rows // 8), 0].iterator.toint()
            targets.append(remote_address(Int32(own), eight // self.owned))
        state = start()
        for group in cutlass.range(rank, groups, self.ctas, unroll=1):
            pipeline.consumer_wait(state)
            for i in cutlass.range_constexpr(SPLIT_SPAN):
                block = SPLIT_SPAN * state.stage + i
                multiply(mma, acc[i], rb, ra, block, block)
            for i in cutlass.range_constexpr(SPLIT_SPAN):
                cute.nvgpu.warpgroup.wait_group(SPLIT_SPAN - 1 - i)
                numbers = cute.make_tensor(acc[i].iterator, cute.make_layout(cute.size(acc[i])))
                for j in cutlass.range_constexpr(self.rows // 4):
                    slab = (SPLIT_SPAN * group + i) * self.slabs + j // 2
                    store_remote_8(targets[j % 2] + slab * (WARP * 8), numbers[2 * j], numbers[2 * j + 1])
            pipeline.consumer_release(state)
            state = pipeline.advance(state)

    @cute.jit
    def add_blocks(self, blocks, products, scales, out, first_row, column, slab, lane):
        """Scale the products of all blocks for slab `slab` of this CTA, add them in order, and store the sums. column:
        the first column that this CTA owns."""
        row, at = slab % (self.rows // 8) * 8 + lane % 4 * 2, column + slab // (self.rows // 8) * 8 + lane // 4
        sums = [Float32(0.0) for _ in range(2)]
        of = [cute.make_rmem_tensor((SCALES,), Float32) for _ in range(3)]
        pair = cute.make_rmem_tensor((2, SCALES), Float32)
        for group in cutlass.range(blocks // SCALES, unroll=2):
            for j in cutlass.range_constexpr(3):
                line = scales[row + j if j < 2 else self.rows, None]
                cute.autovec_copy(cute.local_tile(line, (SCALES,), (group,)), of[j])
            for i in cutlass.range_constexpr(SCALES):
                cute.autovec_copy(products[None, lane, slab, SCALES * group + i], pair[None, i])
            for i in cutlass.range_constexpr(SCALES):
                for c in cutlass.range_constexpr(2):
                    sums[c] += pair[c, i] * (of[c][i] * of[2][i])
        for c in cutlass.range_constexpr(2):
            if first_row + row + c < out.shape[0] and at < out.shape[1]:
                out[first_row + row + c, at] = sums[c].to(self.out_dtype)
