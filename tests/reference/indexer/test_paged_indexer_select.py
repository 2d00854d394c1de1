"""The reference of scores over pages and selection in one op: chunks of sequences, pages, ties, NaN."""

from unittest import mock

import pytest
import torch

from dsa.cases import cases_of
from dsa.reference import paged_indexer_select
from dsa.reference.indexer import paged_indexer_select as module
from tests.reference.common import i32

CASE = cases_of("paged_indexer_select")[0]
PAGE = 16
LENGTHS = {
    "of sequences": i32([80, 0, 13]),
    "of queries": i32([[3, 80], [0, 70], [1, 0]]),
    "beyond the table": i32([2**31 - 1, 1000, 81]),
    "none": i32([-(2**31), -1, 0]),
}


def arguments(lengths=(80, 80, 80), next_n=2, **options):
    """Sums are exact, because a CPU may add those of few sequences in another order."""
    sizes = {"lengths": lengths, "next_n": next_n, "page_size": PAGE, "exact": True}
    given = CASE.arguments(**sizes, **options)
    return given | {"block_table": given["block_table"][:, :5]}


@pytest.mark.parametrize("chunk", [module._CHUNK, 400, 1])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("columns", [1, 50, 80, 300])
@pytest.mark.parametrize("name", LENGTHS)
def test_chunks_of_sequences(name, columns, slots, chunk):
    given = arguments(columns=columns, top_k=12, slots=slots, return_values=columns != 50)
    given["context_lens"] = LENGTHS[name]
    with mock.patch.object(module, "_CHUNK", chunk):
        CASE.check(given, CASE.results(given))


def test_keys_without_a_page_score_minus_infinity():
    """They are selected if too few other keys are there; a negative page has no slot."""
    given = arguments((48,), 1, columns=48)
    given["context_lens"] = i32([40])
    given["block_table"][0, 0], given["block_table"][0, 2] = -1, 1000
    indices, values = paged_indexer_select(**given | {"top_k": 16})
    assert indices.tolist() == [[*range(16, 32)]] and values.isfinite().all()
    few = [True] * 16 + [False] * 16 + [True] * 10
    indices, values = paged_indexer_select(**given | {"top_k": 42})
    assert indices.tolist() == [[*range(40), -1, -1]] and (values == -torch.inf).tolist() == [few]
    slots, values = paged_indexer_select(**given | {"top_k": 42, "slots": True})
    assert slots[0, :16].eq(-1).all() and slots[0, 32:40].tolist() == [1000 * PAGE + i for i in range(8)]
    assert (values == -torch.inf).tolist() == [few]


def test_ties_zeros_and_nan():
    """Ties go to the lowest keys. A zero has no sign. A NaN score is never selected."""
    given = arguments((80, 80), 1, columns=80) | {"context_lens": i32([20, 5])}
    zeros = given | {"weights": -torch.zeros_like(given["weights"]), "top_k": 4}
    got, values = paged_indexer_select(**zeros)
    assert got.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.equal(values.view(torch.int32), torch.zeros(2, 4, dtype=torch.int32))
    cache, page = given["kv_cache"], int(given["block_table"][0, 0])
    cache.view(len(cache), -1)[page, PAGE * 32 + 4 * 3 : PAGE * 32 + 4 * 4] = 0xFF
    got, _ = paged_indexer_select(**given | {"top_k": 20})
    assert got.tolist() == [[0, 1, 2, *range(4, 20), -1], [0, 1, 2, 3, 4] + [-1] * 15]


@pytest.mark.parametrize("empty", [("q", "weights", "context_lens", "block_table"), ("kv_cache",)])
def test_without_sequences_or_pages(empty):
    given = arguments(columns=80, top_k=100)
    given |= {name: given[name][:0] for name in empty}
    got, values = paged_indexer_select(**given)
    assert got.shape == values.shape == (2 * len(given["q"]), 100)
    assert (got == -1).all() and (values == -torch.inf).all()


def test_a_table_without_pages():
    given = arguments(columns=80)
    got, _ = paged_indexer_select(**given | {"block_table": given["block_table"][:, :0]})
    assert got.tolist() == [[-1] * 4] * 6
