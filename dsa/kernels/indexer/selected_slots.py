"""Conversion of selected keys to cache slots through a block table, and padding of result rows with -1."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsa.cute.fake_tensors import fake, strides
from dsa.cute.limits import MAX_SLOTS
from dsa.kernels.indexer.limits import ROW_TO_SEQ, VALUES


class Paging(NamedTuple):
    """block_table [B, pages]. row_to_seq [S]: sequence of each query, if `options` has the bit ROW_TO_SEQ; without this
    bit, query i belongs to sequence i. divisor: a fast divisor by page_size, the keys per page."""

    block_table: cute.Tensor
    row_to_seq: cute.Tensor
    divisor: cute.FastDivmodDivisorV2
    page_size: Int32

    @cute.jit
    def sequence(self, query, options):
        """Return the query's sequence."""
        sequence = query
        if options & ROW_TO_SEQ:
            sequence = self.row_to_seq[query]
        return sequence

    @cute.jit
    def exists(self, sequence):
        """Whether the block table has a row for the sequence and at least one page per row."""
        return sequence >= 0 and sequence < self.block_table.shape[0] and self.block_table.shape[1] > 0

    @cute.jit
    def slot(self, sequence, index, valid=True) -> Int32:
        """Return the cache slot of key number `index` >= 0 of an existing sequence, or -1 if the block table has no
        page for the key or `valid` is false. No branch surrounds the load, so that several loads overlap."""
        last = self.block_table.shape[1] - 1
        page, offset = divmod(index, self.divisor)
        physical = self.block_table[sequence, cutlass.min(page, last)]
        slot = Int64(physical) * self.page_size + offset
        exists = valid and page <= last and physical >= 0 and slot < Int64(MAX_SLOTS)
        return Int32(slot) if exists else Int32(-1)


@cute.jit
def fill_rest(indices: cute.Tensor, values: cute.Tensor, row, found, options, tid, threads: cutlass.Constexpr):
    """Write -1 to a row's indices from element `found` on, and -inf to its values. All threads of the CTA call this."""
    for i in cutlass.range(found + tid, indices.shape[1], threads, unroll=1):
        indices[row, i] = Int32(-1)
        if options & VALUES:
            values[row, i] = -Float32(float("inf"))


def fake_selection(rows) -> tuple[cute.Tensor, ...]:
    """Return fake tensors: block_table [B, pages], row_to_seq [S], indices [rows, k], values [S, k]. S may differ from
    `rows`, because row_to_seq and values are optional."""
    block_table = fake(Int32, (cute.sym_int(), cute.sym_int()), (*strides(1), 1), 4)
    row_to_seq = fake(Int32, (cute.sym_int(),), strides(1), 4)
    indices = fake(Int32, (rows, cute.sym_int()), (*strides(1), 1), 4)
    return block_table, row_to_seq, indices, fake(Float32, (cute.sym_int(), cute.sym_int()), (*strides(1), 1), 4)
