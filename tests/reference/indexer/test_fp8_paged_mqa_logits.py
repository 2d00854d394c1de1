"""References of the paged index scores and their plan: pages, strides, nothing to score, refusals."""

import math

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import fp8_paged_mqa_logits, get_paged_mqa_logits_metadata
from tests.reference.common import assert_refused, i32

PLAN, CASE = cases_of("fp8_paged_mqa_logits")


def arguments(*lengths, columns=20):
    sizes = {"lengths": lengths, "next_n": 1, "heads": 3, "dim": 8, "page_size": 8}
    return CASE.arguments(**sizes, columns=columns, num_sms=0)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("columns", [40, 6])
@pytest.mark.parametrize("per_query", [False, True])
def test_against_float64(next_n, page_size, columns, per_query):
    sizes = {"lengths": (17, 0, 1, 3, 33), "next_n": next_n, "heads": 3, "dim": 8, "page_size": page_size}
    CASE.verify(**sizes, columns=columns, per_query=per_query, num_sms=0)


@pytest.mark.parametrize("page", [-1, 6, 2**31 - 1])
def test_pages_outside_the_cache_hold_no_keys(page):
    given = arguments(24, columns=30)
    given["context_lens"] = i32([1000])  # longer than the table
    given["block_table"][0, 1] = page
    got = fp8_paged_mqa_logits(**given)
    CASE.check(given, [got])
    assert got.isfinite().nonzero()[:, 1].tolist() == [*range(8), *range(16, 24)]


def test_pages_may_be_apart():
    given = arguments(20, 9)
    packed = given["kv_cache"]
    wide = torch.full((len(packed), 8 * 12 + 40), 0x7F, dtype=torch.uint8)
    wide[:, : 8 * 12] = packed.view(len(packed), -1)
    strided = given | {"kv_cache": wide[:, : 8 * 12].unflatten(1, (8, 1, 12))}
    assert torch.equal(fp8_paged_mqa_logits(**strided), fp8_paged_mqa_logits(**given))


def test_strides_and_dtypes():
    given = arguments(20, columns=257)
    half = fp8_paged_mqa_logits(**given | {"logits_dtype": torch.bfloat16})
    assert fp8_paged_mqa_logits(**given).stride() == half.stride() == (512, 1)
    assert torch.equal(half, fp8_paged_mqa_logits(**given).bfloat16())


def test_empty_batch_and_empty_cache():
    given = arguments(20, columns=9)
    none = {name: given[name][:0] for name in ("q", "weights", "context_lens", "block_table")}
    assert fp8_paged_mqa_logits(**given | none).shape == (0, 9)
    got = fp8_paged_mqa_logits(**given | {"kv_cache": given["kv_cache"][:0]})
    assert got.shape == (1, 9) and got.eq(-math.inf).all()


GOOD = {"q": torch.zeros(1, 2, 3, 8).to(torch.float8_e4m3fn), "kv_cache": torch.zeros(4, 8, 1, 12, dtype=torch.uint8)}
GOOD |= {"weights": torch.zeros(2, 3), "context_lens": i32([20]), "block_table": i32([[0, 1, 2]])}
GOOD |= {"schedule_meta": None, "max_context_len": 20}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("context_lens", i32([[20, 20, 20]]), r"context_lens: shape must be \[1\] or \[1, 2\], got \[1, 3\]"),
        ("context_lens", i32([[20]]), r"context_lens: shape must be \[1\] or \[1, 2\], got \[1, 1\]"),
        ("weights", torch.zeros(1, 3), r"weights: shape must be \[2, 3\], got \[1, 3\]"),
        ("kv_cache", GOOD["kv_cache"][..., :11], r"kv_cache: shape must be \[pages, P, 1, 12\], got"),
        ("block_table", GOOD["block_table"].long(), "block_table: dtype must be int32, got int64"),
        ("max_context_len", 0, "max_context_len: must be at least 1, got 0"),
        ("schedule_meta", i32([0, 0]), r"schedule_meta: shape must be \[SMs \+ 1, 2\], got \[2\]"),
    ],
)
def test_wrong_arguments_are_named(name, value, message):
    assert_refused(message, dsa.fp8_paged_mqa_logits, **GOOD | {name: value})


def test_plan_by_hand():
    # 600, 0 and 256 keys are 3, 0 and 1 splits; 3 SMs get 1, 1 and 2 of them
    plan = get_paged_mqa_logits_metadata(i32([600, 0, 256]), 64, 3)
    assert plan.tolist() == [[0, 0], [0, 1], [0, 2], [3, 0]]
    assert get_paged_mqa_logits_metadata(i32([0, 0]), 64, 2).tolist() == [[2, 0], [2, 0], [2, 0]]
    assert get_paged_mqa_logits_metadata(i32([]), 64, 2).tolist() == [[0, 0], [0, 0], [0, 0]]
    # the longest query of a sequence counts
    assert get_paged_mqa_logits_metadata(i32([[1, 600], [0, 0], [256, 9]]), 64, 3).tolist() == plan.tolist()


@pytest.mark.parametrize("next_n", [0, 3])
@pytest.mark.parametrize("num_sms", [1, 2, 7, 132])
def test_plan_divides_all_work_evenly(num_sms, next_n):
    for batch in (1, 3, 40):
        PLAN.verify(batch=batch, num_sms=num_sms, next_n=next_n)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((i32([1]), 48, 1), "block_kv: must be a divisor of 256, got 48"),
        ((i32([1]), 64, 0), "num_sms: must be at least 1, got 0"),
        (([1], 64, 1), r"context_lens: must be a torch.Tensor, got list"),
    ],
)
def test_wrong_arguments_of_a_plan_are_named(arguments, message):
    assert_refused(message, dsa.get_paged_mqa_logits_metadata, *arguments)
