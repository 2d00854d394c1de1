"""`paged_indexer_select` on the CPU: results for small integer scores and any lengths (with hypothesis), and the
arguments that the op passes to its kernels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa.cases import cases_of
from tests.reference.common import i32

CASE = cases_of("paged_indexer_select")[0]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    count=st.integers(1, 70),
    lengths=st.lists(st.integers(-3, 80), min_size=2, max_size=2),
    k=st.integers(1, 80),
    slots=st.booleans(),
)
def test_any_scores_and_lengths(count, lengths, k, slots):
    """Queries are 0 in all channels but one, so that scores are small integers and many are equal."""
    call = CASE.arguments(lengths=(count,), page_size=16, columns=count, top_k=k, slots=slots, exact=True)
    call["q"].view(torch.uint8)[..., 1:] = 0
    call["context_lens"] = i32([lengths])
    CASE.check(call, CASE.results(call))


@pytest.mark.parametrize(
    ("heads", "next_n", "expected"), [(64, 4, True), (64, 3, True), (64, 2, False), (64, 1, False), (32, 4, False)]
)
def test_fp16_accumulation_only_where_arithmetic_bounds(heads, next_n, expected, launches):
    for accumulators in (torch.float16, torch.float32):
        sizes = {"lengths": (70, 0, 128), "next_n": next_n, "heads": heads}
        CASE.run(CASE.arguments(**sizes, accumulators=accumulators))
    # Only the compile function of the score kernel has 7 arguments.
    assert [variant[5] for variant, _ in launches if len(variant) == 7] == [expected, False]


def test_a_query_is_selected_from_what_it_sees(launches):
    """With one length per sequence, the last query sees all keys, and each earlier query one key fewer. A length can be
    any int32."""
    lengths = {"context_lens": i32([70, -(2**31), 2**31 - 1])}
    CASE.run(CASE.arguments(lengths=(70, 0, 128), next_n=3, slots=True) | lengths)
    *_, (_, of_topk) = launches
    assert of_topk[2].tolist() == [68, 69, 70, -2, -1, 0, 2**31 - 3, 2**31 - 2, 2**31 - 1]
    assert of_topk[4].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
