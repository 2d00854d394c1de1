import math
import random

import pytest
import torch

from dsa.reference import topk_indices
from dsa.reference.indexer import topk_indices as topk

INF, NAN = math.inf, math.nan


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def oracle(row, k, start, length, by_value):
    """The contract in plain Python: indices relative to start, padded with -1, and their values."""
    stop = len(row) if length is None else start + length
    candidates = [c for c in range(max(start, 0), min(stop, len(row))) if not math.isnan(row[c])]
    best = sorted(candidates, key=lambda c: (-row[c], c))[:k]
    if not by_value:
        best.sort()
    padding = k - len(best)
    return [c - start for c in best] + [-1] * padding, [row[c] for c in best] + [-INF] * padding


def test_by_hand():
    scores = torch.tensor([[3.0, -1.0, 7.0, 3.0, 0.0]])
    assert topk_indices(scores, 3).tolist() == [[0, 2, 3]]
    assert topk_indices(scores, 3, sorted=True).tolist() == [[2, 0, 3]]
    assert topk_indices(scores, 2).tolist() == [[0, 2]]
    assert topk_indices(scores, 7).tolist() == [[0, 1, 2, 3, 4, -1, -1]]
    indices, values = topk_indices(scores, 7, sorted=True, return_values=True)
    assert indices.tolist() == [[2, 0, 3, 4, 1, -1, -1]] and indices.dtype == torch.int32
    assert values.tolist() == [[7.0, 3.0, 3.0, 0.0, -1.0, -INF, -INF]] and values.dtype == torch.float32


def test_a_plateau_gives_its_lowest_indices():
    scores = torch.zeros(2, 1000)
    scores[0, 700], scores[1, 3] = 1.0, -1.0
    assert topk_indices(scores, 5).tolist() == [[0, 1, 2, 3, 700], [0, 1, 2, 4, 5]]


def test_minus_zero_equals_zero():
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1e-45]])
    assert topk_indices(scores, 2, sorted=True).tolist() == [[0, 1]]
    assert topk_indices(scores, 3).tolist() == [[0, 1, 2]]
    assert topk_indices(scores.bfloat16(), 3).tolist() == [[0, 1, 2]]


def test_neighbouring_floats_are_told_apart():
    for x in (1.0, -1.0, 3e38, -3e38, 1e-44, -1e-44):
        above = torch.tensor(x).nextafter(torch.tensor(INF)).item()
        below = torch.tensor(x).nextafter(torch.tensor(-INF)).item()
        assert topk_indices(torch.tensor([[below, x, above, x]]), 4, sorted=True).tolist() == [[2, 1, 3, 0]]


def test_nan_is_never_picked_and_minus_infinity_comes_last():
    scores = torch.tensor([[NAN, -INF, 2.0, -NAN, -INF, INF]])
    assert topk_indices(scores, 3).tolist() == [[1, 2, 5]]
    assert topk_indices(scores, 6).tolist() == [[1, 2, 4, 5, -1, -1]]
    assert topk_indices(scores, 6, sorted=True).tolist() == [[5, 2, 1, 4, -1, -1]]
    assert topk_indices(torch.full((1, 4), NAN), 2).tolist() == [[-1, -1]]


def test_indices_are_relative_to_the_row_start():
    scores = torch.arange(10.0).repeat(4, 1)
    starts, lengths = i32([3, 0, 9, 10]), i32([4, 2, 1, 5])
    assert topk_indices(scores, 3, starts=starts, lengths=lengths).tolist() == [
        [1, 2, 3],
        [0, 1, -1],
        [0, -1, -1],
        [-1, -1, -1],
    ]
    assert topk_indices(scores, 2, starts=starts).tolist() == [[5, 6], [8, 9], [0, -1], [-1, -1]]


def test_lengths_that_are_zero_negative_or_too_long():
    scores = torch.arange(4.0).repeat(4, 1)
    got = topk_indices(scores, 2, lengths=i32([0, -3, 100, 1]))
    assert got.tolist() == [[-1, -1], [-1, -1], [2, 3], [0, -1]]


