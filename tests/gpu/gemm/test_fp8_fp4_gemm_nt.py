"""Products of FP4 weights on the GPU: bit by bit those of the widened weights."""

import itertools

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

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of both kernels: the one for few rows has its own rows of a, the other a copy of them.
CONFIGS = [*few_rows_kernels.CONFIGS, *kernels.CONFIGS]
# Of matrices: full and all but empty last tiles of every height, and warps with one row.
TAILS = [0, 1, 7, 8, 9, 0, 16, 31, 32, 33, 64, 65, 130, 257, 0]
UNTOUCHED = 7.0


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


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "channels"), [(128, 128), (256, 2048), (136, 160), (8, 32), (4096, 1024)])
@pytest.mark.parametrize(
    "sizes",
    [[0, 5, 0, 0, 300, 64, 1, 0], [0] * 7 + [1], [129] * 4, [1] * 64, [3000, 1]],
    ids=lambda sizes: f"{len(sizes)} of {sum(sizes)}",
)
def test_shapes(sizes, columns, channels, out_dtype, record_error):
    ends = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device="cuda")
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


@pytest.mark.parametrize("tokens", [1, 30, 700])
def test_expected_rows_change_no_bit(tokens):
    """Of 4 of 16 experts, from far too few to all rows, and if all rows are theirs: both kernels, and all tiles."""
    a, b = activations(tokens, 1024), weights(4, 512, 1024)
    count, factors = 6 * tokens, torch.rand(6 * tokens, device="cuda")
    chosen = torch.rand(tokens, 16, device="cuda").argsort(-1)[:, :6]
    for own in (chosen, chosen % 4):
        order, _, ends = dsa.sort_by_expert(own, 4)
        used = ends[-1].item()
        for options in ({"rows": order // 6}, {"rows": order // 6, "weights": factors}):
            expected = dsa.grouped_fp8_gemm_nt(a, dsa.widen_fp4(*b[:2]), ends, **options)[:used]
            for number in sorted({0, 1, used, 96, 97, count}):
                if number <= count:
                    poison_free_memory(mebibytes=16)
                    got = dsa.grouped_fp8_fp4_gemm_nt(a, b, ends, expected_rows=number, **options)
                    assert torch.equal(got[:used], expected), (number, used, sorted(options))


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


def test_a_row_depends_on_no_other():
    a, b = activations(300, 512), weights(4, 512, 512)
    ends = torch.tensor([100, 100, 250, 300], dtype=torch.int32, device="cuda")
    got = dsa.grouped_fp8_fp4_gemm_nt(a, b, ends)
    for row, e in ((0, 0), (99, 0), (100, 2), (249, 2), (250, 3)):
        one = torch.tensor([row], dtype=torch.int32, device="cuda")
        only = (torch.arange(4, device="cuda") >= e).int()
        assert torch.equal(dsa.grouped_fp8_fp4_gemm_nt(a, b, only, rows=one)[0], got[row])
    assert torch.equal(got, dsa.grouped_fp8_fp4_gemm_nt(a, b, ends))


def test_graph_replay_with_new_sizes():
    a, b = activations(64, 256), weights(8, 256, 256)
    ends = torch.full((8,), 256, dtype=torch.int32, device="cuda")
    rows, factors = torch.zeros(256, dtype=torch.int32, device="cuda"), torch.zeros(256, device="cuda")
    dsa.grouped_fp8_fp4_gemm_nt(a, b, ends, rows=rows, weights=factors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dsa.grouped_fp8_fp4_gemm_nt(a, b, ends, rows=rows, weights=factors)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        cuts = torch.randint(0, 257, (7,), generator=generator).sort().values
        ends.copy_(torch.cat((cuts, torch.tensor([256]))))
        rows.copy_(torch.randint(0, 64, (256,), generator=generator))
        factors.copy_(torch.rand(256, generator=generator))
        graph.replay()
        assert torch.equal(out, dsa.grouped_fp8_gemm_nt(a, dsa.widen_fp4(*b[:2]), ends, rows=rows, weights=factors))


@pytest.mark.parametrize("count", [60, 300])
def test_graph_replay_with_fewer_rows(count):
    """Of both kernels: rows that are nobody's in a replay keep what they had."""
    a, b = activations(count, 256), weights(4, 136, 256)
    ends = torch.full((4,), count, dtype=torch.int32, device="cuda")
    dsa.grouped_fp8_fp4_gemm_nt(a, b, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dsa.grouped_fp8_fp4_gemm_nt(a, b, ends)
    for sizes in ([0, 0, 0, 0], [0, 1, 0, 0], [7, 0, count // 2, 5], [0, 0, 0, count]):
        ends.copy_(hostile.ends_of(sizes))
        out.fill_(UNTOUCHED)
        graph.replay()
        used = sum(sizes)
        own = tuple(x[:used] for x in a)
        assert torch.equal(out[:used], dsa.grouped_fp8_gemm_nt(own, dsa.widen_fp4(*b[:2]), ends)), sizes
        assert out[used:].eq(UNTOUCHED).all(), sizes


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


def surrounded(rows, columns, out_dtype):
    """What stands before and behind `rows` rows must stay as it is; twice: the whole, and these rows of it."""
    whole = torch.full((rows + 128, columns), UNTOUCHED, dtype=out_dtype, device="cuda")
    return whole, whole[64 : 64 + rows]


def check_written(config, expected, a, b, ends, **options):
    """expected [M, N]: with UNTOUCHED in rows that are no matrix's."""
    whole, out = surrounded(*expected.shape, expected.dtype)
    launched(config, a, b, ends, out, **options)
    assert torch.equal(out, expected), (config, sorted(options))
    assert whole[:64].eq(UNTOUCHED).all() and whole[-64:].eq(UNTOUCHED).all(), (config, sorted(options))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "channels"), [(392, 640), (136, 512), (8, 128), (264, 160), (8, 32)])
def test_every_tile_gives_the_bits_of_the_widened_weights(columns, channels, out_dtype):
    """Of both kernels, rows in their order or by number, weighted or not."""
    count = sum(TAILS)
    a, b = activations(count, channels), weights(len(TAILS), columns, channels)
    ends = torch.tensor(TAILS, device="cuda").cumsum(0, dtype=torch.int32)
    sums = dsa.grouped_fp8_gemm_nt(a, dsa.widen_fp4(*b[:2]), ends, torch.float32)
    factors = torch.rand(count, device="cuda") - 0.5
    plain, weighted = sums.to(out_dtype), (sums * factors[:, None]).to(out_dtype)
    # The same rows, elsewhere among others.
    order = torch.randperm(count + 50, device="cuda")[:count]
    q = torch.full((count + 50, channels), 0x7F, dtype=torch.uint8, device="cuda")
    s = torch.full((count + 50, a[1].shape[1]), torch.nan, device="cuda")
    q[order], s[order] = a[0].view(torch.uint8), a[1]
    mixed, order = (q.view(E4M3), s), order.int()
    for config in CONFIGS:
        if config in few_rows_kernels.CONFIGS and channels % 128:
            continue
        poison_free_memory(mebibytes=16)
        check_written(config, plain, a, b, ends)
        check_written(config, weighted, a, b, ends, weights=factors)
        check_written(config, plain, mixed, b, ends, rows=order)
        check_written(config, weighted, mixed, b, ends, rows=order, weights=factors)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ends", "rows_of"), hostile.ENDS, ids=str)
def test_nothing_outside_the_rows_is_written(ends, rows_of, out_dtype):
    """Whatever the ends say: rows that are a weight's are right, rows that are none's stay as they were."""
    a, b = activations(64, 256), weights(4, 136, 256)
    wide = dsa.widen_fp4(*b[:2])
    expected = torch.full((64, 136), UNTOUCHED, dtype=out_dtype, device="cuda")
    for e, (begin, end) in rows_of.items():
        part = slice(begin, end)
        expected[part] = dsa.fp8_gemm_nt((a[0][part], a[1][part]), (wide[0][e], wide[1][e]), out_dtype)
    numbers, every = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (ends, range(64)))
    ones = torch.ones(64, device="cuda")
    for config in CONFIGS:
        check_written(config, expected, a, b, numbers)
        check_written(config, expected, a, b, numbers, rows=every, weights=ones)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [TAILS, [*TAILS[:-1], 70], *hostile.SIZES], ids=str)
def test_no_tile_writes_behind_the_last_end(sizes, out_dtype):
    """Of both kernels: what stands behind the last matrix's rows stays, and what is read there reaches no other row."""
    used, behind = sum(sizes), 300
    a, b = activations(used, 256), weights(len(sizes), 136, 256)
    ends = hostile.ends_of(sizes)
    expected = torch.full((used + behind, 136), UNTOUCHED, dtype=out_dtype, device="cuda")
    expected[:used] = dsa.grouped_fp8_gemm_nt(a, dsa.widen_fp4(*b[:2]), ends, out_dtype)
    more = tuple(hostile.with_nan_behind(x, behind) for x in a)
    numbers = hostile.with_no_rows_behind(torch.arange(used, device="cuda", dtype=torch.int32), behind)
    ones = hostile.with_nan_behind(torch.ones(used, device="cuda"), behind)
    for config in CONFIGS:
        check_written(config, expected, more, b, ends)
        check_written(config, expected, more, b, ends, rows=numbers, weights=ones)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("behind", hostile.BEHIND)
@pytest.mark.parametrize("sizes", hostile.SIZES, ids=str)
def test_rows_behind_the_last_end_are_nobodys(sizes, behind, out_dtype):
    """Whatever stands there, the others' bits are those of the call without them."""
    used = sum(sizes)
    ends, order = hostile.ends_of(sizes), torch.randperm(used, device="cuda", dtype=torch.int32)
    factors = torch.rand(used, device="cuda")
    numbers, more_factors = hostile.with_no_rows_behind(order, behind), hostile.with_nan_behind(factors, behind)
    for channels in (512, 160):
        a, b = activations(used, channels), weights(len(sizes), 136, channels)
        more = tuple(hostile.with_nan_behind(x, behind) for x in a)
        for operand, alone, together in (
            (more, {"weights": factors}, {"weights": more_factors}),
            (a, {"rows": order}, {"rows": numbers}),
        ):
            expected = dsa.grouped_fp8_fp4_gemm_nt(a, b, ends, out_dtype, **alone)
            poison_free_memory(mebibytes=64)
            got = dsa.grouped_fp8_fp4_gemm_nt(operand, b, ends, out_dtype, **together)
            assert got.shape == (used + behind, 136) and torch.equal(got[:used], expected), (channels, sorted(together))


@pytest.mark.parametrize("wrong", hostile.ROWS)
def test_rows_that_there_are_not(wrong):
    """The other rows are right, and nothing is written elsewhere."""
    count, sizes = 200, [70, 0, 130]
    a, b = activations(90, 256), weights(3, 136, 256)
    rows = torch.randint(0, 90, (count,), dtype=torch.int32, device="cuda")
    ends = torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32)
    expected = dsa.grouped_fp8_gemm_nt(a, dsa.widen_fp4(*b[:2]), ends, rows=rows)
    bad = torch.zeros(count, dtype=torch.bool, device="cuda")
    bad[[0, 69, 70, 133, count - 1]] = True
    for config in CONFIGS:
        whole, out = surrounded(count, 136, torch.bfloat16)
        launched(config, a, b, ends, out, rows.masked_fill(bad, wrong))
        assert torch.equal(out[~bad], expected[~bad]), config
        assert whole[:64].eq(UNTOUCHED).all() and whole[-64:].eq(UNTOUCHED).all(), config
