"""The FP8 product kernel against the reference, on the GPU: one matrix and groups of them."""

import itertools

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


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
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
    ids=lambda sizes: f"{len(sizes)} of {sum(sizes)}",
)
@pytest.mark.parametrize("columns, channels", [(512, 256), (136, 128)])
def test_groups(sizes, columns, channels, record_error):
    a, b = operands(sum(sizes), columns, channels, len(sizes))
    ends = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device="cuda")
    poison_free_memory(mebibytes=64)
    check(dsa.grouped_fp8_gemm_nt(a, b, ends, torch.float32), a, b, ends, record_error)
    check(dsa.grouped_fp8_gemm_nt(a, b, ends), a, b, ends)


def test_a_row_depends_on_no_other():
    a, b = operands(300, 512, 512, 4)
    ends = torch.tensor([100, 100, 250, 300], dtype=torch.int32, device="cuda")
    got = dsa.grouped_fp8_gemm_nt(a, b, ends)
    for row, e in ((0, 0), (99, 0), (100, 2), (249, 2), (250, 3)):
        alone = dsa.fp8_gemm_nt((a[0][row : row + 1], a[1][row : row + 1]), (b[0][e], b[1][e]))
        assert torch.equal(alone[0], got[row])
    assert torch.equal(got, dsa.grouped_fp8_gemm_nt(a, b, ends))


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


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("columns", "channels"), [(136, 7168), (392, 400), (8, 8192), (64, 16)])
def test_every_tile_of_few_rows_gives_the_same_bits(columns, channels, out_dtype):
    a, b = operands(200, columns, channels)
    expected = launched(kernels.CONFIGS[0], a, (b[0][None], b[1][None]), one_end(200), out_dtype)
    for config in few_rows_kernels.CONFIGS:
        launch = few_rows_kernels.compile_fp8_gemm_few_rows(dtype_name(out_dtype), config)
        for rows in {1, config.rows // 2 + 1, config.rows, config.rows + 1, 200}:
            guarded = torch.full((rows + 2, columns), 7.0, dtype=out_dtype, device="cuda")
            scales = op.aligned_scales(a[1][:rows]), op.aligned_scales(b[1][None])
            launch(a[0][:rows], scales[0], b[0], scales[1], guarded[1:-1], dsa.num_sms(guarded.device))
            assert torch.equal(guarded[1:-1], expected[:rows]), (config, rows)
            assert guarded[0].eq(7).all() and guarded[-1].eq(7).all()


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("columns", "channels"), [(136, 7168), (392, 400), (8, 8192), (576, 1152), (64, 16)])
def test_every_tile_of_one_matrix_gives_the_same_bits(columns, channels, out_dtype):
    """Tiles that begin anywhere in a block of columns that shares a scale, and end behind the last column and row; no
    memory around the result is written."""
    a, b = operands(520, columns, channels)
    expected = launched(kernels.CONFIGS[0], a, (b[0][None], b[1][None]), one_end(520), out_dtype)
    for config in kernels.ONE_MATRIX_CONFIGS:
        high = config.rows
        for rows in {1, 17, 63, 64, 65, high - 1, high, high + 1, high + 70, 2 * high, 520}:
            guarded = torch.full((rows + 2, columns + 8), 7.0, dtype=out_dtype, device="cuda")
            out = guarded[1:-1, :columns]
            launch_one(config, (a[0][:rows], a[1][:rows]), b, out)
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
    expected = launched(kernels.CONFIGS[0], a, (b[0][None], b[1][None]), one_end(300), torch.bfloat16)
    part = columns_of_a_wider_one(b, 4, 512)
    scales = op.aligned_scales(part[1][None])
    assert scales.data_ptr() == part[1].data_ptr()
    for config in kernels.ONE_MATRIX_CONFIGS:
        out = torch.full_like(expected, torch.nan)
        launch_one(config, a, part, out)
        assert torch.equal(out, expected), config
    for config in few_rows_kernels.CONFIGS:
        launch = few_rows_kernels.compile_fp8_gemm_few_rows(dtype_name(torch.bfloat16), config)
        out = torch.full_like(expected, torch.nan)
        launch(a[0], op.aligned_scales(a[1]), part[0], scales, out, dsa.num_sms(out.device))
        assert torch.equal(out, expected), config


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
    expected = launched(kernels.CONFIGS[0], a, (b[0][None], b[1][None]), one_end(4500), torch.bfloat16)
    for config in kernels.ONE_MATRIX_CONFIGS:
        out = torch.full_like(expected, torch.nan)
        launch_one(config, a, b, out, ctas)
        assert torch.equal(out, expected), config


