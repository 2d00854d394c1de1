"""The reference of topk_indices: selections and slots by hand, adjacent floats, and rows in chunks."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.reference import topk_indices
from dsa.reference.indexer import topk_indices as topk
from tests.reference.common import BF16, F32, INF, NAN, i32

CASE = cases_of("topk_indices")[0]
HAND = torch.tensor([[3.0, -1.0, 7.0, 3.0, 0.0]])
ZEROS = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1e-45]])
SPECIAL = torch.tensor([[NAN, -INF, 2.0, -NAN, -INF, INF]])
RISING = torch.arange(10.0).repeat(4, 1)
OUTSIDE = torch.tensor([[INF, NAN, -INF, -5.0, NAN, INF]])


@pytest.mark.parametrize(
    ("scores", "k", "options", "expected"),
    [
        (HAND, 3, {}, [[0, 2, 3]]),
        (HAND, 3, {"sorted": True}, [[2, 0, 3]]),
        (HAND, 2, {}, [[0, 2]]),
        (HAND, 7, {}, [[0, 1, 2, 3, 4, -1, -1]]),
        # -0 equals 0, and of equal scores the lowest indices are picked
        (ZEROS, 2, {"sorted": True}, [[0, 1]]),
        (ZEROS, 3, {}, [[0, 1, 2]]),
        (ZEROS.bfloat16(), 3, {}, [[0, 1, 2]]),
        # NaN is never selected, and -inf comes last
        (SPECIAL, 3, {}, [[1, 2, 5]]),
        (SPECIAL, 6, {}, [[1, 2, 4, 5, -1, -1]]),
        (SPECIAL, 6, {"sorted": True}, [[5, 2, 1, 4, -1, -1]]),
        (torch.full((1, 4), NAN), 2, {}, [[-1, -1]]),
        # indices are relative to the row's start; lengths may be zero, negative or too long
        (
            RISING,
            3,
            {"starts": i32([3, 0, 9, 10]), "lengths": i32([4, 2, 1, 5])},
            [[1, 2, 3], [0, 1, -1], [0, -1, -1], [-1, -1, -1]],
        ),
        (RISING, 2, {"starts": i32([3, 0, 9, 10])}, [[5, 6], [8, 9], [0, -1], [-1, -1]]),
        (RISING, 2, {"lengths": i32([0, -3, 100, 1])}, [[-1, -1], [-1, -1], [8, 9], [0, -1]]),
        (OUTSIDE, 3, {"starts": i32([2]), "lengths": i32([2])}, [[0, 1, -1]]),
        # many equal scores
        (torch.zeros(1, 1000).index_fill(1, torch.tensor(700), 1.0), 5, {}, [[0, 1, 2, 3, 700]]),
        (torch.zeros(1, 1000).index_fill(1, torch.tensor(3), -1.0), 5, {}, [[0, 1, 2, 4, 5]]),
        (torch.zeros(0, 5), 3, {}, []),
    ],
)
def test_by_hand(scores, k, options, expected):
    indices, values = topk_indices(scores, k, **options, return_values=True)
    assert indices.tolist() == expected and indices.dtype == torch.int32
    starts = options.get("starts", torch.zeros(len(scores)))[:, None].long()
    picked = scores.float().gather(1, (indices + starts).clamp(0, scores.shape[1] - 1))
    assert torch.equal(values, torch.where(indices < 0, -INF, picked)) and values.dtype == torch.float32
    assert torch.equal(topk_indices(scores, k, **options), indices)


@pytest.mark.parametrize("x", [1.0, -1.0, 3e38, -3e38, 1e-44, -1e-44])
def test_neighbouring_floats_are_told_apart(x):
    below, above = (torch.tensor(x).nextafter(torch.tensor(end)).item() for end in (-INF, INF))
    assert topk_indices(torch.tensor([[below, x, above, x]]), 4, sorted=True).tolist() == [[2, 1, 3, 0]]


POOLS = [
    lambda *shape: torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN])[torch.randint(7, shape)],
    lambda *shape: torch.randint(-2, 3, shape).float(),
    torch.randn,
    lambda *shape: torch.randn(shape) * 10.0 ** torch.randint(-44, 38, shape),
]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("chunk", [2**26, 100])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("k", [1, 2, 7, 16, 50])
def test_every_number_of_rows_at_a_time_is_right(k, by_value, pool, chunk, dtype, monkeypatch):
    monkeypatch.setattr(topk, "_CHUNK", chunk)
    given = CASE.arguments(rows=9, cols=41, k=k, sorted=by_value) | {"scores": pool(9, 41).to(dtype)}
    for absent in ({}, {"starts": None}, {"lengths": None}, {"starts": None, "lengths": None}):
        CASE.check(given | absent, CASE.results(given | absent))


def test_rows_without_columns():
    assert topk_indices(torch.zeros(2, 0), 3).eq(-1).all()


# (scores, block table). With k = 5, a row of length 8 selects the columns 0, 2, 3, 5 and 6. A page has 2 keys, so their
# pages are in the table's columns 0, 1, 1, 2 and 3.
PAGED = torch.tensor([[5.0, 1.0, 4.0, 9.0, 0.0, 8.0, 7.0, 0.0]] * 3), i32([[7, 2, 0, 1], [3, -1, 5, 6]])


@pytest.mark.parametrize(
    ("scores", "k", "table", "options", "expected"),
    [
        (
            PAGED[0],
            5,
            PAGED[1],
            {"row_to_seq": i32([0, 1, 0]), "lengths": i32([8, 8, 3])},
            [[14, 4, 5, 1, 2], [6, -1, -1, 11, 12], [14, 15, 4, -1, -1]],
        ),
        # Without row_to_seq, row i of scores uses row i of the table, which has one page of 2 keys here. So column 2 of
        # the first row has no page. The second row starts at column 1, so columns 2 and 1 are keys 1 and 0.
        (
            torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]]),
            2,
            i32([[4], [9], [100]]),
            {"starts": i32([0, 1]), "sorted": True},
            [[9, -1], [19, 18]],
        ),
        # rows that belong to no sequence
        (torch.ones(3, 2), 2, i32([[0], [1]]), {"row_to_seq": i32([-1, 1, 2])}, [[-1, -1], [2, 3], [-1, -1]]),
    ],
)
def test_slots_by_hand(scores, k, table, options, expected):
    slots, values = topk_indices(scores, k, block_table=table, page_size=2, **options, return_values=True)
    assert slots.tolist() == expected and torch.equal(values == -INF, slots < 0)
