"""The paged index-score kernel and its plan against the references, both on the GPU."""

import pytest
import torch

import dsa
from dsa.reference.indexer import fp8_paged_mqa_logits as reference
from dsa.testing import poison_free_memory
from tests.gpu.indexer.paged_keys import PagedKeys, int32
from tests.gpu.indexer.score_bounds import check_scores, magnitudes
from tests.gpu.op_checks import assert_runs_have_the_same_bits, captured, far_apart

HALF = {"accumulators": torch.float16}
# Queries of a sequence, accumulators: with one or two queries fp16 is not taken.
KINDS = [*((n, torch.float32) for n in (1, 2, 3, 4)), (3, torch.float16), (4, torch.float16)]
of_every_kind = pytest.mark.parametrize(("next_n", "accumulators"), KINDS, ids=str)


def terms(q, cache, weights, *rest):
    """Sums of |terms|, with -inf where no key is seen."""
    keys = cache.shape[1] * q.shape[3]  # bytes of a page's keys, before their scales
    cache = cache.clone(memory_format=torch.contiguous_format)
    cache.view(len(cache), -1)[:, :keys] &= 0x7F
    return reference.fp8_paged_mqa_logits(magnitudes(q), cache, weights.abs(), *rest)


class Case(PagedKeys):
    def arguments(self, columns, lengths=None):
        lengths = self.lengths if lengths is None else lengths
        plan = dsa.get_paged_mqa_logits_metadata(lengths, self.cache.shape[1], dsa.num_sms("cuda"))
        return self.q, self.cache, self.weights, lengths, self.table, plan, columns

    def scores(self, columns, lengths=None, **options):
        return dsa.fp8_paged_mqa_logits(*self.arguments(columns, lengths), clean_logits=True, **options)

    def check(self, record_error=None, columns=None, lengths=None, clean=True, dtype=torch.float32, **options):
        columns = columns or max(1, int(self.lengths.max()))
        arguments = self.arguments(columns, lengths)
        poison_free_memory(mebibytes=64)
        got = dsa.fp8_paged_mqa_logits(*arguments, clean, dtype, **options)
        expected = reference.fp8_paged_mqa_logits(*arguments, True, dtype)
        assert got.shape == expected.shape and got.stride() == expected.stride() and got.dtype == dtype
        if clean:
            assert torch.equal(got == -torch.inf, expected == -torch.inf)
        else:
            got = torch.where(expected == -torch.inf, -torch.inf, got)
        diff = check_scores(got, expected, terms(*arguments), options.get("accumulators", torch.float32))
        if record_error:
            record_error(diff)


@of_every_kind
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_every_shape(heads, dim, next_n, accumulators, record_error):
    case = Case([0, 1, 63, 64, 65, 257, 1000, 0, 0, 5, 4097, 2], next_n, heads, dim)
    case.check(record_error, accumulators=accumulators)
    case.check(record_error, columns=5000, clean=False, accumulators=accumulators)


def test_one_page_in_the_place_of_many():
    """Pages with a stride of 0."""
    case = Case([130, 0, 64, 1000], 1, 64, 128)
    case.cache = case.cache[int(case.table[2, 0]) :][:1].expand_as(case.cache)
    case.check()


@of_every_kind
@pytest.mark.parametrize("page_size", [32, 64])
def test_small_pages_and_bfloat16_results(page_size, next_n, accumulators, record_error):
    for heads, dim in ((64, 128), (8, 32)):
        case = Case([0, 31, 32, 33, 96, 1000, 3000], next_n, heads, dim, page_size)
        case.check(record_error, columns=3500, accumulators=accumulators)
        case.check(columns=3501, dtype=torch.bfloat16, accumulators=accumulators)


@of_every_kind
def test_a_length_for_every_query(next_n, accumulators, record_error):
    case = Case([5, 700, 64, 1, 300], next_n)
    lengths = torch.stack([int32([0, 300, 64, 1, 7]), *[case.lengths] * (next_n - 1)], 1)
    case.check(record_error, lengths=lengths, columns=800, accumulators=accumulators)
    wide = torch.full((5, 9), 7, dtype=torch.int32, device="cuda")
    wide[:, :next_n] = lengths
    case.check(lengths=wide[:, :next_n], accumulators=accumulators)


