"""The MLA cache's writes and reads against their references on the CPU, bit for bit.

V3.2's scales that are no powers of two against the reference on the GPU: there PyTorch divides by 448 as the kernel
does, by multiplying with the reciprocal, and a CPU's scale may be an ulp off.
"""

from itertools import product

import pytest
import torch

import dsa
from dsa.reference.cache import kv_cache as reference
from dsa.testing import poison_free_memory, poisoned
from tests.gpu.cache import poisoned_caches
from tests.gpu.cache.poisoned_caches import random_slots, with_slots_outside
from tests.gpu.op_checks import (
    assert_compiles,
    assert_runs_have_the_same_bits,
    assert_same_bits,
    captured,
    far_apart,
)

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
LAYOUTS = ["bfloat16", "float16", "float32", "v32", "v4"]
BYTES = ["v32", "v4"]


def dim(layout):
    return 512 if layout == "v4" else 576


def poisoned_cache(layout, pages=9, page_size=64):
    return poisoned_caches.poisoned_cache(layout, dim(layout), pages, page_size)


def random_rows(tokens, d, dtype=torch.bfloat16):
    """Rows of very different sizes, so that scales differ."""
    sizes = torch.exp2(torch.randint(-20, 14, (tokens, 1), device="cuda").float())
    return (torch.randn(tokens, d, device="cuda") * sizes).to(dtype)


def written(kv, cache, slots, use_ue8m0=True):
    if not use_ue8m0:
        expected = cache.clone()
        reference.write_kv_cache(kv, expected, slots, use_ue8m0)
        return expected
    expected = cache.cpu()
    reference.write_kv_cache(kv.cpu(), expected, slots.cpu(), use_ue8m0)
    return expected.cuda()


def read_on_cpu(cache, slots, dtype=torch.float32):
    return reference.read_kv_cache(cache.cpu(), slots.cpu(), dtype=dtype).cuda()


def filled_cache(layout, pages=9, page_size=64):
    """Random numbers in every slot; V3.2's scales are no powers of two."""
    cache = poisoned_cache(layout, pages, page_size)
    slots = torch.arange(pages * page_size, device="cuda")
    reference.write_kv_cache(random_rows(len(slots), dim(layout), torch.float32), cache, slots)
    if layout == "v32":
        scales = torch.randn(pages, page_size, 1, 4, device="cuda") * 10
        cache[..., 512:528] = scales.view(torch.uint8)
    return cache


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("layout", "use_ue8m0"), [*((name, True) for name in LAYOUTS), ("v32", False)])
def test_write(layout, use_ue8m0, dtype, slot_dtype):
    cache, kv = poisoned_cache(layout), random_rows(301, dim(layout), dtype)
    slots, skipped = with_slots_outside(random_slots(cache, 301), 9 * 64, slot_dtype)
    expected = written(kv, cache, skipped, use_ue8m0)
    dsa.write_kv_cache(kv, cache, slots, use_ue8m0)
    assert_same_bits(cache, expected)
    if layout == "v4":
        whole = torch.as_strided(cache, (9, cache.stride(0)), (cache.stride(0), 1))
        assert cache.stride(0) > 64 * 584 and whole[:, 64 * 584 :].eq(0xFF).all()


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_read(layout, dtype, slot_dtype):
    """Of slots outside the cache zeros."""
    cache = filled_cache(layout)
    slots, skipped = with_slots_outside(random_slots(cache, 300), 9 * 64, slot_dtype)
    expected = read_on_cpu(cache, skipped.view(6, 50), dtype)
    poison_free_memory(mebibytes=16)
    got = dsa.read_kv_cache(cache, slots.view(6, 50), dtype=dtype)
    assert got.shape == (6, 50, dim(layout)) and got.is_contiguous() and not got.view(300, -1)[skipped < 0].any()
    assert_same_bits(got, expected)


