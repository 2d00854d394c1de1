"""The index-score kernel against the reference, both on the GPU: every score within a tolerance of its terms, calc_diff
below 5e-6 with the -inf mask equal."""

from itertools import product

import pytest
import torch

import dsa
from dsa.reference.indexer import fp8_mqa_logits as reference
from dsa.testing import poison_free_memory
from tests.gpu.indexer.score_bounds import check_scores, magnitudes
from tests.gpu.op_checks import (
    assert_runs_have_the_same_bits,
    replays,
)

HALF = {"accumulators": torch.float16}
accumulated = pytest.mark.parametrize("accumulators", [torch.float32, torch.float16], ids=str)


def inputs(queries, keys, heads=64, dim=128):
    q = torch.randn(queries, heads, dim, device="cuda").to(torch.float8_e4m3fn)
    k = torch.randn(keys, dim, device="cuda").to(torch.float8_e4m3fn)
    return q, (k, torch.rand(keys, device="cuda") + 0.1), torch.randn(queries, heads, device="cuda")


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def terms(q, kv, weights, starts, ends, **options):
    """Sums of |terms|."""
    kv = magnitudes(kv[0]), kv[1]
    return reference.fp8_mqa_logits(magnitudes(q), kv, weights.abs(), starts, ends, **options)


def check(q, kv, weights, starts, ends, record_error=None, **options):
    poison_free_memory(mebibytes=64)
    got = dsa.fp8_mqa_logits(q, kv, weights, starts, ends, **options)
    expected = reference.fp8_mqa_logits(q, kv, weights, starts, ends, **(options | {"clean_logits": True}))
    assert got.shape == expected.shape and got.stride() == expected.stride() and got.dtype == expected.dtype
    if options.get("clean_logits", True):
        assert torch.equal(got == -torch.inf, expected == -torch.inf)
    else:
        got = torch.where(expected == -torch.inf, -torch.inf, got)
    columns = options.get("max_seqlen_k", 0)
    of_terms = terms(q, kv, weights, starts, ends, max_seqlen_k=columns)
    diff = check_scores(got, expected, of_terms, options.get("accumulators", torch.float32))
    if record_error:
        record_error(diff)


@pytest.mark.parametrize(
    "options",
    [
        *({"clean_logits": clean, "max_seqlen_k": columns} for clean in (True, False) for columns in (0, 777)),
        *({"logits_dtype": torch.bfloat16, "max_seqlen_k": columns} for columns in (0, 777)),
    ],
    ids=str,
)
@accumulated
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_causal(heads, dim, accumulators, options, record_error):
    queries, keys = 301, 1000
    ends = torch.arange(queries, device="cuda", dtype=torch.int32) + keys - queries + 1
    arguments = *inputs(queries, keys, heads, dim), (ends - 777).clamp_min(0), ends
    check(*arguments, record_error, accumulators=accumulators, **options)


@accumulated
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 70000), (2, 63), (5, 64), (3, 65), (700, 129), (64, 5000)])
def test_random_ranges(queries, keys, clean, accumulators, record_error):
    """Empty, unordered, disjoint inside one block of queries, and beyond both ends."""
    options = {"clean_logits": clean, "accumulators": accumulators}
    for heads in (8, 64):
        starts = torch.randint(-5, keys + 1, (queries,), device="cuda", dtype=torch.int32).clamp_min(0)
        ends = torch.randint(0, keys + 100, (queries,), device="cuda", dtype=torch.int32)
        check(*inputs(queries, keys, heads), starts, ends, record_error, **options)


def test_ranges_far_apart_in_one_block():
    """A block whose largest end is far below its smallest start, and one with a hole of many tiles."""
    starts, ends = int32([9000, 9100, 9200, 9300, 0, 9990, 0, 9990]), int32([10, 20, 0, 64, 1, 10000, 5, 9991])
    check(*inputs(8, 10000), starts, ends)
    check(*inputs(8, 10000), starts, ends, max_seqlen_k=128)