@pytest.mark.parametrize(
    ("next_n", "heads", "accumulators"), [(2, 32, torch.float32), (3, 64, torch.float16), (4, 64, torch.float16)]
)
@pytest.mark.parametrize("batch", [1, 31, 33, 700, 4096])
def test_many_sequences(batch, next_n, heads, accumulators, record_error):
    """Many work tiles a CTA; with fp16, each brings its queries into range while other tiles end."""
    lengths = torch.randint(0, 600, (batch,))
    lengths[torch.rand(batch) < 0.5] = 0
    Case(lengths.tolist(), next_n, heads, 64).check(record_error, columns=640, accumulators=accumulators)


def test_long_contexts(record_error):
    Case([1 << 20]).check(record_error)
    Case([1 << 20, 3, 1 << 18], 2, 8, 32).check(record_error)
    Case([1 << 18, 3, 1 << 16], 4).check(record_error, **HALF)


def test_all_lengths_zero():
    for clean in (True, False):
        Case([0] * 5, 2).check(clean=clean, columns=100)
    case = Case([0] * 3)
    case.lengths.fill_(-7)
    case.check(columns=100)


def test_columns_fewer_than_keys_and_a_table_too_short():
    case = Case([1000, 500, 70], 2)
    case.check(columns=333)
    case.table = case.table[:, :3].clone()
    case.check(columns=900)
    case.table = case.table[:, :1]
    case.check(columns=900)


def test_pages_outside_the_cache_score_minus_infinity():
    for page_size in (32, 64):
        case = Case([1000, 500], 2, page_size=page_size)
        for index, page in ((0, -1), (3, len(case.cache)), (6, 2**31 - 1), (7, -(2**31))):
            case.table[0, index] = page
        case.check()


def test_a_schedule_that_makes_no_sense_does_no_harm():
    case = Case([1000, 500, 0, 70], 2)
    arguments = list(case.arguments(1000))
    for low, high in ((-5, 8), (-(2**31), 2**31 - 1), (2**29, 2**30)):
        arguments[5] = torch.randint(low, high, (200, 2), device="cuda", dtype=torch.int32)
        got = dsa.fp8_paged_mqa_logits(*arguments, clean_logits=True)
        assert got.shape == (8, 1000) and (got[4:6] == -torch.inf).all()
    case.check()


def test_cache_beyond_2_to_31_bytes():
    case = Case([3000, 1000], 1)
    case.cache = far_apart(case.cache)
    case.check()


def test_result_beyond_2_to_31_scores():
    case = Case([900] * 600)
    case.table = case.table[:, :15]
    got = dsa.fp8_paged_mqa_logits(*case.arguments(1 << 22))
    few = case.arguments(1000)
    expected = reference.fp8_paged_mqa_logits(*few)
    check_scores(got[:, :900], expected[:, :900], terms(*few)[:, :900])


def test_strided_weights_and_one_page():
    case = Case([60, 7, 64, 1], spare_pages=0)
    for columns in (3 * 64, 3 * 64 + 1):
        case.weights = torch.randn(4, columns, device="cuda")[:, 64:128]
        case.check()
    Case([50], spare_pages=0).check()


