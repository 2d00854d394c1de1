"""References of the paged index scores and their plan: pages, strides, nothing to score, refusals."""

import math

import pytest
import torch

from dsa.cases import cases_of
from dsa.reference import fp8_paged_mqa_logits, get_paged_mqa_logits_metadata
from tests.reference.common import i32

PLAN, CASE = cases_of("fp8_paged_mqa_logits")


def arguments(*lengths, columns=20):
    sizes = {"lengths": lengths, "next_n": 1, "heads": 3, "dim": 8, "page_size": 8}
    return CASE.arguments(**sizes, columns=columns, num_sms=0)


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


def test_plan_by_hand():
    # 600, 0 and 256 keys are 3, 0 and 1 splits; 3 SMs get 1, 1 and 2 of them
    plan = get_paged_mqa_logits_metadata(i32([600, 0, 256]), 64, 3)
    assert plan.tolist() == [[0, 0], [0, 1], [0, 2], [3, 0]]
    assert get_paged_mqa_logits_metadata(i32([0, 0]), 64, 2).tolist() == [[2, 0], [2, 0], [2, 0]]
    assert get_paged_mqa_logits_metadata(i32([]), 64, 2).tolist() == [[0, 0], [0, 0], [0, 0]]
    # the longest query of a sequence counts
    assert get_paged_mqa_logits_metadata(i32([[1, 600], [0, 0], [256, 9]]), 64, 3).tolist() == plan.tolist()
