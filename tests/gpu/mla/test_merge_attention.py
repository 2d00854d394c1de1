"""merge_attention on the GPU: shapes, sinks and LSEs of every magnitude, NaN, and offsets that need 64 bits."""

import pytest
import torch

import dsa
from tests.gpu.attention import INF, NAN, case_of, checked
from tests.gpu.op_checks import assert_same_bits

CASE = case_of("merge_attention")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CHANNELS = [8, 24, 248, 256, 264, 504, 520, 1024, 1544, 4096]
SHAPES = [(1, 8), (7, 8), (5, 3, 16), (3, 5, 2, 64), (2, 3, 5, 1, 128), (1, 1, 1, 1, 1, 256), (301, 16, 512)]
SHAPES += [(33, 9, channels) for channels in CHANNELS]


def inputs(count, shape, dtype=torch.bfloat16, sink=False):
    return CASE.arguments("cuda", count=count, shape=shape, dtype=dtype, sink=sink)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_and_numbers_of_branches_are_right(dtype, shape, count, sink, record_error):
    checked(CASE, inputs(count, shape, dtype, sink), record_error)


def test_sinks_of_every_size_scale_the_output_alone():
    given = inputs(3, (50, 8, 512))
    sink = torch.tensor([-INF, INF, 0.0, 3.0, -3.0, 1e30, -1e30, 100.0], device="cuda")
    out, lse = checked(CASE, given | {"attn_sink": sink})
    plain, plain_lse = CASE.run(given)
    assert torch.equal(lse, plain_lse) and torch.equal(out[:, 0], plain[:, 0]) and not out[:, [1, 5]].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", range(4))
def test_a_branch_alone_is_kept_exactly(dtype, place):
    given, logs = inputs(4, (200, 16, 512), dtype), 100 * torch.randn(200, 16, device="cuda")
    values = given["outs"][place] = torch.randn(200, 16, 512, device="cuda").to(dtype)
    lses = [torch.full_like(logs, -INF if i % 2 else INF) for i in range(4)]
    lses[place] = logs
    assert_same_bits(dsa.merge_attention(given["outs"], lses), (values, logs))
    assert_same_bits(dsa.merge_attention([values], [logs]), (values, logs))


@pytest.mark.parametrize("mark", [INF, -INF])
@pytest.mark.parametrize("sink", [None, INF, -INF])
def test_rows_that_are_empty_everywhere_are_zero(sink, mark):
    outs = [torch.full((5, 8, 512), NAN, device="cuda").bfloat16() for _ in range(2)]
    lses = [torch.full((5, 8), m, device="cuda") for m in (mark, -INF)]
    sinks = None if sink is None else torch.full((8,), sink, device="cuda")
    out, lse = dsa.merge_attention(outs, lses, sinks)
    assert out.eq(0).all() and lse.eq(INF).all()


def test_large_and_distant_lses_do_not_overflow():
    given = inputs(3, (100, 8, 512))
    for lse, offset in zip(given["lses"], (1e4, 1e4 + 3, -1e30)):
        lse += offset
    checked(CASE, given)
    checked(CASE, given | {"lses": [x - 2e4 for x in given["lses"]]})


def test_nan_reaches_its_row_alone():
    given = inputs(2, (40, 8, 512))
    outs, lses = ([x.nan_to_num(0.0, 0.0, 0.0) for x in given[name]] for name in ("outs", "lses"))
    outs[1][3, 2, 100] = lses[0][7, 1] = NAN
    out, lse = dsa.merge_attention(outs, lses)
    expected = torch.zeros(40, 8, 512, dtype=torch.bool, device="cuda")
    expected[7, 1] = True
    assert torch.equal(lse.isnan(), expected[..., 0])
    expected[3, 2, 100] = True
    assert torch.equal(out.isnan(), expected)


def test_offsets_beyond_32_bits():
    few, tokens = inputs(2, (100, 128, 512)), 2**31 // (128 * 512) + 50
    many = {"outs": [torch.zeros(tokens, 128, 512, dtype=torch.bfloat16, device="cuda") for _ in range(2)]}
    many["lses"] = [torch.zeros(tokens, 128, device="cuda") for _ in range(2)]
    for name in many:
        for x, last in zip(many[name], few[name], strict=True):
            x[-100:] = last
    out, lse = dsa.merge_attention(**many)
    assert_same_bits((out[-100:], lse[-100:]), CASE.run(few))
    assert not out[: tokens - 100].any() and lse[: tokens - 100].eq(lse[0, 0]).all()