@of_every_kind
def test_what_is_not_finite_stays_where_it_is(next_n, accumulators):
    """In the columns of a sequence's keys, and in a query's row."""
    case = Case([200] * 5, next_n)
    lengths = case.lengths[:, None].expand(-1, next_n).contiguous()
    finite = case.scores(200, lengths, accumulators=accumulators).clone()
    raw, page = case.cache.view(len(case.cache), -1), case.table[0].tolist()
    raw[page[1], 13 * 128] = 0x7F  # key 77 of sequence 0
    raw[page[2], 64 * 128 + 4 * 22 : 64 * 128 + 4 * 23] = 0xFF  # the scale of its key 150
    case.q.view(torch.uint8)[2, -1, 3, 5] = 0x7F
    of_nan, zero, infinite = 3 * next_n - 1, next_n, 4 * next_n
    case.weights[zero], case.weights[infinite, 7] = 0, torch.inf
    got = case.scores(200, lengths, accumulators=accumulators)
    own = got[:next_n]
    assert own.isnan().any(0).nonzero()[:, 0].tolist() == [77, 150] and own[:, [77, 150]].isnan().all()
    assert got[of_nan].isnan().all() and not got[infinite].isfinite().any() and not got[zero].any()
    keys = [s for s in range(200) if s not in (77, 150)]
    rows = [r for r in range(5 * next_n) if r not in (of_nan, zero, infinite)]
    assert torch.equal(got[rows][:, keys], finite[rows][:, keys])


@of_every_kind
def test_twenty_runs_are_identical_and_any_plan_gives_the_same(next_n, accumulators):
    case, options = Case([5000, 1, 0, 777, 64], next_n), {"clean_logits": True, "accumulators": accumulators}
    assert_runs_have_the_same_bits(case.scores, 5000, accumulators=accumulators)
    first, arguments = case.scores(5000, accumulators=accumulators), case.arguments(5000)[:5]
    plans = [dsa.get_paged_mqa_logits_metadata(case.lengths, 64, sms) for sms in (1, 7, 500)]
    for plan in (*plans, None):
        assert torch.equal(first, dsa.fp8_paged_mqa_logits(*arguments, plan, 5000, **options))


@pytest.mark.parametrize(
    ("batch", "length", "heads", "next_n", "accumulators"),
    [
        *((128, 20000, 64, 1, torch.float32), (64, 20000, 64, 2, torch.float32), (1024, 1500, 32, 1, torch.float32)),
        *((64, 20000, 64, 4, torch.float16), (512, 1500, 64, 4, torch.float16), (64, 20000, 64, 3, torch.float16)),
    ],
)
def test_long_runs_at_full_bandwidth(batch, length, heads, next_n, accumulators):
    """Hundreds of tiles a warpgroup with loads that overtake each other: what wraps the rings, and once broke them."""
    case = Case(torch.randint(length // 2, length, (batch,)).tolist(), next_n, heads)
    arguments, options = case.arguments(length), {"clean_logits": True, "accumulators": accumulators}
    first = dsa.fp8_paged_mqa_logits(*arguments, **options)
    for _ in range(300):
        got = dsa.fp8_paged_mqa_logits(*arguments, **options)
    assert torch.equal(first, got)
    check_scores(first, reference.fp8_paged_mqa_logits(*arguments), terms(*arguments), accumulators)


@of_every_kind
def test_a_sequence_does_not_depend_on_the_batch(next_n, accumulators):
    case, options = Case([300, 1000, 5], next_n), {"clean_logits": True, "accumulators": accumulators}
    before = case.q.view(torch.uint8).clone()
    whole = case.scores(1000, accumulators=accumulators)
    q, cache, weights, lengths, table, *_ = case.arguments(1000)
    own = slice(next_n, 2 * next_n)
    alone = dsa.fp8_paged_mqa_logits(q[1:2], cache, weights[own], lengths[1:2], table[1:2], None, 1000, **options)
    assert torch.equal(whole[own], alone) and torch.equal(case.q.view(torch.uint8), before)


@pytest.mark.parametrize(("next_n", "accumulators"), [KINDS[0], *KINDS[-2:]], ids=str)
def test_agrees_with_contiguous_keys(next_n, accumulators):
    """The same keys through fp8_mqa_logits: the same bits."""
    case, options = Case([1000], next_n), {"accumulators": accumulators}
    slots = (case.table[0, :16].long()[:, None] * 64 + torch.arange(64, device="cuda")).view(-1)[:1000]
    kv, lengths = dsa.read_indexer_cache(case.cache, slots), int32([[1000] * next_n])
    straight = dsa.fp8_mqa_logits(case.q[0], kv, case.weights, lengths[0] * 0, lengths[0], **options)
    assert torch.equal(case.scores(1000, lengths, **options), straight)


@pytest.mark.parametrize("next_n", [3, 4])
def test_half_scores_of_rows_of_any_size(next_n):
    """Every head's queries and every row's weights have a size of their own: none is scaled by another's factor."""
    case = Case([500, 70], next_n)
    powers = torch.exp2(torch.randint(-5, 8, (2, next_n, 64, 1), device="cuda").float())
    case.q = (torch.randn(2, next_n, 64, 128, device="cuda").clamp(-1.7, 1.7) * powers).to(torch.float8_e4m3fn)
    case.weights = torch.randn(2 * next_n, 64, device="cuda") * (powers.view(2 * next_n, 64).square() + 1).rsqrt()
    case.weights *= 10.0 ** torch.arange(-3, 2 * next_n - 3, device="cuda")[:, None]
    got, expected = case.scores(500, **HALF), reference.fp8_paged_mqa_logits(*case.arguments(500), True)
    assert torch.equal(got == -torch.inf, expected == -torch.inf)
    for row, own, of_terms in zip(got, expected, terms(*case.arguments(500)), strict=True):
        check_scores(row, own, of_terms, torch.float16)


@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e20])
def test_half_scores_of_the_largest_numbers(factor):
    """Products of 2.6e7, whose sums over heads all have one sign: nothing overflows."""
    case = Case([500, 64], 4)
    case.q = torch.full((2, 4, 64, 128), 448.0, device="cuda").to(torch.float8_e4m3fn)
    signs = torch.where(torch.rand(len(case.cache), 64, 1, device="cuda") < 0.5, 448.0, -448.0).expand(-1, -1, 128)
    case.cache.view(len(case.cache), -1)[:, : 64 * 128] = signs.to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    case.weights = torch.rand(8, 64, device="cuda") * factor
    case.check(**HALF)


