"""The ops for products with FP4 weights, on the CPU: which kernels they launch, and whether these variants ship."""

import pytest
import torch

import dsa
from dsa.kernels.gemm import fp8_fp4_gemm_few_rows_sm90 as few_rows_kernels
from dsa.kernels.gemm import fp8_fp4_gemm_sm90 as kernels
from dsa.kernels.gemm import limits
from dsa.ops.gemm import fp8_fp4_gemm_nt as op
from dsa.runtime import backends

ENDS = torch.tensor([2, 2, 4], dtype=torch.int32)
ROWS = torch.tensor([4, 0, 0, 3], dtype=torch.int32)


def operands(columns=256, channels=384):
    a = torch.randn(5, channels).to(torch.float8_e4m3fn), torch.rand(5, -(-channels // 128))
    packed = torch.randint(-128, 128, (3, columns, channels // 2), dtype=torch.int8)
    scale = torch.randint(120, 128, (3, columns, channels // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return a, (packed, scale, dsa.fp4_block_scales(packed, scale))


def test_many_rows_are_copied_and_numbers_outside_are_clamped(launches):
    (q, s), b = operands()
    ends, rows = torch.full((3,), 100, dtype=torch.int32), torch.randint(0, 5, (100,), dtype=torch.int32)
    rows[:2] = torch.tensor([-1, 2**31 - 1])
    dsa.grouped_fp8_fp4_gemm_nt((q, s), b, ends, torch.float32, rows=rows)
    [(_, (values, scales, *_))] = launches
    inside = rows.clamp(0, 4)
    assert torch.equal(values.view(torch.uint8), q.view(torch.uint8)[inside])
    assert torch.equal(scales[:, : s.shape[1]], s[inside])


@pytest.mark.parametrize("expected, chosen_for", [(None, 5000), (0, 1), (1, 1), (72, 72), (73, 73), (5000, 5000)])
def test_kernel_and_tiles_are_chosen_for_the_expected_rows(expected, chosen_for, named_launches):
    """The small-M kernel runs for up to 24 expected rows per weight matrix: 72 for three matrices."""
    a, b = operands()
    rows = torch.randint(0, 5, (5000,), dtype=torch.int32)
    out = dsa.grouped_fp8_fp4_gemm_nt(a, b, ENDS, rows=rows, expected_rows=expected)
    few = chosen_for <= 72
    [(name, variant, arguments)] = named_launches
    if few:
        config = op._choose_few_rows_config(chosen_for, 256, 3, 132)
        assert (name, variant) == ("fp8_fp4_gemm_few_rows", ("bfloat16", config))
    else:
        config = op._choose_config(chosen_for, 256, 384, 3, 132)
        assert (name, variant) == ("fp8_fp4_gemm", ("bfloat16", config, False))
    assert arguments[8 if few else 6] is out and len(out) == 5000
    assert arguments[2] is rows if few else len(arguments[0]) == 5000


def test_the_tile_of_one_token_depends_on_the_number_of_gpus():
    """In DeepSeek-V4-Flash, one token has 6 rows, for 6 of 256 experts. Each of two GPUs has 128 experts and expects 3
    rows. For 6 rows, the choice with 128 experts is that with 256."""
    chosen = [few_rows_kernels.choose_config(rows, 4096, 128, 132) for rows in (6, 3)]
    sizes = [(config.groups, config.rows, config.stages, config.resident) for config in chosen]
    assert sizes == [(1, 8, 3, 3), (2, 8, 5, 1)]


def test_a_partial_last_block_of_channels_runs_in_the_kernel_of_many_rows(named_launches):
    a, b = operands(channels=160)
    dsa.grouped_fp8_fp4_gemm_nt(a, b, ENDS, rows=ROWS)
    assert [name for name, *_ in named_launches] == ["fp8_fp4_gemm"]


@pytest.mark.parametrize("matrices, channels, count", [(0, 64, 0), (0, 64, 5), (3, 0, 5), (3, 64, 0)])
def test_nothing_to_multiply_launches_no_kernel(matrices, channels, count, launches):
    q, packed = torch.zeros(count, channels), torch.zeros(matrices, 16, channels // 2, dtype=torch.int8)
    scale = torch.zeros(matrices, 16, channels // 32, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    a = q.to(torch.float8_e4m3fn), torch.ones(count, -(-channels // 128))
    b = packed, scale, torch.ones(matrices, 1, -(-channels // 128))
    out = dsa.grouped_fp8_fp4_gemm_nt(a, b, torch.full((matrices,), count, dtype=torch.int32), torch.float32)
    assert out.shape == (count, 16) and not launches
    assert matrices == 0 or torch.equal(out, torch.zeros(count, 16))


def test_casts_of_weights_are_pytorch():
    assert not {"fp4_block_scales", "widen_fp4"} & backends.ARCHS.keys()
    _, (packed, scale, block_scale) = operands()
    q, again = dsa.widen_fp4(packed, scale)
    assert torch.equal(again, block_scale) and q.shape == (3, 256, 384)


@pytest.mark.parametrize("matrices", [1, 2, 256, limits.MAX_MATRICES])
@pytest.mark.parametrize("rows", [1, 24, 64, 65, 1024, 4096, 16384, 131072, limits.MAX_ROWS])
def test_only_shipped_variants_are_asked_for(rows, matrices):
    shipped = {arguments for module in (kernels, few_rows_kernels) for _, arguments in module.shipped_variants()}
    for columns in (8, 256, 4096):
        for channels in (128, 2048, 7168):
            config = op._choose_config(rows, columns, channels, matrices, 132)
            assert {("float16", config, weighted) for weighted in (False, True)} <= shipped
        assert ("bfloat16", op._choose_few_rows_config(rows, columns, matrices, 132)) in shipped