def test_varlen_sequences():
    lens = [1, 63, 64, 65, 500, 3]
    first = torch.cumsum(torch.tensor([0, *lens[:-1]]), 0)
    starts = torch.repeat_interleave(first, torch.tensor(lens))
    ends = torch.cat([f + 1 + torch.arange(n) for f, n in zip(first, lens)])
    check(*inputs(sum(lens), sum(lens)), int32(starts), int32(ends))
    check(*inputs(sum(lens), sum(lens)), int32(starts), int32(ends), max_seqlen_k=500)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("columns", [1, 63, 64, 100, 257, 3000])
def test_keys_that_do_not_fit_are_left_out(columns, clean):
    starts, ends = int32([0, 0, 5, 990, 300, 999]), int32([1000, 64, 900, 1000, 2000, 1000])
    check(*inputs(6, 1000), starts, ends, max_seqlen_k=columns, clean_logits=clean)


@pytest.mark.parametrize("columns", [0, 100])
def test_ranges_of_any_numbers(columns):
    garbage = [-(2**31), 2**31 - 1, -1, 0, 1, 64, 299, 300, 301, 2**30]
    starts, ends = (int32([a for pair in product(garbage, garbage) for a in pair][i::2]) for i in range(2))
    check(*inputs(100, 300, 8), starts, ends, max_seqlen_k=columns)


def test_one_key_in_the_place_of_many():
    """Rows with a stride of 0."""
    q, (k, scale), weights = inputs(6, 1000)
    check(q, (k[7:8].expand(1000, -1), scale), weights, int32([0, 0, 5, 990, 300, 999]), int32([1000] * 6))


