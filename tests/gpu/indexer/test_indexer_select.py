"""Scores and selection in one op beside the two by themselves, bit by bit."""

import math
import sys
from itertools import product

import pytest
import torch

import dsa
from dsa.kernels.indexer.candidate_lists import CAPACITY, GROUP, PARTS, bound_ranks, pass_strides
from dsa.kernels.indexer.select_limits import TWO_OPS_KEYS
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_runs_have_the_same_bits, replays

accumulated = pytest.mark.parametrize("accumulators", [torch.float32, torch.float16])


def inputs(queries, keys, heads=64, dim=128):
    q = torch.randn(queries, heads, dim, device="cuda").to(torch.float8_e4m3fn)
    k = torch.randn(keys, dim, device="cuda").to(torch.float8_e4m3fn)
    return q, (k, torch.rand(keys, device="cuda") + 0.1), torch.randn(queries, heads, device="cuda")


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def check(q, kv, weights, starts, ends, top_k, accumulators=torch.float32, **paging):
    """Indices and values are those of the two ops, by which this one is defined."""
    keys = len(kv[0])
    first, last = starts.clamp(0, keys), ends.clamp(0, keys)
    scores = dsa.fp8_mqa_logits(q, kv, weights, first, last, accumulators=accumulators)
    lengths = (last - first).clamp_min(0)
    expected = dsa.topk_indices(scores, top_k, starts=first, lengths=lengths, return_values=True, **paging)
    poison_free_memory(mebibytes=64)
    paging["accumulators"] = accumulators
    got = dsa.indexer_select(q, kv, weights, starts, ends, top_k, return_values=True, **paging)
    assert torch.equal(got[0], expected[0])
    # With the bits of the scores, but for the sign of a zero.
    assert torch.equal(got[1].view(torch.int32), (expected[1] + 0.0).view(torch.int32))
    assert torch.equal(dsa.indexer_select(q, kv, weights, starts, ends, top_k, **paging), expected[0])
    return got


@accumulated
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_causal(heads, dim, accumulators):
    for queries, keys in ((301, 5000), (301, 20000), (70, 70000)):
        ends = torch.arange(queries, device="cuda", dtype=torch.int32) + keys - queries + 1
        for top_k in (1, 100, 2048):
            given = *inputs(queries, keys, heads, dim), (ends - keys * 8 // 9).clamp_min(0), ends
            check(*given, top_k, accumulators)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [(1, 1), (1, 70000), (2, 63), (5, 64), (3, 65), (700, 129), (64, 9000), (600, 8193), (9, 200001)],
)
def test_random_ranges(queries, keys):
    """Empty, unordered, disjoint inside one block of queries, and beyond both ends."""
    for heads, top_k in product((8, 64), (5, 512, 2048)):
        starts = torch.randint(-5, keys + 1, (queries,), device="cuda", dtype=torch.int32)
        ends = torch.randint(0, keys + 100, (queries,), device="cuda", dtype=torch.int32)
        check(*inputs(queries, keys, heads), starts, ends, top_k)


@accumulated
def test_more_blocks_than_multiprocessors(accumulators):
    """Lists and rings go on from one work tile to the next, with odd numbers of key tiles in between."""
    queries = 3000
    for keys, longest in ((6400, 6000), (26400, 26000)):
        starts, lengths = torch.randint(0, longest, (2, queries), device="cuda", dtype=torch.int32)
        check(*inputs(queries, keys), starts, starts + lengths, 300, accumulators)


