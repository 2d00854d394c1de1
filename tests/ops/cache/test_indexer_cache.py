"""The bridge of the indexer's key cache, on the CPU: what is written is read, also into tensors of the callers."""

import pytest
import torch

import dsa


def poisoned_cache(pages=3, page_size=4, dim=32):
    return torch.full((pages, page_size, 1, dim + 4), 0xFF, dtype=torch.uint8)  # every e4m3 and every scale is NaN


def keys(tokens=5, dim=32):
    return torch.randn(tokens, dim).to(torch.float8_e4m3fn), torch.rand(tokens) + 0.1


def slots_of(cache, tokens=5):
    return torch.randperm(cache.shape[0] * cache.shape[1])[:tokens]


def layout(x):
    return x.shape, x.stride(), x.dtype


def assert_same(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert layout(x) == layout(y) and torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_what_is_written_is_read(dim, dtype):
    cache, (k, scale) = poisoned_cache(dim=dim), keys(12, dim)
    slots = slots_of(cache, 12).to(dtype)
    dsa.write_indexer_cache(k, scale, cache, slots)
    assert_same(dsa.read_indexer_cache(cache, slots), (k, scale))


def test_a_compiled_graph_reads_what_it_wrote():
    cache, (k, scale) = poisoned_cache(), keys()
    slots, untouched = slots_of(cache), cache.clone()

    def replace(k, scale, cache, slots):
        old = dsa.read_indexer_cache(cache, slots)
        dsa.write_indexer_cache(k, scale, cache, slots)
        return *old, *dsa.read_indexer_cache(cache, slots)

    got = torch.compile(replace, fullgraph=True, backend="aot_eager")(k, scale, cache, slots)
    assert_same(got[:2], dsa.read_indexer_cache(untouched, slots))
    assert_same(got[2:], (k, scale))
    assert_same(dsa.read_indexer_cache(cache, slots), (k, scale))


def test_into_tensors_of_the_callers():
    cache, (k, scale) = poisoned_cache(), keys(12)
    dsa.write_indexer_cache(k, scale, cache, torch.arange(12))
    slots = torch.tensor([11, -1, 0, 12, 5])
    expected = dsa.read_indexer_cache(cache, slots)
    rows, scales = torch.full((7, 64), 77, dtype=torch.uint8), torch.full((7, 3), 77.0)
    got = dsa.read_indexer_cache(cache, slots, rows.view(torch.float8_e4m3fn)[1:6, 16:48], scales[1:6, 1])
    assert got[0].data_ptr() == rows[1:, 16:].data_ptr() and got[1].data_ptr() == scales[1:, 1].data_ptr()
    assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(got[1], expected[1])
    rows[1:6, 16:48], scales[1:6, 1] = 77, 77
    assert (rows == 77).all() and (scales == 77).all()
    empty = dsa.read_indexer_cache(poisoned_cache(0), slots, *(x.clone() for x in expected))
    assert not empty[0].view(torch.uint8).any() and not empty[1].any()
