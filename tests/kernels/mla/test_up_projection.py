"""Products with a head's part of kv_b compile to sm_90a without spills, all loads in flight before the first of them is
waited for."""

from dsa.kernels.mla import mla_absorb_queries_sm90, mla_values_cast_to_fp8_sm90
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble, instructions_in_order
from tests.kernels.variants import shipped


def loads_before_the_first_barrier(instructions):
    return instructions[: instructions.index("BAR")].count("LDG")


@shipped(mla_absorb_queries_sm90.compile_mla_absorb_queries)
def test_absorbed_queries(arguments):
    (nope,) = arguments
    code = cubin(mla_absorb_queries_sm90.compile_mla_absorb_queries, *arguments)
    sass, (instructions,) = disassemble(code), instructions_in_order(code)
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # 512 threads of V3.2's heads are together on a multiprocessor, 384 of GLM-5's.
    assert sass.registers <= 65536 // (512 // nope * nope) // 8 * 8
    # Eight rows of the weight, their scale, and an octet's queries; rope's three; the next octet.
    assert loads_before_the_first_barrier(instructions) == 10 and sass.instructions["LDG"] == 14
    assert sass.instructions["HMMA"] == 16 and sass.instructions["UBLKPF"] == 1


@shipped(mla_values_cast_to_fp8_sm90.compile_mla_values_cast_to_fp8)
def test_values(arguments):
    code = cubin(mla_values_cast_to_fp8_sm90.compile_mla_values_cast_to_fp8, *arguments)
    sass, (instructions,) = disassemble(code), instructions_in_order(code)
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 65536 // mla_values_cast_to_fp8_sm90.THREADS
    # Eight times 16 bytes of the weight, their scale, and four of an octet's latents; the next octet.
    assert loads_before_the_first_barrier(instructions) == 13 and sass.instructions["LDG"] == 17
    assert sass.instructions["HMMA"] == 16 and sass.instructions["UBLKPF"] == 1
