"""SASS of the warm-up's kernels: wgmma in groups (the compiler adds no waits), and TMA loads."""

from dsa.kernels.training import q_tile_plan_sm90, warmup_rows_sm90
from dsa.kernels.training import warmup_target_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_warmup_target)
def test_target(sass, arguments):
    _, dim = arguments
    channels, query_stages, key_stages = kernels.STAGES[dim]
    # The products in the code: one, or one before the loop, two in it, and one after it.
    heads_at_a_time = 1 if dim > channels else 4
    # One start and one wait per group of wgmma, as in the source. More would mean that the compiler has added waits.
    groups = dim // channels if dim > channels else heads_at_a_time
    assert_counts(sass, HGMMA=dim // 16 * heads_at_a_time, WARPGROUP=2 * groups, UTMALDG=2 * channels // 64)
    assert (query_stages + key_stages) * 128 * channels * 2 <= 13 * 16384


@shipped(warmup_rows_sm90.compile_warmup_lse, warmup_rows_sm90.compile_warmup_kl, q_tile_plan_sm90.compile_q_tile_plan)
def test_small_kernels(sass):
    assert sass.registers <= 64
