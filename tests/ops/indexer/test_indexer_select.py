"""`indexer_select` on the CPU, with hypothesis: small integer scores and any ranges."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa.cases import cases_of
from tests.reference.common import i32

CASE = cases_of("indexer_select")[0]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    keys=st.lists(st.integers(-2, 2), min_size=1, max_size=12),
    ranges=st.lists(st.tuples(st.integers(-3, 14), st.integers(-3, 14)), min_size=1, max_size=4),
    k=st.integers(1, 14),
)
def test_any_scores_and_ranges(keys, ranges, k):
    """Queries are 0 in all channels but one, so that scores are small integers and many are equal."""
    call = CASE.arguments(queries=len(ranges), keys=len(keys), top_k=k, exact=True)
    call["q"].view(torch.uint8)[..., 1:] = 0
    call["kv"][0][:, 0] = torch.tensor(keys).to(torch.float8_e4m3fn)
    call["cu_seq_len_k_start"], call["cu_seq_len_k_end"] = (i32(list(column)) for column in zip(*ranges))
    CASE.check(call, CASE.results(call))
