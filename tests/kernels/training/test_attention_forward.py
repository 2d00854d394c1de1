"""Every shipped variant of the attention forward compiles to sm_90a: wgmma in flight beside the softmax, no spills."""

from dsa.cute.compile_cache import cubin
from dsa.cute.sass import disassemble
from dsa.kernels.training import attention_forward_sm90 as kernels
from dsa.kernels.training.limits import DENSE_CHANNELS
from tests.kernels.variants import shipped


@shipped(kernels.compile_attention_forward)
def test_sass(arguments):
    _, config = arguments
    sass = disassemble(cubin(kernels.compile_attention_forward, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # The first scores, and both products in the loop and behind it.
    assert sass.instructions["HGMMA"] == 3 * config.dim // 16 + 2 * kernels.KEYS // 16
    # A wait for each group of them, and two for the one that the softmax hides: the compiler has added none.
    assert sass.instructions["WARPGROUP"] == 5 + 5
    assert sass.registers * config.threads <= 65536
    assert config.fits()


def test_all_channels_have_a_config():
    assert set(DENSE_CHANNELS) == set(kernels.CONFIGS)
