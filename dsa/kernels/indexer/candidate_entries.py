"""Lists of candidates in global memory: entries [queries, CAPACITY] of 8 bytes, a score and its key; counts
[queries, 2], how many there are from the front and from the back; bounds [queries]."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsa.cute.fake_tensors import fake
from dsa.kernels.indexer.candidate_lists import CAPACITY


@cute.jit
def load_entry(entries: cute.Tensor, query, place):
    """(score, key)"""
    return cute.arch.inline_ptx(
        "ld.global.v2.b32 {" + "{$w0}, {$w1}" + "}, [{$r0}];",
        write_only_types=[Float32, Int32],
        read_only_args=[Int64((entries[query, None].iterator + place).toint())],
    )


@cute.jit
def store_entry(entries: cute.Tensor, query, place, score: Float32, key: Int32):
    cute.arch.inline_ptx(
        "st.global.v2.b32 [{$r0}], {" + "{$r1}, {$r2}" + "};",
        read_only_args=[Int64((entries[query, None].iterator + place).toint()), score, key],
    )


def fake_lists(queries) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
    """Stand-ins for the lists of so many queries."""
    entries = fake(Int64, (queries, CAPACITY), (CAPACITY, 1))
    return entries, fake(Int32, (queries, 2), (2, 1)), fake(Float32, (queries,), (1,))
