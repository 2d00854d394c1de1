"""The FP8 product kernel against the reference, on the GPU: one matrix and groups of them."""

import itertools
from functools import partial

import pytest
import torch

import dsa
from dsa.kernels.gemm import fp8_gemm_few_rows_sm90 as few_rows_kernels
from dsa.kernels.gemm import fp8_gemm_sm90 as kernels
from dsa.ops._kernel_arguments import dtype_name
from dsa.ops.gemm import fp8_gemm_nt as op
from dsa.testing import calc_diff, poison_free_memory
from tests.gpu.gemm import hostile

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 7168, 1536), (7, 576, 7168), (64, 2112, 7168), (65, 128, 128), (128, 8, 16), (300, 1000, 400),
          (4096, 4096, 7168), (513, 24576, 1536)]  # fmt: skip
# [N, K] of layers: those of few columns have their channels split where the rows are few.
LAYERS = [(2112, 7168), (576, 7168), (128, 7168), (1536, 7168), (7168, 2048), (24576, 1536), (392, 400)]
# Of matrices: full and all but empty last tiles of every height, and warps with one row.
TAILS = [1, 16, 17, 32, 33, 63, 64, 0, 65, 128, 129, 192, 193, 0, 255, 256, 257, 300]


def operands(rows, columns, channels, matrices=None, powers=True):
    blocks = -(-channels // 128)
    lead = () if matrices is None else (matrices,)
    q = torch.randn(rows, channels, device="cuda").to(E4M3)
    w = torch.randn(*lead, columns, channels, device="cuda").to(E4M3)
    s, ws = (torch.rand(*shape, blocks, device="cuda") + 0.5 for shape in ((rows,), (*lead, -(-columns // 128))))
    if powers:
        s, ws = torch.exp2((8 * s).round() - 8), torch.exp2((8 * ws).round() - 8)
    return (q, s), (w, ws)


def check(got, a, b, ends=None, record_error=None):
    """Within a block the tensor cores keep about 14 bits of the largest product; all else is fp32."""
    with dsa.use_backend("reference"):
        expected = dsa.fp8_gemm_nt(a, b, torch.float32) if ends is None else (
            dsa.grouped_fp8_gemm_nt(a, b, ends, torch.float32)
        )  # fmt: skip
    # What a sum of products of random signs comes to.
    size = sum_of_squares(a, b, ends).sqrt()
    assert got.shape == expected.shape and not got.isnan().any()
    steps = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[got.dtype]
    error = (got.float() - expected).abs() - steps * expected.abs()
    if record_error and got.numel():
        record_error((error / size).max())
    assert (error <= 4e-3 * size).all()
    assert got.numel() == 0 or calc_diff(got, expected) < (1e-7 if got.dtype == torch.float32 else 1e-5)


def sum_of_squares(a, b, ends):
    """sum_k (q s w ws)^2, in fp32."""
    (q, s), (w, ws) = a, b
    rows, channels = w.shape[-2:]
    x = (q.float() * s.repeat_interleave(128, -1)[..., :channels]).square()
    scales = ws.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :channels]
    y = (w.float() * scales).square()
    if ends is None:
        return x @ y.T
    ends = ends.tolist()
    return torch.cat([x[i:j] @ matrix.T for i, j, matrix in zip([0, *ends], ends, y)])


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_matrix(shape, out_dtype, record_error):
    a, b = operands(*shape)
    poison_free_memory(mebibytes=64)
    check(dsa.fp8_gemm_nt(a, b, out_dtype), a, b, record_error=record_error)


def test_any_scales():
    a, b = operands(200, 512, 1024, powers=False)
    check(dsa.fp8_gemm_nt(a, b, torch.float32), a, b)


@pytest.mark.parametrize(
    "sizes",
    [[0, 5, 0, 0, 300, 64, 1, 0], [0] * 7 + [1], [129] * 4, [1] * 256, [0] * 200 + [8] * 56 + [0] * 100, [3000, 1]],
    ids=hostile.name,
)
@pytest.mark.parametrize("columns, channels", [(512, 256), (136, 128)])
def test_groups(sizes, columns, channels, record_error):
    a, b = operands(sum(sizes), columns, channels, len(sizes))
    ends = hostile.ends_of(sizes)
    poison_free_memory(mebibytes=64)
    check(dsa.grouped_fp8_gemm_nt(a, b, ends, torch.float32), a, b, ends, record_error)
    check(dsa.grouped_fp8_gemm_nt(a, b, ends), a, b, ends)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("columns", "channels"), LAYERS)
def test_a_row_does_not_depend_on_how_many_there_are(columns, channels, out_dtype):
    """One kernel multiplies few rows, in tiles of 8 to 64 of them, and with a matrix's channels split or whole; another
    the others."""
    a, b = operands(4096, columns, channels)
    whole = dsa.fp8_gemm_nt(a, b, out_dtype)
    for rows in (*range(1, 66), 100, 128, 192, 256, 300, 511, 512, 1000):
        first = 977 * rows % (4096 - rows)
        part = slice(first, first + rows)
        poison_free_memory(mebibytes=1)
        assert torch.equal(dsa.fp8_gemm_nt((a[0][part], a[1][part]), b, out_dtype), whole[part]), rows


def write_few(config, a, b, out):
    """Write the product of one matrix by the kernel of few rows, with work tiles of `config`."""
    (q, s), (w, ws) = a, b
    launch = few_rows_kernels.compile_fp8_gemm_few_rows(dtype_name(out.dtype), config)
    launch(q, op.aligned_scales(s), w, op.aligned_scales(ws[None]), out, dsa.num_sms(out.device))


def write_one(config, a, b, out, ctas=None):
    """Write the product of one matrix by the kernel of many rows, with work tiles of `config`."""
    poison_free_memory(mebibytes=1)
    (q, s), (w, ws) = a, b
    scales = op.aligned_scales(s), op.aligned_scales(ws[None]).permute(1, 2, 0)
    launch = kernels.compile_fp8_gemm(dtype_name(out.dtype), config)
    launch(q, scales[0], w, scales[1], out, dsa.num_sms(q.device) if ctas is None else ctas)


def write_grouped(config, a, b, ends, out, rows=None, weights=None, drawn=False, ctas=None):
    """Write a grouped product, with work tiles of `config`."""
    (q, s), (w, ws) = a, b
    counter = torch.zeros(1, dtype=torch.int32, device="cuda") if drawn else None
    variant = config, rows is not None, weights is not None, drawn
    kernels.compile_grouped_fp8_gemm(dtype_name(out.dtype), *variant)(
        *(q, op.aligned_scales(s), rows, w.view(-1, w.shape[-1]), op.aligned_scales(ws).permute(1, 2, 0), ends),
        *(out, weights, None, counter, dsa.num_sms(q.device) if ctas is None else ctas),
    )


def write_few_grouped(config, a, b, ends, out, ctas=None):
    """Write a grouped product by the kernel of few rows, with work tiles of `config`."""
    (q, s), (w, ws) = a, b
    launch = few_rows_kernels.compile_grouped_fp8_gemm_few_rows(dtype_name(out.dtype), config)
    scales = op.aligned_scales(s), op.aligned_scales(ws)
    launch(q, scales[0], w.view(-1, w.shape[-1]), scales[1], out, ends, ctas or dsa.num_sms(out.device))


# (config, whether rows are gathered, whether tiles are drawn) of the grouped kernel.
KINDS = [
    *((config, False, False) for config in kernels.CONFIGS),
    *((config, True, False) for config in kernels.GATHERING_CONFIGS),
    *((config, False, True) for config in kernels.DRAWN_CONFIGS),
]


def product(a, b, ends, out_dtype):
    """The grouped product, by one and the same tile."""
    poison_free_memory(mebibytes=16)
    out = torch.empty(len(a[0]), b[0].shape[1], dtype=out_dtype, device="cuda")
    write_grouped(kernels.CONFIGS[0], a, b, ends, out)
    return out


def product_of_one(a, b, out_dtype):
    return product(a, (b[0][None], b[1][None]), hostile.ends_of([len(a[0])]), out_dtype)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "channels"), [(136, 7168), (392, 400), (8, 8192), (64, 16)])
def test_every_tile_of_few_rows_gives_the_same_bits(columns, channels, out_dtype):
    a, b = operands(200, columns, channels)
    expected = product_of_one(a, b, out_dtype)
    for config in few_rows_kernels.CONFIGS:
        for rows in {1, config.rows // 2 + 1, config.rows, config.rows + 1, 200}:
            first = a[0][:rows], a[1][:rows]
            hostile.check_written(partial(write_few, config, first, b), expected[:rows])


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "channels"), [(136, 7168), (392, 400), (8, 8192), (576, 1152), (64, 16)])
def test_every_tile_of_one_matrix_gives_the_same_bits(columns, channels, out_dtype):
    """Tiles that begin anywhere in a block of columns that shares a scale, and end behind the last column and row; no
    memory around the result is written."""
    a, b = operands(520, columns, channels)
    expected = product_of_one(a, b, out_dtype)
    for config in kernels.ONE_MATRIX_CONFIGS:
        high = config.rows
        for rows in {1, 17, 63, 64, 65, high - 1, high, high + 1, high + 70, 2 * high, 520}:
            guarded = torch.full((rows + 2, columns + 8), 7.0, dtype=out_dtype, device="cuda")
            out = guarded[1:-1, :columns]
            write_one(config, (a[0][:rows], a[1][:rows]), b, out)
            assert torch.equal(out, expected[:rows]), (config, rows)
            out.fill_(7.0)
            assert guarded.eq(7).all(), (config, rows)