def test_strided_weights_and_keys():
    q, (k, scale), _ = inputs(40, 300)
    weights = torch.randn(40, 3 * 64 + 1, device="cuda")[:, 64:128]
    wide = torch.zeros(300, 256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    wide[:, :128] = k
    check(q, (wide[:, :128], scale), weights, int32([0] * 40), int32([300] * 40))


@accumulated
def test_what_is_not_finite_stays_where_it_is(accumulators):
    """In a key's column, and in a query's row."""
    q, (k, scale), weights = inputs(20, 200)
    ranges, options = (int32([0] * 20), int32([200] * 20)), {"accumulators": accumulators}
    finite = dsa.fp8_mqa_logits(q, (k, scale), weights, *ranges, **options).clone()
    k.view(torch.uint8)[77], scale[150] = 0x7F, torch.nan
    q.view(torch.uint8)[9, 3, 5] = 0x7F
    weights[5], weights[6, 7] = 0, torch.inf
    got = dsa.fp8_mqa_logits(q, (k, scale), weights, *ranges, **options)
    rows = [t for t in range(20) if t not in (5, 6, 9)]
    keys = [s for s in range(200) if s not in (77, 150)]
    assert got[:, [77, 150]].isnan().all() and got[9].isnan().all() and not got[6].isfinite().any()
    assert torch.equal(got[rows][:, keys], finite[rows][:, keys]) and not got[5, keys].any()


@accumulated
def test_a_row_of_negative_products_is_exactly_zero(accumulators):
    """ReLU's plateau: scores that tie at 0 in the reference tie at 0 here."""
    q = torch.rand(4, 64, 128, device="cuda").add(0.1).to(torch.float8_e4m3fn)
    k = (-torch.rand(100, 128, device="cuda") - 0.1).to(torch.float8_e4m3fn)
    scale, weights = torch.rand(100, device="cuda"), torch.randn(4, 64, device="cuda")
    ranges = int32([0] * 4), int32([100] * 4)
    assert not dsa.fp8_mqa_logits(q, (k, scale), weights, *ranges, accumulators=accumulators).any()


def selected(scores, k=2048):
    """Which keys have the k highest scores of each row."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(k).indices, True)


@pytest.mark.parametrize("exponent", range(-5, 9))
def test_half_scores_of_queries_of_any_size(exponent):
    q = (torch.randn(16, 64, 128, device="cuda").clamp(-1.7, 1.7) * 2.0**exponent).to(torch.float8_e4m3fn)
    _, kv, weights = inputs(16, 500)
    check(q, kv, weights, int32([0] * 16), int32([500] * 16), **HALF)


@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e20])
def test_half_scores_of_the_largest_numbers(factor):
    """Products of 2.6e7, whose sums over heads all have one sign: nothing overflows."""
    q = torch.full((16, 64, 128), 448.0, device="cuda").to(torch.float8_e4m3fn)
    signs = torch.where(torch.rand(500, 1, device="cuda") < 0.5, 448.0, -448.0)
    kv = signs.expand(500, 128).contiguous().to(torch.float8_e4m3fn), torch.ones(500, device="cuda")
    check(q, kv, torch.rand(16, 64, device="cuda") * factor, int32([0] * 16), int32([500] * 16), **HALF)


def test_half_scores_select_the_same_keys():
    """Clustered keys, queries that share a direction, weights of both signs."""
    basis = torch.randn(24, 128, device="cuda") / 128**0.5
    centres = 2 * torch.randn(64, 24, device="cuda")[torch.randint(64, (32768,), device="cuda")]
    k = (centres + torch.randn(32768, 24, device="cuda")) @ basis * 3 + 0.5 * torch.randn(32768, 128, device="cuda")
    q = (torch.randn(64, 1, 24, device="cuda") + torch.randn(64, 64, 24, device="cuda")) @ basis * 4
    (q, q_scale), kv = (dsa.per_token_cast_to_fp8(x.contiguous(), gran_k=128) for x in (q.view(-1, 128), k))
    weights = (torch.randn(64, 64, device="cuda") + 0.5) * q_scale.view(64, 64)
    arguments = q.view(64, 64, 128), (kv[0], kv[1].flatten()), weights, int32([0] * 64), int32([32768] * 64)
    half, whole = dsa.fp8_mqa_logits(*arguments, **HALF), dsa.fp8_mqa_logits(*arguments)
    assert (selected(half) & selected(whole)).sum() > 0.999 * 64 * 2048


def test_offsets_beyond_32_bits():
    queries, keys = 40000, 60000  # 2.4e9 scores
    q, kv, weights = inputs(queries, keys, 8, 32)
    starts = torch.full((queries,), keys - 100, dtype=torch.int32, device="cuda")
    got = dsa.fp8_mqa_logits(q, kv, weights, starts, starts + 100)
    tail = [t[-50:] for t in (q, weights, starts)]
    expected = reference.fp8_mqa_logits(tail[0], kv, tail[1], tail[2], tail[2] + 100)
    check_scores(got[-50:], expected, terms(tail[0], kv, tail[1], tail[2], tail[2] + 100))
    assert (got[20000, :-100] == -torch.inf).all()


@accumulated
def test_twenty_runs_are_identical(accumulators):
    """Many work tiles a CTA: with fp16, queries are brought into range beside another warpgroup's last products."""
    q, kv, weights = inputs(4096, 8192)
    ranges, options = (int32([0] * 4096), int32(range(4096, 8192))), {"accumulators": accumulators}
    assert_runs_have_the_same_bits(dsa.fp8_mqa_logits, q, kv, weights, *ranges, **options)
    check(q[-32:], kv, weights[-32:], *(bounds[-32:] for bounds in ranges), **options)


@accumulated
def test_a_row_does_not_depend_on_the_batch(accumulators):
    q, kv, weights = inputs(37, 900)
    before, options = q.view(torch.uint8).clone(), {"accumulators": accumulators}
    whole = dsa.fp8_mqa_logits(q, kv, weights, int32([5] * 37), int32([900] * 37), **options)
    alone = dsa.fp8_mqa_logits(q[17:18], kv, weights[17:18], int32([5]), int32([900]), **options)
    assert torch.equal(whole[17:18], alone) and torch.equal(q.view(torch.uint8), before)


@accumulated
def test_graph_replay_with_new_ranges(accumulators):
    q, kv, weights = inputs(64, 2000)

    def renew():
        return int32(torch.randint(0, 2000, (64,))), int32(torch.randint(0, 2000, (64,)))

    def op(starts, ends):
        return dsa.fp8_mqa_logits(q, kv, weights, starts, ends, accumulators=accumulators)

    ranges = renew()
    for got in replays(op, ranges, renew):
        expected = reference.fp8_mqa_logits(q, kv, weights, *ranges)
        check_scores(got, expected, terms(q, kv, weights, *ranges), accumulators)
