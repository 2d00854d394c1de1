"""The ops for FP8 products, on the CPU: which kernels they launch, what they copy, and whether the variants ship."""

import itertools

import pytest
import torch

import dsa
from dsa.kernels.gemm import fp8_gemm_choice as choice
from dsa.kernels.gemm import fp8_gemm_config as configs
from dsa.kernels.gemm import fp8_gemm_few_rows_sm90 as few_rows_kernels
from dsa.kernels.gemm import fp8_gemm_sm90 as kernels
from dsa.kernels.gemm import limits
from dsa.ops.gemm import fp8_gemm_nt as op

E4M3 = torch.float8_e4m3fn
FEW_ROWS, ONE_MATRIX = "fp8_gemm_few_rows", "fp8_gemm"
GROUPED_FEW_ROWS, GROUPED = "grouped_fp8_gemm_few_rows", "grouped_fp8_gemm"
# (N, K) of layers of published models.
LAYERS = (2112, 7168), (4096, 8192), (6144, 2048), (7168, 2048), (12288, 6144), (24576, 1536), (65536, 1536)


def operands(rows=6, columns=136, channels=256, matrices=None, leading=()):
    many = () if matrices is None else (matrices,)
    groups = -(-channels // 128)
    a = torch.randn(*leading, rows, channels).to(E4M3), torch.rand(*leading, rows, groups)
    return a, (torch.randn(*many, columns, channels).to(E4M3), torch.rand(*many, -(-columns // 128), groups))


def same(x, y):
    return x.data_ptr() == y.data_ptr() and x.dtype == y.dtype


def padded(scales):
    return torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4))


def test_leading_dimensions_are_rows(launches):
    (q, s), b = operands(leading=(3, 2))
    out = dsa.fp8_gemm_nt((q, s), b)
    [(_, (rows, scales, *_, flat, _))] = launches
    assert rows.shape == (36, 256) and same(rows, q) and scales.shape == (36, 4)
    assert out.shape == (3, 2, 6, 136) and flat.shape == (36, 136) and same(flat, out)


@pytest.mark.parametrize("matrices", [None, 3])
def test_padded_scales_are_read_in_place(matrices, launches):
    (q, s), (w, ws) = operands(channels=2816, matrices=matrices)
    more = () if matrices is None else (torch.tensor([2, 4, 6], dtype=torch.int32),)
    op = dsa.fp8_gemm_nt if matrices is None else dsa.grouped_fp8_gemm_nt
    a, b = (q, padded(s)), (w, padded(ws))
    op(a, b, *more)
    [(_, given)] = launches
    assert any(isinstance(x, torch.Tensor) and same(x, a[1]) for x in given)
    assert any(isinstance(x, torch.Tensor) and same(x, b[1]) for x in given)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        *(((1, 8, 16), FEW_ROWS), ((32, 65536, 16), FEW_ROWS), ((64, 1544, 7168), FEW_ROWS)),
        *(((512, 504, 7168), FEW_ROWS), ((64, 65536, 16), ONE_MATRIX), ((512, 32768, 16), ONE_MATRIX)),
        *(((513, 8, 16), ONE_MATRIX), ((5000, 8, 16), ONE_MATRIX)),
    ],
)
def test_which_kernel_gets_how_many_rows(shape, name, named_launches):
    rows, columns, channels = shape
    dsa.fp8_gemm_nt(*operands(rows=rows, columns=columns, channels=channels))
    assert [launch[0] for launch in named_launches] == [name]


@pytest.mark.parametrize(
    ("rows", "matrices", "options", "name"),
    [
        (64, 2, {}, GROUPED_FEW_ROWS),
        (65, 2, {}, GROUPED),
        (2048, 256, {}, GROUPED_FEW_ROWS),
        (2049, 256, {}, GROUPED),
        (64, 1, {}, GROUPED),
        (64, 2, {"weights": torch.ones(64)}, GROUPED),
        (64, 2, {"rows": torch.arange(64, dtype=torch.int32)}, GROUPED),
        (4096, 2, {"expected_rows": 64}, GROUPED_FEW_ROWS),
        (4096, 2, {"expected_rows": 65}, GROUPED),
        (4096, 1, {"expected_rows": 1}, GROUPED),
    ],
)
def test_which_kernel_gets_how_many_rows_of_matrices(rows, matrices, options, name, named_launches):
    """The small-M kernel runs for several matrices and few expected rows, but not with `rows` or `weights`."""
    ends = torch.full((matrices,), rows, dtype=torch.int32)
    dsa.grouped_fp8_gemm_nt(*operands(rows=rows, columns=8, channels=128, matrices=matrices), ends, **options)
    assert [launch[0] for launch in named_launches] == [name]


