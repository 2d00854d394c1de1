"""write_kv_cache and read_kv_cache on the GPU: layouts and dtypes, every scale, non-finite numbers, strides, and
offsets that need 64 bits.

The reference runs on the same GPU, because PyTorch rounds differently on a CPU: without `use_ue8m0`, a CPU divides by
448 and a GPU multiplies by 1 / 448. So the last bit of a scale can differ between the two.
"""

from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.cache import between_pages, same, written
from tests.gpu.case_checks import FLOATS, by_dtype, by_sizes, check_far_pages, check_layouts, grid, verify
from tests.gpu.op_checks import assert_same_bits

WRITE, READ = (next(x for x in cases_of("kv_cache") if x.op == op) for op in ("write_kv_cache", "read_kv_cache"))
LAYOUTS = ["bfloat16", "float16", "float32", "v32", "v4"]
DTYPES = {"dtype": FLOATS, "slot_dtype": (torch.int32, torch.int64)}
WIDTHS = {"layout": LAYOUTS[:3], "d": (8, 64, 128, 520, 1032, 2056), "dtype": FLOATS, "pages": (5,), "page_size": (16,)}


@by_sizes(
    grid(layout=LAYOUTS, outside=(True,), **DTYPES),
    grid(layout=("v32",), use_ue8m0=(False,), outside=(True,), **DTYPES),
    grid(tokens=(40,), **WIDTHS),
)
def test_every_write_is_right(sizes, record_error):
    verify(WRITE, sizes, record_error)


@by_sizes(grid(layout=LAYOUTS, **DTYPES), grid(shape=((40,),), **WIDTHS))
def test_every_read_is_right(sizes, record_error):
    verify(READ, sizes, record_error)


@pytest.mark.parametrize(
    ("layout", "page_size", "tokens"),
    [
        *product(LAYOUTS, (1, 2, 3, 7, 72, 1000), (500,)),
        *product(("bfloat16", "v32", "v4"), (64,), (0, 1, 3, 4, 5, 33, 5000)),
    ],
)
def test_every_page_size_and_count_is_right(layout, page_size, tokens):
    kind = {"layout": layout, "page_size": page_size, "pages": 2 + tokens // page_size}
    WRITE.verify("cuda", tokens=tokens, **kind)
    READ.verify("cuda", shape=(tokens,), dtype=torch.float32, **kind)


def test_every_byte_and_every_scale_of_v4_is_right():
    given = READ.arguments("cuda", layout="v4", shape=(256,), pages=4)
    pages = given["cache"].as_strided((4, 64 * 584), (given["cache"].stride(0), 1))
    rows, scales = pages.split((64 * 576, 64 * 8), 1)
    rows.unflatten(1, (64, 576))[..., :448] = torch.arange(448, device="cuda").remainder(256).byte()
    scales.unflatten(1, (64, 8))[..., :7] = torch.arange(256, device="cuda").byte().view(4, 64, 1)
    for dtype in FLOATS:
        READ.check_call(given | {"dtype": dtype, "slots": torch.arange(256, device="cuda")})


@pytest.mark.parametrize(("layout", "use_ue8m0"), [("v32", True), ("v32", False), ("v4", True)])
@by_dtype
def test_numbers_that_are_not_finite_are_those_of_the_reference(layout, use_ue8m0, dtype):
    given = WRITE.arguments("cuda", layout=layout, tokens=8, dtype=dtype, use_ue8m0=use_ue8m0)
    kv, given["slots"] = given["kv"], torch.arange(8, device="cuda").flip(0)
    kv[1, 2], kv[2, 300], kv[3, 447], kv[4], kv[5, -1] = torch.nan, torch.inf, -torch.inf, 0.0, torch.nan
    kv[6, -2], kv[7] = torch.inf, torch.finfo(dtype).max
    expected = dsa.reference.read_kv_cache(written(given, kv), given["slots"])
    dsa.write_kv_cache(**given)
    same("rows", dsa.read_kv_cache(given["cache"], given["slots"]), expected)


@pytest.mark.parametrize("tokens", [20, 1])
@pytest.mark.parametrize("layout", ["v32", "float32"])
def test_layouts_of_rows_change_no_bit(layout, tokens):
    check_layouts(WRITE, ("kv",), layout=layout, tokens=tokens, pages=3, page_size=10)


@pytest.mark.parametrize("layout", ["v32", "float32"])
@pytest.mark.parametrize("pages, page_size", [(3, 10), (1, 1)])
def test_strides_of_pages_change_no_bit(pages, page_size, layout):
    """With three pages, the rows of different pages alternate in memory. A cache with a single row can have any
    strides."""
    given = WRITE.arguments("cuda", layout=layout, tokens=pages * page_size, pages=pages, page_size=page_size)
    expected, cache = written(given, given["kv"]), given["cache"]
    given["cache"] = torch.stack([cache.transpose(0, 1)] * 2, 3)[:, :, :, 1].transpose(0, 1)
    if pages == 1:
        given["cache"] = cache.as_strided(cache.shape, (5, 3, 9, 1))
    dsa.write_kv_cache(**given)
    assert_same_bits(given["cache"], expected)
    assert_same_bits(*(f.read_kv_cache(given["cache"], given["slots"]) for f in (dsa, dsa.reference)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_far_apart_have_the_same_bytes(layout):
    check_far_pages(WRITE, layout=layout, tokens=300)
    check_far_pages(READ, layout=layout, shape=(300,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_without_pages_reads_as_zeros_and_is_not_written(layout):
    given = WRITE.arguments("cuda", layout=layout, tokens=5)
    whole, slots = given["cache"], torch.tensor([0, -1, 5, 63, 64], device="cuda")
    before = whole.clone()
    got = dsa.read_kv_cache(whole[:0], slots, dtype=torch.bfloat16)
    assert got.shape == given["kv"].shape and not got.any()
    dsa.write_kv_cache(given["kv"], whole[:0], slots)
    assert_same_bits(whole, before)
    assert between_pages(whole).eq(0xFF).all()
