"""Paged index scores and plans: every variant, lengths and pages of any numbers, NaN, 64-bit offsets, fp16."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.indexer import OF_TERMS, check_scores, paged_scores
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_runs_have_the_same_bits, captured, far_apart

PLAN, CASE = cases_of("fp8_paged_mqa_logits")
HALF = {"accumulators": torch.float16}
# Queries per sequence and accumulators: with one or two queries the op does not use fp16.
KINDS = [*((n, torch.float32) for n in (1, 2, 3, 4)), (3, torch.float16), (4, torch.float16)]
of_every_kind = pytest.mark.parametrize(("next_n", "accumulators"), KINDS, ids=str)


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def arguments(lengths, next_n=1, **sizes):
    columns = max(1, *lengths)
    sizes = {"heads": 64, "dim": 128, "page_size": 64, "columns": columns, "accumulators": torch.float32, **sizes}
    return CASE.arguments("cuda", lengths=lengths, next_n=next_n, num_sms=dsa.num_sms("cuda"), **sizes)


def with_lengths(given, lengths):
    plan = dsa.get_paged_mqa_logits_metadata(lengths, given["kv_cache"].shape[1], dsa.num_sms("cuda"))
    return given | {"context_lens": lengths, "schedule_meta": plan}


def check(given, record_error=None):
    poison_free_memory(mebibytes=64)
    error = CASE.check(given, CASE.run(given))
    if record_error:
        record_error(error)


@of_every_kind
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_every_shape(heads, dim, next_n, accumulators, record_error):
    lengths = [0, 1, 63, 64, 65, 257, 1000, 0, 0, 5, 4097, 2]
    given = arguments(lengths, next_n, heads=heads, dim=dim, accumulators=accumulators)
    check(given, record_error)
    check(given | {"max_context_len": 5000, "clean_logits": False}, record_error)


@of_every_kind
@pytest.mark.parametrize("page_size", [32, 64])
def test_small_pages_and_bfloat16_results(page_size, next_n, accumulators, record_error):
    for heads, dim in ((64, 128), (8, 32)):
        sizes = {"heads": heads, "dim": dim, "page_size": page_size, "accumulators": accumulators, "columns": 3500}
        given = arguments([0, 31, 32, 33, 96, 1000, 3000], next_n, **sizes)
        check(given, record_error)
        check(given | {"max_context_len": 3501, "logits_dtype": torch.bfloat16})


@of_every_kind
def test_a_length_for_every_query(next_n, accumulators, record_error):
    given = arguments([5, 700, 64, 1, 300], next_n, columns=800, accumulators=accumulators)
    lengths = torch.stack([int32([0, 300, 64, 1, 7]), *[given["context_lens"]] * (next_n - 1)], 1)
    check(with_lengths(given, lengths), record_error)
    wide = torch.full((5, 9), 7, dtype=torch.int32, device="cuda")
    wide[:, :next_n] = lengths
    check(with_lengths(given, wide[:, :next_n]))


@pytest.mark.parametrize(
    ("next_n", "heads", "accumulators"), [(2, 32, torch.float32), (3, 64, torch.float16), (4, 64, torch.float16)]
)
@pytest.mark.parametrize("batch", [1, 31, 33, 700, 4096])
def test_many_sequences(batch, next_n, heads, accumulators, record_error):
    """Each CTA has many work tiles. With fp16 it scales the queries of one while others end."""
    lengths = torch.randint(0, 600, (batch,)) * (torch.rand(batch) < 0.5)
    sizes = {"heads": heads, "dim": 64, "columns": 640, "accumulators": accumulators}
    check(arguments(lengths.tolist(), next_n, **sizes), record_error)


@pytest.mark.parametrize(
    ("lengths", "next_n", "sizes"),
    [
        ([1 << 20], 1, {}),
        ([1 << 20, 3, 1 << 18], 2, {"heads": 8, "dim": 32}),
        ([1 << 18, 3, 1 << 16], 4, HALF),
    ],
    ids=str,
)
def test_long_contexts(lengths, next_n, sizes, record_error):
    check(arguments(lengths, next_n, **sizes), record_error)


def test_lengths_of_zero_and_less():
    for clean in (True, False):
        check(arguments([0] * 5, 2, columns=100, clean_logits=clean))
    check(with_lengths(arguments([0] * 3, columns=100), int32([-7] * 3)))


def test_columns_fewer_than_keys_and_a_table_too_short():
    given = arguments([1000, 500, 70], 2, columns=333)
    check(given)
    for pages in (3, 1):
        check(given | {"block_table": given["block_table"][:, :pages].clone(), "max_context_len": 900})


@pytest.mark.parametrize("page_size", [32, 64])
def test_pages_outside_the_cache_score_minus_infinity(page_size):
    given = arguments([1000, 500], 2, page_size=page_size)
    for index, page in ((0, -1), (3, len(given["kv_cache"])), (6, 2**31 - 1), (7, -(2**31))):
        given["block_table"][0, index] = page
    check(given)


def test_an_arbitrary_plan_does_no_harm():
    given = arguments([1000, 500, 0, 70], 2)
    for low, high in ((-5, 8), (-(2**31), 2**31 - 1), (2**29, 2**30)):
        plan = torch.randint(low, high, (200, 2), device="cuda", dtype=torch.int32)
        got = dsa.fp8_paged_mqa_logits(**given | {"schedule_meta": plan})
        assert got.shape == (8, 1000) and (got[4:6] == -torch.inf).all()
    check(given)


def test_strides():
    """Pages with a stride of 0 and pages 2^32 bytes apart, strided weights, a cache of one page."""
    given = arguments([130, 0, 64, 1000])
    cache, full = given["kv_cache"], int(given["block_table"][2, 0])
    check(given | {"kv_cache": cache[full : full + 1].expand_as(cache)})
    check(given | {"kv_cache": far_apart(cache)})
    for columns in (3 * 64, 3 * 64 + 1):
        check(given | {"weights": torch.randn(4, columns, device="cuda")[:, 64:128]})
    check(arguments([50], spare_pages=0))


def test_result_beyond_2_to_31_scores():
    given = arguments([900] * 600, clean_logits=False)
    got = dsa.fp8_paged_mqa_logits(**given | {"max_context_len": 1 << 22})
    CASE.check(given, [got[:, :900]])


@of_every_kind
def test_what_is_not_finite_stays_where_it_is(next_n, accumulators):
    """It stays in the columns of a sequence's keys, and in a query's row."""
    given = arguments([200] * 5, next_n, accumulators=accumulators)
    given = with_lengths(given, given["context_lens"][:, None].expand(-1, next_n).contiguous())
    cache, weights = given["kv_cache"], given["weights"]
    finite = dsa.fp8_paged_mqa_logits(**given).clone()
    raw, page = cache.view(len(cache), -1), given["block_table"][0].tolist()
    raw[page[1], 13 * 128] = 0x7F  # key 77 of sequence 0
    raw[page[2], 64 * 128 + 4 * 22 : 64 * 128 + 4 * 23] = 0xFF  # the scale of its key 150
    given["q"].view(torch.uint8)[2, -1, 3, 5] = 0x7F
    of_nan, zero, infinite = 3 * next_n - 1, next_n, 4 * next_n
    weights[zero], weights[infinite, 7] = 0, torch.inf
    got = dsa.fp8_paged_mqa_logits(**given)
    own = got[:next_n]
    assert own.isnan().any(0).nonzero()[:, 0].tolist() == [77, 150] and own[:, [77, 150]].isnan().all()
    assert got[of_nan].isnan().all() and not got[infinite].isfinite().any() and not got[zero].any()
    keys = [s for s in range(200) if s not in (77, 150)]
    rows = [r for r in range(5 * next_n) if r not in (of_nan, zero, infinite)]
    assert torch.equal(got[rows][:, keys], finite[rows][:, keys])


@of_every_kind
def test_twenty_runs_and_all_plans_give_the_same_bits(next_n, accumulators):
    given = arguments([5000, 1, 0, 777, 64], next_n, accumulators=accumulators)
    assert_runs_have_the_same_bits(dsa.fp8_paged_mqa_logits, **given)
    first = dsa.fp8_paged_mqa_logits(**given)
    plans = [dsa.get_paged_mqa_logits_metadata(given["context_lens"], 64, sms) for sms in (1, 7, 500)]
    for plan in (*plans, None):
        assert torch.equal(first, dsa.fp8_paged_mqa_logits(**given | {"schedule_meta": plan}))


@pytest.mark.parametrize(
    ("batch", "length", "heads", "next_n", "accumulators"),
    [
        *((128, 20000, 64, 1, torch.float32), (64, 20000, 64, 2, torch.float32), (1024, 1500, 32, 1, torch.float32)),
        *((64, 20000, 64, 4, torch.float16), (512, 1500, 64, 4, torch.float16), (64, 20000, 64, 3, torch.float16)),
    ],
)
def test_long_runs_at_full_bandwidth(batch, length, heads, next_n, accumulators):
    """A warpgroup has hundreds of tiles, and its loads overtake each other: the rings wrap. This once broke them."""
    lengths = torch.randint(length // 2, length, (batch,)).tolist()
    given = arguments(lengths, next_n, heads=heads, columns=length, accumulators=accumulators)
    first = dsa.fp8_paged_mqa_logits(**given)
    for _ in range(300):
        got = dsa.fp8_paged_mqa_logits(**given)
    assert torch.equal(first, got)
    CASE.check(given, [first])


@of_every_kind
def test_a_sequence_does_not_depend_on_the_batch(next_n, accumulators):
    given = arguments([300, 1000, 5], next_n, accumulators=accumulators)
    before, own = given["q"].view(torch.uint8).clone(), slice(next_n, 2 * next_n)
    alone = {name: given[name][1:2] for name in ("q", "context_lens", "block_table")}
    alone |= {"weights": given["weights"][own], "schedule_meta": None}
    whole, got = dsa.fp8_paged_mqa_logits(**given), dsa.fp8_paged_mqa_logits(**given | alone)
    assert torch.equal(whole[own], got) and torch.equal(given["q"].view(torch.uint8), before)


@pytest.mark.parametrize(("next_n", "accumulators"), [KINDS[0], *KINDS[-2:]], ids=str)
def test_contiguous_keys_have_the_same_bits(next_n, accumulators):
    given = with_lengths(arguments([1000], next_n, accumulators=accumulators), int32([[1000] * next_n]))
    slots = (given["block_table"][0, :16].long()[:, None] * 64 + torch.arange(64, device="cuda")).view(-1)[:1000]
    kv, ends = dsa.read_indexer_cache(given["kv_cache"], slots), given["context_lens"][0]
    straight = dsa.fp8_mqa_logits(given["q"][0], kv, given["weights"], ends * 0, ends, accumulators=accumulators)
    assert torch.equal(dsa.fp8_paged_mqa_logits(**given), straight)


@pytest.mark.parametrize("next_n", [3, 4])
def test_fp16_accumulation_of_rows_of_any_size(next_n):
    """Queries of each head and weights of each row differ in size: none is scaled by another's factor."""
    given = arguments([500, 70], next_n, **HALF)
    powers = torch.exp2(torch.randint(-5, 8, (2, next_n, 64, 1), device="cuda").float())
    q = torch.randn(2, next_n, 64, 128, device="cuda").clamp(-1.7, 1.7) * powers
    weights = given["weights"] * (powers.view(2 * next_n, 64).square() + 1).rsqrt()
    weights *= 10.0 ** torch.arange(-3, 2 * next_n - 3, device="cuda")[:, None]
    given |= {"q": q.to(torch.float8_e4m3fn), "weights": weights}
    for row in zip(dsa.fp8_paged_mqa_logits(**given), *paged_scores(given), strict=True):
        check_scores(*row, OF_TERMS[torch.float16])


