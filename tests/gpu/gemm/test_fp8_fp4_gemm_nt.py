"""Products of FP4 weights on the GPU: bit by bit those of the widened weights."""

from functools import partial

import pytest
import torch

import dsa
from dsa.kernels.gemm import fp8_fp4_gemm_few_rows_sm90 as few_rows_kernels
from dsa.kernels.gemm import fp8_fp4_gemm_sm90 as kernels
from dsa.ops._kernel_arguments import dtype_name
from dsa.ops.gemm import fp8_fp4_gemm_nt as op
from dsa.ops.gemm import fp8_gemm_nt as fp8
from dsa.testing import poison_free_memory
from tests.gpu.gemm import hostile
from tests.gpu.op_checks import replays

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of both kernels: the one for few rows has its own rows of a, the other a copy of them.
CONFIGS = [*few_rows_kernels.CONFIGS, *kernels.CONFIGS]
# Of matrices: full and all but empty last tiles of every height, and warps with one row.
TAILS = [0, 1, 7, 8, 9, 0, 16, 31, 32, 33, 64, 65, 130, 257, 0]


def weights(experts, columns, channels, spread=14):
    """Any codes, and scales that e4m3 holds, as `grouped_fp8_fp4_gemm_nt` takes them."""
    packed = torch.randint(-128, 128, (experts, columns, channels // 2), dtype=torch.int8, device="cuda")
    shape = experts, columns, channels // 32
    scale = torch.randint(120 - spread, 121, shape, dtype=torch.uint8, device="cuda").view(torch.float8_e8m0fnu)
    return packed, scale, dsa.fp4_block_scales(packed, scale)


def activations(tokens, channels):
    q = torch.randn(tokens, channels, device="cuda").to(E4M3)
    return q, torch.rand(tokens, -(-channels // 128), device="cuda") + 0.5


def check(a, b, ends, out_dtype, record_error=None, **options):
    poison_free_memory(mebibytes=64)
    got = dsa.grouped_fp8_fp4_gemm_nt(a, b, ends, out_dtype, **options)
    expected = dsa.grouped_fp8_gemm_nt(a, dsa.widen_fp4(*b[:2]), ends, out_dtype, **options)
    assert got.dtype == out_dtype and got.is_contiguous() and torch.equal(got, expected)
    if record_error:
        record_error((got.float() - expected.float()).abs().max() if got.numel() else 0.0)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize(("columns", "channels"), [(128, 128), (256, 2048), (136, 160), (8, 32), (4096, 1024)])
@pytest.mark.parametrize(
    "sizes",
    [[0, 5, 0, 0, 300, 64, 1, 0], [0] * 7 + [1], [129] * 4, [1] * 64, [3000, 1]],
    ids=hostile.name,
)
def test_shapes(sizes, columns, channels, out_dtype, record_error):
    ends = hostile.ends_of(sizes)
    check(activations(sum(sizes), channels), weights(len(sizes), columns, channels), ends, out_dtype, record_error)


@pytest.mark.parametrize("tokens", [1, 32, 128, 2000])
def test_rows_and_weights(tokens, record_error):
    """As a mixture has them, 6 of 16 experts."""
    a, b = activations(tokens, 1024), weights(16, 512, 1024)
    chosen = torch.rand(tokens, 16, device="cuda").argsort(-1)[:, :6]
    order, _, ends = dsa.sort_by_expert(chosen, 16)
    factors = torch.rand(6 * tokens, device="cuda")
    check(a, b, ends, torch.bfloat16, record_error, rows=order // 6)
    check(a, b, ends, torch.bfloat16, record_error, rows=order // 6, weights=factors)
    check(a, b, ends, torch.float32, record_error, rows=order // 6, weights=factors)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("behind", [0, *hostile.BEHIND])
@pytest.mark.parametrize("sizes", [*hostile.SIZES, [70, 0, 1300, 9], [2] * 300], ids=hostile.name)
@pytest.mark.parametrize("channels", [512, 160])
def test_expected_rows_and_rows_behind_change_no_bit(channels, sizes, behind, out_dtype):
    """Both kernels, and all tiles."""
    a, b = activations(sum(sizes), channels), weights(len(sizes), 136, channels)
    hostile.check_expected_rows(dsa.grouped_fp8_fp4_gemm_nt, a, b, sizes, behind, out_dtype=out_dtype)


def test_every_code_at_every_scale():
    """Rows of one code and groups of every exponent, beside the block's largest."""
    codes = torch.arange(16, device="cuda").repeat_interleave(8)[:, None] * 17
    packed = codes.to(torch.uint8).view(torch.int8).expand(1, 128, 256).contiguous()
    exponents = (torch.arange(16, device="cuda") % 15).expand(1, 128, 16)
    scale = (exponents + 100).to(torch.uint8).view(torch.float8_e8m0fnu).contiguous()
    b = packed, scale, dsa.fp4_block_scales(packed, scale)
    check(activations(64, 512), b, torch.tensor([64], dtype=torch.int32, device="cuda"), torch.float32)


def test_ends_of_the_scale_range():
    """Scales of zeros are anything, and scales near 2^-127 make subnormal products."""
    packed, scale, _ = weights(2, 128, 256)
    packed[0, 7, :16] = 0
    scale.view(torch.uint8)[0, 7, 0], scale.view(torch.uint8)[1] = 254, 0
    b = packed, scale, dsa.fp4_block_scales(packed, scale)
    ends = torch.tensor([20, 64], dtype=torch.int32, device="cuda")
    check(activations(64, 256), b, ends, torch.float32)


def test_graph_replay_with_new_sizes():
    a, b = activations(64, 256), weights(8, 256, 256)

    def renew():
        ends = torch.cat((torch.randint(0, 257, (7,)).sort().values, torch.tensor([256])))
        return [x.cuda() for x in (ends.int(), torch.randint(0, 64, (256,)).int(), torch.rand(256))]

    def op(ends, rows, factors):
        return dsa.grouped_fp8_fp4_gemm_nt(a, b, ends, rows=rows, weights=factors)

    given = ends, rows, factors = renew()
    for out in replays(op, given, renew):
        expected = dsa.grouped_fp8_gemm_nt(a, dsa.widen_fp4(*b[:2]), ends, rows=rows, weights=factors)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("count", [60, 300])
def test_graph_replay_with_fewer_rows(count):
    """Of both kernels."""
    a, b = activations(count, 256), weights(4, 136, 256)
    wide = dsa.widen_fp4(*b[:2])

    def expected_of(own, sizes):
        return dsa.grouped_fp8_gemm_nt(own, wide, hostile.ends_of(sizes))

    hostile.check_replays_with_fewer_rows(dsa.grouped_fp8_fp4_gemm_nt, a, b, expected_of)


def launched(config, a, b, ends, out, rows=None, weights=None):
    """The product with work tiles of `config`, written to `out`."""
    (q, s), (packed, scale, block_scale) = a, b
    codes = packed.view(torch.uint8).view(-1, packed.shape[-1])
    group_scales, of_blocks = op._group_scales(scale), fp8.aligned_scales(block_scale)
    multiprocessors = dsa.num_sms(out.device)
    if config in few_rows_kernels.CONFIGS:
        none = q.new_empty(0, dtype=torch.int32), s.new_empty(0)
        rows, weights = (empty if x is None else x for x, empty in zip((rows, weights), none))
        few_rows_kernels.compile_fp8_fp4_gemm_few_rows(dtype_name(out.dtype), config)(
            *(q, fp8.aligned_scales(s), rows, codes, group_scales, of_blocks, ends, weights, out),
            config.ctas(multiprocessors),
        )
        return
    q, s = fp8.copied_rows(q, s, rows)
    kernels.compile_fp8_fp4_gemm(dtype_name(out.dtype), config, weights is not None)(
        *(q, fp8.aligned_scales(s), codes, group_scales.flatten(0, 1), of_blocks.permute(1, 2, 0), ends, out, weights),
        multiprocessors,
    )


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "channels"), [(392, 640), (136, 512), (8, 128), (264, 160), (8, 32)])
def test_every_tile_gives_the_bits_of_the_widened_weights(columns, channels, out_dtype):
    """Of both kernels, rows in their order or by number, weighted or not."""
    count = sum(TAILS)
    a, b = activations(count, channels), weights(len(TAILS), columns, channels)
    ends, factors = hostile.ends_of(TAILS), torch.rand(count, device="cuda") - 0.5
    sums = dsa.grouped_fp8_gemm_nt(a, dsa.widen_fp4(*b[:2]), ends, torch.float32)
    plain, weighted = sums.to(out_dtype), (sums * factors[:, None]).to(out_dtype)
    # The same rows, elsewhere among others.
    order = torch.randperm(count + 50, device="cuda")[:count]
    q = torch.full((count + 50, channels), 0x7F, dtype=torch.uint8, device="cuda")
    s = torch.full((count + 50, a[1].shape[1]), torch.nan, device="cuda")
    q[order], s[order] = a[0].view(torch.uint8), a[1]
    for config in CONFIGS:
        if config in few_rows_kernels.CONFIGS and channels % 128:
            continue
        for operand, rows in ((a, None), ((q.view(E4M3), s), order.int())):
            write = partial(launched, config, operand, b, ends, rows=rows)
            poison_free_memory(mebibytes=16)
            hostile.check_written(write, plain)
            hostile.check_written(partial(write, weights=factors), weighted)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("ends", "rows_of", "count"), hostile.rows_of_matrices(TAILS, [*TAILS[:-1], 70]), ids=hostile.name
)
def test_only_the_rows_of_matrices_are_written(ends, rows_of, count, out_dtype):
    """By both kernels and every tile, whatever the ends say; and what stands in other rows does not reach these."""
    a, b = activations(count, 256), weights(len(ends), 136, 256)
    expected, ends = hostile.untouched(count, 136, out_dtype), torch.tensor(ends, dtype=torch.int32, device="cuda")
    product = partial(dsa.fp8_gemm_nt, out_dtype=out_dtype)
    hostile.write_products(product, a, dsa.widen_fp4(*b[:2]), rows_of, expected)
    a, numbers, ones = hostile.with_nobodys_rows(a, rows_of)
    for config in CONFIGS:
        hostile.check_written(partial(launched, config, a, b, ends), expected)
        hostile.check_written(partial(launched, config, a, b, ends, rows=numbers, weights=ones), expected)


@pytest.mark.parametrize("wrong", hostile.ROWS)
def test_rows_that_there_are_not(wrong):
    """The other rows are right, and nothing is written elsewhere."""
    a, b = activations(90, 256), weights(3, 136, 256)
    rows, ends = torch.randint(0, 90, (200,), dtype=torch.int32, device="cuda"), hostile.ends_of([70, 0, 130])
    expected = dsa.grouped_fp8_gemm_nt(a, dsa.widen_fp4(*b[:2]), ends, rows=rows)
    bad = torch.zeros(200, dtype=torch.bool, device="cuda")
    bad[[0, 69, 70, 133, 199]] = True
    rows.masked_fill_(bad, wrong)

    def write(config, out):
        launched(config, a, b, ends, out, rows)
        out[bad] = expected[bad]

    for config in CONFIGS:
        hostile.check_written(partial(write, config), expected)