@pytest.mark.parametrize("next_n", [1, 2])
def test_fewer_queries_have_fp32_accumulators(next_n):
    case = Case([1000, 77], next_n)
    assert torch.equal(case.scores(1000, **HALF), case.scores(1000))


@of_every_kind
@pytest.mark.parametrize("each", [False, True])
def test_graph_replay_with_new_lengths(each, next_n, accumulators):
    """A length for each sequence, or for each query."""
    case = Case([2000] * 9, next_n)
    lengths = case.lengths[:, None].expand(-1, next_n).contiguous() if each else case.lengths
    graph, got = captured(case.scores, 2000, lengths, accumulators=accumulators)
    for _ in range(5):
        lengths.copy_(torch.randint(0, 2001, lengths.shape) * (torch.rand(lengths.shape) < 0.8))
        graph.replay()
        arguments = case.arguments(2000, lengths)
        expected = reference.fp8_paged_mqa_logits(*arguments, True)
        check_scores(got, expected, terms(*arguments), accumulators)
    lengths.zero_()
    graph.replay()
    assert (got == -torch.inf).all()


@pytest.mark.parametrize("sms", [1, 2, 78, 132, 2000])
def test_metadata(sms):
    for batch in (0, 1, 2, 31, 1000, 1024, 1025, 5000):
        for columns in (None, 1, 4):
            shape = (batch,) if columns is None else (batch, columns)
            lengths = torch.randint(-50, 3000, shape, device="cuda", dtype=torch.int32)
            lengths[torch.rand(shape, device="cuda") < 0.4] = 0
            for case in (lengths, torch.zeros_like(lengths), lengths.clamp_max(257), lengths * 2**22 - 1):
                got = dsa.get_paged_mqa_logits_metadata(case, 64, sms)
                assert torch.equal(got, reference.get_paged_mqa_logits_metadata(case, 64, sms))
    strided = torch.arange(600, dtype=torch.int32, device="cuda").view(300, 2)
    for case in (strided[:, 0], strided[:, 1:]):
        got = dsa.get_paged_mqa_logits_metadata(case, 64, sms)
        assert torch.equal(got, reference.get_paged_mqa_logits_metadata(case.contiguous(), 64, sms))
