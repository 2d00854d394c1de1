"""The references of the paged index scores and their plan: missing pages, page strides, an empty batch or cache, and
plans by hand."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.reference import fp8_paged_mqa_logits, get_paged_mqa_logits_metadata
from tests.reference.common import BYTE, INF, i32

CASE = cases_of("fp8_paged_mqa_logits")[1]


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


def test_pages_may_have_a_stride():
    given = arguments(20, 9)
    packed = given["kv_cache"]
    wide = torch.full((len(packed), 8 * 12 + 40), 0x7F, dtype=BYTE)
    wide[:, : 8 * 12] = packed.view(len(packed), -1)
    strided = given | {"kv_cache": wide[:, : 8 * 12].unflatten(1, (8, 1, 12))}
    assert torch.equal(fp8_paged_mqa_logits(**strided), fp8_paged_mqa_logits(**given))


@pytest.mark.parametrize("empty", [("q", "weights", "context_lens", "block_table"), ("kv_cache",)])
def test_empty_batch_and_empty_cache(empty):
    given = arguments(20, columns=9)
    given |= {name: given[name][:0] for name in empty}
    got = fp8_paged_mqa_logits(**given)
    assert got.shape == (len(given["q"]), 9) and got.eq(-INF).all()


@pytest.mark.parametrize(
    ("lengths", "sms", "plan"),
    [
        # A split is 256 keys, so the sequences have 3, 0 and 1 splits. The 3 SMs get 1, 1 and 2.
        ([600, 0, 256], 3, [[0, 0], [0, 1], [0, 2], [3, 0]]),
        # With a length per query, a sequence has as many splits as its longest query needs.
        ([[1, 600], [0, 0], [256, 9]], 3, [[0, 0], [0, 1], [0, 2], [3, 0]]),
        ([0, 0], 2, [[2, 0]] * 3),
        ([], 2, [[0, 0]] * 3),
    ],
)
def test_plan_by_hand(lengths, sms, plan):
    assert get_paged_mqa_logits_metadata(i32(lengths), 64, sms).tolist() == plan
