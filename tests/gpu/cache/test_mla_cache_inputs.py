"""write_mla_cache (norm, rope and write in one op) on the GPU: layouts and dtypes, strides, offsets that need 64 bits,
and non-finite numbers."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.cache import as_kept, same, unrounded
from dsa.testing import assert_close, poisoned
from tests.gpu.case_checks import FLOATS, by_dtype, by_sizes, check_far_pages, check_layouts, grid, verify
from tests.gpu.op_checks import assert_same_bits

CASE = cases_of("mla_cache_inputs")[0]
FLOAT_CACHES = [(name, d) for name in ("bfloat16", "float16", "float32") for d in (576, 512)]
CACHES = [*FLOAT_CACHES, ("v32", 576), ("v4", 512)]
SOME = [("bfloat16", 576), ("float16", 512), *CACHES[-2:]]
ROWS = {"outside": (True,), "tokens": (501,), "eps": (1e-5,), "dtype": FLOATS, "interleaved": (True, False)}


@pytest.mark.parametrize(("layout", "d"), CACHES)
@by_sizes(
    grid(slot_dtype=(torch.int64,), kept=(True,), use_ue8m0=(True, False), **ROWS),
    grid(slot_dtype=(torch.int32,), kept=(False,), use_ue8m0=(True, False), **ROWS),
)
def test_every_write_is_right(sizes, layout, d, record_error):
    # V4's scales are always powers of two.
    verify(CASE, sizes | {"layout": layout, "d": d, "use_ue8m0": sizes["use_ue8m0"] or layout == "v4"}, record_error)


@pytest.mark.parametrize(
    ("layout", "d", "page_size", "tokens"),
    [
        *((*kind, page_size, 100) for kind in SOME for page_size in (1, 3, 7, 1000)),
        *((*kind, 64, tokens) for kind in SOME for tokens in (0, 1, 3, 4, 5, 33, 5000)),
    ],
)
def test_every_page_size_and_count_is_right(layout, d, page_size, tokens):
    CASE.verify("cuda", layout=layout, d=d, page_size=page_size, pages=2 + tokens // page_size, tokens=tokens)


@pytest.mark.parametrize("tokens", [20, 1])
def test_layouts_change_no_bit(tokens):
    check_layouts(CASE, ("kv", "cos", "sin"), layout="v32", tokens=tokens)


def test_nothing_between_the_rows_of_out_is_written():
    given, other = (CASE.arguments("cuda", layout="v32", tokens=20) for _ in range(2))
    wide = poisoned((20, 3 * 576), torch.bfloat16, "cuda")
    other["out"] = wide[:, 576:1152]
    assert_same_bits(CASE.results(other), CASE.results(given))
    assert wide[:, :576].isnan().all() and wide[:, 1152:].isnan().all()


@pytest.mark.parametrize(("layout", "d"), CACHES[4:])
@by_dtype
def test_numbers_that_are_not_finite_are_those_of_the_reference(dtype, layout, d):
    given = CASE.arguments("cuda", layout=layout, d=d, tokens=8, dtype=dtype)
    kv, given["slots"] = given["kv"], torch.arange(8, device="cuda")
    kv[1, 2], kv[2, 300], kv[3, 447], kv[4], kv[5, -1] = torch.nan, torch.inf, -torch.inf, 0.0, torch.nan
    kv[6, -2] = torch.inf
    on_cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    rows, expected, eps = unrounded(given), unrounded(on_cpu).cuda(), torch.finfo(dtype).eps
    for what in (torch.isnan, torch.isinf):
        assert torch.equal(what(rows), what(expected))
    finite = [x.nan_to_num(7, 7, 7) for x in (rows, expected)]
    assert_close("rows", *finite, abs_tol=128 * eps, rel_tol=4 * eps)
    dsa.write_mla_cache(**given)
    same("out", given["out"], as_kept(given, rows))


@pytest.mark.parametrize(("layout", "d"), [("bfloat16", 512), ("v32", 576), ("v4", 512)])
def test_pages_far_apart_have_the_same_bytes(layout, d):
    check_far_pages(CASE, layout=layout, d=d, tokens=300)
