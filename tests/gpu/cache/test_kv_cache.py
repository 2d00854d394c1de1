"""The MLA cache: layouts and dtypes, every scale, numbers that are not finite, strides, 64-bit offsets.

The reference runs on the same GPU: without `use_ue8m0` a CPU divides by 448 and a GPU multiplies with the reciprocal,
so that a scale's last bit may differ.
"""

from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.cache import between_pages, same, written
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_bits, far_apart

WRITE, READ = (next(x for x in cases_of("kv_cache") if x.op == op) for op in ("write_kv_cache", "read_kv_cache"))
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
LAYOUTS = ["bfloat16", "float16", "float32", "v32", "v4"]


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("layout", "use_ue8m0"), [*((name, True) for name in LAYOUTS), ("v32", False)])
def test_write(layout, use_ue8m0, dtype, slot_dtype):
    kind = {"layout": layout, "dtype": dtype, "slot_dtype": slot_dtype, "use_ue8m0": use_ue8m0}
    WRITE.verify("cuda", outside=True, **kind)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_read(layout, dtype, slot_dtype):
    poison_free_memory(mebibytes=16)
    READ.verify("cuda", layout=layout, dtype=dtype, slot_dtype=slot_dtype)


def test_every_byte_and_every_scale_of_v4():
    """All 256 exponents, among them 2^-127 and NaN, with all 256 bytes of e4m3."""
    given = READ.arguments("cuda", layout="v4", shape=(256,), pages=4)
    pages = given["cache"].as_strided((4, 64 * 584), (given["cache"].stride(0), 1))
    rows, scales = pages.split((64 * 576, 64 * 8), 1)
    rows.unflatten(1, (64, 576))[..., :448] = torch.arange(448, device="cuda").remainder(256).byte()
    scales.unflatten(1, (64, 8))[..., :7] = torch.arange(256, device="cuda").byte().view(4, 64, 1)
    given["slots"] = torch.arange(256, device="cuda")
    for dtype in FLOATS:
        READ.check(given | {"dtype": dtype}, READ.results(given | {"dtype": dtype}))


@pytest.mark.parametrize(
    ("layout", "page_size", "tokens"),
    [
        *product(LAYOUTS, (1, 2, 3, 7, 72, 1000), (500,)),
        *product(("bfloat16", "v32", "v4"), (64,), (0, 1, 3, 4, 5, 33, 5000)),
    ],
)
def test_page_sizes_and_counts(layout, page_size, tokens):
    kind = {"layout": layout, "page_size": page_size, "pages": 2 + tokens // page_size}
    WRITE.verify("cuda", tokens=tokens, **kind)
    READ.verify("cuda", shape=(tokens,), dtype=torch.float32, **kind)


@pytest.mark.parametrize("d", [8, 64, 128, 520, 1032, 2056])
@pytest.mark.parametrize("layout", LAYOUTS[:3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_float_rows_of_any_width(dtype, layout, d):
    kind = {"layout": layout, "d": d, "dtype": dtype, "pages": 5, "page_size": 16}
    WRITE.verify("cuda", tokens=40, **kind)
    READ.verify("cuda", shape=(40,), **kind)


@pytest.mark.parametrize(("layout", "use_ue8m0"), [("v32", True), ("v32", False), ("v4", True)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_that_are_not_finite(layout, use_ue8m0, dtype):
    given = WRITE.arguments("cuda", layout=layout, tokens=8, dtype=dtype, use_ue8m0=use_ue8m0)
    kv, slots = given["kv"], torch.arange(8, device="cuda").flip(0)
    kv[1, 2], kv[2, 300], kv[3, 447], kv[4], kv[5, -1] = torch.nan, torch.inf, -torch.inf, 0.0, torch.nan
    kv[6, -2], kv[7] = torch.inf, torch.finfo(dtype).max
    given["slots"] = slots
    expected = dsa.reference.read_kv_cache(written(given, kv), slots)
    dsa.write_kv_cache(**given)
    same("rows", dsa.read_kv_cache(given["cache"], slots), expected)


@pytest.mark.parametrize("layout", ["v32", "float32"])
def test_strided_rows_and_pages(layout):
    given = WRITE.arguments("cuda", layout=layout, tokens=20, pages=3, page_size=10)
    given["kv"] = torch.randn(20, 3 * 576, device="cuda").bfloat16()[:, 576 : 2 * 576]
    expected = written(given, given["kv"])
    by_offset = torch.stack([given["cache"].transpose(0, 1)] * 2, 3)[:, :, :, 1].transpose(0, 1)
    for cache in (given["cache"], by_offset):
        dsa.write_kv_cache(**given | {"cache": cache})
        assert_same_bits(cache, expected)
        assert_same_bits(*(f.read_kv_cache(cache, given["slots"]) for f in (dsa, dsa.reference)))


def test_a_single_row_and_page_of_any_strides():
    given = WRITE.arguments("cuda", layout="v32", tokens=1, pages=1, page_size=1)
    expected = written(given, given["kv"])
    kv, cache = given["kv"].as_strided((1, 576), (7, 1)), given["cache"].as_strided((1, 1, 1, 656), (5, 3, 9, 1))
    dsa.write_kv_cache(**given | {"kv": kv, "cache": cache})
    assert_same_bits(given["cache"], expected)
    assert_same_bits(*(f.read_kv_cache(cache, given["slots"]) for f in (dsa, dsa.reference)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_far_apart(layout):
    """Bytes beyond 2^31, and with numbers of up to 16 bits also numbers beyond 2^31."""
    given = WRITE.arguments("cuda", layout=layout, tokens=300)
    near, far, last = given["cache"], far_apart(given["cache"]), torch.tensor([512, 575], device="cuda")
    slots = torch.cat((last, given["slots"][2:])).unique()
    for cache in (far, near):
        dsa.write_kv_cache(given["kv"][: len(slots)], cache, slots)
    assert_same_bits(far, near)
    assert_same_bits(dsa.read_kv_cache(far, slots), dsa.read_kv_cache(near, slots))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_pages(layout):
    given = WRITE.arguments("cuda", layout=layout, tokens=5)
    whole, before = given["cache"], given["cache"].clone()
    got = dsa.read_kv_cache(whole[:0], torch.zeros_like(given["slots"]), dtype=torch.bfloat16)
    assert got.shape == given["kv"].shape and not got.any()
    slots = torch.tensor([0, -1, 5, 63, 64], device="cuda")
    dsa.write_kv_cache(given["kv"], whole[:0], slots)
    assert_same_bits(whole, before)
    assert between_pages(whole).eq(0xFF).all()