def columns_of_a_wider_one(b, before, behind):
    """The same weight and scales as columns of wider ones, so many blocks of 128 before and so many channels behind
    them, which are NaN."""
    w, ws = b
    channels, blocks = w.shape[1], -(-behind // 128)
    wide = torch.full((len(w), 128 * before + channels + behind), 0x7F, dtype=torch.uint8, device="cuda").view(E4M3)
    scales = torch.full((len(ws), before + ws.shape[1] + blocks), torch.nan, device="cuda")
    own, of_own = wide[:, 128 * before :][:, :channels], scales[:, before:][:, : ws.shape[1]]
    own.copy_(w)
    of_own.copy_(ws)
    assert not own.is_contiguous()
    return own, of_own


# [N, K] of a GPU's columns: of V3.2's output projection on 4 and 8 GPUs, V4-Flash's on 2, shared experts' on 8 and 2.
PARTS = [(7168, 4096), (7168, 2048), (4096, 4096), (7168, 256), (4096, 1024), (136, 400), (8, 16)]


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("before", "behind"), [(0, 512), (4, 0), (2, 128), (1, 16), (8, 400)])
@pytest.mark.parametrize(("columns", "channels"), PARTS)
def test_columns_of_a_wider_weight(columns, channels, before, behind, out_dtype):
    """Bit by bit what the same weight by itself gives, and nothing beside it is read; also where the call is
    recorded, and in turns with the same columns elsewhere."""
    a, b = operands(600, columns, channels)
    parts = [columns_of_a_wider_one(b, before, behind) for _ in range(2)]
    for rows in (1, 8, 33, 64, 65, 300, 600):
        first = a[0][:rows], a[1][:rows]
        expected = dsa.fp8_gemm_nt(first, b, out_dtype)
        assert not expected.isnan().any()
        for i in range(12 if rows in (1, 600) else 1):
            poison_free_memory(mebibytes=1)
            assert torch.equal(dsa.fp8_gemm_nt(first, parts[i % 2], out_dtype), expected), (rows, i)


