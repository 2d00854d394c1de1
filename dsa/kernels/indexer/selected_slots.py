"""Cache slots of selected keys, through a block table; and the unused ends of rows of results."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsa.cute.fake_tensors import fake, strides
from dsa.cute.limits import MAX_SLOTS
from dsa.kernels.indexer.limits import ROW_TO_SEQ, VALUES


class Paging(NamedTuple):
    """block_table [B, pages]. row_to_seq [S]: sequence of each query, if `options` has the bit ROW_TO_SEQ; without it,
    query i belongs to sequence i."""

    block_table: cute.Tensor
    row_to_seq: cute.Tensor
    divisor: cute.FastDivmodDivisorV2
    page_size: Int32

    @cute.jit
    def sequence(self, query, options):
        """The query's sequence."""
        sequence = query
        if options & ROW_TO_SEQ:
            sequence = self.row_to_seq[query]
        return sequence

    @cute.jit
    def exists(self, sequence):
        """Whether the block table has a row for the sequence, and a page in it."""
        return sequence >= 0 and sequence < self.block_table.shape[0] and self.block_table.shape[1] > 0

    @cute.jit
    def slot(self, sequence, index, valid=True) -> Int32:
        """Cache slot of key number `index` >= 0 of an existing sequence. -1 if the block table has no page for it, or
        if not `valid`. No branch surrounds the load, so that several loads overlap."""
        last = self.block_table.shape[1] - 1
        page, offset = divmod(index, self.divisor)
        physical = self.block_table[sequence, cutlass.min(page, last)]
        slot = Int64(physical) * self.page_size + offset
        exists = valid and page <= last and physical >= 0 and slot < Int64(MAX_SLOTS)
        return Int32(slot) if exists else Int32(-1)


@cute.jit
def fill_rest(indices: cute.Tensor, values: cute.Tensor, row, found, options, tid, threads: cutlass.Constexpr):
    """Write -1 and -inf to a row's results from number `found` on. All threads of the CTA call this."""
    for i in cutlass.range(found + tid, indices.shape[1], threads, unroll=1):
        indices[row, i] = Int32(-1)
        if options & VALUES:
            values[row, i] = -Float32(float("inf"))


def fake_selection(rows) -> tuple[cute.Tensor, ...]:
    """Fake tensors: block_table [B, pages], row_to_seq [S], indices [rows, k], values [S, k], where S may be another
    number of rows."""
    block_table = fake(Int32, (cute.sym_int(), cute.sym_int()), (*strides(1), 1), 4)
    row_to_seq = fake(Int32, (cute.sym_int(),), strides(1), 4)
    indices = fake(Int32, (rows, cute.sym_int()), (*strides(1), 1), 4)
    return block_table, row_to_seq, indices, fake(Float32, (cute.sym_int(), cute.sym_int()), (*strides(1), 1), 4)
