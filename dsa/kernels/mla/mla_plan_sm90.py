"""Plan split-KV for dense MLA decoding: divide the keys of all sequences among parts (decode_producer.py).

Work: one CTA
- All threads compute the prefix sums of the sequences' costs in shared memory. The cost of a sequence is measured in
  tiles of TILE_N keys: the number of the sequence's tiles plus `overhead`, the fixed cost of a work tile.
- Warp 0 then assigns sequences to parts, one part after the other. A part has a budget (`payload`): the mean
  cost per part plus `overhead`. The part gets the next whole sequences that fit the budget; the warp checks 32
  sequences at a time. If more than `overhead` of the budget is left, the part also gets a split of the next
  sequence.
- Each split adds `overhead` to the cost, because the rest of the sequence is another work tile. The budget includes
  this `overhead`, so every part advances by at least the mean cost. The last part gets all sequences that are left.
- While warp 0 plans, the other warps write 0 to the unused columns of the plan.
- The plan contains no end for the last split of a sequence: that split runs to the end that the sequence has when
  the plan is used. So a plan made for other lengths is unbalanced but correct.
- A length can be any int32. Each of the B sequences counts as at most MAX_TILES / B tiles, so sums fit in 32 bits.
Shared memory: MAX_BATCH + 1 prefix sums. Constraints: at most MAX_BATCH sequences.
Roofline: bound by latency, because warp 0 plans one part after the other: 26 us for 132 parts, 14 us for 66.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.cute.reductions import block_exclusive_scan
from dsa.cute.sm90 import WARP
from dsa.kernels.mla.decode_producer import TO_THE_END, PlanColumn
from dsa.kernels.mla.limits import MAX_BATCH, PLAN_COLUMNS, PLAN_NUMBERS, TILE_N
from dsa.runtime.compile_cache import cached, compile_sm90

THREADS = 1024
MAX_TILES = 2**30  # a sequence counts as at most MAX_TILES / B tiles, so that sums over the B sequences fit in int32


class MlaPlanSm90:
    @cute.jit
    def __call__(self, lengths: cute.Tensor, plan: cute.Tensor, num_splits: cute.Tensor, overhead: Int32, stream):
        self.kernel(lengths, plan, num_splits, overhead).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, lengths: cute.Tensor, plan: cute.Tensor, num_splits: cute.Tensor, overhead: Int32):
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % WARP, tid // WARP
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Int32, cute.make_layout(WARP), 16)
        before = smem.allocate_tensor(Int32, cute.make_layout(MAX_BATCH + 1), 16)
        wait_for_prerequisite_grids()
        batch = lengths.shape[0]
        total, most = Int32(0), MAX_TILES // batch
        for base in cutlass.range(0, batch, THREADS, unroll=1):
            own = Int32(0)
            if base + tid < batch:
                # Round up. Adding TILE_N - 1 to the length could overflow 32 bits.
                tiles = (cutlass.max(lengths[base + tid], 0) - 1) // TILE_N + 1
                own = cutlass.min(tiles, most) + overhead
            earlier, here = block_exclusive_scan(own, sums, lane, warp)
            if base + tid < batch:
                before[base + tid] = total + earlier
            total += here
            cute.arch.sync_threads()
        if tid == 0:
            before[batch] = total
        cute.arch.sync_threads()
        if warp == 0:
            self.split(before, plan, num_splits, overhead, total, batch, lane)
        else:
            for part in cutlass.range(tid - WARP, plan.shape[0], THREADS - WARP, unroll=1):
                for column in cutlass.range_constexpr(PLAN_NUMBERS, PLAN_COLUMNS):
                    plan[part, column] = 0

    @cute.jit
    def split(self, before, plan, num_splits, overhead, total, batch, lane):
        """Assign sequences to parts, and write the plan. Set num_splits[b + 1] to the number of partial results of
        sequences 0 to b. One warp calls this. before: [B + 1], entry b is the cost of sequences 0 to b - 1; `total` is
        the last entry.
        """
        parts = plan.shape[0]
        payload = (total + parts - 1) // parts + overhead
        # The next part begins at tile `tile` of `sequence`, with split number `index` of this sequence. So far there
        # are `partials` partial results and `split_sequences` split sequences.
        sequence, tile, index, partials, split_sequences = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        for part in cutlass.range(parts, unroll=1):
            first, first_tile, first_index = sequence, tile, index
            base = before[cutlass.min(sequence, batch)] + tile
            fit, more = Int32(0), True
            while more:
                following = sequence + fit + lane + 1
                fits = following <= batch
                if fits:
                    fits = before[following] - base <= payload or part == parts - 1
                count = cute.arch.popc(cute.arch.vote_ballot_sync(fits))
                if count > 0 and fit == 0 and tile > 0:
                    partials += index + 1
                if lane < count:
                    num_splits[sequence + fit + lane + 1] = partials
                fit += count
                more = count == WARP
            end_tile, last = Int32(TO_THE_END), sequence + fit - 1
            if fit > 0:
                sequence, tile, index = sequence + fit, Int32(0), Int32(0)
            if sequence < batch:
                left = payload - (before[sequence] + tile - base) - overhead
                if left > 0:
                    if lane == 0 and tile == 0:
                        plan[split_sequences, PlanColumn.SPLIT_SEQUENCE] = sequence
                    if tile == 0:
                        split_sequences += 1
                    tile, index, last = tile + left, index + 1, sequence
                    end_tile = tile
            if lane == 0:
                plan[part, PlanColumn.FIRST_SEQUENCE], plan[part, PlanColumn.FIRST_TILE] = first, first_tile
                plan[part, PlanColumn.LAST_SEQUENCE], plan[part, PlanColumn.END_TILE] = last, end_tile
                plan[part, PlanColumn.FIRST_SPLIT] = first_index
        for i in cutlass.range(split_sequences + lane, parts, WARP, unroll=1):
            plan[i, PlanColumn.SPLIT_SEQUENCE] = -1
        if lane == 0:
            num_splits[0] = 0


@cached
def compile_mla_plan():
    """Compile f(lengths [B], plan [parts, 8], num_splits [B + 1], overhead), all int32; 0 < B <= MAX_BATCH. f writes
    plan (see `PlanColumn`) and num_splits (see `DecodeScheduler`)."""
    return compile_sm90(
        MlaPlanSm90(),
        fake(Int32, (cute.sym_int(),), strides(1), 4),
        fake(Int32, (cute.sym_int(), PLAN_COLUMNS), (PLAN_COLUMNS, 1), 4),
        fake(Int32, (cute.sym_int(),), (1,), 4),
        *(Int32(0), fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the op can ask for."""
    return [(compile_mla_plan, ())]