def test_scores_outside_the_range_are_never_looked_at():
    scores = torch.full((1, 6), NAN)
    scores[0, 0], scores[0, 5], scores[0, 2], scores[0, 3] = INF, INF, -INF, -5.0
    indices, values = topk_indices(scores, 3, starts=i32([2]), lengths=i32([2]), return_values=True)
    assert indices.tolist() == [[0, 1, -1]] and values.tolist() == [[-INF, -5.0, -INF]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_rows_against_sorted(dtype):
    rng = random.Random(7)
    pools = [
        lambda: rng.choice([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN]),
        lambda: float(rng.randint(-2, 2)),
        lambda: rng.gauss(0, 1),
        lambda: rng.uniform(-1, 1) * 10.0 ** rng.randint(-44, 38),
    ]
    for trial in range(120):
        rows, cols, k = rng.randint(1, 5), rng.randint(0, 40), rng.choice([1, 2, 7, 16, 50])
        pool = pools[trial % len(pools)]
        scores = torch.tensor([[pool() for _ in range(cols)] for _ in range(rows)]).view(rows, cols).to(dtype)
        starts = [rng.randint(0, cols + 2) for _ in range(rows)] if rng.random() < 0.7 else None
        lengths = [rng.randint(-1, cols + 3) for _ in range(rows)] if rng.random() < 0.7 else None
        by_value = rng.random() < 0.5
        indices, values = topk_indices(
            scores,
            k,
            starts=None if starts is None else i32(starts),
            lengths=None if lengths is None else i32(lengths),
            sorted=by_value,
            return_values=True,
        )
        for r in range(rows):
            expected = oracle(
                scores[r].float().tolist(),
                k,
                0 if starts is None else starts[r],
                None if lengths is None else lengths[r],
                by_value,
            )
            assert (indices[r].tolist(), values[r].tolist()) == expected, (trial, r)


def test_rows_do_not_depend_on_each_other_or_on_chunks(monkeypatch):
    scores = torch.randint(-3, 4, (9, 50)).float()
    together = topk_indices(scores, 8)
    monkeypatch.setattr(topk, "_CHUNK", 100)
    assert torch.equal(topk_indices(scores, 8), together)
    for r in range(9):
        assert torch.equal(topk_indices(scores[r : r + 1], 8)[0], together[r])


def test_translation_through_a_block_table():
    scores = torch.tensor([[5.0, 1.0, 4.0, 9.0, 0.0, 8.0, 7.0, 0.0]] * 3)
    table = i32([[7, 2, 0, 1], [3, -1, 5, 6]])
    got = topk_indices(scores, 5, block_table=table, page_size=2, row_to_seq=i32([0, 1, 0]), lengths=i32([8, 8, 3]))
    # picked 0, 2, 3, 5, 6: offsets 0, 0, 1, 1, 0 of logical pages 0, 1, 1, 2, 3
    assert got.tolist() == [[14, 4, 5, 1, 2], [6, -1, -1, 11, 12], [14, 15, 4, -1, -1]]


def test_translation_defaults_to_one_sequence_per_row():
    scores = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    table = i32([[4], [9], [100]])
    indices, values = topk_indices(
        scores, 2, block_table=table, page_size=2, sorted=True, return_values=True, starts=i32([0, 1])
    )
    # row 0: column 2 lies beyond the table; row 1: columns 2 and 1 are indices 1 and 0
    assert indices.tolist() == [[9, -1], [19, 18]]
    assert values.tolist() == [[3.0, -INF], [1.0, 0.0]]


def test_rows_of_no_sequence():
    table = i32([[0], [1]])
    got = topk_indices(torch.ones(3, 2), 2, block_table=table, page_size=2, row_to_seq=i32([-1, 1, 2]))
    assert got.tolist() == [[-1, -1], [2, 3], [-1, -1]]


def test_nothing():
    assert topk_indices(torch.zeros(0, 5), 3).shape == (0, 3)
    assert topk_indices(torch.zeros(2, 0), 3).eq(-1).all()


def test_strided_scores():
    scores = torch.randn(6, 40)
    assert torch.equal(topk_indices(scores[::2, :30], 4), topk_indices(scores[::2, :30].contiguous(), 4))


def test_refuses_bad_arguments():
    scores, table = torch.zeros(2, 4), i32([[0], [1]])
    with pytest.raises(ValueError, match="scores: dtype must be float32 or bfloat16, got float64"):
        topk_indices(scores.double(), 1)
    with pytest.raises(ValueError, match=r"scores: shape must be \[rows, cols\], got \[8\]"):
        topk_indices(scores.view(-1), 1)
    with pytest.raises(ValueError, match="k: must be at least 1, got 0"):
        topk_indices(scores, 0)
    with pytest.raises(ValueError, match=r"lengths: shape must be \[2\], got \[3\]"):
        topk_indices(scores, 1, lengths=i32([1, 1, 1]))
    with pytest.raises(ValueError, match="starts: dtype must be int32, got int64"):
        topk_indices(scores, 1, starts=torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="page_size: must be given with block_table, got None"):
        topk_indices(scores, 1, block_table=table)
    with pytest.raises(ValueError, match="page_size: must be None without block_table, got int"):
        topk_indices(scores, 1, page_size=64)
    with pytest.raises(ValueError, match="row_to_seq: must be None without block_table, got Tensor"):
        topk_indices(scores, 1, row_to_seq=i32([0, 0]))
    with pytest.raises(ValueError, match=r"block_table: must have a row for each of the 2 rows .* got \[1, 1\]"):
        topk_indices(scores, 1, block_table=table[:1], page_size=1)
