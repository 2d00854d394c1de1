"""Write a constant to the rows of ragged results that no other kernel writes.

Plan
- `bounds` ascend within the rows of the tensors (q_tile_plan_sm90.py). Rows before the first and after the last bound
  belong to no sequence; all warps share the work of filling these rows. If a sequence has more than `most` rows (the
  caller's maximum length), its rows after the first `most` are uncovered, too: each warp checks 32 sequences at a time
  and fills these rows.
- Usually no row is uncovered, and every warp ends after two to four loads.
Roofline: without uncovered rows, bound by latency, 2 us.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.cute.sm90 import WARP
from dsa.kernels.training.fake_tensors import ShippedVariants, fake_line
from dsa.runtime.compile_cache import cached, compile_sm90

WARPS = 8
ZERO, INFINITY = 0, 0x7F800000  # bit patterns: 0 of any dtype, infinity of fp32


class UncoveredRowsSm90:
    """The kernel. values: for each tensor, the 32-bit word that fills the tensor's uncovered rows."""

    def __init__(self, values: tuple[int, ...]):
        self.values = values

    @cute.jit
    def __call__(self, bounds: cute.Tensor, tensors: list[cute.Tensor], most: Int32, ctas: Int32, stream):
        self.kernel(bounds, tensors, most, ctas).launch(
            grid=(ctas, 1, 1), block=(WARP * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, bounds: cute.Tensor, tensors: list[cute.Tensor], most: Int32, ctas: Int32):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp, lane, warps = cta * WARPS + tid // WARP, tid % WARP, ctas * WARPS
        wait_for_prerequisite_grids()
        batch = bounds.shape[0] - 1
        self.fill(tensors, warp, bounds[0], warps, lane)
        self.fill(tensors, bounds[batch] + warp, tensors[0].shape[0], warps, lane)
        for first in cutlass.range(WARP * warp, batch, WARP * warps, unroll=1):
            begin, end = Int32(0), Int32(0)
            if first + lane < batch:
                end = bounds[first + lane + 1]
                begin = end - cutlass.max(end - bounds[first + lane] - most, 0)
            if cute.arch.vote_any_sync(begin < end):
                for i in cutlass.range(WARP, unroll=1):
                    self.fill(tensors, cute.arch.shuffle_sync(begin, i), cute.arch.shuffle_sync(end, i), 1, lane)

    @cute.jit
    def fill(self, tensors, begin, end, step, lane):
        """Fill the rows `begin`, `begin` + `step`, ... below `end`. Called by a whole warp."""
        for row in cutlass.range(begin, end, step, unroll=1):
            for tensor, value in zip(tensors, self.values):
                _, heads, words = tensor.shape
                for i in cutlass.range(lane, heads * words, WARP, unroll=1):
                    tensor[row, i // words, i % words] = Int32(value)


@cached
def compile_uncovered_rows(values: tuple[int, ...]):
    """-> f(bounds [B + 1], tensors, most, ctas). tensors: a list of tensors [T, H, W], one per entry of `values`, with
    a contiguous last dimension. W counts 32-bit words: all tensors are passed as int32, whatever their dtype. B can be
    0."""
    rows = cute.sym_int()
    tensors = [fake(Int32, (rows, cute.sym_int(), cute.sym_int()), (*strides(2), 1), 4) for _ in values]
    return compile_sm90(UncoveredRowsSm90(values), fake_line(Int32), tensors, Int32(0), Int32(1), fake_stream())


def shipped_variants() -> ShippedVariants:
    """Return a (compile function, arguments) pair for each variant that the ops can ask for."""
    return [(compile_uncovered_rows, (values,)) for values in ((ZERO,), (ZERO, ZERO), (ZERO, INFINITY))]
