"""Every shipped variant of the warm-up's own kernels compiles to sm_90a: wgmma, TMA, no spills, wgmma in groups."""

from dsa.kernels.training import q_tile_plan_sm90, warmup_rows_sm90
from dsa.kernels.training import warmup_target_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_warmup_target)
def test_target(arguments):
    _, dim = arguments
    channels, query_stages, key_stages = kernels.STAGES[dim]
    sass = disassemble(cubin(kernels.compile_warmup_target, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers * kernels.THREADS <= 65536
    heads_at_a_time = 1 if dim > channels else 4  # the first, two of the loop, the last
    assert sass.instructions["HGMMA"] == dim // 16 * heads_at_a_time
    # A wait and an arrival for each group, as written: the compiler has not put one behind every wgmma.
    groups = dim // channels if dim > channels else heads_at_a_time
    assert sass.instructions["WARPGROUP"] == 2 * groups
    assert sass.instructions["UTMALDG"] == 2 * channels // 64
    assert (query_stages + key_stages) * 128 * channels * 2 <= 13 * 16384


@shipped(warmup_rows_sm90.compile_warmup_lse, warmup_rows_sm90.compile_warmup_kl, q_tile_plan_sm90.compile_q_tile_plan)
def test_small_kernels(compile_function, arguments):
    sass = disassemble(cubin(compile_function, *arguments))
    assert sass.stack == 0 and sass.registers <= 64