def launch_one(config, a, b, out, ctas=None):
    """Write the product of one matrix, with work tiles of `config`."""
    poison_free_memory(mebibytes=1)
    (q, s), (w, ws) = a, b
    scales = op.aligned_scales(s), op.aligned_scales(ws[None]).permute(1, 2, 0)
    launch = kernels.compile_fp8_gemm(dtype_name(out.dtype), config)
    launch(q, scales[0], w, scales[1], out, dsa.num_sms(q.device) if ctas is None else ctas)


def one_end(rows):
    return torch.tensor([rows], dtype=torch.int32, device="cuda")


def launched(config, a, b, ends, out_dtype, rows=None, weights=None, drawn=False, out=None, ctas=None):
    """The kernel's product with work tiles of `config`, written to `out` if there is one."""
    (q, s), (w, ws) = a, b
    if out is None:
        poison_free_memory(mebibytes=16)
        out = torch.empty(len(q if rows is None else rows), w.shape[1], dtype=out_dtype, device="cuda")
    variant = config, rows is not None, weights is not None, drawn
    counter = torch.zeros(1, dtype=torch.int32, device="cuda") if drawn else None
    kernels.compile_grouped_fp8_gemm(dtype_name(out_dtype), *variant)(
        *(q, op.aligned_scales(s), rows, w.view(-1, w.shape[-1]), op.aligned_scales(ws).permute(1, 2, 0), ends),
        *(out, weights, None, counter, dsa.num_sms(q.device) if ctas is None else ctas),
    )
    return out


def kinds(config):
    """What the kernel has tiles of `config` for: (gathered, drawn)."""
    found = [(False, False)]
    found += [(True, False)] if config in kernels.GATHERING_CONFIGS else []
    return found + ([(False, True)] if config in kernels.DRAWN_CONFIGS else [])


def matrix_by_matrix(a, b, sizes, out_dtype=torch.float32):
    parts, begin = [], 0
    for e, size in enumerate(sizes):
        part = slice(begin, begin + size)
        parts.append(dsa.fp8_gemm_nt((a[0][part], a[1][part]), (b[0][e], b[1][e]), out_dtype))
        begin += size
    return torch.cat(parts)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("columns", "channels"), [(392, 400), (576, 1152), (8, 16)])
def test_every_tile_gives_the_same_bits(columns, channels, out_dtype):
    """Whether rows are gathered, weighted, or work tiles drawn: what each matrix's product alone gives."""
    a, b = operands(sum(TAILS), columns, channels, len(TAILS))
    ends = torch.tensor(TAILS).cumsum(0, dtype=torch.int32).cuda()
    expected = matrix_by_matrix(a, b, TAILS)
    factors = torch.rand(len(expected), device="cuda") - 0.5
    # Rows that stand in another order, as parts of wider ones.
    order = torch.randperm(len(expected), device="cuda")
    shuffled = tuple(torch.empty_like(x.view(torch.uint8)).index_copy_(0, order, x.view(torch.uint8)) for x in a)
    q = torch.cat((shuffled[0], shuffled[0]), 1).view(E4M3)[:, :channels]
    mixed = q, shuffled[1].view(torch.float32)
    for config in kernels.CONFIGS:
        for gathered, drawn in kinds(config):
            operand, rows = (mixed, order.int()) if gathered else (a, None)
            got = launched(config, operand, b, ends, out_dtype, rows, None, drawn)
            assert torch.equal(got, expected.to(out_dtype)), (config, gathered, drawn)
            got = launched(config, operand, b, ends, out_dtype, rows, factors, drawn)
            assert torch.equal(got, (expected * factors[:, None]).to(out_dtype)), (config, gathered, drawn)


