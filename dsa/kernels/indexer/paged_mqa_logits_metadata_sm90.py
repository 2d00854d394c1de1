"""Schedule of the paged index scores (stream-K): the splits of 256 keys that each SM processes.

Plan
- One CTA. All threads together sum the numbers of splits of all sequences. Then the CTA processes 1024 sequences at a
  time: a scan gives the number of splits up to the end of each sequence.
- Boundary i of the schedule is the index of the first split of SM i, computed from the total. In the round of 1024
  sequences that contains this split, thread i % 1024 finds the split's sequence by binary search in the scanned ends.
- A sequence counts as at most (2^31 - 1) / B splits, so that no sum overflows. This does not change the scores: if an
  SM's splits end in a later sequence, the SM processes all remaining keys of the sequences before it.
Shared memory: 1024 ends and 32 sums, all int32. Constraints: none on the number of sequences or SMs.
Roofline: bound by latency, a few microseconds.
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
from dsa.kernels.indexer.limits import SCHEDULE_SPLIT
from dsa.runtime.compile_cache import cached, compile_sm90

THREADS = 1024
MAX_SPLITS = 2**31 - 1


class PagedMqaLogitsMetadataSm90:
    @cute.jit
    def __call__(self, lengths: cute.Tensor, schedule: cute.Tensor, stream):
        self.kernel(lengths, schedule).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, lengths: cute.Tensor, schedule: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % WARP, tid // WARP
        smem = SmemAllocator()
        ends = smem.allocate_tensor(Int32, cute.make_layout(THREADS), 16)
        sums = smem.allocate_tensor(Int32, cute.make_layout(THREADS // WARP), 16)
        wait_for_prerequisite_grids()
        batch = lengths.shape[0]
        most = MAX_SPLITS // cutlass.max(batch, 1)

        own = Int32(0)
        for b in cutlass.range(tid, batch, THREADS, unroll=1):
            own += self.splits(lengths, b, most)
        total = block_exclusive_scan(own, sums, lane, warp)[1]
        cute.arch.sync_threads()
        boundaries = schedule.shape[0]
        sms = boundaries - 1
        each, longer = total // sms, total % sms

        before = Int32(0)
        for base in cutlass.range(0, batch, THREADS, unroll=1):
            own = Int32(0)
            if base + tid < batch:
                own = self.splits(lengths, base + tid, most)
            earlier, here = block_exclusive_scan(own, sums, lane, warp)
            ends[tid] = earlier + own
            cute.arch.sync_threads()
            for i in cutlass.range(tid, boundaries, THREADS, unroll=1):
                # The boundary's split, relative to this round's first split. The last `longer` SMs have one split more.
                first = i * each + cutlass.max(i - (sms - longer), 0) - before
                if first >= 0 and first < here:
                    # Find the first sequence that ends after the boundary, which skips sequences without splits.
                    found = Int32(0)
                    for step in cutlass.range_constexpr(10):
                        half = found + (THREADS >> (step + 1))
                        if ends[half - 1] <= first:
                            found = half
                    start = Int32(0)
                    if found > 0:
                        start = ends[found - 1]
                    schedule[i, 0] = base + found
                    schedule[i, 1] = first - start
            before += here
            cute.arch.sync_threads()
        for i in cutlass.range(tid, boundaries, THREADS, unroll=1):
            if i * each + cutlass.max(i - (sms - longer), 0) >= total:
                schedule[i, 0] = batch
                schedule[i, 1] = Int32(0)

    @cute.jit
    def splits(self, lengths, b, most):
        longest = Int32(0)
        for i in cutlass.range(lengths.shape[1], unroll=1):
            longest = cutlass.max(longest, lengths[b, i])
        # (longest + 255) // 256 would overflow for lengths near 2^31.
        return cutlass.min(longest // SCHEDULE_SPLIT + cutlass.min(longest % SCHEDULE_SPLIT, 1), most)


@cached
def compile_paged_mqa_logits_metadata():
    """-> f(lengths [B, any] int32, schedule [SMs + 1, 2] int32). A sequence's length is the largest number in a row of
    lengths. Row i of schedule is the pair (sequence, split in the sequence) at which SM i begins and SM i - 1 ends."""
    lengths = fake(Int32, (cute.sym_int(), cute.sym_int()), (*strides(1), 1), 4)
    schedule = fake(Int32, (cute.sym_int(), 2), (2, 1), 4)
    return compile_sm90(PagedMqaLogitsMetadataSm90(), lengths, schedule, fake_stream())


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [(compile_paged_mqa_logits_metadata, ())]
