"""grouped_fp8_gemm_swiglu and grouped_fp8_fp4_gemm_swiglu on the GPU have the bits of the grouped GEMM followed by
swiglu_cast_to_fp8."""

from functools import partial

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.kernels.gemm import fp8_gemm_sm90 as kernels
from tests.gpu.attention import int32
from tests.gpu.case_checks import FLOATS, by_sizes, grid, verify
from tests.gpu.gemm import hostile
from tests.gpu.gemm.launches import write_swiglu
from tests.gpu.op_checks import assert_same_bits

FP8, FP4 = CASES = cases_of("grouped_fp8_gemm_swiglu")
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# Rows per matrix. Both tile heights get a full last tile, one with a single row, and one with a single row for a warp.
TAILS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 0, 65, 127, 128, 129, 191, 193, 0, 257]
KINDS = [(config, *kind) for config in kernels.SWIGLU_CONFIGS for kind in ((False, False), (True, False))]
KINDS.append((kernels.SWIGLU_CONFIGS[-1], False, True))


def product_and_cast(a, b, ends, dtype=torch.bfloat16, use_ue8m0=True, limit=None):
    gate_up = dsa.grouped_fp8_gemm_nt(a, b, ends, dtype)
    return dsa.swiglu_cast_to_fp8(*gate_up.chunk(2, -1), use_ue8m0, limit=limit)


@by_case
# The last call has 4200 rows. The kernel gathers at most 4096 rows, so the op copies the rows first.
@pytest.mark.parametrize(
    ("tokens", "inner", "channels"), [(1, 128, 128), (37, 384, 1024), (700, 2048, 512), (1400, 128, 256)]
)
@by_sizes(grid(limit=(None, 1.5), use_ue8m0=(False, True), dtype=FLOATS))
def test_every_shape_has_the_bits_of_product_and_cast(sizes, tokens, inner, channels, case, record_error):
    counts = torch.randint(8, (3 * tokens,)).bincount(minlength=8).tolist()
    verify(case, sizes | {"sizes": counts, "tokens": tokens, "inner": inner, "channels": channels}, record_error)


@pytest.mark.parametrize("channels", [1024, 640])
@pytest.mark.parametrize("count", [1, 8, 300, 2000])
def test_rows_with_a_stride_of_0_have_the_bits_of_copies(count, channels):
    """The counts select every kernel of the grouped ops."""
    (q, s), fp4 = hostile.operands(FP4, 1, 8, channels=channels)
    fp8, ends = dsa.widen_fp4(*fp4[:2]), (torch.rand(8, device="cuda") * count / 8).int().cumsum(0).int()
    ends[-1] = count
    same_rows = q.expand(count, -1), s.expand(count, -1)
    copies = tuple(x.contiguous() for x in same_rows)
    for op, b in (
        *((dsa.grouped_fp8_gemm_nt, fp8), (dsa.grouped_fp8_gemm_swiglu, fp8)),
        *((dsa.grouped_fp8_fp4_gemm_nt, fp4), (dsa.grouped_fp8_fp4_gemm_swiglu, fp4)),
    ):
        assert_same_bits(op(same_rows, b, ends), op(copies, b, ends))
    one = fp8[0][0], fp8[1][0]
    assert_same_bits(dsa.fp8_gemm_nt(same_rows, one), dsa.fp8_gemm_nt(copies, one))


@pytest.mark.parametrize(
    "variant",
    [(FLOATS[0], True, None), (FLOATS[0], False, 1.5), (FLOATS[1], True, 1.5), (FLOATS[2], False, None)],
    ids=str,
)
@pytest.mark.parametrize(("inner", "channels"), [(128, 160), (128, 256), (384, 1152)])
@pytest.mark.parametrize(
    ("ends", "rows_of", "count"), hostile.rows_of_matrices(TAILS, [*TAILS[::-1], 0]), ids=hostile.name
)
def test_every_tile_writes_product_and_cast_of_each_matrix(ends, rows_of, count, inner, channels, variant):
    a, b = hostile.operands(FP8, count, len(ends), inner=inner, channels=channels)
    dtype, use_ue8m0, limit = variant

    def product(own, matrix, _):
        return dsa.swiglu_cast_to_fp8(*dsa.fp8_gemm_nt(own, matrix, dtype).chunk(2, -1), use_ue8m0, limit=limit)

    a, mixed, numbers, _, expected = hostile.with_unused_rows(product, a, b, rows_of)
    for config, gathered, is_dynamic in KINDS:
        operand, rows = (mixed, numbers) if gathered else (a, None)
        write = partial(write_swiglu, config, operand, b, int32(ends), variant=variant, rows=rows)
        for ctas in (None, 3) if is_dynamic else (None,):
            written = partial(write, is_dynamic=is_dynamic, ctas=ctas)
            hostile.check_written(written, *expected, has_outside=gathered)


@by_case
@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("inner", [128, 2048])
@pytest.mark.parametrize("unused", [0, *hostile.UNUSED])
@pytest.mark.parametrize("sizes", [*hostile.SIZES, [70, 0, 1300, 9]], ids=str)
def test_expected_rows_and_unused_rows_change_no_bit(sizes, unused, inner, limit, case):
    """The sizes and expected_rows select the fused kernel, or a GEMM followed by a cast that skips unused rows. FP4
    weights always select the latter."""
    a, b = hostile.operands(case, sum(sizes), len(sizes), inner=inner, channels=256)
    hostile.check_expected_rows(case.function(), a, b, sizes, unused, weighted=False, limit=limit)


@pytest.mark.parametrize(
    ("case", "count", "inner"), [(FP8, 300, 128), (FP8, 2000, 128), (FP4, 2000, 2048)], ids=["few", "many", "FP4"]
)
def test_a_graph_follows_new_ends(case, count, inner):
    """The case "few" runs the fused kernel. The case "many" has dynamic scheduling, for which each replay must zero the
    tile counter. The case "FP4" runs a GEMM followed by a cast."""
    a, b = hostile.operands(case, count, 4, inner=inner, channels=256)
    wide = dsa.widen_fp4(*b[:2]) if case is FP4 else b
    # With FP4 weights the GEMM makes padded copies of scales, because K = 256 is not a multiple of 512. The op frees
    # the copies before it allocates the results, so both can have the same memory. Each replay writes the copies again.
    # So unused rows of the results need not keep their bytes.
    hostile.check_replays_with_fewer_rows(
        *(case.function(), a, b, lambda own, sizes: product_and_cast(own, wide, hostile.ends_of(sizes))),
        keeps_unused=case is FP8,
    )