@pytest.mark.parametrize(("columns", "channels"), [(392, 1024), (136, 400), (576, 512)])
def test_every_tile_reads_columns_of_a_wider_weight(columns, channels):
    a, b = operands(300, columns, channels)
    part = columns_of_a_wider_one(b, 4, 512)
    assert op.aligned_scales(part[1][None]).data_ptr() == part[1].data_ptr()
    expected = product_of_one(a, b, torch.bfloat16)
    writers = [partial(write_one, config) for config in kernels.ONE_MATRIX_CONFIGS]
    writers += [partial(write_few, config) for config in few_rows_kernels.CONFIGS]
    for write in writers:
        hostile.check_written(partial(write, a, part), expected)


def test_a_row_that_stands_for_all_of_a_weight():
    """A stride of 0, which TMA takes: the bits of as many copies."""
    a, (w, ws) = operands(70, 136, 512)
    for rows in (1, 70):
        first = a[0][:rows], a[1][:rows]
        expected = dsa.fp8_gemm_nt(first, (w[:1].expand(136, -1).clone(), ws[:1].expand(2, -1).clone()))
        assert torch.equal(dsa.fp8_gemm_nt(first, (w[:1].expand(136, -1), ws[:1].expand(2, -1))), expected)


@pytest.mark.parametrize("ctas", [1, 7, 132, 500])
def test_tiles_of_one_matrix_by_any_number_of_ctas(ctas):
    """Of rows in several bands."""
    a, b = operands(4500, 1000, 144)
    expected = product_of_one(a, b, torch.bfloat16)
    for config in kernels.ONE_MATRIX_CONFIGS:
        hostile.check_written(partial(write_one, config, a, b, ctas=ctas), expected)


