"""Grouped products of experts with FP8 and FP4 weights, on the CPU: the argument `expected_rows`, processes that have
only some of the experts, and the kernels that the ops launch."""

import pytest
import torch

import dsa
from dsa.kernels.gemm import fp8_gemm_sm90 as kernels
from dsa.kernels.gemm import limits
from dsa.kernels.gemm import swiglu_cast_sm90 as cast_kernels
from dsa.kernels.gemm.fp8_gemm_config import GATHERED_ROWS
from dsa.ops.gemm import fp8_fp4_gemm_nt as fp4
from dsa.ops.gemm import fp8_gemm_nt as fp8
from dsa.ops.gemm import grouped_fp8_gemm_swiglu as swiglu
from dsa.ops.gemm import swiglu_cast_to_fp8 as cast

E4M3 = torch.float8_e4m3fn
ENDS = torch.tensor([2, 2, 4], dtype=torch.int32)
ROWS = torch.tensor([4, 0, 0, 3], dtype=torch.int32)
OPS = {name: getattr(dsa, name) for name in dsa.__all__ if name.startswith("grouped_fp8") and name.count("fp4") < 2}


def operands(name, columns=256, channels=384, matrices=3):
    groups = -(-channels // 128)
    a = torch.randn(5, channels).to(E4M3), torch.rand(5, groups)
    if "fp4" not in name:
        return a, (torch.randn(matrices, columns, channels).to(E4M3), torch.rand(matrices, -(-columns // 128), groups))
    packed = torch.randint(-128, 128, (matrices, columns, channels // 2), dtype=torch.int8)
    scale = torch.randint(120, 128, (matrices, columns, channels // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return a, (packed, scale, dsa.fp4_block_scales(packed, scale))


def tensors(result):
    return result if isinstance(result, tuple) else (result,)


def same(got, expected):
    for x, y in zip(tensors(got), tensors(expected), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", OPS)
def test_expected_rows_of_any_number_of_rows_in_one_graph(name):
    a, b = operands(name)

    def run(a, b, ends, rows):
        return OPS[name](a, b, ends, rows=rows, expected_rows=-(-len(rows) * 2 // 3))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (4, 7):
        ends, rows = ENDS.clamp(max=count), torch.randint(0, 5, (count,), dtype=torch.int32)
        used = ends[-1]
        same(*(tuple(x[:used] for x in tensors(f(a, b, ends, rows))) for f in (compiled, run)))


@pytest.mark.parametrize("name", OPS)
def test_expected_rows_change_no_result(name):
    a, b = operands(name)
    ends = ENDS.clamp(max=2)
    for rows, count in ((ROWS, 4), (None, 5)):
        expected = OPS[name](a, b, ends, rows=rows)
        for number in (0, 1, 2, count):
            same(OPS[name](a, b, ends, rows=rows, expected_rows=number), expected)


@pytest.mark.parametrize("ends", [[2, 2, 3], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_rows_after_the_last_end_belong_to_no_expert(name, ends):
    a, b = operands(name)
    numbers, used = torch.tensor(ends, dtype=torch.int32), ends[-1]
    rows = torch.cat((ROWS[:used], torch.full((4 - used,), -1, dtype=torch.int32)))

    def run(a, b, ends, rows):
        return OPS[name](a, b, ends, rows=rows)

    expected = tensors(run(a, b, numbers, ROWS[:used]))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for got in (run(a, b, numbers, rows), compiled(a, b, numbers, rows)):
        assert all(len(x) == 4 for x in tensors(got))
        same(tuple(x[:used] for x in tensors(got)), expected)
    as_they_are = tensors(OPS[name](a, b, numbers))
    assert all(len(x) == 5 for x in as_they_are)
    same(tuple(x[:used] for x in as_they_are), OPS[name](tuple(x[:used] for x in a), b, numbers))


@pytest.mark.parametrize(("begin", "end"), [(0, 2), (2, 5), (5, 6), (6, 8)])
@pytest.mark.parametrize("fp4", [False, True])
def test_a_process_with_some_of_the_experts(fp4, begin, end):
    """Tokens choose among experts 0 to 5, and the process has experts `begin` to `end` - 1. Choices of other experts
    get the row index -1, which counts as zero in the sum. The reference fills rows from ends[-1] on with NaN."""
    chosen = torch.rand(11, 6).argsort(-1)[:, :3]
    x = torch.randn(11, 256).bfloat16()
    first, second = "grouped_fp8_fp4_gemm_swiglu" if fp4 else "grouped_fp8_gemm_swiglu", "fp4" if fp4 else "fp8"
    weights = operands(first, 512, 256, 8)[1], operands(second, 256, 256, 8)[1]
    product = dsa.grouped_fp8_fp4_gemm_nt if fp4 else dsa.grouped_fp8_gemm_nt

    def outputs(begin, end):
        _, rows, ends = dsa.sort_by_expert(chosen - begin, end - begin)
        up, down = (tuple(x[begin:end] for x in weight) for weight in weights)
        h = OPS[first](dsa.scatter_cast_to_fp8(x, rows), up, ends)
        y = product(h, down, ends)
        assert y[ends[-1] :].isnan().all()
        return y, rows, dsa.combine_experts(y, rows)

    whole, every, _ = outputs(0, 6)
    y, rows, combined = outputs(begin, end)
    own = (chosen >= begin) & (chosen < end)
    assert torch.equal(rows >= 0, own)
    assert torch.equal(y[rows[own].long()], whole[every[own].long()])
    assert torch.equal(combined, dsa.combine_experts(whole, every.masked_fill(~own, -1)))
    assert not combined.isnan().any()


def padded(scales):
    return torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4))


def many(count, matrices):
    """Return (rows, ends): `count` random indices of five tokens, and ends that give all rows to the first matrix."""
    ends = torch.full((matrices,), count, dtype=torch.int32)
    return torch.randint(0, 5, (count,), dtype=torch.int32), ends


def bytes_of(q):
    return q.view(torch.uint8)


def test_swiglu_gathers_few_rows_and_copies_many(named_launches):
    """The kernel gathers up to 4096 rows. The op copies more rows before the launch, and only then can schedule them
    dynamically."""
    (q, s), b = operands("fp8", matrices=2)
    for count, gathered, is_dynamic in ((4096, True, False), (4097, False, True)):
        rows, ends = many(count, 2)
        rows[-1] = -7
        dsa.grouped_fp8_gemm_swiglu((q, s), b, ends, rows=rows)
        _, variant, arguments = named_launches.pop()
        assert variant[-2:] == (gathered, is_dynamic)
        assert (arguments[2] is rows) == gathered and (arguments[2] is None) == is_dynamic
        inside = rows.clamp(0, 4)
        assert gathered or torch.equal(bytes_of(arguments[0]), bytes_of(q)[inside])
        assert gathered or torch.equal(arguments[1], padded(s)[inside])
        assert arguments[9] is None if gathered else arguments[9].tolist() == [0]


@pytest.mark.parametrize(
    "gathered, expected, name, chosen_for",
    [
        (False, 0, "grouped_fp8_gemm_few_rows", 1),
        (False, 64, "grouped_fp8_gemm_few_rows", 64),
        (False, 65, "fp8_gemm_swiglu", 65),
        (False, 1023, "fp8_gemm_swiglu", 1023),
        (False, 1024, "fp8_gemm_swiglu", 1024),
        (True, 0, "fp8_gemm_swiglu", 1),
        (True, 4096, "fp8_gemm_swiglu", 4096),
        (True, 4097, "fp8_gemm_swiglu", 4097),
    ],
)
def test_swiglus_kernels_are_chosen_for_the_expected_rows(gathered, expected, name, chosen_for, named_launches):
    """`expected_rows` also decides whether rows are gathered and whether scheduling is dynamic."""
    a, b = operands("fp8", matrices=2)
    rows, ends = many(5000, 2)
    if not gathered:
        a, rows = (bytes_of(a[0])[rows].view(E4M3), a[1][rows]), None
    out, _ = dsa.grouped_fp8_gemm_swiglu(a, b, ends, rows=rows, expected_rows=expected)
    (kernel, variant, arguments), *more = named_launches
    assert kernel == name and len(out) == 5000
    if name == "grouped_fp8_gemm_few_rows":
        config = fp8._choose_grouped_few_rows_config(chosen_for, 2)
        assert variant == ("bfloat16", config) and len(arguments[0]) == 5000 and len(more) == 1
        return
    keeps_rows = gathered and chosen_for <= 4096
    is_dynamic = not keeps_rows and chosen_for >= 1024
    config = swiglu._choose_config(chosen_for, 256, 384, 2, 132, is_dynamic)
    assert variant == ("bfloat16", True, False, config, keeps_rows, is_dynamic) and not more
    assert (arguments[2] is not None) == keeps_rows and len(arguments[0]) == (5 if keeps_rows else 5000)


@pytest.mark.parametrize("expected, chosen_for", [(None, 5000), (0, 1), (48, 48), (49, 49)])
def test_swiglu_of_fp4_weights_passes_the_expected_rows_on(expected, chosen_for, named_launches):
    """The small-M kernel runs for up to 24 expected rows per weight matrix: 48 for two matrices."""
    a, b = operands("fp4", matrices=2)
    rows, ends = many(5000, 2)
    dsa.grouped_fp8_fp4_gemm_swiglu(a, b, ends, rows=rows, expected_rows=expected)
    name, variant, _ = named_launches[0]
    if chosen_for <= 48:
        config = fp4._choose_few_rows_config(chosen_for, 256, 2, 132)
        assert (name, variant) == ("fp8_fp4_gemm_few_rows", ("bfloat16", config))
    else:
        config = fp4._choose_config(chosen_for, 256, 384, 2, 132)
        assert (name, variant) == ("fp8_fp4_gemm", ("bfloat16", config, False))


@pytest.mark.parametrize("name", ["grouped_fp8_gemm_swiglu", "grouped_fp8_fp4_gemm_swiglu"])
def test_swiglu_of_nothing(name, named_launches):
    """Without channels the sums are zero, and the op returns the cast of zeros."""
    a, b = operands(name)
    none = torch.zeros(3, dtype=torch.int32)
    out, scale = OPS[name](tuple(x[:0] for x in a), b, none)
    assert out.shape == (0, 128) and scale.shape == (0, 1) and not named_launches
    a = tuple(x[:, :0] for x in a)
    out, scale = OPS[name](a, tuple(x if x.dim() == 2 else x[..., :0] for x in b), ENDS + 1)
    [(_, _, arguments)] = named_launches
    assert out.shape == (5, 128) and scale.shape == (5, 1) and not arguments[0].any() and not arguments[1].any()


def test_without_weights_no_row_belongs_to_an_expert(named_launches):
    """A grouped cast would read the last element of `ends`, which is empty here."""
    a, b = operands("fp4", channels=128)
    a = tuple(x[:1].expand(30000, -1) for x in a)
    none = torch.zeros(0, dtype=torch.int32)
    out, scale = dsa.grouped_fp8_fp4_gemm_swiglu(a, tuple(x[:0] for x in b), none)
    assert out.shape == (30000, 128) and scale.shape == (30000, 1)
    assert [name for name, _, _ in named_launches] == ["swiglu_cast"]


@pytest.mark.parametrize("limit", [None, 7.0])
@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_only_shipped_casts_are_asked_for(dtype, use_ue8m0, limit, named_launches):
    """One wave of CTAs cannot cast so many rows, so the op runs the cast that reads `ends`."""
    compile_cast = cast_kernels.compile_swiglu_cast_of_matrices
    cast.cast_of_matrices(torch.zeros(70000, 256, dtype=dtype), ENDS, use_ue8m0, limit, False)
    [(name, variant, _)] = named_launches
    assert name == "swiglu_cast_of_matrices" and (compile_cast, variant) in cast_kernels.shipped_variants()


@pytest.mark.parametrize("matrices", [1, 2, 256, limits.MAX_MATRICES])
@pytest.mark.parametrize("rows", [1, 24, 64, 65, 1024, 4096, 16384, 131072, limits.MAX_ROWS])
def test_only_shipped_variants_are_asked_for(rows, matrices):
    shipped = {arguments for _, arguments in kernels.shipped_variants()}
    for columns in (256, 4096):
        for channels in (128, 2048, 7168):
            sizes = rows, columns, channels, matrices, 132
            is_dynamic = fp8.schedules_dynamically(rows, matrices)
            assert ("bfloat16", True, False, swiglu._choose_config(*sizes, is_dynamic), False, is_dynamic) in shipped
            if rows <= GATHERED_ROWS:
                assert ("bfloat16", True, False, swiglu._choose_config(*sizes, False), True, False) in shipped
