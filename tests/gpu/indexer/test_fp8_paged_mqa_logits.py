"""fp8_paged_mqa_logits and get_paged_mqa_logits_metadata (its plans) on the GPU: the shared tests with many options,
non-finite numbers, fp16 accumulation, results of more than 2^31 elements, and long runs."""

from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.indexer import OF_TERMS, check_scores, paged_scores
from dsa.testing import poison_free_memory
from tests.gpu.attention import int32
from tests.gpu.indexer.scored_keys import FP16, FP32, KINDS, KeysInPages, Op, by_kind
from tests.gpu.op_checks import assert_runs_have_the_same_bits

PLAN, CASE = cases_of("fp8_paged_mqa_logits")
OP = Op(CASE, CASE.check)
OPTIONS = [
    {},
    {"max_context_len": 5000, "clean_logits": False},
    {"max_context_len": 3501, "logits_dtype": torch.bfloat16},
]
E4M3 = torch.float8_e4m3fn
LONG_RUNS = [
    *((128, 20000, 64, (1, FP32)), (64, 20000, 64, (2, FP32)), (1024, 1500, 32, (1, FP32))),
    *((64, 20000, 64, (4, FP16)), (512, 1500, 64, (4, FP16)), (64, 20000, 64, (3, FP16))),
]


@pytest.fixture(params=OPTIONS, ids=str)
def op(request):
    return Op(CASE, CASE.check, request.param)


class TestKeysInPages(KeysInPages):
    """Run the shared tests with every entry of OPTIONS."""


def test_scores_beyond_2_to_the_31():
    given = OP.pages((900,) * 600, KINDS[0], clean_logits=False)
    got = dsa.fp8_paged_mqa_logits(**given | {"max_context_len": 1 << 22})
    CASE.check(given, [got[:, :900]])


@by_kind
def test_what_is_not_finite_stays_where_it_is(kind):
    given, next_n = OP.pages((200,) * 5, kind), kind[0]
    given["context_lens"] = int32([[200] * next_n] * 5)
    cache, weights = given["kv_cache"], given["weights"]
    finite = dsa.fp8_paged_mqa_logits(**given).clone()
    raw, page = cache.view(len(cache), -1), given["block_table"][0].tolist()
    raw[page[1], 13 * 128] = 0x7F  # key 77 of sequence 0
    raw[page[2], 64 * 128 + 4 * 22 : 64 * 128 + 4 * 23] = 0xFF  # the scale of key 150 of sequence 0
    given["q"].view(torch.uint8)[2, -1, 3, 5] = 0x7F
    of_nan, zero, infinite = 3 * next_n - 1, next_n, 4 * next_n
    weights[zero], weights[infinite, 7] = 0, torch.inf
    got = dsa.fp8_paged_mqa_logits(**given)
    wrong = ~got.isfinite()
    expected = torch.zeros_like(wrong)
    expected[:next_n, [77, 150]] = expected[[of_nan, infinite]] = True
    assert torch.equal(wrong, expected) and not got[zero].any()
    assert got[:next_n, [77, 150]].isnan().all() and got[of_nan].isnan().all()
    expected[zero] = True
    assert torch.equal(got[~expected], finite[~expected])


@by_kind
def test_twenty_runs_and_all_plans_give_the_same_bits(kind):
    given = OP.pages((5000, 1, 0, 777, 64), kind)
    assert_runs_have_the_same_bits(dsa.fp8_paged_mqa_logits, **given)
    first = dsa.fp8_paged_mqa_logits(**given)
    for sms in (1, 7, dsa.num_sms("cuda"), 500):
        plan = dsa.get_paged_mqa_logits_metadata(given["context_lens"], 64, sms)
        assert torch.equal(first, dsa.fp8_paged_mqa_logits(**given | {"schedule_meta": plan}))