def matrix_by_matrix(a, b, sizes, out_dtype=torch.float32):
    parts, begin = [], 0
    for e, size in enumerate(sizes):
        part = slice(begin, begin + size)
        parts.append(dsa.fp8_gemm_nt((a[0][part], a[1][part]), (b[0][e], b[1][e]), out_dtype))
        begin += size
    return torch.cat(parts)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "channels"), [(392, 400), (576, 1152), (8, 16)])
def test_every_tile_gives_the_same_bits(columns, channels, out_dtype):
    """Whether rows are gathered, weighted, or work tiles drawn: what each matrix's product alone gives."""
    a, b = operands(sum(TAILS), columns, channels, len(TAILS))
    ends, expected = hostile.ends_of(TAILS), matrix_by_matrix(a, b, TAILS)
    factors = torch.rand(len(expected), device="cuda") - 0.5
    plain, weighted = expected.to(out_dtype), (expected * factors[:, None]).to(out_dtype)
    # Rows that stand in another order, as parts of wider ones.
    order = torch.randperm(len(expected), device="cuda")
    shuffled = tuple(torch.empty_like(x.view(torch.uint8)).index_copy_(0, order, x.view(torch.uint8)) for x in a)
    q = torch.cat((shuffled[0], shuffled[0]), 1).view(E4M3)[:, :channels]
    mixed = q, shuffled[1].view(torch.float32)
    for config, gathered, drawn in KINDS:
        operand, rows = (mixed, order.int()) if gathered else (a, None)
        write = partial(write_grouped, config, operand, b, ends, rows=rows, drawn=drawn)
        hostile.check_written(write, plain)
        hostile.check_written(partial(write, weights=factors), weighted)


@pytest.mark.parametrize("ctas", [1, 7, 132, 500])
def test_tiles_drawn_by_any_number_of_ctas(ctas):
    a, b = operands(sum(TAILS), 392, 256, len(TAILS))
    ends = hostile.ends_of(TAILS)
    expected = product(a, b, ends, torch.bfloat16)
    for config in kernels.DRAWN_CONFIGS:
        hostile.check_written(partial(write_grouped, config, a, b, ends, drawn=True, ctas=ctas), expected)


