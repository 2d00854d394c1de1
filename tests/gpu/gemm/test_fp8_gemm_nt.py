"""Products of FP8 operands on the GPU: one matrix and groups of them, by every kernel and tile."""

import itertools
from functools import partial

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.kernels.gemm import fp8_gemm_few_rows_sm90 as few_rows_kernels
from dsa.kernels.gemm import fp8_gemm_sm90 as kernels
from dsa.testing import poison_free_memory
from tests.gpu.gemm import hostile
from tests.gpu.gemm.launches import write_few, write_few_grouped, write_grouped, write_one

*_, ONE, GROUPED = cases_of("fp8_gemm_nt")
E4M3 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
by_dtype = pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
SHAPES = [(1, 7168, 1536), (7, 576, 7168), (64, 2112, 7168), (65, 128, 128), (128, 8, 16), (300, 1000, 400),
          (4096, 4096, 7168), (513, 24576, 1536)]  # fmt: skip
# [N, K] of layers. With few rows, those of few columns run split-K.
LAYERS = [(2112, 7168), (576, 7168), (128, 7168), (1536, 7168), (7168, 2048), (24576, 1536), (392, 400)]
# Rows of matrices: full and almost empty last tiles of every height, and warps with one row.
TAILS = [1, 16, 17, 32, 33, 63, 64, 0, 65, 128, 129, 192, 193, 0, 255, 256, 257, 300]
# (config, whether rows are gathered, whether scheduling is dynamic) of the grouped kernel.
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


@by_dtype
@pytest.mark.parametrize(("rows", "columns", "channels"), SHAPES)
def test_one_matrix(rows, columns, channels, out_dtype, record_error):
    poison_free_memory(mebibytes=64)
    record_error(ONE.verify("cuda", rows=rows, columns=columns, channels=channels, out_dtype=out_dtype))


@pytest.mark.parametrize(
    "sizes",
    [[0, 5, 0, 0, 300, 64, 1, 0], [0] * 7 + [1], [129] * 4, [1] * 256, [0] * 200 + [8] * 56 + [0] * 100, [3000, 1]],
    ids=hostile.name,
)
@pytest.mark.parametrize("columns, channels", [(512, 256), (136, 128)])
def test_groups(sizes, columns, channels, record_error):
    options = {"sizes": sizes, "tokens": 0, "columns": columns, "channels": channels, "weighted": False}
    for out_dtype in (torch.float32, torch.bfloat16):
        poison_free_memory(mebibytes=64)
        record_error(GROUPED.verify("cuda", **options, out_dtype=out_dtype))


