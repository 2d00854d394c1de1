"""The merge kernel on the GPU against fp64."""

import math

import pytest
import torch

import dsa
from dsa.testing import assert_close, poison_free_memory

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Half a unit in the last place of the result, or what fp32 loses on the way.
ROUNDING = {torch.bfloat16: 1.01 / 256, torch.float16: 1.01 / 2048, torch.float32: 1e-5}
INF, NAN = math.inf, math.nan


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


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_variants(dtype, count, with_sink, record_error):
    sink = torch.randn(16, device="cuda") if with_sink else None
    check(*branches(count, (301, 16, 512), dtype), sink, record_error)


@pytest.mark.parametrize("shape", [(1, 8), (7, 8), (5, 3, 16), (3, 5, 2, 64), (2, 3, 5, 1, 128), (1, 1, 1, 1, 1, 256)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(dtype, shape, record_error):
    check(*branches(2, shape, dtype), torch.randn(shape[-2], device="cuda"), record_error)


@pytest.mark.parametrize("d_v", [8, 24, 248, 256, 264, 504, 520, 1024, 1544, 4096])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channels(dtype, count, d_v, record_error):
    check(*branches(count, (33, 9, d_v), dtype), None, record_error)


@pytest.mark.parametrize("shape", [(0, 16, 512), (3, 0, 512), (2, 0, 3, 4, 64)], ids=str)
def test_nothing_to_merge(shape):
    out, lse = dsa.merge_attention(*branches(2, shape))
    assert out.shape == shape and lse.shape == shape[:-1]


def test_sinks_of_every_size():
    outs, lses = branches(3, (50, 8, 512))
    sink = torch.tensor([-INF, INF, 0.0, 3.0, -3.0, 1e30, -1e30, 100.0], device="cuda")
    check(outs, lses, sink)
    out, lse = dsa.merge_attention(outs, lses, sink)
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
def test_rows_that_are_empty_everywhere(mark):
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


def test_strides():
    """outs between other numbers, in another order of dimensions, without a stride; LSEs as decoding returns them."""
    outs, lses = branches(4, (6, 3, 8, 512))
    wide = torch.nn.functional.pad(outs[1], (8, 56), value=NAN)[..., 8:520]
    one = outs[3][:1, :1, :1].nan_to_num(0.5)
    given = [outs[0], wide, outs[2].transpose(0, 2).contiguous().transpose(0, 2), one.expand_as(outs[0])]
    logs = [
        lses[0].transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack((lses[1], lses[1]), 3)[..., 1],
        lses[2],
        torch.ones(1, 1, 1, device="cuda").expand_as(lses[0]),
    ]
    sink = torch.randn(16, device="cuda")[::2]
    check(given, logs, sink)
    got = dsa.merge_attention(given, logs, sink)
    expected = dsa.merge_attention([x.contiguous() for x in given], [x.contiguous() for x in logs], sink.contiguous())
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_what_decoding_returns():
    """Two halves of a sequence's pages, merged, are the attention to all of them."""
    q = torch.randn(3, 2, 16, 576, device="cuda").bfloat16() / 10
    cache = torch.randn(24, 64, 1, 576, device="cuda").bfloat16() / 10
    table = torch.randperm(24, device="cuda").int().view(3, 8)
    parts = []
    for pages, lengths in ((table, 512), (table[:, :3].contiguous(), 192), (table[:, 3:].contiguous(), 320)):
        length = torch.full((3,), lengths, dtype=torch.int32, device="cuda")
        out, lse = dsa.flash_mla_with_kvcache(q, cache, pages, length, 512, None)
        parts.append((out, lse.transpose(1, 2)))
    (whole, whole_lse), *halves = parts
    out, lse = dsa.merge_attention(*map(list, zip(*halves)))
    assert_close("out", out, whole, abs_tol=8e-4, rel_tol=2.01 / 128, cos_tol=1e-5)  # each of them is rounded
    assert_close("lse", lse, whole_lse, abs_tol=1e-6, rel_tol=8.01 / 65536)


def test_offsets_beyond_32_bits():
    tokens = 2**31 // (128 * 512) + 50
    outs = [torch.zeros(tokens, 128, 512, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    lses = [torch.zeros(tokens, 128, device="cuda") for _ in range(2)]
    some, logs = branches(2, (100, 128, 512))
    for tensors, values in ((outs, some), (lses, logs)):
        for x, y in zip(tensors, values):
            x[-100:] = y
    out, lse = dsa.merge_attention(outs, lses)
    expected = dsa.merge_attention(some, logs)
    assert torch.equal(out[-100:], expected[0]) and torch.equal(lse[-100:], expected[1])
    assert not out[: tokens - 100].any() and lse[: tokens - 100].eq(lse[0, 0]).all()


def test_twenty_runs_are_identical():
    outs, lses = branches(3, (500, 128, 512))
    first = dsa.merge_attention(outs, lses)
    for _ in range(20):
        again = dsa.merge_attention(outs, lses)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_graph_replay_with_new_data():
    outs, lses = branches(2, (100, 16, 512))
    sink = torch.randn(16, device="cuda")
    dsa.merge_attention(outs, lses, sink)  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = dsa.merge_attention(outs, lses, sink)
    for _ in range(3):
        new_outs, new_lses = branches(2, (100, 16, 512))
        for x, y in zip((*outs, *lses), (*new_outs, *new_lses)):
            x.copy_(y)
        sink.normal_()
        graph.replay()
        expected = dsa.merge_attention(outs, lses, sink)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
        check(outs, lses, sink)


def test_side_stream():
    outs, lses = branches(2, (2000, 64, 512))
    outs = [x.nan_to_num(0.0) for x in outs]
    expected, _ = dsa.merge_attention(outs, lses)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a kernel on another stream would read outs before the doubling below
        for out in outs:
            out.mul_(2)
        got, _ = dsa.merge_attention(outs, lses)
    stream.synchronize()
    assert torch.equal(got, 2 * expected)


@pytest.mark.several_gpus
def test_tensors_on_another_gpu_than_the_current_one():
    outs, lses = branches(2, (100, 16, 512))
    expected = dsa.merge_attention(outs, lses)
    with torch.cuda.device(0):
        got = dsa.merge_attention([x.to("cuda:1") for x in outs], [x.to("cuda:1") for x in lses])
    assert got[0].device.index == 1 and torch.equal(got[0].cpu(), expected[0].cpu())


def test_torch_compile():
    outs, lses = branches(2, (9, 16, 512))
    compiled = torch.compile(dsa.merge_attention, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(outs, lses), dsa.merge_attention(outs, lses)):
        assert torch.equal(got, expected)


def test_errors_name_the_argument():
    outs, lses = branches(5, (4, 8, 512))
    with pytest.raises(ValueError, match="outs: the kernel merges 1 to 4 branches, got 5"):
        dsa.merge_attention(outs, lses)
    with pytest.raises(ValueError, match=r"lses\[1\]: must be on outs\[0\]'s device cuda:0, got cpu"):
        dsa.merge_attention(outs[:2], [lses[0], lses[1].cpu()])
    with pytest.raises(ValueError, match=r"outs\[0\]: the kernel takes d_v a multiple of 8"):
        dsa.merge_attention([x[..., :12].contiguous() for x in outs[:2]], lses[:2])
