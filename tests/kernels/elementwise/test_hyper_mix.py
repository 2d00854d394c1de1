"""The kernels of the streams' projection compile to sm_90a: mma from registers, all loads of a round in flight."""

from dsa.kernels.elementwise import hyper_mix_few_tokens_sm90, hyper_mix_sm90
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(hyper_mix_few_tokens_sm90.compile_hyper_mix_few_tokens)
def test_few_tokens(compile_function, arguments):
    sass = disassemble(cubin(compile_function, *arguments))
    (rows,) = arguments
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 65536 // 256
    blocks = 64 // rows
    assert sass.instructions["LDG"] == blocks * 2 * (3 + rows // 8)
    assert sass.instructions["HMMA"] == blocks * 2 * 2 * 3 * rows // 16


@shipped(hyper_mix_sm90.compile_hyper_mix, hyper_mix_sm90.compile_hyper_mix_persistent)
def test_many_tokens(compile_function, arguments):
    """168 registers at the launch are 232 of a consumer."""
    sass = disassemble(cubin(compile_function, *arguments))
    (rows,) = arguments
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 168
    assert sass.instructions["HMMA"] == 2 * 2 * 9 * 2
    assert sass.instructions["UTMALDG"] == 2 * 256 // rows
