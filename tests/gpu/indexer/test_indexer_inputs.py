"""The fused queries and keys against their references on the CPU: the queries bit for bit.

Scales that are no powers of two against the reference on the GPU: there PyTorch divides by 448 as the kernel does, by
multiplying with the reciprocal, and a CPU's scale may be an ulp off.
"""

from itertools import product

import pytest
import torch

import dsa
from dsa.reference.cache.indexer_cache import read_indexer_cache
from dsa.reference.indexer import indexer_inputs as reference
from dsa.testing import calc_diff, poison_free_memory, poisoned
from tests.gpu.cache.poisoned_caches import with_slots_outside
from tests.gpu.op_checks import assert_compiles, assert_runs_have_the_same_bits, assert_same_bits, captured, far_apart


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


def check_queries(*arguments, **options):
    poison_free_memory(mebibytes=16)
    got = dsa.quantize_indexer_queries(*arguments, **options)
    if options.get("use_ue8m0", True):
        expected = on_cpu(reference.quantize_indexer_queries, *arguments, **options)
    else:
        expected = reference.quantize_indexer_queries(*arguments, **options)
    assert all(x.is_contiguous() for x in got)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dims", ["first", "last"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotated", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_queries(dtype, rotated, interleaved, dims, use_ue8m0):
    q, weights = torch.randn(37, 5, 128, device="cuda").to(dtype), torch.randn(37, 5, device="cuda")
    options = {"interleaved": interleaved, "dims": dims, "use_ue8m0": use_ue8m0}
    check_queries(q, weights, *angles(37, rotated), **options)


@pytest.mark.parametrize("tokens", [0, 1, 31, 33, 5000])
@pytest.mark.parametrize("heads", [1, 8, 64])
def test_query_counts(tokens, heads):
    q, weights = torch.randn(tokens, heads, 128, device="cuda").bfloat16(), torch.randn(tokens, heads, device="cuda")
    check_queries(q, weights, *angles(tokens))


def test_strided_queries_and_misaligned_angles():
    wide = torch.randn(20, 4, 3 * 128, device="cuda").bfloat16()
    weights = torch.randn(20, 9, device="cuda")[:, 2:6]
    cos, sin = (torch.randn(20, 33, device="cuda")[:, 1:] for _ in range(2))
    check_queries(wide[..., 128:256], weights, cos, sin)
    one = wide[:1, :1, 128:256].as_strided((1, 1, 128), (7, 3, 1), 128)
    check_queries(one, weights[:1, :1], cos[:1], sin[:1])


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
    """Slots outside the cache are skipped."""
    arguments, shape, slots = key_case(501, dtype, rotated)
    options = {"interleaved": interleaved, "dims": dims, "use_ue8m0": use_ue8m0, "eps": 1e-3}
    slots, skipped = with_slots_outside(slots, shape[0] * 64, torch.int64)
    got = poisoned(shape, torch.uint8, "cuda")
    expected = written_keys(*arguments, got, skipped, **options)
    dsa.write_indexer_keys(*arguments, got, slots, **options)
    # Where the sums' order tips a rounding, a value is one step off: rare, and nothing else in the cache moves.
    assert (got != expected).float().mean() < 2e-3
    own = skipped[skipped >= 0]
    (k, s), (ke, se) = read_indexer_cache(got, own), read_indexer_cache(expected, own)
    diff = calc_diff(k.float() * s[:, None], ke.float() * se[:, None])
    record_error(diff)
    assert diff < 1e-5
    untouched = torch.ones(shape[0] * shape[1], dtype=torch.bool, device="cuda")
    untouched[own] = False
    for cache in read_indexer_cache(got, untouched.nonzero()[:, 0]):
        assert (cache.view(torch.uint8) == 0xFF).all()


@pytest.mark.parametrize(
    ("tokens", "page_size", "slot_dtype"),
    [*product((0, 1, 31, 33, 4096), (64,), (torch.int64,)), *product((70,), (1 << 10, 64, 4), (torch.int32,))],
)
def test_key_counts(tokens, page_size, slot_dtype):
    arguments, shape, slots = key_case(tokens, page_size=page_size)
    if tokens > 30:
        slots, skipped = with_slots_outside(slots, shape[0] * page_size, slot_dtype)
    else:
        slots, skipped = slots.to(slot_dtype), slots
    got = poisoned(shape, torch.uint8, "cuda")
    expected = written_keys(*arguments, got, skipped)
    dsa.write_indexer_keys(*arguments, got, slots)
    # Of what is written, or of few rows a number or two.
    assert (got != expected).sum() <= 2 + 2e-3 * 132 * tokens


def test_pages_far_apart():
    arguments, shape, slots = key_case(300)
    near = poisoned(shape, torch.uint8, "cuda")
    far = far_apart(near)
    for cache in (far, near):
        dsa.write_indexer_keys(*arguments, cache, slots)
    assert torch.equal(far, near)


def test_repeated_runs_graph_replay_and_torch_compile():
    arguments, shape, slots = key_case(200)
    q, weights = torch.randn(200, 64, 128, device="cuda").bfloat16(), torch.randn(200, 64, device="cuda")
    cache = poisoned(shape, torch.uint8, "cuda")

    def run():
        cache.fill_(0xFF)
        dsa.write_indexer_keys(*arguments, cache, slots)
        return *dsa.quantize_indexer_queries(q, weights, *arguments[3:]), cache.clone()

    assert_runs_have_the_same_bits(run)
    (graph, replayed), before = captured(run), run()
    q.normal_()
    arguments[0].normal_()
    slots.copy_(slots.flip(0))
    graph.replay()
    assert_same_bits(replayed, run())
    assert not torch.equal(replayed[2], before[2])
    assert_compiles(run)
