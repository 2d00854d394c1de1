"""The reference of indexer_select: queries in chunks, clipped ranges, ties, and NaN."""

from unittest import mock

import pytest

from dsa.cases import cases_of
from dsa.reference.indexer import indexer_select as module
from tests.reference.common import NAN, i32, zeros

CASE = cases_of("indexer_select")[0]
MIN, MAX = -(2**31), 2**31 - 1


@pytest.mark.parametrize("chunk", [module._CHUNK, 200, 1])
@pytest.mark.parametrize("return_values", [True, False])
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("row_to_seq", [True, False])
def test_every_number_of_queries_at_a_time_is_right(row_to_seq, page_size, return_values, chunk):
    """The sums are exact, because a CPU can sum in another order if a chunk has few queries."""
    sizes = {"queries": 5, "keys": 90, "top_k": 12, "page_size": page_size, "return_values": return_values}
    given = CASE.arguments(**sizes, exact=True)
    if page_size and not row_to_seq:  # one row of the table per query
        given |= {"block_table": given["block_table"][given["row_to_seq"].long()], "row_to_seq": None}
    with mock.patch.object(module, "_CHUNK", chunk):
        CASE.check(given, CASE.results(given))


@pytest.mark.parametrize(
    ("keys", "starts", "ends", "top_k", "changes", "expected"),
    [
        # Ranges outside the keys are clipped.
        (10, [MIN, 8, MAX], [MAX, MAX, -5], 10, {}, [[*range(10)], [0, 1] + [-1] * 8, [-1] * 10]),
        # Scores of zero tie, and the lowest keys win.
        (20, [3, 0], [20, 20], 4, {"weights": zeros(2, 8)}, [[0, 1, 2, 3]] * 2),
        # A NaN score is never selected.
        (20, [0, 0], [20, 5], 20, {"nan": 4}, [[*range(4), *range(5, 20), -1], [0, 1, 2, 3] + [-1] * 16]),
    ],
)
def test_selections_by_hand(keys, starts, ends, top_k, changes, expected):
    given = CASE.arguments(queries=len(starts), keys=keys, top_k=top_k, return_values=False)
    given |= {"cu_seq_len_k_start": i32(starts), "cu_seq_len_k_end": i32(ends)} | changes
    if "nan" in changes:
        given["kv"][1][given.pop("nan")] = NAN
    (got,) = CASE.run(given)
    assert got.tolist() == expected
