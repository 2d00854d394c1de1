"""The kernels of sparse MLA attention's gradients compile to sm_90a: wgmma not waited for one by one, no spills."""

from dsa.cute.sm90 import WARPGROUP
from dsa.kernels.training import sparse_mla_backward_sm90 as kernels
from dsa.kernels.training import sparse_mla_backward_sums_sm90 as sums
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_sparse_mla_backward)
def test_sass(arguments):
    _, channels, ordered = arguments
    sass = disassemble(cubin(kernels.compile_sparse_mla_backward, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # A warp gathers a chunk of 64 channels of four keys at a time, and has 16 keys.
    assert sass.instructions["LDGSTS"] == channels // kernels.CHUNK * 4
    # wgmma reads each chunk, and both halves of a rope part, after a fence; the others fence dS and the barriers.
    assert sass.instructions["FENCE"] == kernels.VALUE // kernels.CHUNK + 2 * (channels > kernels.VALUE) + 2
    # Sums of 16 bytes a lane, or stores to rows of their own.
    assert bool(sass.instructions["REDG"]) != ordered
    # Where registers do not suffice, the assembler waits behind every product: two instructions more for each.
    assert sass.instructions["WARPGROUP"] < sass.instructions["HGMMA"]
    assert sass.registers * kernels.THREADS <= 65536
    given = 2 * kernels.CONSUMER_REGISTERS + kernels.PRODUCER_REGISTERS
    assert given <= sass.registers * kernels.THREADS // WARPGROUP


@shipped(sums.compile_backward_inputs, sums.compile_reorder_sums, sums.compile_sum_lists)
def test_before_and_behind(compile_function, arguments):
    assert disassemble(cubin(compile_function, *arguments)).stack == 0