@pytest.mark.parametrize("heads", [8, 64])
def test_blocks_shared_by_two_multiprocessors(heads):
    """From half a block for each to blocks that not all of them have as many of."""
    block_q, sms = 128 // heads if heads < 64 else 4, torch.cuda.get_device_properties(0).multi_processor_count
    for blocks in (1, 3, sms // 2, sms // 2 + 1, sms - 1, sms, sms + 1, 2 * sms - 1, 2 * sms + 7, 3 * sms, 4 * sms + 1):
        queries, keys = blocks * block_q - 1, 9000
        starts = torch.randint(0, 300, (queries,), device="cuda", dtype=torch.int32)
        check(*inputs(queries, keys, heads, 32), starts, torch.full_like(starts, keys), 700)


@accumulated
def test_blocks_without_keys_between_others(accumulators):
    """Before, behind and between blocks of few key tiles and of many, of which a CTA prepares one while it computes
    another."""
    for queries, keys in ((3200, 12000), (2700, 30000)):
        blocks = queries // 4
        longest = torch.tensor([0, 0, 70, 300, 2100, 9000, keys], device="cuda")
        for odds in ((9, 0, 0, 0, 0, 0, 1), (5, 1, 1, 1, 1, 1, 1), (1, 0, 4, 4, 0, 0, 1), (0, 0, 0, 0, 1, 1, 2)):
            drawn = torch.multinomial(torch.tensor(odds, device="cuda").float(), blocks, replacement=True)
            most = longest[drawn].repeat_interleave(4)
            lengths = (most * torch.rand(queries, device="cuda")).ceil().int()
            starts = ((keys - lengths) * torch.rand(queries, device="cuda")).int()
            check(*inputs(queries, keys), starts, starts + lengths, 500, accumulators)
        nothing = int32([0] * queries)
        check(*inputs(queries, keys), nothing, nothing, 500, accumulators)


@pytest.mark.parametrize("keys", [30000, 100000, 300000])
def test_queries_that_see_little_of_their_blocks_sample(keys):
    """Of a block that sees all keys, so that a sample has few scores of them, or scores in few of its parts."""
    for length in (CAPACITY + 1, 6000, 9000, keys // 8, keys // 4):
        at = torch.linspace(0, keys - length, 48, device="cuda").int().view(16, 3)
        all_keys = torch.zeros(16, 1, dtype=torch.int32, device="cuda")
        starts, ends = torch.cat((all_keys, at), 1), torch.cat((all_keys + keys, at + length), 1)
        for top_k in (10, 2048):
            check(*inputs(64, keys), starts.flatten(), ends.flatten(), top_k)


def test_rows_of_very_different_lengths():
    """In one block: those that the list holds, by a key more or less, and those of all keys or none."""
    keys = 70000
    lengths = [0, 1, 15, 16, 17, 2047, 2048, 2049, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY, 30000, keys]
    for top_k in (1, 2000, 2048):
        starts = int32([7 * i for i in range(len(lengths))])
        check(*inputs(len(lengths), keys), starts, starts + int32(lengths), top_k)
        check(*inputs(len(lengths), keys), keys - int32(lengths), int32([keys] * len(lengths)), top_k)
        order = torch.randperm(len(lengths))
        middle = (keys - int32(lengths)[order]) // 2
        check(*inputs(len(lengths), keys), middle, middle + int32(lengths)[order], top_k)


def test_ranges_of_any_numbers():
    for keys in (300, 20000):  # the two ops, and lists of candidates
        garbage = [-(2**31), 2**31 - 1, -1, 0, 1, 64, keys - 1, keys, keys + 1, 2**30]
        starts, ends = (int32([a for pair in product(garbage, garbage) for a in pair][i::2]) for i in range(2))
        for heads, accumulators in product((8, 64), (torch.float32, torch.float16)):
            check(*inputs(100, keys, heads), starts, ends, 33, accumulators)


# Scores of any shape, as scales of keys that all have the same products: what these are is the row's order.
SHAPES = {
    "ascending": lambda n: torch.arange(1, n + 1),
    "descending": lambda n: torch.arange(n, 0, -1),
    "equal": torch.ones,
    "two values": lambda n: torch.arange(n) % 2 + 1,
    "zeros but for a few": lambda n: (torch.arange(n) % 1000 == 7).float(),
    "the largest last": lambda n: torch.cat((torch.rand(n - 2500), 1 + torch.rand(2500))),
    "steps": lambda n: torch.arange(n) // 700 + 1,
    "many sizes": lambda n: torch.rand(n).mul(60).exp2(),
    "both infinities": lambda n: torch.tensor([torch.inf, -torch.inf, 1.0, -1.0, 0.0, -0.0])[torch.arange(n) % 6],
    "both signs, many sizes": lambda n: torch.randn(n) * torch.rand(n).mul(60).exp2(),
    "infinite": lambda n: torch.where(torch.arange(n) % 3 == 0, torch.inf, torch.rand(n)),
    # Sampled scores are all above the rest (too few candidates) or all below it (lists overflow).
    "large where sampled": lambda n: torch.rand(n) + 2 * _sampled(n),
    "small where sampled": lambda n: torch.rand(n) + 2 * ~_sampled(n),
    "large in the first pass": lambda n: torch.rand(n) + 2 * _sampled(n, pass_strides(n)[0]),
    "small in the first pass": lambda n: torch.rand(n) + 2 * ~_sampled(n, pass_strides(n)[0]),
    # Of the first sample's scores, maxima are compared: of every 16th of its tiles.
    "the largest in the same maxima": lambda n: torch.rand(n) + 2 * _sampled(n, 16 * pass_strides(n)[0]),
    "the smallest in the same maxima": lambda n: torch.rand(n) + 2 * ~_sampled(n, 16 * pass_strides(n)[0]),
    # The k-th largest is among those that equal the bound.
    "a few levels": lambda n: torch.randint(1, 9, (n,)),
    "many levels": lambda n: torch.randint(1, n // 700, (n,)),
    # Of those that equal the k-th a warp ranks 32, and a search by keys more.
    "20 or so of a level": lambda n: torch.randint(1, n // 20, (n,)),
    "31 of a level": lambda n: torch.arange(n) // 31 + 1,
    "32 of a level": lambda n: torch.arange(n) // 32 + 1,
    "33 of a level": lambda n: torch.arange(n) // 33 + 1,
    "33 of a level, apart": lambda n: torch.arange(n) % -(-n // 33) + 1,
    "zeros and more than are wanted": lambda n: torch.rand(n) * (torch.rand(n) < 0.2),
    "NaN": lambda n: torch.where(torch.rand(n) < 0.3, torch.nan, torch.rand(n)),
    "NaN but for a few": lambda n: torch.where(torch.rand(n) < 0.97, torch.nan, torch.rand(n)),
    "NaN where sampled": lambda n: torch.where(_sampled(n), torch.nan, torch.rand(n)),
}


def _sampled(keys, stride=4):
    """The keys of every stride-th tile of a block whose queries see all keys."""
    tiles = math.ceil(math.ceil(keys / GROUP) / PARTS)
    return (torch.arange(keys) // GROUP) % tiles % stride == 0


@accumulated
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_of_any_shape(shape, sign, accumulators):
    for keys in (7000, 20000, 50000):  # the two ops; one pass that gives bounds; two
        queries = 10
        q, (k, _), weights = inputs(queries, keys)
        k[:], weights[:] = k[0].clone(), sign * weights.abs()
        scale = SHAPES[shape](keys).float().cuda()
        starts = int32([0, 5, keys // 2, 0, keys - 3000, 63, 0, 0, 1, 2])
        ends = int32([keys, keys - 1, keys, 3000, keys - 100, keys - 1000, keys, keys, keys, keys])
        for top_k in (1, 500, 2048):
            check(q, (k, scale), weights, starts, ends, top_k, accumulators)


def _hardly_more_than_the_rank(keys):
    """The list behind the second pass has so few keys more than the last bound's rank that any number a little below
    them does for the bound, and a search for it ends with the first digit. If that began below the list's own bound, so
    would the new bound, and of the keys in between, some of which are among the largest 2048, the list has none."""
    strides = pass_strides(keys)
    first_rank, second_rank = bound_ranks(2048, strides)
    first, second = (_sampled(keys, stride) for stride in strides[:2])
    scores = torch.rand(keys) * 0.5
    free = torch.ones(keys, dtype=torch.bool)

    def place(count, where, low, high):
        places = (where & free).nonzero().flatten()
        chosen = places[torch.randperm(len(places))[:count]]
        scores[chosen] = low + (high - low) * torch.rand(count)
        free[chosen] = False

    place(first_rank, first, 1.96, 2.0)
    place(first_rank // 8, first, 1.91, 1.92)  # more than a search leaves out, so the first bound is between these
    place(second_rank + second_rank // 32 - first_rank, second & ~first, 1.96, 2.0)
    place(500, ~second, 1.96, 2.0)
    place(2500, free, 1.76, 1.88)
    return scores


@accumulated
@pytest.mark.parametrize("keys", [30000, 50000, 131072])
def test_a_bound_is_not_below_that_of_its_list(keys, accumulators):
    """Queries whose scores differ by a factor alone, so that digits begin everywhere between them."""
    queries = 96
    q, (k, _), weights = inputs(queries, keys)
    q[:], k[:] = q[0].clone(), k[0].clone()
    weights = weights[:1].abs() * torch.linspace(0, 1, queries + 1, device="cuda")[:queries, None].exp2()
    scale = _hardly_more_than_the_rank(keys).cuda()
    check(q, (k, scale), weights, int32([0] * queries), int32([keys] * queries), 2048, accumulators)


@accumulated
def test_some_lists_overflow_and_others_do_not(accumulators):
    """Of a block: queries that see zeros alone, and queries that see other keys."""
    q, (k, scale), weights = inputs(16, 60000)
    scale[:30000] = 0.0
    starts = int32([0, 30000] * 8)
    check(q, (k, scale), weights, starts, starts + 30000, 2048, accumulators)
    check(q, (k, scale), weights, int32([0] * 16), int32([60000] * 15 + [30000]), 100, accumulators)


@accumulated
def test_nan_is_never_selected(accumulators):
    for keys in (3000, 13000):  # the two ops, and lists of candidates
        q, (k, scale), weights = inputs(20, keys)
        k.view(torch.uint8)[77], scale[150 : keys - 500] = 0x7F, torch.nan
        indices, _ = check(q, (k, scale), weights, int32([0] * 20), int32([keys] * 20), 700, accumulators)
        assert ((indices >= 0).sum(1) == 500 + 150 - 1).all()


def test_slots():
    queries, keys = 50, 4000
    for times in (1, 5):  # the two ops, and lists of candidates
        arguments = inputs(queries, times * keys)
        starts = times * int32([0] * 25 + [2000] * 25)
        ends = starts + times * int32(range(1000, 2000, 20))
        table = torch.randperm(128 * times, device="cuda").int().view(2, 64 * times)
        table[1, 3], table[0, 2] = -1, 2**31 - 1
        sequences = int32([0] * 25 + [1] * 23 + [2, -1])
        check(*arguments, starts, ends, 256, block_table=table[:, : 30 * times], page_size=64, row_to_seq=sequences)
        every = table[sequences.clamp(0, 1).long()]
        check(*arguments, starts, ends, 256, block_table=every, page_size=32)
        arguments[1][1].fill_(0.0)  # ties of all: lists overflow
        check(*arguments, starts, ends, 256, block_table=every, page_size=32)


def test_more_queries_than_a_launch_has(monkeypatch):
    monkeypatch.setattr(sys.modules["dsa.ops.indexer.indexer_select"], "MOST_QUERIES", 16)
    arguments = inputs(50, 20000)
    starts = torch.randint(0, 9000, (50,), device="cuda", dtype=torch.int32)
    table, sequences = torch.randperm(1280, device="cuda").int().view(2, 640), int32(range(50)) % 2
    for paging in ({}, {"row_to_seq": sequences, "block_table": table}, {"block_table": table[sequences.long()]}):
        sized = paging | ({"page_size": 32} if paging else {})
        check(*arguments, starts, starts + 10000, 256, **sized)


def test_strided_weights_and_keys():
    for keys in (3000, 13000):
        q, (k, scale), _ = inputs(40, keys)
        weights = torch.randn(40, 3 * 64 + 1, device="cuda")[:, 64:128]
        wide = torch.zeros(keys, 256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        wide[:, :128] = k
        check(q, (wide[:, :128], scale), weights, int32([0] * 40), int32([keys] * 40), 64)


@accumulated
def test_long_contexts(accumulators):
    """Positions beyond 2^20, and keys whose last bytes are beyond 2^31 of the first's."""
    keys = 2**24 + 2**20
    k = torch.randint(0, 0x78, (keys, 128), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    (q, _, weights), kv, options = inputs(8, 1), (k, torch.rand(keys, device="cuda")), {"accumulators": accumulators}
    starts = int32([0, keys - 5000, 2**20 - 3, 2**24 - 2048] * 2)
    ends = int32([keys, keys, 2**20 + 9000, 2**24 + 9000] * 2)
    scores = dsa.fp8_mqa_logits(q, kv, weights, starts, ends, clean_logits=False, **options)
    expected = dsa.topk_indices(scores, 2048, starts=starts, lengths=ends - starts)
    assert torch.equal(dsa.indexer_select(q, kv, weights, starts, ends, 2048, **options), expected)


@accumulated
@pytest.mark.parametrize("keys", [7000, 40000])
def test_a_graph_takes_new_ranges_and_scores(keys, accumulators):
    """Also scores whose lists overflow, of which the capture knew nothing, and such that do not, behind these."""
    (q, (k, scale), weights), options, dense = inputs(200, keys), {"accumulators": accumulators}, [1.0, 0.001] * 3

    def renew():
        middle = keys // 2
        starts, ends = (int32(torch.randint(low, low + middle, (200,))) for low in (0, middle))
        scale = torch.rand(keys) * (torch.rand(keys) < dense.pop())
        return starts, ends, scale.cuda(), torch.randn_like(weights)

    def select(starts, ends, scale, weights):
        return dsa.indexer_select(q, (k, scale), weights, starts, ends, 300, **options)

    given = starts, ends, scale, weights = renew()
    for got in replays(select, given, renew, times=4):
        scores = dsa.fp8_mqa_logits(q, (k, scale), weights, starts, ends, **options)
        assert torch.equal(got, dsa.topk_indices(scores, 300, starts=starts, lengths=ends - starts))


@accumulated
def test_twenty_runs_are_identical(accumulators):
    arguments = (*inputs(500, 30000), int32([0] * 500), int32(range(29500, 30000)), 2048)
    assert_runs_have_the_same_bits(dsa.indexer_select, *arguments, accumulators=accumulators)


@pytest.mark.parametrize("keys", [TWO_OPS_KEYS, 40000, 131072])
def test_memory_beside_the_results(keys):
    arguments = (*inputs(2048, keys), int32([0] * 2048), int32([keys] * 2048), 2048)
    got = dsa.indexer_select(*arguments)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = dsa.indexer_select(*arguments)
    assert torch.cuda.max_memory_allocated() - before <= got.nbytes + 2048 * 33 * 1024
