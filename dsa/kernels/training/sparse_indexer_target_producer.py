"""The producer warpgroup of the sparse stage's target kernel. It loads a query's q rows and then its keys, through the
same pipelines."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.copies import arrive_when_gathered
from dsa.cute.pipeline import Pipeline, PipelineState, start
from dsa.kernels.training.sparse_indexer_target_tiles import Inputs, Pipelines
from dsa.kernels.training.topk_gather import (
    CHUNK_BYTES,
    TILE,
    QuerySchedule,
    gather_chunk,
    head_rows,
    key_rows,
    own_rows,
    selected,
)


class TargetProducer:
    """chunks: per row of q and kv. row_tiles: q has `row_tiles` x 64 heads. index_chunks: per index row."""

    def __init__(self, chunks: int, row_tiles: int, index_chunks: int):
        self.chunks, self.row_tiles, self.index_chunks = chunks, row_tiles, index_chunks

    @cute.jit
    def run(self, inputs: Inputs, pipelines: Pipelines, keys, index, schedule: QuerySchedule, warp, lane):
        """Load all queries of this CTA. keys, index: the stages of chunks and of index tiles in shared memory."""
        keys_start, index_start = Int32(keys.iterator.toint()), Int32(index.iterator.toint())
        count = inputs.kv.shape[0]
        rows = own_rows(warp, lane)
        key_state, index_state = start(), start()
        for query in cutlass.range(schedule.first, schedule.queries, schedule.step, unroll=1):
            for part in cutlass.range_constexpr(self.row_tiles):
                sources, valid = head_rows(inputs.q, query, part * TILE, rows, lane)
                key_state = self.load_chunks(pipelines.keys, keys_start, sources, valid, key_state, warp, lane)
            sources, valid = head_rows(inputs.q_idx, query, 0, rows, lane)
            index_state = self.load_index(pipelines.index, index_start, sources, valid, index_state, warp, lane)
            found = selected(inputs.indices[query, None], Int32(0), rows, count)
            for tile in cutlass.range(schedule.key_tiles, unroll=1):
                sources, valid = key_rows(inputs.kv, found, lane)
                index_sources, _ = key_rows(inputs.k_idx, found, lane)
                # Prefetch the next tile's indices while this tile's keys are gathered.
                found = selected(inputs.indices[query, None], (tile + 1) * TILE, rows, count)
                key_state = self.load_chunks(pipelines.keys, keys_start, sources, valid, key_state, warp, lane)
                index_state = self.load_index(
                    pipelines.index, index_start, index_sources, valid, index_state, warp, lane
                )

    @cute.jit
    def load_chunks(self, pipeline: Pipeline, start: Int32, sources, valid, state: PipelineState, warp, lane):
        for chunk in cutlass.range_constexpr(self.chunks):
            pipeline.producer_wait(state)
            gather_chunk(start + state.stage * CHUNK_BYTES, sources, valid, chunk, warp, lane)
            arrive_when_gathered(pipeline.producer_barrier(state))
            state = pipeline.advance(state)
        return state

    @cute.jit
    def load_index(self, pipeline: Pipeline, start: Int32, sources, valid, state: PipelineState, warp, lane):
        pipeline.producer_wait(state)
        for chunk in cutlass.range_constexpr(self.index_chunks):
            target = start + (state.stage * self.index_chunks + chunk) * CHUNK_BYTES
            gather_chunk(target, sources, valid, chunk, warp, lane)
        arrive_when_gathered(pipeline.producer_barrier(state))
        return pipeline.advance(state)