@pytest.mark.parametrize("ctas", [1, 7, 132, 500])
def test_tiles_drawn_by_any_number_of_ctas(ctas):
    a, b = operands(sum(TAILS), 392, 256, len(TAILS))
    ends = torch.tensor(TAILS).cumsum(0, dtype=torch.int32).cuda()
    expected = launched(kernels.CONFIGS[0], a, b, ends, torch.bfloat16)
    for config in kernels.DRAWN_CONFIGS:
        assert torch.equal(launched(config, a, b, ends, torch.bfloat16, drawn=True, ctas=ctas), expected)


@pytest.mark.parametrize(
    "sizes",
    [[0] * 1000 + [50] * 24, [2] * 1024, [0, 0, 4500, 0], [1500, 0, 1, 2600]],
    ids=lambda sizes: f"{len(sizes)} of {sum(sizes)}",
)
def test_many_rows_of_several_matrices(sizes):
    """Work tiles are drawn; rows by number are gathered by the kernel, or copied where they are too many for that."""
    count = sum(sizes)
    a, b = operands(700, 136, 256, len(sizes))
    rows = torch.randint(0, 700, (count,), dtype=torch.int32, device="cuda")
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32).cuda()
    copied = a[0].view(torch.uint8)[rows].view(E4M3), a[1][rows]
    expected = launched(kernels.CONFIGS[0], copied, b, ends, torch.float32)
    used = [(e, size) for e, size in enumerate(sizes) if size][-3:]
    behind = count
    for e, size in reversed(used):
        part, behind = slice(behind - size, behind), behind - size
        alone = dsa.fp8_gemm_nt((copied[0][part], copied[1][part]), (b[0][e], b[1][e]), torch.float32)
        assert torch.equal(expected[part], alone)
    factors = torch.rand(count, device="cuda")
    for operand, order in ((copied, None), (a, rows)):
        poison_free_memory(mebibytes=64)
        assert torch.equal(dsa.grouped_fp8_gemm_nt(operand, b, ends, rows=order), expected.bfloat16())
        got = dsa.grouped_fp8_gemm_nt(operand, b, ends, torch.float16, rows=order, weights=factors)
        assert torch.equal(got, (expected * factors[:, None]).half())


@pytest.mark.parametrize("behind", [0, 5000])
@pytest.mark.parametrize(
    "sizes", [[3, 0, 40, 1], [70, 0, 1300, 9], [2] * 300], ids=lambda sizes: f"{len(sizes)} of {sum(sizes)}"
)
def test_expected_rows_change_no_bit(sizes, behind):
    """From far too few to all rows: both kernels, tiles of all sizes, drawn or not, and rows gathered or copied."""
    used = sum(sizes)
    a, b = operands(used, 136, 256, len(sizes))
    ends, factors = hostile.ends_of(sizes), torch.rand(used, device="cuda")
    order = torch.randperm(used, dtype=torch.int32, device="cuda")
    more = tuple(hostile.with_nan_behind(x, behind) for x in a)
    numbers, more_factors = hostile.with_no_rows_behind(order, behind), hostile.with_nan_behind(factors, behind)
    for operand, alone, together in (
        (more, {}, {}),
        (more, {"weights": factors}, {"weights": more_factors}),
        (a, {"rows": order}, {"rows": numbers}),
    ):
        expected = dsa.grouped_fp8_gemm_nt(a, b, ends, **alone)
        count = used + behind
        for number in {0, 1, 64, 65, used, 1024, 4096, 4097, count}:
            if number <= count:
                poison_free_memory(mebibytes=16)
                got = dsa.grouped_fp8_gemm_nt(operand, b, ends, expected_rows=number, **together)
                assert len(got) == count and torch.equal(got[:used], expected), (number, sorted(together))


