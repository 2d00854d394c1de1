"""The fused queries and keys against their references on the CPU: the queries bit for bit.

Scales that are no powers of two against the reference on the GPU: there PyTorch divides by 448 as the kernel does, by
multiplying with the reciprocal, and a CPU's scale may be an ulp off.
"""

import pytest
import torch

import dsa
from dsa.reference.cache.indexer_cache import read_indexer_cache
from dsa.reference.indexer import indexer_inputs as reference
from dsa.testing import calc_diff, poison_free_memory, poisoned


def on_cpu(function, *arguments, **options):
    return [x.cuda() for x in function(*(a.cpu() for a in arguments), **options)]


def written_keys(*arguments, **options):
    """The cache after `write_indexer_keys`, whose cache and slots are the last two arguments."""
    if not options.get("use_ue8m0", True):
        *inputs, cache, slots = arguments
        expected = cache.clone()
        reference.write_indexer_keys(*inputs, expected, slots, **options)
        return expected
    arguments = [a.cpu() for a in arguments]
    reference.write_indexer_keys(*arguments, **options)
    return arguments[-2].cuda()


def angles(tokens, rotated=64):
    a = 10 * torch.randn(tokens, rotated // 2, device="cuda")
    return a.cos(), a.sin()


def same_bits(got, expected):
    return torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dims", ["first", "last"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotated", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_queries(dtype, rotated, interleaved, dims, use_ue8m0):
    q, weights = torch.randn(37, 5, 128, device="cuda").to(dtype), torch.randn(37, 5, device="cuda")
    options = {"interleaved": interleaved, "dims": dims, "use_ue8m0": use_ue8m0}
    arguments = (q, weights, *angles(37, rotated))
    poison_free_memory(mebibytes=16)
    q8, scaled = dsa.quantize_indexer_queries(*arguments, **options)
    if use_ue8m0:
        expected, expected_scaled = on_cpu(reference.quantize_indexer_queries, *arguments, **options)
    else:
        expected, expected_scaled = reference.quantize_indexer_queries(*arguments, **options)
    assert same_bits(q8, expected) and torch.equal(scaled, expected_scaled)
    assert q8.is_contiguous() and scaled.is_contiguous()


@pytest.mark.parametrize("tokens", [0, 1, 31, 33, 5000])
@pytest.mark.parametrize("heads", [1, 8, 64])
def test_query_counts(tokens, heads):
    arguments = torch.randn(tokens, heads, 128, device="cuda").bfloat16(), torch.randn(tokens, heads, device="cuda")
    got = dsa.quantize_indexer_queries(*arguments, *(a := angles(tokens)))
    expected = on_cpu(reference.quantize_indexer_queries, *arguments, *a)
    assert same_bits(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_strided_queries_and_misaligned_angles():
    wide = torch.randn(20, 4, 3 * 128, device="cuda").bfloat16()
    weights = torch.randn(20, 9, device="cuda")[:, 2:6]
    cos, sin = (torch.randn(20, 33, device="cuda")[:, 1:] for _ in range(2))
    got = dsa.quantize_indexer_queries(wide[..., 128:256], weights, cos, sin)
    expected = on_cpu(reference.quantize_indexer_queries, wide[..., 128:256], weights, cos, sin)
    assert same_bits(got[0], expected[0]) and torch.equal(got[1], expected[1])
    one = wide[:1, :1, 128:256].as_strided((1, 1, 128), (7, 3, 1), 128)
    got = dsa.quantize_indexer_queries(one, weights[:1, :1], cos[:1], sin[:1])
    assert same_bits(got[0], on_cpu(reference.quantize_indexer_queries, one, weights[:1, :1], cos[:1], sin[:1])[0])


def test_queries_that_are_not_numbers():
    q, weights = torch.randn(6, 8, 128, device="cuda"), torch.randn(6, 8, device="cuda")
    q[1, 2, 3], q[2, 3, 100], q[3, 4, 127], q[4] = torch.nan, torch.inf, -torch.inf, 0.0
    got = dsa.quantize_indexer_queries(q, weights, *(a := angles(6)))
    expected = on_cpu(reference.quantize_indexer_queries, q, weights, *a)
    assert torch.equal(got[0].float().nan_to_num(7), expected[0].float().nan_to_num(7))
    assert torch.equal(got[1].nan_to_num(7), expected[1].nan_to_num(7))


def key_case(tokens, dtype=torch.bfloat16, rotated=64, page_size=64):
    k = (torch.randn(tokens, 128, device="cuda") * 3 + 1).to(dtype)
    gain, bias = torch.randn(128, device="cuda"), torch.randn(128, device="cuda")
    pages = 2 * -(-tokens // page_size) + 1
    slots = torch.randperm(pages * page_size, device="cuda")[:tokens]
    return (k, gain, bias, *angles(tokens, rotated)), (pages, page_size, 1, 132), slots


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dims", ["first", "last"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotated", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_keys(dtype, rotated, interleaved, dims, use_ue8m0, record_error):
    arguments, shape, slots = key_case(501, dtype, rotated)
    options = {"interleaved": interleaved, "dims": dims, "use_ue8m0": use_ue8m0, "eps": 1e-3}
    got = poisoned(shape, torch.uint8, "cuda")
    expected = written_keys(*arguments, got, slots, **options)
    dsa.write_indexer_keys(*arguments, got, slots, **options)
    # Where the sums' order tips a rounding, a value is one step off: rare, and nothing else in the cache moves.
    assert (got != expected).float().mean() < 2e-3
    (k, s), (ke, se) = read_indexer_cache(got, slots), read_indexer_cache(expected, slots)
    diff = calc_diff(k.float() * s[:, None], ke.float() * se[:, None])
    record_error(diff)
    assert diff < 1e-5
    untouched = torch.ones(shape[0] * shape[1], dtype=torch.bool, device="cuda")
    untouched[slots] = False
    for cache in read_indexer_cache(got, untouched.nonzero()[:, 0]):
        assert (cache.view(torch.uint8) == 0xFF).all()


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [1 << 10, 64, 4])
def test_slots_outside_the_cache_are_skipped(slot_dtype, page_size):
    arguments, shape, slots = key_case(70, page_size=page_size)
    capacity = shape[0] * shape[1]
    bad = {3: -1, 10: capacity, 20: -(2**31), 30: 2**31 - 1}
    if slot_dtype == torch.int64:
        bad |= {40: 2**32, 41: 2**63 - 1}
    skipped = slots.clone()
    for t, slot in bad.items():
        slots[t], skipped[t] = slot, -1
    got, expected = poisoned(shape, torch.uint8, "cuda"), poisoned(shape, torch.uint8, "cuda")
    dsa.write_indexer_keys(*arguments, got, slots.to(slot_dtype))
    dsa.write_indexer_keys(*arguments, expected, skipped)
    assert torch.equal(got, expected)
    for t in bad:
        assert skipped[t] == -1


@pytest.mark.parametrize("tokens", [0, 1, 31, 33, 4096])
def test_key_counts(tokens):
    arguments, shape, slots = key_case(tokens)
    got = poisoned(shape, torch.uint8, "cuda")
    expected = written_keys(*arguments, got, slots)
    dsa.write_indexer_keys(*arguments, got, slots)
    # Of what is written, or of few rows a number or two.
    assert (got != expected).sum() <= 2 + 2e-3 * 132 * tokens


def test_pages_far_apart():
    arguments, shape, slots = key_case(300)
    stride = 5 * 2**30 // shape[0] // 16 * 16
    wide = torch.full((shape[0] * stride,), 0xFF, dtype=torch.uint8, device="cuda")
    far = wide.as_strided(shape, (stride, 132, 132, 1))
    near = poisoned(shape, torch.uint8, "cuda")
    dsa.write_indexer_keys(*arguments, far, slots)
    dsa.write_indexer_keys(*arguments, near, slots)
    assert torch.equal(far, near)


def test_the_indexer_scores_what_it_wrote():
    """Queries and keys through the fused ops and the paged scores, against the formula on their dequantised values."""
    arguments, shape, slots = key_case(64)
    cache = poisoned(shape, torch.uint8, "cuda")
    slots = torch.arange(64, 128, device="cuda")
    dsa.write_indexer_keys(*arguments, cache, slots)
    q, weights = torch.randn(1, 64, 128, device="cuda").bfloat16(), torch.randn(1, 64, device="cuda")
    q8, scaled = dsa.quantize_indexer_queries(q, weights, *angles(1))
    length = torch.tensor([64], dtype=torch.int32, device="cuda")
    table = torch.tensor([[1]], dtype=torch.int32, device="cuda")
    got = dsa.fp8_paged_mqa_logits(q8[:, None], cache, scaled, length, table, None, 64)
    k, scale = read_indexer_cache(cache, slots)
    dots = (q8[0].double() @ (k.double() * scale[:, None].double()).T).relu()
    assert calc_diff(got, scaled.double() @ dots) < 5e-6


def test_twenty_runs_are_identical_and_graphs_replay():
    arguments, shape, slots = key_case(200)
    q, weights = torch.randn(200, 64, 128, device="cuda").bfloat16(), torch.randn(200, 64, device="cuda")
    cache = poisoned(shape, torch.uint8, "cuda")

    def run():
        dsa.write_indexer_keys(*arguments, cache, slots)
        return dsa.quantize_indexer_queries(q, weights, *arguments[3:])

    first, pages = run(), cache.clone()
    for _ in range(20):
        again = run()
        assert same_bits(first[0], again[0]) and torch.equal(first[1], again[1]) and torch.equal(pages, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    q.normal_()
    arguments[0].normal_()
    slots.copy_(slots.flip(0))
    cache.fill_(0xFF)
    graph.replay()
    got_pages = cache.clone()
    cache.fill_(0xFF)
    again = run()
    assert same_bits(replayed[0], again[0]) and torch.equal(replayed[1], again[1]) and torch.equal(got_pages, cache)
    assert not torch.equal(pages, cache)


def test_torch_compile():
    arguments, shape, slots = key_case(9)
    eager, compiled = (poisoned(shape, torch.uint8, "cuda") for _ in range(2))
    q, weights = torch.randn(9, 8, 128, device="cuda").bfloat16(), torch.randn(9, 8, device="cuda")

    def run(cache):
        dsa.write_indexer_keys(*arguments, cache, slots)
        return dsa.quantize_indexer_queries(q, weights, *arguments[3:])

    expected = run(eager)
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(compiled)
    assert torch.equal(eager, compiled) and same_bits(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_errors_name_the_argument():
    arguments, shape, slots = key_case(9)
    cache = poisoned(shape, torch.uint8, "cuda")
    with pytest.raises(ValueError, match=r"cos: the kernel rotates R \(32, 64, 128\) channels, got 16"):
        dsa.write_indexer_keys(*arguments[:3], *angles(9, 16), cache, slots)
    with pytest.raises(ValueError, match="slots: must be on cache's device cuda:0, got cpu"):
        dsa.write_indexer_keys(*arguments, cache, slots.cpu())
    with pytest.raises(ValueError, match="cache: pages must start at multiples of 16 bytes"):
        odd = torch.empty(9 * 8450, dtype=torch.uint8, device="cuda").as_strided((9, 64, 1, 132), (8450, 132, 132, 1))
        dsa.write_indexer_keys(*arguments, odd, slots)
    with pytest.raises(ValueError, match="q: rows must start at multiples of 16 bytes"):
        q = torch.empty(9, 2, 132, device="cuda").bfloat16()[..., 2:130]
        dsa.quantize_indexer_queries(q, torch.empty(9, 2, device="cuda"), *angles(9))
