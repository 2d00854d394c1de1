"""Conversion of selected keys to cache slots through a block table, and padding of result rows with -1."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsa.cute.fake_tensors import fake, strides
from dsa.cute.limits import MAX_SLOTS
from dsa.kernels.indexer.limits import ROW_TO_SEQ, VALUES


class Paging(NamedTuple):
    """block_table [B, pages] int32: the cache pages of each sequence, negative for a missing page. row_to_seq [S]
    int32: sequence of each query. It is used only if `options` has the bit ROW_TO_SEQ; otherwise query i belongs to
    sequence i. page_size: keys per page. divisor: for fast division by page_size."""

    block_table: cute.Tensor
    row_to_seq: cute.Tensor
    divisor: cute.FastDivmodDivisorV2
    page_size: Int32

    @cute.jit
    def sequence(self, query, options):
        sequence = query
        if options & ROW_TO_SEQ:
            sequence = self.row_to_seq[query]
        return sequence

    @cute.jit
    def exists(self, sequence):
        """Whether the block table has a row for the sequence, and at least one column."""
        return sequence >= 0 and sequence < self.block_table.shape[0] and self.block_table.shape[1] > 0

    @cute.jit
    def slot(self, sequence, index, valid=True) -> Int32:
        """Return the cache slot of key number `index` >= 0 of a sequence for which `exists` is true. The result is -1
        if the block table has no page for the key, if the slot is at least MAX_SLOTS, or if `valid` is false. No branch
        surrounds the load, so that several loads overlap."""
        last = self.block_table.shape[1] - 1
        page, offset = divmod(index, self.divisor)
        physical = self.block_table[sequence, cutlass.min(page, last)]
        slot = Int64(physical) * self.page_size + offset
        exists = valid and page <= last and physical >= 0 and slot < Int64(MAX_SLOTS)
        return Int32(slot) if exists else Int32(-1)


@cute.jit
def fill_rest(indices: cute.Tensor, values: cute.Tensor, row, found, options, tid, threads: cutlass.Constexpr):
    """From element `found` on, write -1 to a row's indices. If `options` has VALUES, also write -inf to the row's
    values. All threads of the CTA call this."""
    for i in cutlass.range(found + tid, indices.shape[1], threads, unroll=1):
        indices[row, i] = Int32(-1)
        if options & VALUES:
            values[row, i] = -Float32(float("inf"))


def fake_selection(rows) -> tuple[cute.Tensor, ...]:
    """Return fake tensors: block_table, row_to_seq, indices [rows, k] (int32) and values (fp32). All but indices are
    optional, and placeholders of any size can stand for them, so `rows` does not fix their sizes."""
    block_table = fake(Int32, (cute.sym_int(), cute.sym_int()), (*strides(1), 1), 4)
    row_to_seq = fake(Int32, (cute.sym_int(),), strides(1), 4)
    indices = fake(Int32, (rows, cute.sym_int()), (*strides(1), 1), 4)
    return block_table, row_to_seq, indices, fake(Float32, (cute.sym_int(), cute.sym_int()), (*strides(1), 1), 4)