@pytest.mark.parametrize(("batch", "length", "heads", "kind"), LONG_RUNS)
def test_long_runs_at_full_bandwidth(batch, length, heads, kind):
    """A warpgroup has hundreds of tiles, so the ring buffers wrap around many times, and loads complete out of order.
    An earlier kernel gave wrong scores in calls of this kind only."""
    lengths = torch.randint(length // 2, length, (batch,)).tolist()
    given = OP.pages(lengths, kind, heads=heads, num_sms=dsa.num_sms("cuda"))
    first = dsa.fp8_paged_mqa_logits(**given)
    for _ in range(300):
        got = dsa.fp8_paged_mqa_logits(**given)
    assert torch.equal(first, got)
    CASE.check(given, [first])


@by_kind
def test_a_sequence_does_not_depend_on_the_batch(kind):
    given, own = OP.pages((300, 1000, 5), kind), slice(kind[0], 2 * kind[0])
    alone = {name: given[name][1:2] for name in ("q", "context_lens", "block_table")} | {
        "weights": given["weights"][own]
    }
    whole, got = dsa.fp8_paged_mqa_logits(**given), dsa.fp8_paged_mqa_logits(**given | alone)
    assert torch.equal(whole[own], got)


@pytest.mark.parametrize("kind", [KINDS[0], *KINDS[-2:]], ids=str)
def test_contiguous_keys_have_the_same_bits(kind):
    given, (next_n, accumulators) = OP.pages((1000,), kind), kind
    given["context_lens"] = int32([[1000] * next_n])
    slots = (given["block_table"][0, :16].long()[:, None] * 64 + torch.arange(64, device="cuda")).view(-1)[:1000]
    kv, ends = dsa.read_indexer_cache(given["kv_cache"], slots), given["context_lens"][0]
    straight = dsa.fp8_mqa_logits(given["q"][0], kv, given["weights"], ends * 0, ends, accumulators=accumulators)
    assert torch.equal(dsa.fp8_paged_mqa_logits(**given), straight)


@pytest.mark.parametrize("next_n", [3, 4])
def test_fp16_accumulation_of_rows_of_any_size(next_n):
    """Queries vary in size from head to head, and weights from row to row. The fp16 factor by which the kernel scales a
    row would give wrong scores in another row."""
    given = OP.pages((500, 70), (next_n, FP16))
    powers = torch.exp2(torch.randint(-5, 8, (2, next_n, 64, 1), device="cuda").float())
    q = torch.randn(2, next_n, 64, 128, device="cuda").clamp(-1.7, 1.7) * powers
    weights = given["weights"] * (powers.view(2 * next_n, 64).square() + 1).rsqrt()
    weights *= 10.0 ** torch.arange(-3, 2 * next_n - 3, device="cuda")[:, None]
    given |= {"q": q.to(E4M3), "weights": weights}
    for row in zip(dsa.fp8_paged_mqa_logits(**given), *paged_scores(given), strict=True):
        check_scores(*row, OF_TERMS[FP16])


@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e20])
def test_fp16_accumulation_of_the_largest_numbers(factor):
    """Products q . k are up to 448^2 * 128, and all terms of a score have the same sign. The kernel must scale q and
    the weights so that no fp16 sum overflows."""
    given = OP.pages((500, 64), (4, FP16))
    cache = given["kv_cache"].view(len(given["kv_cache"]), -1)
    signs = torch.where(torch.rand(len(cache), 64, 1, device="cuda") < 0.5, 448.0, -448.0).expand(-1, -1, 128)
    cache[:, : 64 * 128] = signs.to(E4M3).view(torch.uint8).flatten(1)
    q = torch.full(given["q"].shape, 448.0, device="cuda").to(E4M3)
    OP.verify(given, q=q, weights=given["weights"].abs() * factor)


@pytest.mark.parametrize("next_n", [1, 2])
def test_fewer_queries_have_fp32_accumulators(next_n):
    half, whole = (CASE.run(OP.pages((1000, 77), (next_n, x)))[0] for x in (FP16, FP32))
    assert torch.equal(half, whole)


@pytest.mark.parametrize("sms", [1, 2, 78, 132, 2000])
@pytest.mark.parametrize(("batch", "next_n"), [*product((1, 2, 31, 1000, 1024, 1025, 5000), (0, 1, 4))])
def test_plans_are_right(batch, next_n, sms):
    poison_free_memory(mebibytes=8)
    given = PLAN.arguments("cuda", batch=batch, next_n=next_n, block_kv=64, num_sms=sms)
    x = given["context_lens"]
    for lengths in (x, x * 0, x.clamp_max(257), x * 2**22 - 1, x[:0]):
        own = given | {"context_lens": lengths}
        PLAN.check(own, PLAN.run(own))
