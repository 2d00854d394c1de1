"""The cache copies against their references on the GPU, bit for bit."""

import pytest
import torch

import dsa
from dsa.reference.cache import indexer_cache as reference
from dsa.testing import poisoned


def case(tokens, dim=128, page_size=64):
    k = torch.randint(0, 256, (tokens, dim), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    pages = 2 * -(-tokens // page_size) + 1
    slots = torch.randperm(pages * page_size, device="cuda")[:tokens]
    return k, torch.randn(tokens, device="cuda"), slots, (pages, page_size, 1, dim + 4)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [4, 64, 1000])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_write_and_read(dim, page_size, slot_dtype):
    k, scale, slots, shape = case(777, dim, page_size)
    slots[5] = -1
    got, expected = poisoned(shape, torch.uint8, "cuda"), poisoned(shape, torch.uint8, "cuda")
    dsa.write_indexer_cache(k, scale, got, slots.to(slot_dtype))
    reference.write_indexer_cache(k, scale, expected, slots)
    assert torch.equal(got, expected)
    slots[7], slots[9] = shape[0] * shape[1], 2**31 - 1
    back, back_scale = dsa.read_indexer_cache(got, slots.to(slot_dtype))
    expected, expected_scale = reference.read_indexer_cache(expected, slots)
    assert torch.equal(back.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(back_scale, expected_scale)


def test_slots_outside_the_cache_are_skipped():
    k, scale, slots, shape = case(100)
    got, expected = poisoned(shape, torch.uint8, "cuda"), poisoned(shape, torch.uint8, "cuda")
    wrong = slots.clone()
    for t, slot in enumerate((-1, -2, shape[0] * shape[1], 2**40, -(2**63))):
        wrong[t], slots[t] = slot, -1
    dsa.write_indexer_cache(k, scale, got, wrong)
    reference.write_indexer_cache(k, scale, expected, slots)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_few_tokens_and_strided_rows(tokens):
    k, scale, slots, shape = case(tokens)
    wide = torch.zeros(tokens, 256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    wide[:, 128:] = k
    cache = poisoned(shape, torch.uint8, "cuda")
    dsa.write_indexer_cache(wide[:, 128:], scale, cache, slots)
    back, back_scale = dsa.read_indexer_cache(cache, slots)
    assert torch.equal(back.view(torch.uint8), k.view(torch.uint8)) and torch.equal(back_scale, scale)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_into_tensors_of_the_callers(dim):
    """Rows and scales any distance apart; what is between them stays as it is."""
    k, scale, slots, shape = case(777, dim)
    cache = poisoned(shape, torch.uint8, "cuda")
    dsa.write_indexer_cache(k, scale, cache, slots)
    slots[3], slots[4] = -1, shape[0] * shape[1]
    expected = reference.read_indexer_cache(cache, slots)
    rows = torch.full((779, dim + 48), 77, dtype=torch.uint8, device="cuda")
    scales = torch.full((779, 3), 77.0, device="cuda")
    got = dsa.read_indexer_cache(cache, slots, rows.view(torch.float8_e4m3fn)[1:-1, 16 : 16 + dim], scales[1:-1, 1])
    assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(got[1], expected[1])
    rows[1:-1, 16 : 16 + dim], scales[1:-1, 1] = 77, 77
    assert (rows == 77).all() and (scales == 77).all()


def test_no_pages():
    k, scale = dsa.read_indexer_cache(
        torch.empty(0, 64, 1, 132, dtype=torch.uint8, device="cuda"), torch.zeros(5, dtype=torch.int64, device="cuda")
    )
    assert not k.float().any() and not scale.any() and k.shape == (5, 128)


def test_pages_far_apart():
    k, scale, slots, shape = case(300)
    stride = 5 * 2**30 // shape[0] // 16 * 16
    wide = torch.full((shape[0] * stride,), 0xFF, dtype=torch.uint8, device="cuda")
    cache = wide.as_strided(shape, (stride, 132, 132, 1))
    dsa.write_indexer_cache(k, scale, cache, slots)
    back, back_scale = dsa.read_indexer_cache(cache, slots)
    assert torch.equal(back.view(torch.uint8), k.view(torch.uint8)) and torch.equal(back_scale, scale)


def test_graph_replay_and_torch_compile():
    k, scale, slots, shape = case(64)
    cache = poisoned(shape, torch.uint8, "cuda")

    def run():
        dsa.write_indexer_cache(k, scale, cache, slots)
        return dsa.read_indexer_cache(cache, slots.flip(0))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    k.view(torch.uint8).random_(0, 256)
    slots.copy_(slots.roll(3))
    graph.replay()
    assert torch.equal(got[0].view(torch.uint8), k.view(torch.uint8).flip(0))
    again = torch.compile(run, fullgraph=True, backend="aot_eager")()
    assert torch.equal(got[0].view(torch.uint8), again[0].view(torch.uint8)) and torch.equal(got[1], again[1])


def test_errors_name_the_argument():
    k, scale, slots, shape = case(9)
    cache = poisoned(shape, torch.uint8, "cuda")
    with pytest.raises(ValueError, match="k: must be on cache's device cuda:0, got cpu"):
        dsa.write_indexer_cache(k.cpu(), scale, cache, slots)
    with pytest.raises(ValueError, match="slots: must be contiguous"):
        dsa.read_indexer_cache(cache, slots.repeat(2)[::2])
    with pytest.raises(ValueError, match=r"cache: the kernel takes D \(32, 64, 128\), got 16"):
        dsa.read_indexer_cache(torch.empty(2, 64, 1, 20, dtype=torch.uint8, device="cuda"), slots)