@pytest.mark.parametrize(
    "sizes",
    [[0] * 1000 + [50] * 24, [2] * 1024, [0, 0, 4500, 0], [1500, 0, 1, 2600]],
    ids=hostile.name,
)
def test_many_rows_of_several_matrices(sizes):
    """Work tiles are drawn; rows by number are gathered by the kernel, or copied where they are too many for that."""
    count = sum(sizes)
    a, b = operands(700, 136, 256, len(sizes))
    rows = torch.randint(0, 700, (count,), dtype=torch.int32, device="cuda")
    ends, factors = hostile.ends_of(sizes), torch.rand(count, device="cuda")
    copied = a[0].view(torch.uint8)[rows].view(E4M3), a[1][rows]
    expected = product(copied, b, ends, torch.float32)
    assert torch.equal(expected, matrix_by_matrix(copied, b, sizes))
    for operand, order in ((copied, None), (a, rows)):
        poison_free_memory(mebibytes=64)
        assert torch.equal(dsa.grouped_fp8_gemm_nt(operand, b, ends, rows=order), expected.bfloat16())
        got = dsa.grouped_fp8_gemm_nt(operand, b, ends, torch.float16, rows=order, weights=factors)
        assert torch.equal(got, (expected * factors[:, None]).half())


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("behind", [0, *hostile.BEHIND])
@pytest.mark.parametrize("sizes", [*hostile.SIZES, [70, 0, 1300, 9], [2] * 300], ids=hostile.name)
def test_expected_rows_and_rows_behind_change_no_bit(sizes, behind, out_dtype):
    """Both kernels, tiles of all sizes, drawn or not, and rows gathered or copied."""
    a, b = operands(sum(sizes), 392, 400, len(sizes))
    hostile.check_expected_rows(dsa.grouped_fp8_gemm_nt, a, b, sizes, behind, out_dtype=out_dtype)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("ends", "rows_of", "count"), hostile.rows_of_matrices(TAILS, [*TAILS[::-1], 0]), ids=hostile.name
)
def test_only_the_rows_of_matrices_are_written(ends, rows_of, count, out_dtype):
    """By every kernel and tile, whatever the ends say; and what stands in other rows does not reach these."""
    a, b = operands(count, 136, 256, len(ends))
    expected, ends = hostile.untouched(count, 136, out_dtype), torch.tensor(ends, dtype=torch.int32, device="cuda")
    hostile.write_products(partial(dsa.fp8_gemm_nt, out_dtype=out_dtype), a, b, rows_of, expected)
    a, numbers, ones = hostile.with_nobodys_rows(a, rows_of)
    for (config, gathered, drawn), weights in itertools.product(KINDS, (None, ones)):
        options = {"rows": numbers if gathered else None, "weights": weights, "drawn": drawn}
        hostile.check_written(partial(write_grouped, config, a, b, ends, **options), expected)
    for config in few_rows_kernels.GROUPED_CONFIGS:
        hostile.check_written(partial(write_few_grouped, config, a, b, ends), expected)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", [[0, 5, 0, 30, 9, 1, 0], [1] * 200, [0] * 1000 + [2] * 24, [60, 0, 4]], ids=hostile.name
)
@pytest.mark.parametrize(("columns", "channels"), [(392, 400), (72, 1152)])
def test_few_rows_of_several_matrices(sizes, columns, channels, out_dtype):
    a, b = operands(sum(sizes), columns, channels, len(sizes))
    ends = hostile.ends_of(sizes)
    expected = product(a, b, ends, out_dtype)
    for config, ctas in itertools.product(few_rows_kernels.GROUPED_CONFIGS, (None, 5)):
        hostile.check_written(partial(write_few_grouped, config, a, b, ends, ctas=ctas), expected)


@pytest.mark.parametrize("wrong", hostile.ROWS)
@pytest.mark.parametrize("count", [200, 4200])
def test_rows_that_there_are_not(count, wrong):
    """Gathered by the kernel or copied before: the other rows are right."""
    a, b = operands(90, 136, 256, 3)
    rows = torch.randint(0, 90, (count,), dtype=torch.int32, device="cuda")
    ends = torch.tensor([70, 70, count], dtype=torch.int32, device="cuda")
    expected = dsa.grouped_fp8_gemm_nt(a, b, ends, rows=rows)
    bad = torch.zeros(count, dtype=torch.bool, device="cuda")
    bad[[0, 69, 70, 133, count - 1]] = True
    rows.masked_fill_(bad, wrong)
    assert torch.equal(dsa.grouped_fp8_gemm_nt(a, b, ends, rows=rows)[~bad], expected[~bad])

    def write(config, out):
        write_grouped(config, a, b, ends, out, rows)
        out[bad] = expected[bad]

    for config in kernels.GATHERING_CONFIGS:
        hostile.check_written(partial(write, config), expected)


def test_strided_rows_and_leading_dimensions():
    (q, s), b = operands(48, 256, 512)
    wide = torch.cat((q.view(torch.uint8), q.view(torch.uint8)), 1).view(E4M3)[:, :512]
    check(dsa.fp8_gemm_nt((wide, s), b), (q, s), b)
    check(dsa.fp8_gemm_nt((q.view(4, 12, 512), s.view(4, 12, 4)), b).view(48, 256), (q, s), b)


@pytest.mark.parametrize(
    ("count", "expected"), [(60, None), (300, None), (2000, None), (6000, 0), (6000, 300), (6000, 6000)]
)
def test_graph_replay_with_fewer_rows(count, expected):
    """Of each of the grouped kernels, of which one zeroes a counter in each replay."""
    a, b = operands(count, 136, 256, 4)
    hostile.check_replays_with_fewer_rows(
        *(dsa.grouped_fp8_gemm_nt, a, b, lambda own, sizes: matrix_by_matrix(own, b, sizes, torch.bfloat16)),
        expected_rows=expected,
    )
