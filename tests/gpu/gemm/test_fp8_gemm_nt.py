"""FP8 GEMMs on the GPU, with one weight matrix and with several (grouped), for every kernel and tile."""

import itertools
from functools import partial

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.kernels.gemm import fp8_gemm_few_rows_sm90 as few_rows_kernels
from dsa.kernels.gemm import fp8_gemm_sm90 as kernels
from dsa.testing import poison_free_memory
from tests.gpu.attention import int32
from tests.gpu.case_checks import by_sizes, grid, verify
from tests.gpu.gemm import hostile
from tests.gpu.gemm.hostile import DTYPES, by_dtype
from tests.gpu.gemm.launches import write_few, write_few_grouped, write_grouped, write_one
from tests.gpu.op_checks import assert_same_bits

*_, ONE, GROUPED = cases_of("fp8_gemm_nt")
E4M3 = torch.float8_e4m3fn
SHAPES = [(1, 7168, 1536), (7, 576, 7168), (64, 2112, 7168), (65, 128, 128), (128, 8, 16), (300, 1000, 400),
          (4096, 4096, 7168), (513, 24576, 1536)]  # fmt: skip
GROUPS = [
    *([0, 5, 0, 0, 300, 64, 1, 0], [0] * 7 + [1], [129] * 4, [1] * 256, [0] * 200 + [8] * 56 + [0] * 100, [3000, 1]),
    *([0, 5, 0, 30, 9, 1, 0], [1] * 200, [0] * 1000 + [2] * 24, [60, 0, 4]),
]
# (N, K) of layers of models. With few rows, layers with small N run split-K.
LAYERS = [(2112, 7168), (576, 7168), (128, 7168), (1536, 7168), (7168, 2048), (24576, 1536), (392, 400)]
# (N, K) of a rank's part of a layer under tensor parallelism. In order: the output projection of V3.2 on 4 and on 8
# GPUs and of V4-Flash on 2; the down projection of the shared expert of V3.2 on 8 GPUs and of V4-Flash on 2; two small
# sizes.
PARTS = [(7168, 4096), (7168, 2048), (4096, 4096), (7168, 256), (4096, 1024), (136, 400), (8, 16)]
# Rows per matrix. Every tile height gets a full last tile, one with a single row, and one with a single row for a warp.
TAILS = [1, 16, 17, 32, 33, 63, 64, 0, 65, 128, 129, 192, 193, 0, 255, 256, 257, 300]
ONE_MATRIX = [
    *((write_few, config) for config in few_rows_kernels.CONFIGS),
    *((write_one, config) for config in kernels.ONE_MATRIX_CONFIGS),
]
KINDS = [
    *((config, False, False) for config in kernels.CONFIGS),
    *((config, True, False) for config in kernels.GATHERING_CONFIGS),
    *((config, False, True) for config in kernels.DYNAMIC_CONFIGS),
]


def operands(rows, columns, channels, matrices=None):
    if matrices is not None:
        return hostile.operands(GROUPED, rows, matrices, columns=columns, channels=channels)
    given = ONE.arguments("cuda", rows=rows, columns=columns, channels=channels)
    return given["a"], given["b"]


@pytest.mark.parametrize("rows", [1, 5, 40, 300, 5000])
@pytest.mark.parametrize("channels", [16, 768, 2816])
def test_columns_that_pad_scales_change_no_bit(rows, channels):
    """The products read the added columns, whose products must be finite, but use none of them."""

    def pad(operand):
        values, scales = operand
        return values, torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4), value=1e18)

    a, b = operands(rows, 392, channels)
    assert_same_bits([dsa.fp8_gemm_nt(pad(a), pad(b))], [dsa.fp8_gemm_nt(a, b)])
    a, b = operands(rows, 256, channels, matrices=4)
    ends = int32([rows] * 4)
    assert_same_bits([dsa.grouped_fp8_gemm_nt(pad(a), pad(b), ends)], [dsa.grouped_fp8_gemm_nt(a, b, ends)])
    assert_same_bits(dsa.grouped_fp8_gemm_swiglu(pad(a), pad(b), ends), dsa.grouped_fp8_gemm_swiglu(a, b, ends))


@by_dtype
@pytest.mark.parametrize(("rows", "columns", "channels"), SHAPES)
def test_one_matrix_is_right(rows, columns, channels, out_dtype, record_error):
    sizes = {"rows": rows, "columns": columns, "channels": channels, "out_dtype": out_dtype}
    verify(ONE, sizes, record_error)


