"""The experts' sum beside what its cases leave out: sizes, rows outside, NaN, strides."""

import math
from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import among_nan, assert_equal

(CASE,) = cases_of("combine_experts")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("k", [1, 2, 6, 7, 8, 9, 16, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_variants(dtype, k, index_dtype, shared, weighted, record_error):
    poison_free_memory(mebibytes=64)
    kind = {"dtype": dtype, "index_dtype": index_dtype, "shared": shared, "residual": not shared, "weighted": weighted}
    record_error(CASE.verify("cuda", k=k, **kind))


@pytest.mark.parametrize(
    ("tokens", "k", "channels", "dtype"),
    [
        *product((1, 7, 300), (8,), (8, 16, 200, 1016, 1024, 1032, 4096, 7168), DTYPES),
        *((tokens, k, channels, DTYPES[0]) for tokens in (1024, 4096) for k, channels in ((8, 7168), (6, 4096))),
    ],
    ids=str,
)
def test_shapes(tokens, k, channels, dtype, record_error):
    poison_free_memory(mebibytes=64)
    record_error(CASE.verify("cuda", tokens=tokens, k=k, channels=channels, dtype=dtype))


def equals_the_reference(**given):
    assert_equal(dsa.combine_experts(**given), dsa.reference.combine_experts(**given))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_outside_are_zero_whatever_their_weights(dtype, index_dtype):
    given = CASE.arguments("cuda", tokens=50, k=9, channels=512, dtype=dtype, index_dtype=index_dtype)
    rows, weights, count = given["rows"], given["weights"], len(given["y"])
    info = torch.iinfo(index_dtype)
    for column, (row, weight) in enumerate([(-1, INF), (count, NAN), (info.min, 1.0), (info.max, -INF)]):
        rows[::2, 2 * column], weights[::2, 2 * column] = row, weight
    if index_dtype == torch.int64:
        rows[1::2, 1] = 2**32 + 3  # not row 3
    equals_the_reference(**given)
    assert dsa.combine_experts(**given).isfinite().all()
    rows.fill_(-1)
    assert torch.equal(dsa.combine_experts(given["y"], rows, weights, given["shared"]), given["shared"])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_no_token_names_are_not_read(dtype, weighted):
    """They come after the rows of a process's own experts, and products leave anything there."""
    experts = torch.rand(90, 24, device="cuda").argsort(-1)[:, :8]
    for begin, count in ((8, 8), (0, 5), (20, 4), (40, 3)):
        _, rows, ends = dsa.sort_by_expert(experts - begin, count)
        used = int(ends[-1])
        given = CASE.arguments("cuda", tokens=90, k=8, channels=512, dtype=dtype, weighted=weighted) | {"rows": rows}
        given["y"][used:], given["y"][-1] = NAN, INF
        got = dsa.combine_experts(**given)
        assert got.isfinite().all()
        assert torch.equal(got, dsa.reference.combine_experts(**given | {"y": given["y"][:used]}))


def test_nan_and_infinity_reach_their_tokens_only():
    given = CASE.arguments("cuda", tokens=40, k=8, channels=512, residual=False)
    y, rows, weights, shared = (given[name] for name in ("y", "rows", "weights", "shared"))
    y[rows[3, 2], 100], y[rows[4, 0], 7], weights[9, 4], shared[11, 1] = NAN, INF, NAN, -INF
    bad = ~dsa.combine_experts(**given).isfinite()
    assert bad.any(1).nonzero().flatten().tolist() == [3, 4, 9, 11] and bad.sum() == 512 + 3
    equals_the_reference(**given)


def test_weights_of_every_size_and_sign():
    given = CASE.arguments("cuda", tokens=64, channels=1024, dtype=torch.float32)
    given["weights"] *= torch.logspace(-30, 30, 64, device="cuda")[:, None]
    equals_the_reference(**given)
    equals_the_reference(**given | {"weights": torch.zeros_like(given["weights"])})


def test_strides():
    given = CASE.arguments("cuda", tokens=50, k=6, channels=512)
    rows, weights = given["rows"], given["weights"]
    equals_the_reference(**given | {"rows": rows.T.contiguous().T, "weights": weights.repeat_interleave(2, 1)[:, ::2]})
    equals_the_reference(**given | {"y": given["y"][::2], "shared": given["shared"][:1].expand(50, 512)})
    equals_the_reference(**given | {"y": given["y"][:1], "residual": among_nan(given["residual"])})


def test_offsets_beyond_32_bits():
    y = torch.zeros(340_000, 7168, device="cuda", dtype=torch.bfloat16)  # 2.4e9 elements
    y[-3:] = torch.randn(3, 7168, device="cuda").bfloat16()
    rows = torch.tensor([[339_997, 339_999, 0], [5, 339_998, 340_000]], device="cuda", dtype=torch.int32)
    weights = torch.rand(2, 3, device="cuda")
    expected = dsa.reference.combine_experts(y[-3:], rows - 339_997, weights)
    assert torch.equal(dsa.combine_experts(y, rows, weights), expected)