def test_rows_that_are_gathered_and_weighted(launches):
    (q, s), b = operands(channels=512, matrices=3)
    rows, weights = torch.tensor([5, 0, 0, 3], dtype=torch.int32), torch.rand(8)[::2]
    ends = torch.tensor([2, 2, 4], dtype=torch.int32)
    for given in (None, weights):
        out = dsa.grouped_fp8_gemm_nt((q, s), b, ends, torch.float16, rows=rows, weights=given)
        variant, arguments = launches.pop()
        config = configs.choose_config(4, 136, 512, 3, 132, configs.GATHERING_CONFIGS)
        assert variant == ("float16", config, True, given is not None, False)
        assert arguments[0] is q and arguments[1] is s and arguments[2] is rows and arguments[6] is out
        assert out.shape == (4, 136) and arguments[8] is arguments[9] is None
        assert arguments[7] is None if given is None else torch.equal(arguments[7], weights)
    assert arguments[7].is_contiguous() and not launches


@pytest.mark.parametrize("rows_first", [(-5, 6), (2**31 - 1, -(2**31))])
def test_more_rows_than_are_gathered_are_copied(rows_first, launches):
    (q, s), b = operands(channels=16, columns=8, matrices=2)
    rows = torch.randint(0, 6, (configs.GATHERED_ROWS + 1,), dtype=torch.int32)
    ends = torch.tensor([100, len(rows) - 1], dtype=torch.int32)
    dsa.grouped_fp8_gemm_nt((q, s), b, ends, rows=rows[:-1])
    gathered, arguments = launches.pop()
    assert gathered[2:] == (True, False, False) and same(arguments[2], rows) and arguments[9] is None
    rows[:2] = torch.tensor(rows_first)
    dsa.grouped_fp8_gemm_nt((q, s), b, ends + 1, rows=rows)
    copied, arguments = launches.pop()
    assert copied[2:] == (False, False, True) and arguments[2] is None
    clamped = rows.clamp(0, 5)
    assert torch.equal(arguments[0].view(torch.uint8), q.view(torch.uint8)[clamped])
    assert torch.equal(arguments[1], padded(s)[clamped])


@pytest.mark.parametrize(
    "rows, matrices, is_dynamic",
    [(1024, 1, False), (1023, 2, False), (1024, 2, True), (1279, 40, False), (1280, 40, True)],
)
def test_dynamic_scheduling_has_a_counter(rows, matrices, is_dynamic, launches):
    a, b = operands(rows=rows, channels=16, columns=8, matrices=matrices)
    ends = torch.full((matrices,), rows, dtype=torch.int32)
    for _ in range(2):
        dsa.grouped_fp8_gemm_nt(a, b, ends)
    (variant, first), (_, second) = launches
    assert variant[2:] == (False, False, is_dynamic)
    for counter in (first[9], second[9]):
        assert counter is None if not is_dynamic else (counter.tolist() == [0] and counter.dtype == torch.int32)
    assert not is_dynamic or first[9] is not second[9]


@pytest.mark.parametrize(
    "expected, chosen_for", [(None, 5000), (0, 1), (1, 1), (1023, 1023), (4096, 4096), (4097, 4097)]
)
@pytest.mark.parametrize("gathered", [False, True])
def test_tiles_are_chosen_for_the_expected_rows(gathered, expected, chosen_for, launches):
    """`expected_rows` also decides whether the kernel gathers `rows` or the op copies them before the launch."""
    count, matrices = 5000, 2
    (q, s), b = operands(rows=6 if gathered else count, channels=512, columns=8, matrices=matrices)
    rows = torch.randint(0, 6, (count,), dtype=torch.int32) if gathered else None
    ones, ends = torch.ones(count), torch.tensor([1, 3], dtype=torch.int32)
    out = dsa.grouped_fp8_gemm_nt((q, s), b, ends, rows=rows, weights=ones, expected_rows=expected)
    [(variant, arguments)] = launches
    keeps_rows = gathered and chosen_for <= configs.GATHERED_ROWS
    is_dynamic = not keeps_rows and chosen_for >= 1024
    config = op._choose_grouped_config(chosen_for, 8, 512, matrices, 132, keeps_rows, is_dynamic)
    assert variant == ("bfloat16", config, keeps_rows, True, is_dynamic)
    assert (arguments[2] is rows) if keeps_rows else arguments[2] is None
    assert keeps_rows or len(arguments[0]) == count
    assert len(out) == count and arguments[6] is out and (arguments[9] is not None) == is_dynamic