def test_every_byte_and_every_scale_of_v4():
    """All 256 exponents, among them 2^-127 and NaN, with all 256 bytes of e4m3."""
    cache = poisoned_cache("v4", 4, 64)
    whole = torch.as_strided(cache, (4, cache.stride(0)), (cache.stride(0), 1))
    values = torch.arange(448, device="cuda").remainder(256).byte()
    whole[:, : 64 * 576].unflatten(1, (64, 576))[..., :448] = values
    whole[:, : 64 * 576].unflatten(1, (64, 576))[..., 448:] = 0x3F
    exponents = torch.arange(256, device="cuda").byte().view(4, 64, 1)
    whole[:, 64 * 576 : 64 * 584].unflatten(1, (64, 8))[..., :7] = exponents
    for dtype in FLOATS:
        got = dsa.read_kv_cache(cache, torch.arange(256, device="cuda"), dtype=dtype)
        expected = read_on_cpu(cache, torch.arange(256), dtype)
        assert torch.equal(got.isnan(), expected.isnan())
        assert_same_bits(got.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize(
    ("layout", "page_size", "tokens"),
    [
        *product(LAYOUTS, (1, 2, 3, 7, 72, 1000), (500,)),
        *product(("bfloat16", "v32", "v4"), (64,), (0, 1, 3, 4, 5, 33, 5000)),
    ],
)
def test_page_sizes_and_counts(layout, page_size, tokens):
    cache, kv = poisoned_cache(layout, 2 + tokens // page_size, page_size), random_rows(tokens, dim(layout))
    slots = random_slots(cache, tokens)
    expected = written(kv, cache, slots)
    dsa.write_kv_cache(kv, cache, slots)
    assert_same_bits(cache, expected)
    assert_same_bits(dsa.read_kv_cache(cache, slots), read_on_cpu(cache, slots))


@pytest.mark.parametrize("channels", [8, 64, 128, 520, 1032, 2056])
@pytest.mark.parametrize("cache_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_float_rows_of_any_width(dtype, cache_dtype, channels):
    cache = poisoned((5, 16, 1, channels), cache_dtype, "cuda")
    kv, slots = random_rows(40, channels, dtype), random_slots(cache, 40)
    slots[7] = -1
    expected = written(kv, cache, slots)
    dsa.write_kv_cache(kv, cache, slots)
    assert_same_bits(cache, expected)
    assert_same_bits(dsa.read_kv_cache(cache, slots, dtype=dtype), read_on_cpu(cache, slots, dtype))


@pytest.mark.parametrize("layout", BYTES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_no_number(layout, dtype):
    cache, kv = poisoned_cache(layout), torch.randn(8, dim(layout), device="cuda").to(dtype)
    kv[1, 2], kv[2, 300], kv[3, 447], kv[4], kv[5, -1], kv[6, -2] = (
        *(torch.nan, torch.inf, -torch.inf),
        *(0.0, torch.nan, torch.inf),
    )
    kv[7] = torch.finfo(dtype).max
    slots = random_slots(cache, 8)
    for use_ue8m0 in (True, False) if layout == "v32" else (True,):
        expected = read_on_cpu(written(kv, cache, slots, use_ue8m0), slots)
        dsa.write_kv_cache(kv, cache, slots, use_ue8m0)
        got = dsa.read_kv_cache(cache, slots)
        assert torch.equal(got.isnan(), expected.isnan())
        assert_same_bits(got.nan_to_num(7), expected.nan_to_num(7))


def test_strided_rows_and_pages():
    wide = random_rows(20, 3 * 576)
    kv, slots = wide[:, 576 : 2 * 576], torch.arange(20, device="cuda")
    for layout in ("v32", "float32"):
        plain = poisoned_cache(layout, 3, 10)
        strided = torch.stack([poisoned_cache(layout, 10, 3)] * 2, 3)[:, :, :, 1].transpose(0, 1)
        expected = written(kv, plain, slots)
        for cache in (plain, strided):
            dsa.write_kv_cache(kv, cache, slots)
            assert_same_bits(cache, expected)
            assert_same_bits(dsa.read_kv_cache(cache, slots), read_on_cpu(expected, slots))
    one = kv[:1].as_strided((1, 576), (7, 1), kv.storage_offset())
    cache = poisoned_cache("v32", 1, 1).as_strided((1, 1, 1, 656), (5, 3, 9, 1))
    dsa.write_kv_cache(one, cache, slots[:1])
    assert_same_bits(dsa.read_kv_cache(cache, slots[:1]), read_on_cpu(cache, slots[:1]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_far_apart(layout):
    """Beyond 2^31 bytes; those of 16 bits and below, beyond 2^31 numbers, too."""
    near, kv = poisoned_cache(layout), random_rows(300, dim(layout))
    far = far_apart(near)
    slots = torch.cat((torch.tensor([8 * 64, 8 * 64 + 63], device="cuda"), random_slots(near, 300)[2:])).unique()
    for cache in (far, near):
        dsa.write_kv_cache(kv[: len(slots)], cache, slots)
    assert_same_bits(far, near)
    assert_same_bits(dsa.read_kv_cache(far, slots), dsa.read_kv_cache(near, slots))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_pages(layout):
    whole = poisoned_cache(layout, 1)
    cache, before = whole[:0], whole.clone()
    got = dsa.read_kv_cache(cache, torch.zeros(5, dtype=torch.int64, device="cuda"), dtype=torch.bfloat16)
    assert got.shape == (5, dim(layout)) and not got.any()
    dsa.write_kv_cache(random_rows(5, dim(layout)), cache, torch.tensor([0, -1, 5, 63, 64], device="cuda"))
    assert_same_bits(whole, before)


@pytest.mark.parametrize("layout", ["bfloat16", "v32", "v4"])
def test_repeated_runs_graph_replay_and_torch_compile(layout):
    cache, kv = poisoned_cache(layout), random_rows(64, dim(layout))
    slots = random_slots(cache, 64)

    def run():
        cache.fill_(torch.nan if cache.is_floating_point() else 0xFF)
        dsa.write_kv_cache(kv, cache, slots)
        return dsa.read_kv_cache(cache, slots.flip(0), dtype=torch.bfloat16), cache.clone()

    assert_runs_have_the_same_bits(run)
    graph, got = captured(run)
    kv.copy_(random_rows(64, dim(layout)))
    slots.copy_(slots.roll(3))
    expected = written(kv, poisoned_cache(layout), slots)
    graph.replay()
    assert_same_bits(got, (read_on_cpu(expected, slots.flip(0), torch.bfloat16), expected))
    assert_compiles(run)