@pytest.mark.parametrize("expected", [0, 300, 6000])
def test_graph_replay_with_other_rows_than_expected(expected):
    """Rows that are nobody's in a replay keep what they had, however many are somebody's."""
    count = 6000
    a, b = operands(count, 136, 256, 4)
    ends = torch.full((4,), count, dtype=torch.int32, device="cuda")
    dsa.grouped_fp8_gemm_nt(a, b, ends, expected_rows=expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dsa.grouped_fp8_gemm_nt(a, b, ends, expected_rows=expected)
    for sizes in ([0, 0, 0, 0], [0, 1, 0, 0], [7, 0, 299, 5], [2900, 0, 100, 3000]):
        ends.copy_(hostile.ends_of(sizes))
        out.fill_(7.0)
        graph.replay()
        used = sum(sizes)
        assert torch.equal(out[:used], dsa.grouped_fp8_gemm_nt(tuple(x[:used] for x in a), b, ends)), sizes
        assert out[used:].eq(7).all(), sizes


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ends", "rows_of"), hostile.ENDS, ids=str)
def test_nothing_outside_the_rows_is_written(ends, rows_of, out_dtype):
    """Whatever the ends say: rows that are a weight's are right, rows that are none's stay as they were, and so do the
    rows in memory before and behind."""
    count, columns = 64, 136
    a, b = operands(count, columns, 128, 4)
    expected = torch.full((3 * count, columns), 7.0, dtype=out_dtype, device="cuda")
    for e, (begin, end) in rows_of.items():
        part = slice(begin, end)
        expected[count:][part] = dsa.fp8_gemm_nt((a[0][part], a[1][part]), (b[0][e], b[1][e]), out_dtype)
    numbers = torch.tensor(ends, dtype=torch.int32, device="cuda")
    every = torch.arange(count, dtype=torch.int32, device="cuda")
    for config in kernels.CONFIGS:
        for gathered, drawn in kinds(config):
            guarded = torch.full_like(expected, 7.0)
            out, rows = guarded[count : 2 * count], every if gathered else None
            launched(config, a, b, numbers, out_dtype, rows, None, drawn, out)
            assert torch.equal(guarded, expected), (config, gathered, drawn)
    for config in few_rows_kernels.GROUPED_CONFIGS:
        guarded = torch.full_like(expected, 7.0)
        launched_few(config, a, b, numbers, guarded[count : 2 * count])
        assert torch.equal(guarded, expected), config


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("behind", hostile.BEHIND)
@pytest.mark.parametrize("sizes", hostile.SIZES, ids=str)
def test_rows_behind_the_last_end_are_nobodys(sizes, behind, out_dtype):
    """Whatever stands there, the others' bits are those of the call without them: whichever kernel this one takes, and
    that one."""
    used = sum(sizes)
    a, b = operands(used, 392, 400, len(sizes))
    ends, order = hostile.ends_of(sizes), torch.randperm(used, device="cuda", dtype=torch.int32)
    factors = torch.rand(used, device="cuda")
    more, numbers = tuple(hostile.with_nan_behind(x, behind) for x in a), hostile.with_no_rows_behind(order, behind)
    weights = hostile.with_nan_behind(factors, behind)
    for operand, alone, together in (
        (more, {}, {}),
        (more, {"weights": factors}, {"weights": weights}),
        (a, {"rows": order}, {"rows": numbers}),
        (a, {"rows": order, "weights": factors}, {"rows": numbers, "weights": weights}),
    ):
        expected = dsa.grouped_fp8_gemm_nt(a, b, ends, out_dtype, **alone)
        poison_free_memory(mebibytes=64)
        got = dsa.grouped_fp8_gemm_nt(operand, b, ends, out_dtype, **together)
        assert got.shape == (used + behind, 392) and torch.equal(got[:used], expected), sorted(together)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [TAILS, [*TAILS[::-1], 0], *hostile.SIZES], ids=str)