@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e20])
def test_fp16_accumulation_of_the_largest_numbers(factor):
    """Products are 2.6e7, and their sums over heads all have one sign: nothing overflows."""
    given = arguments([500, 64], 4, **HALF)
    cache, e4m3 = given["kv_cache"], torch.float8_e4m3fn
    signs = torch.where(torch.rand(len(cache), 64, 1, device="cuda") < 0.5, 448.0, -448.0).expand(-1, -1, 128)
    cache.view(len(cache), -1)[:, : 64 * 128] = signs.to(e4m3).view(torch.uint8).flatten(1)
    q = torch.full((2, 4, 64, 128), 448.0, device="cuda").to(e4m3)
    check(given | {"q": q, "weights": given["weights"].abs() * factor})


@pytest.mark.parametrize("next_n", [1, 2])
def test_fewer_queries_have_fp32_accumulators(next_n):
    given = arguments([1000, 77], next_n)
    assert torch.equal(dsa.fp8_paged_mqa_logits(**given | HALF), dsa.fp8_paged_mqa_logits(**given))


@of_every_kind
@pytest.mark.parametrize("per_query", [False, True])
def test_a_graph_plans_again_for_new_lengths(per_query, next_n, accumulators):
    given = arguments([2000] * 9, next_n, per_query=per_query, accumulators=accumulators) | {"schedule_meta": None}
    lengths = given["context_lens"]
    graph, got = captured(dsa.fp8_paged_mqa_logits, **given)
    for _ in range(5):
        lengths.copy_(torch.randint(0, 2001, lengths.shape) * (torch.rand(lengths.shape) < 0.8))
        graph.replay()
        CASE.check(given, [got])
    lengths.zero_()
    graph.replay()
    assert (got == -torch.inf).all()


@pytest.mark.parametrize("sms", [1, 2, 78, 132, 2000])
def test_plans(sms):
    for batch in (1, 2, 31, 1000, 1024, 1025, 5000):
        for next_n in (0, 1, 4):
            given = PLAN.arguments("cuda", batch=batch, next_n=next_n, block_kv=64, num_sms=sms)
            x = given["context_lens"]
            for lengths in (x, x * 0, x.clamp_max(257), x * 2**22 - 1, x[:0]):
                own = given | {"context_lens": lengths}
                PLAN.check(own, PLAN.run(own))
    strided = torch.arange(600, dtype=torch.int32, device="cuda").view(300, 2)
    for lengths in (strided[:, 0], strided[:, 1:]):
        own = given | {"context_lens": lengths}
        PLAN.check(own, PLAN.run(own))
