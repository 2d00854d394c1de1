"""Index scores: every variant, ranges of any numbers, non-finite numbers, fp16 accumulation, 64-bit offsets."""

from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_runs_have_the_same_bits

CASE = cases_of("fp8_mqa_logits")[0]
HALF = {"accumulators": torch.float16}
PER_QUERY = ("q", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end")
accumulated = pytest.mark.parametrize("accumulators", [torch.float32, torch.float16], ids=str)


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def arguments(queries, keys, starts=0, ends=None, **sizes):
    """Bounds of all queries, or of each. By default a query sees all keys."""
    sizes = {"heads": 64, "dim": 128, "accumulators": torch.float32, **sizes}
    bounds = (int32(x).expand(queries).contiguous() for x in (starts, keys if ends is None else ends))
    found = CASE.arguments("cuda", queries=queries, keys=keys, **sizes)
    return found | dict(zip(PER_QUERY[2:], bounds))


def rows_of(given, rows):
    return given | {name: given[name][rows] for name in PER_QUERY}


def check(given):
    poison_free_memory(mebibytes=64)
    CASE.check(given, CASE.run(given))


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
    poison_free_memory(mebibytes=64)
    sizes = {"queries": 301, "keys": 1000, "window": 777, "heads": heads, "dim": dim}
    record_error(CASE.verify("cuda", **sizes, accumulators=accumulators, **options))


@accumulated
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 70000), (2, 63), (5, 64), (3, 65), (700, 129), (64, 5000)])
def test_random_ranges(queries, keys, clean, accumulators, record_error):
    """Ranges may be empty, unordered, disjoint inside one block of queries, and outside the keys."""
    options = {"clean_logits": clean, "accumulators": accumulators}
    for heads in (8, 64):
        poison_free_memory(mebibytes=64)
        record_error(CASE.verify("cuda", queries=queries, keys=keys, heads=heads, **options))


@pytest.mark.parametrize("columns", [0, 128])
def test_ranges_far_apart_in_one_block(columns):
    """The largest end of a block is far below its smallest start, and a block has a hole of many tiles."""
    starts, ends = [9000, 9100, 9200, 9300, 0, 9990, 0, 9990], [10, 20, 0, 64, 1, 10000, 5, 9991]
    check(arguments(8, 10000, starts, ends, max_seqlen_k=columns))


@pytest.mark.parametrize("columns", [0, 500])
def test_packed_sequences(columns):
    lens = torch.tensor([1, 63, 64, 65, 500, 3])
    first = (lens.cumsum(0) - lens).repeat_interleave(lens)
    count = int(lens.sum())
    check(arguments(count, count, first, torch.arange(1, count + 1), max_seqlen_k=columns))


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("columns", [1, 63, 64, 100, 257, 3000])
def test_keys_that_do_not_fit_are_left_out(columns, clean):
    starts, ends = [0, 0, 5, 990, 300, 999], [1000, 64, 900, 1000, 2000, 1000]
    check(arguments(6, 1000, starts, ends, max_seqlen_k=columns, clean_logits=clean))


@pytest.mark.parametrize("columns", [0, 100])
def test_ranges_of_any_numbers(columns):
    pairs = int32([*product([-(2**31), 2**31 - 1, -1, 0, 1, 64, 299, 300, 301, 2**30], repeat=2)])
    check(arguments(100, 300, pairs[:, 0], pairs[:, 1], heads=8, max_seqlen_k=columns))


def test_strides():
    """Rows of keys with a stride of 0, keys and weights in wider rows."""
    given = arguments(6, 1000, [0, 0, 5, 990, 300, 999])
    k, scale = given["kv"]
    check(given | {"kv": (k[7:8].expand(1000, -1), scale)})
    wide = torch.zeros(1000, 256, dtype=torch.uint8, device="cuda").view(k.dtype)
    wide[:, :128] = k
    weights = torch.randn(6, 3 * 64 + 1, device="cuda")[:, 64:128]
    check(given | {"kv": (wide[:, :128], scale), "weights": weights})


@accumulated
def test_what_is_not_finite_stays_where_it_is(accumulators):
    """It stays in a key's column and in a query's row."""
    given = arguments(20, 200, accumulators=accumulators)
    q, (k, scale), weights = given["q"], given["kv"], given["weights"]
    finite = dsa.fp8_mqa_logits(**given).clone()
    k.view(torch.uint8)[77], scale[150] = 0x7F, torch.nan
    q.view(torch.uint8)[9, 3, 5] = 0x7F
    weights[5], weights[6, 7] = 0, torch.inf
    got = dsa.fp8_mqa_logits(**given)
    rows = [t for t in range(20) if t not in (5, 6, 9)]
    keys = [s for s in range(200) if s not in (77, 150)]
    assert got[:, [77, 150]].isnan().all() and got[9].isnan().all() and not got[6].isfinite().any()
    assert torch.equal(got[rows][:, keys], finite[rows][:, keys]) and not got[5, keys].any()


