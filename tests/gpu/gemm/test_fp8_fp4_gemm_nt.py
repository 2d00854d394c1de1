"""GEMMs with FP4 weights on the GPU have the bits of GEMMs with the weights widened to FP8."""

from functools import partial

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.kernels.gemm import fp8_fp4_gemm_few_rows_sm90 as few_rows_kernels
from dsa.kernels.gemm import fp8_fp4_gemm_sm90 as kernels
from tests.gpu.attention import int32
from tests.gpu.case_checks import by_sizes, grid, verify
from tests.gpu.gemm import hostile
from tests.gpu.gemm.hostile import DTYPES, by_dtype
from tests.gpu.gemm.launches import write_fp4

CASE, *_ = cases_of("fp8_fp4_gemm_nt")
# The small-M kernel gathers rows of a itself. The kernel for many rows reads a gathered copy.
CONFIGS = [*few_rows_kernels.CONFIGS, *kernels.CONFIGS]
# Rows per matrix. Every tile height gets a full last tile, one with a single row, and one with a single row for a warp.
TAILS = [0, 1, 7, 8, 9, 0, 16, 31, 32, 33, 64, 65, 130, 257, 0]


def operands(rows, matrices, columns, channels):
    return hostile.operands(CASE, rows, matrices, columns=columns, channels=channels)


@pytest.mark.parametrize(("columns", "channels"), [(128, 128), (256, 2048), (136, 160), (8, 32), (4096, 1024)])
@by_sizes(
    grid(
        sizes=[[0, 5, 0, 0, 300, 64, 1, 0], [0] * 7 + [1], [129] * 4, [1] * 64, [3000, 1]],
        tokens=(0,),
        out_dtype=DTYPES,
        weighted=(False,),
    )
)
def test_every_shape_is_right(sizes, columns, channels, record_error):
    verify(CASE, sizes | {"columns": columns, "channels": channels}, record_error)


@pytest.mark.parametrize("weighted, out_dtype", [(False, DTYPES[1]), (True, DTYPES[1]), (True, DTYPES[0])])
@pytest.mark.parametrize("tokens", [1, 32, 128, 2000])
def test_gathered_rows_with_weights_are_right(tokens, weighted, out_dtype, record_error):
    counts = torch.randint(16, (6 * tokens,)).bincount(minlength=16).tolist()
    sizes = {"sizes": counts, "tokens": tokens, "columns": 512, "channels": 1024}
    verify(CASE, sizes | {"weighted": weighted, "out_dtype": out_dtype}, record_error)


@pytest.mark.parametrize("out_dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("unused", [0, *hostile.UNUSED])
@pytest.mark.parametrize("sizes", [*hostile.SIZES, [70, 0, 1300, 9], [2] * 300], ids=hostile.name)
@pytest.mark.parametrize("channels", [512, 160])
def test_expected_rows_and_unused_rows_change_no_bit(channels, sizes, unused, out_dtype):
    a, b = operands(sum(sizes), len(sizes), 136, channels)
    hostile.check_expected_rows(dsa.grouped_fp8_fp4_gemm_nt, a, b, sizes, unused, out_dtype=out_dtype)


def test_every_code_at_every_scale_is_right():
    """Each row of the weight repeats one FP4 code. In the last block of 128 channels, the exponents of two scales
    differ by 14, the largest difference that is allowed."""
    given = CASE.arguments("cuda", sizes=[64], columns=128, channels=512, weighted=False, out_dtype=torch.float32)
    packed, scale, _ = given["b"]
    packed.view(torch.uint8).copy_(torch.arange(16, device="cuda").repeat_interleave(8)[:, None] * 17)
    scale.view(torch.uint8).copy_(torch.arange(16, device="cuda") % 15 + 100)
    given["b"] = packed, scale, dsa.fp4_block_scales(packed, scale)
    CASE.check(given, CASE.run(given))


def test_ends_of_the_scale_range_are_right():
    """32 zeros can have any scale, here the largest. Scales of 2^-127, the smallest, give subnormal products."""
    a, (packed, scale, _) = operands(64, 2, 128, 256)
    packed[0, 7, :16] = 0
    scale.view(torch.uint8)[0, 7, 0], scale.view(torch.uint8)[1] = 254, 0
    b, ends = (packed, scale, dsa.fp4_block_scales(packed, scale)), hostile.ends_of([20, 44])
    expected = dsa.grouped_fp8_gemm_nt(a, dsa.widen_fp4(packed, scale), ends, torch.float32)
    assert torch.equal(dsa.grouped_fp8_fp4_gemm_nt(a, b, ends, torch.float32), expected)


@pytest.mark.parametrize("count", [60, 300])
def test_a_graph_follows_new_ends(count):
    """The counts select the small-M kernel and the kernel for many rows."""
    a, b = operands(count, 4, 136, 256)
    wide = dsa.widen_fp4(*b[:2])
    hostile.check_replays_with_fewer_rows(
        *(dsa.grouped_fp8_fp4_gemm_nt, a, b),
        lambda own, sizes: dsa.grouped_fp8_gemm_nt(own, wide, hostile.ends_of(sizes)),
    )


@by_dtype
@pytest.mark.parametrize(("columns", "channels"), [(136, 256), (392, 640), (8, 128), (264, 160), (8, 32)])
@pytest.mark.parametrize(
    ("ends", "rows_of", "count"), hostile.rows_of_matrices(TAILS, [*TAILS[:-1], 70]), ids=hostile.name
)
def test_every_tile_writes_the_products_of_each_widened_matrix(ends, rows_of, count, columns, channels, out_dtype):
    a, b = operands(count, len(ends), columns, channels)

    def product(own, matrix, weights):
        sums = dsa.fp8_gemm_nt(own, matrix, torch.float32)
        return sums.to(out_dtype), (sums * weights[:, None]).to(out_dtype)

    wide = dsa.widen_fp4(*b[:2])
    a, mixed, numbers, weights, (plain, weighted) = hostile.with_unused_rows(product, a, wide, rows_of)
    for config in CONFIGS if channels % 128 == 0 else kernels.CONFIGS:
        for operand, rows in ((a, None), (mixed, numbers)):
            write = partial(write_fp4, config, operand, b, int32(ends), rows=rows)
            hostile.check_written(write, plain, has_outside=rows is not None)
            hostile.check_written(partial(write, weights=weights), weighted, has_outside=rows is not None)