def test_no_tile_writes_behind_the_last_end(sizes, out_dtype):
    """Of every kernel: what stands behind the last matrix's rows stays, and what is read there reaches no other row."""
    used, behind = sum(sizes), 300
    a, b = operands(used, 136, 256, len(sizes))
    ends = hostile.ends_of(sizes)
    more = tuple(hostile.with_nan_behind(x, behind) for x in a)
    expected = torch.full((used + behind, 136), 7.0, dtype=out_dtype, device="cuda")
    expected[:used] = matrix_by_matrix(a, b, sizes, out_dtype)
    numbers = hostile.with_no_rows_behind(torch.arange(used, device="cuda", dtype=torch.int32), behind)
    ones = hostile.with_nan_behind(torch.ones(used, device="cuda"), behind)
    for config in kernels.CONFIGS:
        for (gathered, drawn), weights in itertools.product(kinds(config), (None, ones)):
            out, rows = torch.full_like(expected, 7.0), numbers if gathered else None
            launched(config, more, b, ends, out_dtype, rows, weights, drawn, out)
            assert torch.equal(out, expected), (config, gathered, drawn, weights is None)
    for config in few_rows_kernels.GROUPED_CONFIGS:
        out = torch.full_like(expected, 7.0)
        launched_few(config, more, b, ends, out)
        assert torch.equal(out, expected), config


def launched_few(config, a, b, ends, out, ctas=None):
    """The grouped kernel of few rows with work tiles of `config`, written to `out`."""
    (q, s), (w, ws) = a, b
    launch = few_rows_kernels.compile_grouped_fp8_gemm_few_rows(dtype_name(out.dtype), config)
    scales = op.aligned_scales(s), op.aligned_scales(ws)
    launch(q, scales[0], w.view(-1, w.shape[-1]), scales[1], out, ends, ctas or dsa.num_sms(out.device))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sizes", [[0, 5, 0, 30, 9, 1, 0], [1] * 200, [0] * 1000 + [2] * 24, [60, 0, 4]], ids=lambda sizes: str(len(sizes))
)
@pytest.mark.parametrize(("columns", "channels"), [(392, 400), (72, 1152)])
def test_few_rows_of_several_matrices(sizes, columns, channels, out_dtype):
    a, b = operands(sum(sizes), columns, channels, len(sizes))
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32).cuda()
    expected = launched(kernels.CONFIGS[0], a, b, ends, out_dtype)
    for config in few_rows_kernels.GROUPED_CONFIGS:
        for ctas in (None, 5):
            guarded = torch.full((len(expected) + 2, columns), 7.0, dtype=out_dtype, device="cuda")
            launched_few(config, a, b, ends, guarded[1:-1], ctas)
            assert torch.equal(guarded[1:-1], expected), (config, ctas)
            assert guarded[0].eq(7).all() and guarded[-1].eq(7).all()


