"""The expansion with projection compiles to sm_90a: mma of what the warp itself made, all loads of its tokens in
flight, and no barrier that waits for what was stored."""

from dsa.kernels.elementwise import hyper_expand_mix_sm90 as kernels
from dsa.kernels.elementwise import hyper_mix_few_tokens_sm90
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble, instructions_in_order
from tests.kernels.variants import shipped


@shipped(kernels.compile_hyper_expand_mix)
def test_sass(compile_function, arguments):
    sass = disassemble(cubin(compile_function, *arguments))
    at_once = min(*arguments, kernels.AT_ONCE)
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 65536 // kernels.THREADS
    assert sass.instructions["LDG"] == at_once * (5 + 5) and sass.instructions["LDGSTS"] == 3 * kernels.OWN_OUTPUTS
    assert sass.instructions["STG"] == at_once + 2
    # 4 blocks of 64 channels, 16 a step, of three parts.
    assert sass.instructions["HMMA"] == 4 * 4 * 3
    # The groups go to other CTAs by stores that a barrier counts.
    assert sass.instructions["STAS"] == 1 and not sass.instructions["MEMBAR"]


@shipped(kernels.compile_hyper_expand_mix)
def test_no_load_waits_for_another(compile_function, arguments):
    (instructions,) = instructions_in_order(cubin(compile_function, *arguments))
    at_once = min(*arguments, kernels.AT_ONCE)
    found = [name for name in instructions if name in ("LDG", "FFMA")]
    assert found[: 10 * at_once] == 10 * at_once * ["LDG"]
    assert "LDGSTS" not in instructions[instructions.index("LDG") :]


def test_has_the_slices_of_the_projection_by_itself():
    """A CTA's warps are its group's slices there, too."""
    assert kernels.THREADS == hyper_mix_few_tokens_sm90.THREADS and kernels.CTAS == hyper_mix_few_tokens_sm90.CTAS
