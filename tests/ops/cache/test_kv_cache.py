"""The bridge of the MLA cache, on the CPU: compiled graphs that read what they wrote, dtypes and strides."""

import pytest
import torch

import dsa

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
    assert [variant for variant, _ in launches] == [("float32", "v32", False), ("v4", "float32")] * 2
    assert all(arguments[1].dtype == torch.uint8 for _, arguments in launches)


def test_pages_of_floats_may_have_any_strides(launches):
    wide = torch.zeros(4, 3, 1, 48)
    dsa.write_kv_cache(rows("float"), wide.transpose(0, 1)[..., 16:32], torch.arange(5))
    ((_, (_, pages, _)),) = launches
    assert pages.shape == (3, 4, 16) and pages.stride() == (48, 144, 1) and pages.storage_offset() == 16