@pytest.mark.parametrize("tokens", [1, 8, 32, 40])
def test_experts_of_few_tokens(tokens):
    """256 experts, eight of them a token: each row's product is its expert's alone."""
    experts = torch.rand(tokens, 256, device="cuda").argsort(-1)[:, :8]
    _, rows, ends = dsa.sort_by_expert(experts, 256)
    a, b = operands(8 * tokens, 256, 384, 256)
    got = dsa.grouped_fp8_gemm_nt(a, b, ends)
    for token, j in ((0, 0), (tokens - 1, 7), (tokens // 2, 3)):
        row, e = rows[token, j], experts[token, j]
        alone = dsa.fp8_gemm_nt((a[0][row : row + 1], a[1][row : row + 1]), (b[0][e], b[1][e]))
        assert torch.equal(got[row], alone[0])
    check(got, a, b, ends)


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
    got = dsa.grouped_fp8_gemm_nt(a, b, ends, rows=rows.masked_fill(bad, wrong))
    assert torch.equal(got[~bad], expected[~bad])
    for config in kernels.GATHERING_CONFIGS:
        guarded = torch.full((count + 2, 136), 7.0, dtype=torch.bfloat16, device="cuda")
        launched(config, a, b, ends, torch.bfloat16, rows.masked_fill(bad, wrong), out=guarded[1:-1])
        assert torch.equal(guarded[1:-1][~bad], expected[~bad])
        assert guarded[0].eq(7).all() and guarded[-1].eq(7).all()


def test_strided_rows_leading_dimensions_and_empty_inputs():
    (q, s), b = operands(48, 256, 512)
    wide = torch.cat((q.view(torch.uint8), q.view(torch.uint8)), 1).view(E4M3)[:, :512]
    check(dsa.fp8_gemm_nt((wide, s), b), (q, s), b)
    check(dsa.fp8_gemm_nt((q.view(4, 12, 512), s.view(4, 12, 4)), b).view(48, 256), (q, s), b)
    assert dsa.fp8_gemm_nt((q[:0], s[:0]), b).shape == (0, 256)
    assert dsa.fp8_gemm_nt((q[:, :0], s[:, :0]), (b[0][:, :0], b[1][:, :0])).eq(0).all()


def test_graph_replay_with_new_sizes():
    a, b = operands(256, 256, 256, 8)
    ends = torch.full((8,), 256, dtype=torch.int32, device="cuda")
    dsa.grouped_fp8_gemm_nt(a, b, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dsa.grouped_fp8_gemm_nt(a, b, ends, torch.float32)
    for seed in range(3):
        cuts = torch.randint(0, 257, (7,), generator=torch.Generator().manual_seed(seed)).sort().values
        ends.copy_(torch.cat((cuts, torch.tensor([256]))))
        graph.replay()
        check(out, a, b, ends)


def test_graph_replay_of_drawn_tiles():
    """The graph zeroes the counter of each replay."""
    a, b = operands(2000, 392, 256, 8)
    ends = torch.full((8,), 2000, dtype=torch.int32, device="cuda")
    factors = torch.rand(2000, device="cuda")
    dsa.grouped_fp8_gemm_nt(a, b, ends, weights=factors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dsa.grouped_fp8_gemm_nt(a, b, ends, weights=factors)
    for seed in (0, 0, 1):
        cuts = torch.randint(0, 2001, (7,), generator=torch.Generator().manual_seed(seed)).sort().values
        ends.copy_(torch.cat((cuts, torch.tensor([2000]))))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, launched(kernels.CONFIGS[1], a, b, ends, torch.bfloat16, weights=factors))


@pytest.mark.parametrize("count", [60, 300, 2000])
def test_graph_replay_with_fewer_rows(count):
    """Of each of the grouped kernels: rows that are nobody's in a replay keep what they had."""
    a, b = operands(count, 136, 256, 4)
    ends = torch.full((4,), count, dtype=torch.int32, device="cuda")
    dsa.grouped_fp8_gemm_nt(a, b, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dsa.grouped_fp8_gemm_nt(a, b, ends)
    for sizes in ([count, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0], [7, 0, count // 2, 5], [0, 0, 0, count]):
        ends.copy_(hostile.ends_of(sizes))
        out.fill_(7.0)
        graph.replay()
        used = sum(sizes)
        assert torch.equal(out[:used], matrix_by_matrix(a, b, sizes, torch.bfloat16)), sizes
        assert out[used:].eq(7).all(), sizes


def test_shapes_without_a_kernel():
    a, b = operands(4, 12, 128)
    with pytest.raises(
        ValueError, match=r"b\[0\]: the kernel takes K that is a multiple of 16 and N of 8, got \[N, K\]"
    ):
        dsa.fp8_gemm_nt(a, b)
