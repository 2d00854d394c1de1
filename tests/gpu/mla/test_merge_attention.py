"""The merge kernel on the GPU against fp64."""

import pytest
import torch

import dsa
from dsa.testing import assert_close, poison_free_memory
from tests.gpu.attention import INF, NAN
from tests.gpu.op_checks import (
    among_nan,
    assert_runs_have_the_same_bits,
    assert_runs_on_the_current_stream,
    assert_same_bits,
    assert_same_on_the_second_gpu,
    replays,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Half a unit in the last place of the result, or what fp32 loses on the way.
ROUNDING = {torch.bfloat16: 1.01 / 256, torch.float16: 1.01 / 2048, torch.float32: 1e-5}
CHANNELS = [8, 24, 248, 256, 264, 504, 520, 1024, 1544, 4096]
SHAPES = [(1, 8), (7, 8), (5, 3, 16), (3, 5, 2, 64), (2, 3, 5, 1, 128), (1, 1, 1, 1, 1, 256)]


def branches(count, shape, dtype=torch.bfloat16):
    """Branches of every importance, the rows of every sixth LSE empty, by an infinity of either sign, and NaN."""
    outs, lses = [], []
    for _ in range(count):
        out, lse = torch.randn(shape, device="cuda").to(dtype), 4 * torch.randn(shape[:-1], device="cuda")
        mark = torch.rand(shape[:-1], device="cuda")
        lse[mark < 1 / 12], lse[mark > 11 / 12] = INF, -INF
        out[lse.isinf()] = NAN
        outs.append(out)
        lses.append(lse)
    return outs, lses


def merge(*tensors):
    """As many outs as LSEs, and a sink where the number is odd."""
    count = len(tensors) // 2
    return dsa.merge_attention(tensors[:count], tensors[count : 2 * count], *tensors[2 * count :])


def merged(outs, lses, sink=None):
    """fp64."""
    logs = torch.stack([x.double() for x in lses])
    empty = logs.isinf()
    logs = logs.masked_fill(empty, -INF)
    lse = logs.logsumexp(0)
    nothing = lse == -INF
    weights = (logs - lse.masked_fill(nothing, 0.0)).exp()
    if sink is not None:
        weights = weights * torch.sigmoid(lse - sink.double()).masked_fill(nothing, 0.0)
    values = torch.stack([x.double() for x in outs]).masked_fill(empty[..., None], 0.0)
    return (weights[..., None] * values).sum(0), lse.masked_fill(nothing, INF)


def check(outs, lses, sink=None, record_error=None):
    poison_free_memory(mebibytes=64)
    out, lse = dsa.merge_attention(outs, lses, sink)
    expected, expected_lse = merged(outs, lses, sink)
    assert out.dtype == outs[0].dtype and out.is_contiguous() and lse.dtype == torch.float32 and lse.is_contiguous()
    error = assert_close("out", out, expected, abs_tol=4e-6, rel_tol=ROUNDING[out.dtype], cos_tol=5e-6)
    assert_close("lse", lse, expected_lse, abs_tol=2e-6, rel_tol=1e-6)
    if record_error:
        record_error(error)
    return out, lse


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_variants(dtype, count, with_sink, record_error):
    sink = torch.randn(16, device="cuda") if with_sink else None
    check(*branches(count, (301, 16, 512), dtype), sink, record_error)


@pytest.mark.parametrize("shape", [*SHAPES, *((33, 9, channels) for channels in CHANNELS)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(dtype, shape, record_error):
    check(*branches(2, shape, dtype), torch.randn(shape[-2], device="cuda"), record_error)
    check(*branches(4, shape, dtype), None, record_error)


def test_sinks_of_every_size():
    outs, lses = branches(3, (50, 8, 512))
    out, lse = check(outs, lses, torch.tensor([-INF, INF, 0.0, 3.0, -3.0, 1e30, -1e30, 100.0], device="cuda"))
    plain, plain_lse = dsa.merge_attention(outs, lses)
    assert torch.equal(lse, plain_lse) and torch.equal(out[:, 0], plain[:, 0]) and not out[:, [1, 5]].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_branch_alone_is_kept_exactly(dtype):
    outs, lses = branches(4, (200, 16, 512), dtype)
    values, logs = torch.randn(200, 16, 512, device="cuda").to(dtype), 100 * torch.randn(200, 16, device="cuda")
    for i in range(4):
        alone = [torch.full_like(x, INF if i % 2 else -INF) for x in lses]
        for out, lse in ((outs, alone), (outs[i : i + 1], alone[i : i + 1])):
            out[i % len(out)], lse[i % len(lse)] = values, logs
            got, got_lse = dsa.merge_attention(out, lse)
            assert torch.equal(got, values) and torch.equal(got_lse, logs)


@pytest.mark.parametrize("mark", [INF, -INF])
def test_rows_that_are_empty_everywhere_are_zero(mark):
    outs = [torch.full((5, 8, 512), NAN, device="cuda").bfloat16() for _ in range(2)]
    lses = [torch.full((5, 8), m, device="cuda") for m in (mark, -INF)]
    for sink in (None, torch.full((8,), INF, device="cuda"), torch.full((8,), -INF, device="cuda")):
        out, lse = dsa.merge_attention(outs, lses, sink)
        assert out.eq(0).all() and lse.eq(INF).all()


def test_large_and_distant_lses():
    outs, lses = branches(3, (100, 8, 512))
    for lse, offset in zip(lses, (1e4, 1e4 + 3, -1e30)):
        lse += offset
    check(outs, lses)
    check(outs, [x - 2e4 for x in lses])


def test_nan_reaches_its_row_only():
    outs, lses = branches(2, (40, 8, 512))
    lses = [x.nan_to_num(0.0, 0.0, 0.0) for x in lses]
    outs = [x.nan_to_num(0.0) for x in outs]
    outs[1][3, 2, 100] = NAN
    lses[0][7, 1] = NAN
    out, lse = dsa.merge_attention(outs, lses)
    expected = torch.zeros(40, 8, 512, dtype=torch.bool, device="cuda")
    expected[7, 1] = True
    assert torch.equal(lse.isnan(), expected[..., 0])
    expected[3, 2, 100] = True
    assert torch.equal(out.isnan(), expected)


def test_strides_change_no_bit():
    """outs between other numbers, in another order of dimensions, without a stride; LSEs as decoding returns them."""
    outs, lses = branches(4, (6, 3, 8, 512))
    one = outs[3][:1, :1, :1].nan_to_num(0.5)
    given = [outs[0], among_nan(outs[1]), outs[2].transpose(0, 2).contiguous().transpose(0, 2), one.expand_as(outs[0])]
    logs = [
        lses[0].transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack((lses[1], lses[1]), 3)[..., 1],
        lses[2],
        torch.ones(1, 1, 1, device="cuda").expand_as(lses[0]),
    ]
    sink = torch.randn(16, device="cuda")[::2]
    tensors = *given, *logs, sink
    assert_same_bits(check(given, logs, sink), merge(*(x.contiguous() for x in tensors)))


def test_offsets_beyond_32_bits():
    tokens = 2**31 // (128 * 512) + 50
    given = [torch.zeros(tokens, 128, 512, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    given += [torch.zeros(tokens, 128, device="cuda") for _ in range(2)]
    outs, lses = branches(2, (100, 128, 512))
    for x, last in zip(given, (*outs, *lses), strict=True):
        x[-100:] = last
    out, lse = merge(*given)
    assert_same_bits((out[-100:], lse[-100:]), dsa.merge_attention(outs, lses))
    assert not out[: tokens - 100].any() and lse[: tokens - 100].eq(lse[0, 0]).all()


def test_runs_are_identical():
    outs, lses = branches(3, (500, 128, 512))
    assert_runs_have_the_same_bits(merge, *outs, *lses)


def test_a_graph_takes_new_data():
    def inputs():
        outs, lses = branches(2, (100, 16, 512))
        return *outs, *lses, torch.randn(16, device="cuda")

    given = inputs()
    for got in replays(merge, given, inputs):
        assert_same_bits(got, check(given[:2], given[2:4], given[4]))


def test_the_kernel_runs_on_the_current_stream():
    outs, lses = branches(2, (2000, 64, 512))
    assert_runs_on_the_current_stream(merge, *outs, *lses)


@pytest.mark.several_gpus
def test_tensors_on_another_gpu_than_the_current_one():
    outs, lses = branches(2, (100, 16, 512))
    assert_same_on_the_second_gpu(merge, *outs, *lses)
