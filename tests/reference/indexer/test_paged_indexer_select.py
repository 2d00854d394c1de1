"""The reference of paged_indexer_select: sequences in chunks, missing pages, ties, and NaN."""

from unittest import mock

import pytest
import torch

from dsa.cases import cases_of
from dsa.reference import paged_indexer_select
from dsa.reference.indexer import paged_indexer_select as module
from tests.reference.common import INF, i32, zeros

CASE = cases_of("paged_indexer_select")[0]
PAGE = 16
LENGTHS = {
    "of sequences": i32([80, 0, 13]),
    "of queries": i32([[3, 80], [0, 70], [1, 0]]),
    "beyond the table": i32([2**31 - 1, 1000, 81]),
    "none": i32([-(2**31), -1, 0]),
}


def arguments(lengths=(80, 80, 80), next_n=2, columns=80, **options):
    """Return arguments with tables of 5 pages. The sums are exact, because a CPU can sum in another order if a chunk
    has few sequences."""
    sizes = {"lengths": lengths, "next_n": next_n, "page_size": PAGE, "columns": columns, "exact": True}
    given = CASE.arguments(**sizes, **options)
    return given | {"block_table": given["block_table"][:, :5]}


@pytest.mark.parametrize("chunk", [module._CHUNK, 400, 1])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("columns", [1, 50, 80, 300])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_number_of_sequences_at_a_time_is_right(name, columns, slots, chunk):
    given = arguments(columns=columns, top_k=12, slots=slots, return_values=columns != 50)
    given["context_lens"] = LENGTHS[name]
    with mock.patch.object(module, "_CHUNK", chunk):
        CASE.check(given, CASE.results(given))


@pytest.mark.parametrize(
    ("top_k", "slots", "columns", "expected", "finite"),
    [
        (16, False, slice(16), [*range(16, 32)], [True] * 16),
        (42, False, slice(42), [*range(40), -1, -1], [False] * 16 + [True] * 16 + [False] * 10),
        # Keys of a negative page have no slot, and keys of a page beyond the cache have one.
        (42, True, slice(16), [-1] * 16, [False] * 16),
        (42, True, slice(32, 42), [1000 * PAGE + i for i in range(8)] + [-1, -1], [False] * 10),
    ],
)
def test_keys_without_a_page_are_selected_if_there_are_too_few_others(top_k, slots, columns, expected, finite):
    """Pages 0 and 2 are missing. Their keys have the score -inf, so they are selected last."""
    given = arguments((48,), 1, columns=48, top_k=top_k, slots=slots) | {"context_lens": i32([40])}
    given["block_table"][0, 0], given["block_table"][0, 2] = -1, 1000
    got, values = paged_indexer_select(**given)
    assert got[0, columns].tolist() == expected and (values > -INF)[0, columns].tolist() == finite


def test_ties_go_to_the_lowest_keys_and_a_zero_has_no_sign():
    given = arguments((80, 80), 1, top_k=4) | {"context_lens": i32([20, 5]), "weights": -zeros(2, 8)}
    got, values = paged_indexer_select(**given)
    assert got.tolist() == [[0, 1, 2, 3]] * 2 and not values.view(torch.int32).any()


def test_nan_is_never_selected():
    given = arguments((80, 80), 1, top_k=20) | {"context_lens": i32([20, 5])}
    cache, page = given["kv_cache"], int(given["block_table"][0, 0])
    cache.view(len(cache), -1)[page, PAGE * 32 + 4 * 3 : PAGE * 32 + 4 * 4] = 0xFF
    got, _ = paged_indexer_select(**given)
    assert got.tolist() == [[0, 1, 2, *range(4, 20), -1], [0, 1, 2, 3, 4] + [-1] * 15]


@pytest.mark.parametrize(
    "changes",
    [
        lambda a: {name: a[name][:0] for name in ("q", "weights", "context_lens", "block_table")},
        lambda a: {"kv_cache": a["kv_cache"][:0]},
        lambda a: {"block_table": a["block_table"][:, :0]},
    ],
)
def test_without_sequences_or_pages_nothing_is_selected(changes):
    given = arguments(top_k=100)
    given |= changes(given)
    got, values = paged_indexer_select(**given)
    assert got.shape == values.shape == (2 * len(given["q"]), 100)
    assert (got == -1).all() and (values == -INF).all()