@pytest.mark.parametrize("groups", GROUPS, ids=hostile.name)
@by_sizes(
    *(grid(columns=[n], channels=[k], out_dtype=DTYPES) for n, k in ((512, 256), (136, 128), (392, 400), (72, 1152)))
)
def test_groups_are_right(sizes, groups, record_error):
    verify(GROUPED, sizes | {"sizes": groups, "tokens": 0, "weighted": False}, record_error)


@pytest.mark.parametrize("tokens", [0, 700])
@pytest.mark.parametrize(
    "groups", [[0] * 1000 + [50] * 24, [2] * 1024, [0, 0, 4500, 0], [1500, 0, 1, 2600]], ids=hostile.name
)
@by_sizes(grid(weighted=(False, True), out_dtype=DTYPES[1:], columns=[136], channels=[256]))
def test_many_rows_of_groups_are_right(sizes, groups, tokens, record_error):
    """Four matrices have enough rows for dynamic scheduling, 1024 matrices do not. With tokens > 0, rows are gathered.
    The kernel itself gathers at most 4096 rows; more rows are copied before the launch."""
    verify(GROUPED, sizes | {"sizes": groups, "tokens": tokens}, record_error)


def first_rows(a, rows):
    return a[0][:rows], a[1][:rows]


def columns_of_a_wider_one(b, before, after):
    """Return b in columns of wider tensors, among NaN. before: blocks of 128 channels before b's columns. after:
    channels after b's columns"""
    w, ws = b
    wide = torch.full((len(w), 128 * before + w.shape[1] + after), 0x7F, dtype=torch.uint8, device="cuda").view(E4M3)
    scales = torch.full((len(ws), before + ws.shape[1] - (-after // 128)), torch.nan, device="cuda")
    own, own_scales = wide[:, 128 * before :][:, : w.shape[1]], scales[:, before:][:, : ws.shape[1]]
    assert not own.is_contiguous()
    return own.copy_(w), own_scales.copy_(ws)


@by_dtype
@pytest.mark.parametrize(
    ("columns", "channels"), [(136, 7168), (392, 400), (392, 1024), (8, 8192), (576, 1152), (64, 16)]
)
def test_every_tile_of_one_matrix_gives_the_same_bits(columns, channels, out_dtype):
    """Some tiles begin inside a block of 128 columns that share a scale. Most calls have a partial last tile."""
    a, b = operands(520, columns, channels)
    expected = dsa.fp8_gemm_nt(a, b, out_dtype)
    for (write, config), weight in itertools.product(ONE_MATRIX, (b, columns_of_a_wider_one(b, 4, 512))):
        high = config.rows
        for rows in {1, 17, 63, 64, 65, high // 2 + 1, high - 1, high, high + 1, high + 70, 2 * high}:
            poison_free_memory(mebibytes=1)
            hostile.check_written(partial(write, config, first_rows(a, rows), weight), expected[:rows], spare=8)


@pytest.mark.parametrize("out_dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("before", "after"), [(0, 512), (4, 0), (2, 128), (1, 16), (8, 400)])
@pytest.mark.parametrize(("columns", "channels"), [*LAYERS, *PARTS])
def test_a_row_depends_on_no_other_row_and_on_nothing_around_the_weight(columns, channels, before, after, out_dtype):
    """The numbers of rows select both kernels, tiles of 8 to 64 rows, and split-K. Repeated calls with the weight at
    two addresses let the op replay recorded calls."""
    a, b = operands(1200, columns, channels)
    whole, parts = dsa.fp8_gemm_nt(a, b, out_dtype), [columns_of_a_wider_one(b, before, after) for _ in range(2)]
    assert not whole.isnan().any()
    for rows in (*range(1, 66), 100, 128, 192, 256, 300, 511, 512, 1000):
        first = 977 * rows % (1200 - rows)
        part = slice(first, first + rows)
        for i in range(12 if rows in (1, 512) else 1):
            poison_free_memory(mebibytes=1)
            found = dsa.fp8_gemm_nt((a[0][part], a[1][part]), parts[(rows + i) % 2], out_dtype)
            assert torch.equal(found, whole[part]), (rows, i)


def test_strides_change_no_bit():
    (q, s), (w, ws) = operands(72, 136, 512)
    expected = dsa.fp8_gemm_nt((q, s), (w, ws))
    assert torch.equal(dsa.fp8_gemm_nt((q.view(4, 18, 512), s.view(4, 18, 4)), (w, ws)).view(72, 136), expected)
    one = w[:1].expand(136, -1), ws[:1].expand(2, -1)
    for rows in (1, 70):
        first = first_rows((q, s), rows)
        assert torch.equal(dsa.fp8_gemm_nt(first, one), dsa.fp8_gemm_nt(first, tuple(x.clone() for x in one)))


@pytest.mark.parametrize("ctas", [1, 7, 132, 500])
def test_any_number_of_ctas_gives_the_same_bits(ctas):
    """The scheduler divides the rows of a matrix into bands of row tiles. 4500 rows are more than one band."""
    a, b = operands(4500, 1000, 144)
    expected = dsa.fp8_gemm_nt(a, b)
    for config in kernels.ONE_MATRIX_CONFIGS:
        hostile.check_written(partial(write_one, config, a, b, ctas=ctas), expected)


def matrix_by_matrix(a, b, sizes, out_dtype=torch.float32):
    parts = zip(*(x.split(sizes) for x in a), *b, strict=True)
    return torch.cat([dsa.fp8_gemm_nt((q, s), (w, ws), out_dtype) for q, s, w, ws in parts])


@by_dtype
@pytest.mark.parametrize(("columns", "channels"), [(136, 256), (392, 400), (576, 1152), (8, 16)])
@pytest.mark.parametrize(
    ("ends", "rows_of", "count"), hostile.rows_of_matrices(TAILS, [*TAILS[::-1], 0]), ids=hostile.name
)
def test_every_tile_writes_the_products_of_each_matrix_alone(ends, rows_of, count, columns, channels, out_dtype):
    a, b = operands(count, columns, channels, len(ends))

    def product(own, matrix, weights):
        sums = dsa.fp8_gemm_nt(own, matrix, torch.float32)
        return sums.to(out_dtype), (sums * weights[:, None]).to(out_dtype)

    a, (q, s), numbers, weights, (plain, weighted) = hostile.with_unused_rows(product, a, b, rows_of)
    longer_rows = torch.cat((q.view(torch.uint8), q.view(torch.uint8)), 1).view(E4M3)[:, :channels]
    for config, gathered, is_dynamic in KINDS:
        operand, rows = ((longer_rows, s), numbers) if gathered else (a, None)
        write = partial(write_grouped, config, operand, b, int32(ends), rows=rows, is_dynamic=is_dynamic)
        for ctas in (None, 1, 7, 500) if is_dynamic else (None,):
            hostile.check_written(partial(write, ctas=ctas), plain, has_outside=gathered)
            hostile.check_written(partial(write, ctas=ctas, weights=weights), weighted, has_outside=gathered)
    for config, ctas in itertools.product(few_rows_kernels.GROUPED_CONFIGS, (None, 5)):
        hostile.check_written(partial(write_few_grouped, config, a, b, int32(ends), ctas=ctas), plain)


@pytest.mark.parametrize("out_dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("unused", [0, *hostile.UNUSED])
@pytest.mark.parametrize("sizes", [*hostile.SIZES, [70, 0, 1300, 9], [2] * 300], ids=hostile.name)
def test_expected_rows_and_unused_rows_change_no_bit(sizes, unused, out_dtype):
    """The sizes and expected_rows select both kernels, all tiles, and static and dynamic scheduling. The kernel gathers
    the rows, or the op copies them first."""
    a, b = operands(sum(sizes), 392, 400, len(sizes))
    hostile.check_expected_rows(dsa.grouped_fp8_gemm_nt, a, b, sizes, unused, out_dtype=out_dtype)


@pytest.mark.parametrize(
    ("count", "expected"), [(60, None), (300, None), (2000, None), (6000, 0), (6000, 300), (6000, 6000)]
)
def test_a_graph_follows_new_ends(count, expected):
    """The counts and expected rows select each of the grouped kernels. With dynamic scheduling each replay must zero
    the tile counter."""
    a, b = operands(count, 136, 256, 4)
    hostile.check_replays_with_fewer_rows(
        *(dsa.grouped_fp8_gemm_nt, a, b, lambda own, sizes: matrix_by_matrix(own, b, sizes, torch.bfloat16)),
        expected_rows=expected,
    )
