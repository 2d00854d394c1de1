"""fp8_mqa_logits (index scores) on the GPU: the shared tests with many options, non-finite numbers, fp16 accumulation,
and results of more than 2^31 elements."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from tests.gpu.indexer.scored_keys import FP16, FP32, RANGES, KeysInOnePiece, Op, accumulated
from tests.gpu.op_checks import assert_rows_stand_alone, assert_runs_have_the_same_bits

CASE = cases_of("fp8_mqa_logits")[0]
OP = Op(CASE, CASE.check)
E4M3, PER_QUERY = torch.float8_e4m3fn, ("q", "weights", *RANGES)
OPTIONS = [{"max_seqlen_k": columns} for columns in (0, 1, 100, 777)]
OPTIONS += [{"clean_logits": False, "max_seqlen_k": columns} for columns in (0, 777)]
OPTIONS += [{"logits_dtype": torch.bfloat16, "max_seqlen_k": columns} for columns in (0, 777)]


def arguments(queries, keys, accumulators=FP32, **sizes):
    given = OP.arguments(queries=queries, keys=keys, accumulators=accumulators, **sizes)
    zeros = torch.zeros_like(given[RANGES[0]])
    return given | dict(zip(RANGES, (zeros, zeros + keys)))


def last_rows(given, count):
    return given | {name: given[name][-count:] for name in PER_QUERY}


@pytest.fixture(params=OPTIONS, ids=str)
def op(request):
    return Op(CASE, CASE.check, request.param)


class TestKeysInOnePiece(KeysInOnePiece):
    """Run the shared tests with every entry of OPTIONS."""


@accumulated
def test_what_is_not_finite_stays_where_it_is(accumulators):
    given = arguments(20, 200, accumulators)
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
    """ReLU makes these scores 0. They must be exactly 0, so that they tie and a selection orders them by the keys'
    indices."""
    given = arguments(4, 100, accumulators)
    k, scale = given["kv"]
    given |= {"q": (given["q"].float().abs() + 0.1).to(E4M3), "kv": ((-k.float().abs() - 0.1).to(E4M3), scale)}
    assert not dsa.fp8_mqa_logits(**given).any()


@pytest.mark.parametrize("exponent", range(-5, 9))
def test_fp16_accumulation_of_queries_of_any_size(exponent):
    q = torch.randn(16, 64, 128, device="cuda").clamp(-1.7, 1.7) * 2.0**exponent
    OP.verify(arguments(16, 500, FP16), q=q.to(E4M3))


@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e20])
def test_fp16_accumulation_of_the_largest_numbers(factor):
    """Products q . k are up to 448^2 * 128, and all terms of a score have the same sign. The kernel must scale q and
    the weights so that no fp16 sum overflows."""
    given = arguments(16, 500, FP16)
    signs = torch.where(torch.rand(500, 1, device="cuda") < 0.5, 448.0, -448.0)
    kv = signs.expand(500, 128).contiguous().to(E4M3), torch.ones(500, device="cuda")
    q = torch.full_like(given["q"].float(), 448.0).to(E4M3)
    OP.verify(given, q=q, kv=kv, weights=given["weights"].abs() * factor)


def selected(scores, k=2048):
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(k).indices, True)


def test_fp16_accumulation_selects_the_same_keys():
    """As in a model, the keys are clustered, the heads of a query share a direction, and the weights have both
    signs."""
    basis = torch.randn(24, 128, device="cuda") / 128**0.5
    centres = 2 * torch.randn(64, 24, device="cuda")[torch.randint(64, (32768,), device="cuda")]
    k = (centres + torch.randn(32768, 24, device="cuda")) @ basis * 3 + 0.5 * torch.randn(32768, 128, device="cuda")
    q = (torch.randn(64, 1, 24, device="cuda") + torch.randn(64, 64, 24, device="cuda")) @ basis * 4
    (q, q_scale), (k, scale) = (dsa.per_token_cast_to_fp8(x.contiguous(), gran_k=128) for x in (q.view(-1, 128), k))
    weights = (torch.randn(64, 64, device="cuda") + 0.5) * q_scale.view(64, 64)
    given = arguments(64, 32768) | {"q": q.view(64, 64, 128), "kv": (k, scale.flatten()), "weights": weights}
    half, whole = (selected(dsa.fp8_mqa_logits(**given | {"accumulators": x})) for x in (FP16, FP32))
    assert (half & whole).sum() > 0.999 * 64 * 2048


def test_scores_beyond_2_to_the_31():
    keys = 60000
    given = arguments(40000, keys, heads=8, dim=32)
    given[RANGES[0]] += keys - 100
    got = dsa.fp8_mqa_logits(**given)
    CASE.check(last_rows(given, 50), [got[-50:]])
    assert (got[20000, :-100] == -torch.inf).all()


@accumulated
def test_twenty_runs_of_many_work_tiles_are_identical(accumulators):
    """With fp16 accumulators, one warpgroup scales the queries of a work tile while another still computes the previous
    work tile. If these warpgroups raced, the runs would differ."""
    given = OP.arguments(queries=4096, keys=8192, window=8192, accumulators=accumulators)
    assert_runs_have_the_same_bits(dsa.fp8_mqa_logits, **given)
    CASE.check(last_rows(given, 32), [dsa.fp8_mqa_logits(**given)[-32:]])


@accumulated
def test_a_row_does_not_depend_on_the_batch(accumulators):
    assert_rows_stand_alone(CASE.run, arguments(37, 900, accumulators), PER_QUERY, [slice(17, 18), slice(9, 30)])
