"""The shipped variants of the hyper-connections compile to sm_90a: streams read once in wide loads, no spills."""

from dsa.kernels.elementwise import hyper_connections_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_hyper_collapse, kernels.compile_hyper_head, kernels.compile_hyper_expand)
def test_sass(compile_function, arguments):
    sass = disassemble(cubin(compile_function, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert not sass.instructions["CALL"]  # divisions and powers are approximations of one instruction
    if compile_function is not kernels.compile_hyper_expand:
        _, threads, steps = arguments
        assert sass.registers * threads <= 65536 // (2048 // (threads * steps))
        # The streams; mix, base and scale for pre, then the same for post and comb.
        behind = 2 * 5 + 2 if compile_function is kernels.compile_hyper_collapse else 0
        assert sass.instructions["LDG"] == 4 * steps + 3 + behind
        assert sass.instructions["BAR"] == 1
    else:
        assert sass.registers <= 64
        assert sass.instructions["LDG"] == 5 + 1 + 4 and sass.instructions["STG"] == 4