@pytest.mark.parametrize("out_dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("columns", "channels"), LAYERS)
def test_a_row_does_not_depend_on_how_many_there_are(columns, channels, out_dtype):
    """Few rows run in the small-M kernel, in tiles of 8 to 64 rows, with and without split-K; other rows in another
    kernel."""
    a, b = operands(4096, columns, channels)
    whole = dsa.fp8_gemm_nt(a, b, out_dtype)
    for rows in (*range(1, 66), 100, 128, 192, 256, 300, 511, 512, 1000):
        first = 977 * rows % (4096 - rows)
        part = slice(first, first + rows)
        poison_free_memory(mebibytes=1)
        assert torch.equal(dsa.fp8_gemm_nt((a[0][part], a[1][part]), b, out_dtype), whole[part]), rows


def first_rows(a, rows):
    return a[0][:rows], a[1][:rows]


def columns_of_a_wider_one(b, before, after):
    """The same weight and scales as columns of wider ones. The columns around are NaN: blocks of 128 before, channels
    after."""
    w, ws = b
    wide = torch.full((len(w), 128 * before + w.shape[1] + after), 0x7F, dtype=torch.uint8, device="cuda").view(E4M3)
    scales = torch.full((len(ws), before + ws.shape[1] - (-after // 128)), torch.nan, device="cuda")
    own, own_scales = wide[:, 128 * before :][:, : w.shape[1]], scales[:, before:][:, : ws.shape[1]]
    own.copy_(w)
    own_scales.copy_(ws)
    assert not own.is_contiguous()
    return own, own_scales


def alone_and_wider(b):
    """A weight, and the same weight as columns of a wider one."""
    return b, columns_of_a_wider_one(b, 4, 512)


@by_dtype
@pytest.mark.parametrize(("columns", "channels"), [(136, 7168), (392, 400), (392, 1024), (8, 8192), (64, 16)])
def test_every_tile_of_few_rows_gives_the_same_bits(columns, channels, out_dtype):
    a, b = operands(200, columns, channels)
    expected = dsa.fp8_gemm_nt(a, b, out_dtype)
    for config, weight in itertools.product(few_rows_kernels.CONFIGS, alone_and_wider(b)):
        for rows in {1, config.rows // 2 + 1, config.rows, config.rows + 1, 200}:
            hostile.check_written(partial(write_few, config, first_rows(a, rows), weight), expected[:rows])


@by_dtype
@pytest.mark.parametrize(("columns", "channels"), [(136, 7168), (392, 400), (8, 8192), (576, 1152), (64, 16)])
def test_every_tile_of_one_matrix_gives_the_same_bits(columns, channels, out_dtype):
    """Tiles begin anywhere in a block of columns with one scale, and end after the last column and row. No memory
    around the result is written."""
    a, b = operands(520, columns, channels)
    expected = dsa.fp8_gemm_nt(a, b, out_dtype)
    for config, weight in itertools.product(kernels.ONE_MATRIX_CONFIGS, alone_and_wider(b)):
        high = config.rows
        for rows in {1, 17, 63, 64, 65, high - 1, high, high + 1, high + 70, 2 * high, 520}:
            poison_free_memory(mebibytes=1)
            guarded = torch.full((rows + 2, columns + 8), 7.0, dtype=out_dtype, device="cuda")
            out = guarded[1:-1, :columns]
            write_one(config, first_rows(a, rows), weight, out)
            assert torch.equal(out, expected[:rows]), (config, rows)
            out.fill_(7.0)
            assert guarded.eq(7).all(), (config, rows)


# [N, K] of a GPU's columns: V3.2's output projection on 4 and 8 GPUs, V4-Flash's on 2, shared experts on 8 and 2.
PARTS = [(7168, 4096), (7168, 2048), (4096, 4096), (7168, 256), (4096, 1024), (136, 400), (8, 16)]


@pytest.mark.parametrize("out_dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("before", "after"), [(0, 512), (4, 0), (2, 128), (1, 16), (8, 400)])
@pytest.mark.parametrize(("columns", "channels"), PARTS)
def test_columns_of_a_wider_weight(columns, channels, before, after, out_dtype):
    """The bits of the weight alone; nothing next to it is read. Repeated calls, with the columns at two places in turn,
    also run recorded."""
    a, b = operands(600, columns, channels)
    parts = [columns_of_a_wider_one(b, before, after) for _ in range(2)]
    for rows in (1, 8, 33, 64, 65, 300, 600):
        first = first_rows(a, rows)
        expected = dsa.fp8_gemm_nt(first, b, out_dtype)
        assert not expected.isnan().any()
        for i in range(12 if rows in (1, 600) else 1):
            poison_free_memory(mebibytes=1)
            assert torch.equal(dsa.fp8_gemm_nt(first, parts[i % 2], out_dtype), expected), (rows, i)


def test_strides():
    """Rows of a as parts of longer rows, leading dimensions, and a weight whose rows have a stride of 0."""
    (q, s), (w, ws) = operands(72, 136, 512)
    wide = torch.cat((q.view(torch.uint8), q.view(torch.uint8)), 1).view(E4M3)[:, :512]
    expected = dsa.fp8_gemm_nt((q, s), (w, ws))
    assert torch.equal(dsa.fp8_gemm_nt((wide, s), (w, ws)), expected)
    assert torch.equal(dsa.fp8_gemm_nt((q.view(4, 18, 512), s.view(4, 18, 4)), (w, ws)).view(72, 136), expected)
    one = w[:1].expand(136, -1), ws[:1].expand(2, -1)
    for rows in (1, 70):
        first = first_rows((q, s), rows)
        assert torch.equal(dsa.fp8_gemm_nt(first, one), dsa.fp8_gemm_nt(first, tuple(x.clone() for x in one)))


@pytest.mark.parametrize("ctas", [1, 7, 132, 500])
def test_tiles_by_any_number_of_ctas(ctas):
    """One matrix, with rows in several bands; groups with dynamic scheduling."""
    a, b = operands(4500, 1000, 144)
    expected = dsa.fp8_gemm_nt(a, b)
    for config in kernels.ONE_MATRIX_CONFIGS:
        hostile.check_written(partial(write_one, config, a, b, ctas=ctas), expected)
    (a, b), ends = operands(sum(TAILS), 392, 256, len(TAILS)), hostile.ends_of(TAILS)
    expected = dsa.grouped_fp8_gemm_nt(a, b, ends)
    for config in kernels.DYNAMIC_CONFIGS:
        hostile.check_written(partial(write_grouped, config, a, b, ends, is_dynamic=True, ctas=ctas), expected)


def matrix_by_matrix(a, b, sizes, out_dtype=torch.float32):
    parts = zip(*(x.split(sizes) for x in a), *b, strict=True)
    return torch.cat([dsa.fp8_gemm_nt((q, s), (w, ws), out_dtype) for q, s, w, ws in parts])


@by_dtype
@pytest.mark.parametrize(("columns", "channels"), [(392, 400), (576, 1152), (8, 16)])
def test_every_tile_gives_the_same_bits(columns, channels, out_dtype):
    """The bits of each matrix's product alone: with and without gathered rows, weights and dynamic scheduling."""
    a, b = operands(sum(TAILS), columns, channels, len(TAILS))
    ends, expected = hostile.ends_of(TAILS), matrix_by_matrix(a, b, TAILS)
    factors = torch.rand(len(expected), device="cuda") - 0.5
    plain, weighted = expected.to(out_dtype), (expected * factors[:, None]).to(out_dtype)
    # The same rows in another order, as parts of longer rows.
    order = torch.randperm(len(expected), device="cuda")
    q, s = (hostile.rows_of(x, order.argsort()) for x in a)
    q = torch.cat((q.view(torch.uint8), q.view(torch.uint8)), 1).view(E4M3)[:, :channels]
    for config, gathered, is_dynamic in KINDS:
        operand, rows = ((q, s), order.int()) if gathered else (a, None)
        write = partial(write_grouped, config, operand, b, ends, rows=rows, is_dynamic=is_dynamic)
        hostile.check_written(write, plain)
        hostile.check_written(partial(write, weights=factors), weighted)


@pytest.mark.parametrize(
    "sizes",
    [[0] * 1000 + [50] * 24, [2] * 1024, [0, 0, 4500, 0], [1500, 0, 1, 2600]],
    ids=hostile.name,
)
def test_many_rows_of_several_matrices(sizes):
    """Scheduling is dynamic. The kernel gathers rows by number, or the op copies them if they are many."""
    given = GROUPED.arguments("cuda", sizes=sizes, tokens=700, columns=136, channels=256)
    a, b, ends, rows, factors = (given[name] for name in ("a", "b", "ends", "rows", "weights"))
    copied = tuple(hostile.rows_of(x, rows) for x in a)
    expected = matrix_by_matrix(copied, b, sizes)
    for operand, order in ((copied, None), (a, rows)):
        poison_free_memory(mebibytes=64)
        assert torch.equal(dsa.grouped_fp8_gemm_nt(operand, b, ends, rows=order), expected.bfloat16())
        got = dsa.grouped_fp8_gemm_nt(operand, b, ends, torch.float16, rows=order, weights=factors)
        assert torch.equal(got, (expected * factors[:, None]).half())


@pytest.mark.parametrize("out_dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("unused", [0, *hostile.UNUSED])
@pytest.mark.parametrize("sizes", [*hostile.SIZES, [70, 0, 1300, 9], [2] * 300], ids=hostile.name)
def test_expected_rows_and_unused_rows_change_no_bit(sizes, unused, out_dtype):
    """In both kernels, with tiles of all sizes, static and dynamic scheduling, and rows gathered or copied."""
    a, b = operands(sum(sizes), 392, 400, len(sizes))
    hostile.check_expected_rows(dsa.grouped_fp8_gemm_nt, a, b, sizes, unused, out_dtype=out_dtype)


@by_dtype
@pytest.mark.parametrize(
    ("ends", "rows_of", "count"), hostile.rows_of_matrices(TAILS, [*TAILS[::-1], 0]), ids=hostile.name
)
def test_only_the_rows_of_matrices_are_written(ends, rows_of, count, out_dtype):
    """By every kernel and tile, for any ends. The contents of other rows reach no result."""
    a, b = operands(count, 136, 256, len(ends))
    expected, ends = hostile.untouched(count, 136, out_dtype), torch.tensor(ends, dtype=torch.int32, device="cuda")
    hostile.write_products(partial(dsa.fp8_gemm_nt, out_dtype=out_dtype), a, b, rows_of, expected)
    a, numbers, ones = hostile.with_unused_rows(a, rows_of)
    for (config, gathered, is_dynamic), weights in itertools.product(KINDS, (None, ones)):
        options = {"rows": numbers if gathered else None, "weights": weights, "is_dynamic": is_dynamic}
        hostile.check_written(partial(write_grouped, config, a, b, ends, **options), expected)
    for config in few_rows_kernels.GROUPED_CONFIGS:
        hostile.check_written(partial(write_few_grouped, config, a, b, ends), expected)


@by_dtype
@pytest.mark.parametrize(
    "sizes", [[0, 5, 0, 30, 9, 1, 0], [1] * 200, [0] * 1000 + [2] * 24, [60, 0, 4]], ids=hostile.name
)
@pytest.mark.parametrize(("columns", "channels"), [(392, 400), (72, 1152)])
def test_few_rows_of_several_matrices(sizes, columns, channels, out_dtype):
    (a, b), ends = operands(sum(sizes), columns, channels, len(sizes)), hostile.ends_of(sizes)
    expected = matrix_by_matrix(a, b, sizes, out_dtype)
    for config, ctas in itertools.product(few_rows_kernels.GROUPED_CONFIGS, (None, 5)):
        hostile.check_written(partial(write_few_grouped, config, a, b, ends, ctas=ctas), expected)


@pytest.mark.parametrize("wrong", hostile.ROWS)
@pytest.mark.parametrize("count", [200, 4200])
def test_numbers_of_rows_outside_change_no_other_row(count, wrong):
    """Rows are gathered by the kernel or copied before."""
    given = GROUPED.arguments("cuda", sizes=[70, 0, count - 70], tokens=90, columns=136, channels=256, weighted=False)
    a, b, ends, rows = (given[name] for name in ("a", "b", "ends", "rows"))
    run = partial(dsa.grouped_fp8_gemm_nt, a, b, ends, rows=rows)
    writers = [partial(write_grouped, config, a, b, ends, rows=rows) for config in kernels.GATHERING_CONFIGS]
    hostile.check_numbers_outside(run, writers, rows, wrong)


@pytest.mark.parametrize(
    ("count", "expected"), [(60, None), (300, None), (2000, None), (6000, 0), (6000, 300), (6000, 6000)]
)
def test_graph_replay_with_fewer_rows(count, expected):
    """By each of the grouped kernels; with dynamic scheduling each replay zeroes the counter."""
    a, b = operands(count, 136, 256, 4)
    hostile.check_replays_with_fewer_rows(
        *(dsa.grouped_fp8_gemm_nt, a, b, lambda own, sizes: matrix_by_matrix(own, b, sizes, torch.bfloat16)),
        expected_rows=expected,
    )
