"""Every shipped variant of multi-head attention compiles to sm_90a: wgmma in flight beside the softmax, no spills."""

from dsa.kernels.mla import mha_varlen_fwd_sm90 as kernels
from dsa.kernels.mla.mha_limits import MHA_DIMS
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_mha_varlen_fwd)
def test_sass(arguments):
    _, config, rope, selected = arguments
    sass = disassemble(cubin(kernels.compile_mha_varlen_fwd, *arguments))
    found = sass.instructions
    assert sass.stack == 0 and not found["STL"] and not found["LDL"]
    # The first scores, and both products in the loop and behind it.
    assert found["HGMMA"] == 3 * config.dim // 16 + 2 * config.keys // 16
    # Of 64 channels each: queries, a block of keys, rope channels apart or not, and of values.
    assert found["UTMALDG"] == (2 * config.dim + config.value_dim) // 64 and rope % 64 == 0
    # A wait for each group of them, and two for the one that the softmax hides: the compiler has added none.
    assert found["WARPGROUP"] == 5 + 5
    # Bits go to predicates a byte at a time, not one by one: of a lane's two rows, for maxima and powers, in front of
    # the loop and in it.
    assert found["R2P"] == (2 * 2 * 2 * config.keys // 32 if selected else 0)
    assert sass.registers * config.threads <= 65536
    assert config.fits()


def test_all_channels_have_a_config():
    assert set(MHA_DIMS) == set(kernels.CONFIGS)
