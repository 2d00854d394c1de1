"""The output warpgroups with swap A/B and 16-bit latent keys: O^T += V^T P^T, and the store of O.

Of each 64 channels a warp has 16, of which a lane has channels lane / 4 and lane / 4 + 8. O^T is transposed
through shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import PipelineState, state_at_of_two
from dsa.cute.shared_memory import pack, store_transposed
from dsa.cute.sm90 import opaque
from dsa.kernels.mla.limits import HEAD_DIM_V, TILE_N
from dsa.kernels.mla.mla_attention import MlaShared
from dsa.kernels.mla.mla_epilogue import Results
from dsa.kernels.mla.mla_tiles import K16, K_CHUNK, V_CHUNK, V_CHUNKS, KvPipeline, KvStages
from dsa.kernels.mla.swap_ab_exchange import HeadRange, Thread
from dsa.kernels.mla.swap_ab_output_loop import SwapAbOutputLoop, ValueOperands
from dsa.kernels.mla.tile_scheduler import WorkTileInfo


class SwapAbValues(SwapAbOutputLoop):
    """Output for keys in `kv` and `head_tile` heads, 16 or 32."""

    acc_channels = V_CHUNK

    def __init__(self, kv: KvStages, head_tile: int):
        super().__init__(head_tile)
        self.kv, self.dtype = kv, kv.dtype

    def tiled_mma(self) -> cute.TiledMma:
        mn_major, shape = cute.nvgpu.OperandMajorMode.MN, (TILE_N, self.head_tile)
        return sm90.make_trivial_tiled_mma(self.dtype, self.dtype, mn_major, mn_major, Float32, (1, 1, 1), shape)

    @cute.jit
    def output_mainloop(
        self,
        results: Results,
        mma: cute.TiledMma,
        shared: MlaShared,
        heads: HeadRange,
        group,
        thread: Thread,
    ):
        """Run an output warpgroup: its half of the channels, all work tiles of this CTA."""
        keys = shared.kv.v
        values = cute.make_tensor(keys.iterator, cute.select(keys.layout, mode=[1, 0, 2]))
        v = mma.make_fragment_A(mma.get_slice(thread.tid).partition_A(values))
        self.run(results, mma, v, shared, PipelineState(thread.side, Int32(0)), heads, group, thread)

    @cute.jit
    def skip_q(self, pipeline: KvPipeline, state: PipelineState) -> PipelineState:
        return pipeline.v.skip(state, V_CHUNKS)

    @cute.jit
    def add_tile(
        self,
        operands: ValueOperands,
        shared: MlaShared,
        state: PipelineState,
        tile_count,
        thread: Thread,
    ) -> PipelineState:
        """As in `SwapAbOutputLoop`; `state` is at the warpgroup's first v chunk of the tile."""
        pipeline, exchange = shared.pipeline, shared.exchange
        p_state = state_at_of_two(tile_count)
        exchange.p_pipeline.consumer_wait(p_state)
        self.rescale(operands.flat, exchange, p_state.stage, thread.lane)
        cute.nvgpu.warpgroup.fence()
        second = pipeline.v.skip(state, 2)
        for half, v in enumerate((state, second)):
            own, acc = opaque(v.stage), operands.accs[half]
            for step in cutlass.range_constexpr(TILE_N // K16):
                a, b = operands.v[None, None, step, own], operands.p[None, None, step, p_state.stage]
                cute.gemm(operands.mma, acc, a, b, acc)
            cute.nvgpu.warpgroup.commit_group()
        cute.nvgpu.warpgroup.wait_group(1)
        self.kv.release(pipeline.v, state)
        cute.nvgpu.warpgroup.wait_group(0)
        self.kv.release(pipeline.v, second)
        exchange.p_pipeline.consumer_release(p_state)
        return pipeline.v.skip(second, 2)

    @cute.jit
    def write(
        self,
        operands: ValueOperands,
        results: Results,
        shared: MlaShared,
        work: WorkTileInfo,
        heads: HeadRange,
        group,
        thread: Thread,
    ):
        flat = operands.flat
        for c in cutlass.range_constexpr(self.columns):
            inverse = shared.exchange.inverse[self.head_of(c, thread.lane)]
            for j in cutlass.range_constexpr(8):
                flat[self.element(c, j)] *= inverse
        if work.split_idx >= 0:
            self.store_partial(flat, results.out_partial, work.split_idx, heads, thread)
        else:
            sequence, query = divmod(work.batch_idx, group)
            self.store(flat, results.out, sequence, query, heads, shared.staging, thread)

    @cute.jit
    def store_partial(self, flat, out_partial, split_idx, heads: HeadRange, thread: Thread):
        lane = opaque(thread.lane)
        for c in cutlass.range_constexpr(self.columns):
            row = heads.first + self.head_of(c, lane)
            if row < heads.total:
                target = out_partial[split_idx, 0, row, None]
                for j in cutlass.range_constexpr(8):
                    channel = (
                        thread.side * (HEAD_DIM_V // 2) + j // 2 * K_CHUNK + thread.warp * 16 + j % 2 * 8 + (lane >> 2)
                    )
                    target[channel] = flat[self.element(c, j)]

    @cute.jit
    def store(self, flat, out, sequence, query, heads: HeadRange, staging: cute.Pointer, thread: Thread):
        """Store O through `head_tile` x 16 elements of the warp's shared memory."""
        lane, warp = opaque(thread.lane), thread.side * 4 + thread.warp
        own = staging + warp * (self.head_tile * 16)
        vector = cute.make_rmem_tensor((8,), self.dtype)
        for product in cutlass.range_constexpr(4):
            for n in cutlass.range_constexpr(self.head_tile // 16):
                # Matrices of 8 channels x 8 heads, 2 x 2: channels first, then heads.
                words = []
                for i in cutlass.range_constexpr(4):
                    column, j = 4 * n + i // 2 * 2, 2 * product + i % 2
                    words.append(pack(flat[self.element(column, j)], flat[self.element(column + 1, j)], self.dtype))
                head = 16 * n + (lane >> 4) * 8 + (lane & 7)
                store_transposed(Int32((own + (head * 16 + (lane & 8))).toint()), words)
            cute.arch.sync_warp()
            channel = thread.side * (HEAD_DIM_V // 2) + product * K_CHUNK + thread.warp * 16 + (lane & 1) * 8
            for n in cutlass.range_constexpr(self.head_tile // 16):
                head = 16 * n + (lane >> 1)
                cute.autovec_copy(cute.make_tensor(own + (head * 16 + (lane & 1) * 8), cute.make_layout(8)), vector)
                if heads.first + head < heads.total:
                    target = out[sequence, query, heads.first + head, None]
                    cute.autovec_copy(vector, cute.local_tile(target, (8,), (channel // 8,)))
            cute.arch.sync_warp()
