"""The shipped variants of the per-head warm-up loss's kernels compile to sm_90a: wgmma in flight, no spills."""

from dsa.kernels.training import per_head_gradient_sm90 as gradient
from dsa.kernels.training import per_head_key_sum_sm90 as key_sum
from dsa.kernels.training import per_head_kl_sm90 as kl
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped

K16 = 16  # channels, keys or rows of a wgmma instruction
ALL = 65536 // 128  # registers of a multiprocessor, for each thread of a warpgroup


@shipped(kl.compile_per_head_kl)
def test_kl_sass(arguments):
    sass = disassemble(cubin(kl.compile_per_head_kl, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.instructions["HGMMA"] == sum(arguments) // K16
    # Without registers to spare the assembler waits behind every product.
    assert sass.instructions["WARPGROUP"] < sass.instructions["HGMMA"]
    assert kl.CONSUMERS * kl.CONSUMER_REGISTERS + kl.PRODUCER_REGISTERS <= ALL


@shipped(gradient.compile_per_head_gradient)
def test_gradient_sass(arguments):
    sass = disassemble(cubin(gradient.compile_per_head_gradient, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    dim, index_dim = arguments
    # Scores of both kinds; D times keys, in the loop and behind it; D times queries.
    products = (dim + index_dim + 2 * gradient.KEYS + index_dim // 64 * gradient.ROWS) // K16
    assert sass.instructions["HGMMA"] == products
    assert sass.instructions["WARPGROUP"] < products
    assert sass.instructions["REDG"] == index_dim // 8
    registers = gradient.REGISTERS[index_dim]
    assert gradient.SCORE_WARPGROUPS * registers.score + registers.key + registers.producer <= ALL


@shipped(key_sum.compile_per_head_key_sum)
def test_key_sum_sass(arguments):
    sass = disassemble(cubin(key_sum.compile_per_head_key_sum, *arguments))
    assert sass.stack == 0 and sass.registers <= 128