@accumulated
def test_a_row_of_negative_products_is_exactly_zero(accumulators):
    """ReLU gives a plateau of zeros: its scores tie."""
    given = arguments(4, 100, accumulators=accumulators)
    q, (k, scale) = given["q"].float().abs() + 0.1, given["kv"]
    keys = -(k.float().abs() + 0.1)
    given |= {"q": q.to(k.dtype), "kv": (keys.to(k.dtype), scale)}
    assert not dsa.fp8_mqa_logits(**given).any()


@pytest.mark.parametrize("exponent", range(-5, 9))
def test_fp16_accumulation_of_queries_of_any_size(exponent):
    given = arguments(16, 500, **HALF)
    q = torch.randn(16, 64, 128, device="cuda").clamp(-1.7, 1.7) * 2.0**exponent
    check(given | {"q": q.to(torch.float8_e4m3fn)})


@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e20])
def test_fp16_accumulation_of_the_largest_numbers(factor):
    """Products are 2.6e7, and their sums over heads all have one sign: nothing overflows."""
    given = arguments(16, 500, **HALF)
    signs = torch.where(torch.rand(500, 1, device="cuda") < 0.5, 448.0, -448.0)
    k = signs.expand(500, 128).contiguous().to(torch.float8_e4m3fn)
    q, weights = torch.full_like(given["q"].float(), 448.0).to(k.dtype), given["weights"].abs() * factor
    check(given | {"q": q, "kv": (k, torch.ones(500, device="cuda")), "weights": weights})


def selected(scores, k=2048):
    """Which keys have the k highest scores of each row."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(k).indices, True)


def test_fp16_accumulation_selects_the_same_keys():
    """Keys are clustered, queries share a direction, and weights have both signs."""
    basis = torch.randn(24, 128, device="cuda") / 128**0.5
    centres = 2 * torch.randn(64, 24, device="cuda")[torch.randint(64, (32768,), device="cuda")]
    k = (centres + torch.randn(32768, 24, device="cuda")) @ basis * 3 + 0.5 * torch.randn(32768, 128, device="cuda")
    q = (torch.randn(64, 1, 24, device="cuda") + torch.randn(64, 64, 24, device="cuda")) @ basis * 4
    (q, q_scale), (k, scale) = (dsa.per_token_cast_to_fp8(x.contiguous(), gran_k=128) for x in (q.view(-1, 128), k))
    weights = (torch.randn(64, 64, device="cuda") + 0.5) * q_scale.view(64, 64)
    given = arguments(64, 32768) | {"q": q.view(64, 64, 128), "kv": (k, scale.flatten()), "weights": weights}
    half, whole = dsa.fp8_mqa_logits(**given | HALF), dsa.fp8_mqa_logits(**given)
    assert (selected(half) & selected(whole)).sum() > 0.999 * 64 * 2048


def test_offsets_beyond_32_bits():
    keys = 60000
    given = arguments(40000, keys, keys - 100, heads=8, dim=32)  # 2.4e9 scores
    got = dsa.fp8_mqa_logits(**given)
    CASE.check(rows_of(given, slice(-50, None)), [got[-50:]])
    assert (got[20000, :-100] == -torch.inf).all()


@accumulated
def test_twenty_runs_of_many_work_tiles_are_identical(accumulators):
    """With fp16 a warpgroup scales queries while another one computes its last products."""
    given = arguments(4096, 8192, 0, range(4096, 8192), accumulators=accumulators)
    assert_runs_have_the_same_bits(dsa.fp8_mqa_logits, **given)
    last = slice(-32, None)
    CASE.check(rows_of(given, last), [dsa.fp8_mqa_logits(**given)[last]])


@accumulated
def test_a_row_does_not_depend_on_the_batch(accumulators):
    given = arguments(37, 900, 5, accumulators=accumulators)
    before = given["q"].view(torch.uint8).clone()
    whole, alone = (dsa.fp8_mqa_logits(**x) for x in (given, rows_of(given, slice(17, 18))))
    assert torch.equal(whole[17:18], alone) and torch.equal(given["q"].view(torch.uint8), before)