@pytest.mark.parametrize("matrices", [1, 2, 256, limits.MAX_MATRICES])
@pytest.mark.parametrize("gathered", [False, True])
def test_only_shipped_variants_are_asked_for(gathered, matrices):
    shipped = {arguments for function, arguments in kernels.shipped_variants()
               if function is kernels.compile_grouped_fp8_gemm}  # fmt: skip
    for rows in (1, 7, 64, 65, 300, 1024, 4096, 16384, 131072, limits.MAX_ROWS):
        if gathered and rows > configs.GATHERED_ROWS:
            continue
        is_dynamic = not gathered and op.schedules_dynamically(rows, matrices)
        for columns, channels in ((8, 16), (136, 128), (2112, 7168), (24576, 1536)):
            config = op._choose_grouped_config(rows, columns, channels, matrices, 132, gathered, is_dynamic)
            for dtype, weighted in itertools.product(limits.OUT_DTYPES, (False, True)):
                assert (dtype, config, gathered, weighted, is_dynamic) in shipped


def test_all_shipped_variants_of_one_matrix_are_asked_for():
    one_matrix = kernels.compile_fp8_gemm, few_rows_kernels.compile_fp8_gemm_few_rows
    every = kernels.shipped_variants() + few_rows_kernels.shipped_variants()
    asked = {
        op._choose_config(rows, *sizes, 132)
        for rows in (*choice.ROWS, 33, 300, limits.MAX_ROWS)
        for sizes in (*LAYERS, (1536, 7168), (576, 7168), (7176, 16384), (8, 16), (136, 128))
    }
    shipped = {arguments for function, arguments in every if function in one_matrix}
    assert {(dtype, config) for dtype in limits.OUT_DTYPES for config in asked} == shipped


def test_rows_that_the_kernel_cannot_read_are_copied(launches):
    (q, s), b = operands(channels=64)
    wide = torch.zeros(6, 72, dtype=torch.uint8)
    wide[:, :64] = q.view(torch.uint8)
    dsa.fp8_gemm_nt((wide.view(E4M3)[:, :64], s), b)
    rows = launches[0][1][0]
    assert rows.is_contiguous() and torch.equal(rows.view(torch.uint8), q.view(torch.uint8))


@pytest.mark.parametrize("rows", [6, 600], ids=["few", "many"])
@pytest.mark.parametrize("part", range(3))
def test_columns_of_a_wider_weight_are_read_where_they_are(rows, part, named_launches):
    _, (whole, scales) = operands(channels=3 * 512)
    w, ws = whole.chunk(3, 1)[part], scales.chunk(3, 1)[part]
    a, _ = operands(rows=rows, channels=512)
    dsa.fp8_gemm_nt(a, (w, ws))
    [(_, _, (*_, weight, weight_scales, _, _))] = named_launches
    assert weight is w and same(weight_scales, ws) and torch.equal(weight_scales.squeeze(), ws)


def test_scales_that_the_kernel_cannot_read_are_copied(named_launches):
    """Every row of scales must start at a multiple of 16 bytes. So in a slice, the wider tensor's number of blocks and
    the slice's first block must be multiples of 4. Rows with a stride of 0 are not copied."""
    _, (whole, scales) = operands(channels=1536)
    a, few = operands(channels=512)[0], operands(channels=256)[0]
    of_all = scales[:1, :4].expand(2, 4)
    calls = [
        (a, whole[:, :512], scales[:, 1:5]),
        (a, whole[:, 512:1024], of_all),
        (a, whole[:1, :512].expand(136, -1), scales[:, :4]),
        (few, whole[:, 256:512], scales[:, 2:4]),
    ]
    for first, *second in calls:
        dsa.fp8_gemm_nt(first, second)
    expected = scales[:, 1:5], of_all, scales[:, :4], padded(scales[:, 2:4])
    for (_, w, _), (_, _, (*_, weight, weight_scales, _, _)), ws in zip(calls, named_launches, expected, strict=True):
        assert torch.equal(weight_scales[0], ws) and not weight_scales.data_ptr() % 16
        assert not any(stride % 4 for stride in weight_scales.stride()[:2])
        assert torch.equal(weight.view(torch.uint8), w.view(torch.uint8)) and weight.stride() == w.stride()
