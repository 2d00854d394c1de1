"""SASS of sparse MLA attention's gradients: the assembler adds no waits between wgmma."""

from dsa.cute.sm90 import WARPGROUP
from dsa.kernels.training import sparse_mla_backward_sm90 as kernels
from dsa.kernels.training import sparse_mla_backward_sums_sm90 as sums
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_sparse_mla_backward)
def test_sass(sass, arguments):
    _, channels, ordered = arguments
    # An LDGSTS gathers a chunk of four keys, and a warp gathers 16 keys of a tile. FENCE: one per chunk, two for a rope
    # part (one per half), one for dS, and one for the mbarriers.
    fences = kernels.VALUE // kernels.CHUNK + 2 * (channels > kernels.VALUE) + 2
    assert_counts(sass, LDGSTS=channels // kernels.CHUNK * 4, FENCE=fences)
    # dKV is added to global memory by reductions (REDG), or with `ordered` stored to separate rows.
    assert bool(sass.instructions["REDG"]) != ordered
    # With too few registers, the assembler would start and wait for every wgmma separately.
    assert sass.instructions["WARPGROUP"] < sass.instructions["HGMMA"]
    allocated = 2 * kernels.CONSUMER_REGISTERS + kernels.PRODUCER_REGISTERS
    assert allocated <= sass.registers * kernels.THREADS // WARPGROUP


@shipped(sums.compile_backward_inputs, sums.compile_reorder_sums, sums.compile_sum_lists)
def test_sums_use_at_most_128_registers(sass):
    assert sass.registers <= 128
