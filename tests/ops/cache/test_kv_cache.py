"""The bridge of the MLA cache, on the CPU: dispatch, torch.compile, and errors that name the argument."""

import pytest
import torch

import dsa
from dsa.ops.cache import kv_cache as op  # noqa: F401 -- `launches` looks at it

LAYOUTS = ["float", "v32", "v4"]


def poisoned_cache(layout="v32", pages=3, page_size=4):
    """Of NaN, all of it."""
    if layout == "float":
        return torch.full((pages, page_size, 1, 16), torch.nan, dtype=torch.bfloat16)
    if layout == "v32":
        return torch.full((pages, page_size, 1, 656), 0xFF, dtype=torch.uint8)
    cache = dsa.make_v4_cache(pages, page_size) if pages else torch.empty(0, page_size, 1, 584, dtype=torch.uint8)
    return cache.fill_(0xFF)


def rows(layout="v32", tokens=5):
    return torch.randn(tokens, {"float": 16, "v32": 576, "v4": 512}[layout])


def slots_of(cache, tokens=5):
    return torch.randperm(cache.shape[0] * cache.shape[1])[:tokens]


def same_bits(got, expected):
    return torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_graph_reads_what_it_wrote(layout):
    cache, kv = poisoned_cache(layout), rows(layout)
    dsa.write_kv_cache(rows(layout, 12), cache, torch.arange(12))
    slots, untouched = slots_of(cache), cache.clone()

    def replace(kv, cache, slots):
        old = dsa.read_kv_cache(cache, slots)
        dsa.write_kv_cache(kv, cache, slots)
        return old, dsa.read_kv_cache(cache, slots, dtype=torch.bfloat16)

    old, new = torch.compile(replace, fullgraph=True, backend="aot_eager")(kv, cache, slots)
    assert torch.equal(old, dsa.read_kv_cache(untouched, slots))
    dsa.write_kv_cache(kv, untouched, slots)
    assert same_bits(cache, untouched) and torch.equal(new, dsa.read_kv_cache(cache, slots, dtype=torch.bfloat16))


def test_bytes_of_every_dtype_and_exact_scales(launches):
    for dtype in (torch.int8, torch.float8_e4m3fn):
        dsa.write_kv_cache(rows(), poisoned_cache().view(dtype), torch.arange(5), False)
        dsa.read_kv_cache(poisoned_cache("v4").view(dtype), torch.arange(5))
    assert [variant for variant, _ in launches] == [(torch.float32, "v32", False), ("v4", torch.float32)] * 2
    assert all(arguments[1].dtype == torch.uint8 for _, arguments in launches)


def test_pages_of_floats_may_have_any_strides(launches):
    wide = torch.zeros(4, 3, 1, 48)
    dsa.write_kv_cache(rows("float"), wide.transpose(0, 1)[..., 16:32], torch.arange(5))
    ((_, (_, pages, _)),) = launches
    assert pages.shape == (3, 4, 16) and pages.stride() == (48, 144, 1) and pages.storage_offset() == 16


def test_strides_that_mean_nothing(launches):
    """Dimensions of size 1 may have any stride, and the kernels want some multiples."""
    kv = rows().as_strided((1, 576), (7, 1))
    cache = poisoned_cache().as_strided((1, 1, 1, 656), (5, 3, 9, 1))
    dsa.write_kv_cache(kv, cache, torch.tensor([0, 1]).as_strided((1,), (2,)))
    one_page = poisoned_cache("v4").as_strided((1, 4, 1, 584), (7, 584, 584, 1))
    dsa.read_kv_cache(one_page, torch.tensor([0, 1])[::2])
    (_, written), (_, read) = launches
    for rows_, pages, words in (written, read):
        assert rows_.stride(0) * rows_.element_size() % 16 == 0 and pages.stride(0) % 16 == pages.stride(1) % 16 == 0
        assert words.shape == (2,) and words.stride() == (1,)
    assert written[0].data_ptr() == kv.data_ptr() and written[1].data_ptr() == cache.data_ptr()


def test_nothing_to_do_is_not_launched(launches):
    for layout in LAYOUTS:
        dsa.write_kv_cache(rows(layout, 0), poisoned_cache(layout), torch.arange(0))
        dsa.write_kv_cache(rows(layout), poisoned_cache(layout, 0), torch.full((5,), -1))
        assert dsa.read_kv_cache(poisoned_cache(layout), torch.zeros(2, 0, dtype=torch.int32)).shape[:2] == (2, 0)
        none = dsa.read_kv_cache(poisoned_cache(layout, 0), torch.arange(6).view(2, 3))
        assert none.shape[:2] == (2, 3) and not none.any()
    assert launches == []


def test_what_the_kernels_do_not_take(launches):
    good = {"kv": rows(), "cache": poisoned_cache(), "slots": torch.arange(5)}
    v4 = torch.zeros(3, 3 * 584, dtype=torch.uint8).view(3, 3, 1, 584)  # a page is no multiple of 16 bytes
    for changes, message in [
        ({"kv": torch.randn(5, 577)[:, :576]}, "kv: rows must start at multiples of 16 bytes"),
        ({"kv": torch.randn(5, 1152)[:, ::2]}, "kv: the last dimension must be contiguous"),
        ({"kv": rows().to("meta")}, "kv: must be on cache's device cpu, got meta"),
        ({"slots": torch.arange(10)[::2]}, r"slots: must be contiguous, got strides \[2\]"),
        ({"slots": torch.arange(5).to("meta")}, "slots: must be on cache's device cpu, got meta"),
        ({"cache": torch.zeros(3, 4, 1, 660).byte()[..., :656]}, "cache: rows must start at multiples of 16 bytes"),
        ({"cache": torch.zeros(3, 4, 1, 1312).byte()[..., ::2]}, "cache: the last dimension must be contiguous"),
        ({"cache": v4, "kv": rows("v4")}, "cache: pages must start at multiples of 16 bytes"),
        (
            {"cache": torch.zeros(3, 4, 1, 12), "kv": torch.zeros(5, 12)},
            "cache: the kernel takes float rows of a multiple of 8",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            dsa.write_kv_cache(**{**good, **changes})
        if "kv" not in changes or "cache" in changes:
            arguments = {**good, **changes}
            with pytest.raises(ValueError, match=message):
                dsa.read_kv_cache(arguments["cache"], arguments["slots"])
    assert launches == []
