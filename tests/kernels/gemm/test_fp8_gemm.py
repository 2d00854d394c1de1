"""Every shipped variant of the FP8 product compiles to sm_90a: FP8 wgmma, TMA, no spills, room in shared memory."""

from dsa.cute.compile_cache import cubin
from dsa.cute.quantize import GROUP
from dsa.cute.sass import disassemble
from dsa.kernels.gemm import fp8_gemm_sm90 as kernels
from dsa.kernels.gemm import limits
from tests.kernels.variants import shipped


@shipped(kernels.compile_fp8_gemm)
def test_sass(arguments):
    _, config = arguments
    sass = disassemble(cubin(kernels.compile_fp8_gemm, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.instructions["QGMMA"] == kernels.GROUP // 32 * kernels.SCALES * -(-config.columns // kernels.WIDTH)
    assert sass.instructions["UTMALDG"] == 2
    # One multiply-add an accumulator: the compiler has neither split them nor left any out.
    assert sass.instructions["FFMA"] == config.columns // 2 * kernels.SCALES
    assert sass.registers * config.threads <= 65536
    assert config.fits()


def test_a_scale_is_of_as_many_channels_as_the_casts_give():
    assert limits.GROUP == GROUP
