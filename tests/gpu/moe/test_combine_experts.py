"""combine_experts (the weighted sum of experts' outputs) on the GPU: every option and size, row indices outside y,
layouts, and non-finite numbers."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from tests.gpu.attention import INF, NAN, checked
from tests.gpu.case_checks import FLOATS, by_dtype, by_sizes, check_layouts, grid, verify

(CASE,) = cases_of("combine_experts")
INDEX_DTYPES = [torch.int32, torch.int64]
KINDS = {"k": (1, 2, 6, 7, 8, 9, 16, 33), "dtype": FLOATS, "index_dtype": INDEX_DTYPES, "weighted": (True, False)}


@by_sizes(
    grid(shared=(True,), residual=(False,), **KINDS),
    grid(shared=(False,), residual=(True,), **KINDS),
    grid(tokens=(1, 7, 300), channels=(8, 16, 200, 1016, 1024, 1032, 4096, 7168), dtype=FLOATS),
    grid(tokens=(1024, 4096), channels=(7168,)),
    grid(tokens=(1024, 4096), channels=(4096,), k=(6,)),
)
def test_every_option_and_size_is_right(sizes, record_error):
    verify(CASE, sizes, record_error)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@by_dtype
def test_rows_outside_count_nothing_whatever_their_weights(dtype, index_dtype):
    given = CASE.arguments("cuda", tokens=50, k=9, channels=512, dtype=dtype, index_dtype=index_dtype)
    rows, weights, info = given["rows"], given["weights"], torch.iinfo(index_dtype)
    for column, (row, weight) in enumerate([(-1, INF), (len(given["y"]), NAN), (info.min, 1.0), (info.max, -INF)]):
        rows[::2, 2 * column], weights[::2, 2 * column] = row, weight
    if index_dtype == torch.int64:
        rows[1::2, 1] = 2**32 + 3  # must not be truncated to row 3
    assert checked(CASE, given)[0].isfinite().all()
    checked(CASE, given | {"rows": torch.full_like(rows, -1)})


@pytest.mark.parametrize("weighted", [False, True])
@by_dtype
def test_rows_that_no_token_names_are_not_read(dtype, weighted):
    """Rows of y from ends[-1] on belong to no expert of this process. They can contain anything, because a grouped GEMM
    does not write them."""
    experts = torch.rand(90, 24, device="cuda").argsort(-1)[:, :8]
    for first, count in ((8, 8), (0, 5), (20, 4), (40, 3)):
        _, rows, ends = dsa.sort_by_expert(experts - first, count)
        given = CASE.arguments("cuda", tokens=90, k=8, channels=512, dtype=dtype, weighted=weighted) | {"rows": rows}
        given["y"][ends[-1] :], given["y"][-1] = NAN, INF
        assert checked(CASE, given)[0].isfinite().all()


def test_nan_and_infinity_reach_their_tokens_only():
    given = CASE.arguments("cuda", tokens=40, k=8, channels=512, residual=False)
    y, rows, weights, shared = (given[name] for name in ("y", "rows", "weights", "shared"))
    y[rows[3, 2], 100], y[rows[4, 0], 7], weights[9, 4], shared[11, 1] = NAN, INF, NAN, -INF
    bad = ~checked(CASE, given)[0].isfinite()
    assert bad.any(1).nonzero().flatten().tolist() == [3, 4, 9, 11] and bad.sum() == 512 + 3


def test_weights_of_every_size_and_sign_are_right():
    given = CASE.arguments("cuda", tokens=64, channels=1024, dtype=torch.float32)
    for size in (torch.logspace(-30, 30, 64, device="cuda")[:, None], 0.0):
        checked(CASE, given | {"weights": given["weights"] * size})


@pytest.mark.parametrize("tokens", [50, 1])
def test_layouts_change_no_bit(tokens):
    check_layouts(CASE, ("y", "rows", "weights", "shared", "residual"), tokens=tokens, k=6, channels=512)


def test_offsets_beyond_32_bits():
    given = CASE.arguments("cuda", tokens=3, k=3, channels=7168)
    far = torch.zeros(340_000, 7168, device="cuda", dtype=torch.bfloat16)
    far[-9:] = given["y"]
    rows = torch.where(given["rows"] < 0, -1, given["rows"] + len(far) - 9)
    assert torch.equal(dsa.combine_experts(**given | {"y": far, "rows": rows}), dsa.combine_experts(**given))
