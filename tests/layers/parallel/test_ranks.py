"""Sums and pieces over ranks: values, order and bits."""

from types import SimpleNamespace

import pytest
import torch

from dsa_layers.parallel import ranks
from dsa_layers.parallel.ranks import SHARED_SUM_ROWS, Ranks
from tests.layers.parallel.processes import in_ranks

COUNTS = (0, 1, 7, SHARED_SUM_ROWS * 3 - 1, SHARED_SUM_ROWS * 3, SHARED_SUM_ROWS * 3 + 1, 200)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def parts(rank, rows, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(max(COUNTS), 3, 5, generator=generator, dtype=torch.float64).mul(10.0**rank).to(dtype)[:rows]


def sums(ranks):
    cases = [(rows, dtype) for rows in COUNTS for dtype in DTYPES]
    return [ranks.sum(parts(ranks.rank, *case)) for case in cases], ranks.join_columns(parts(ranks.rank, 4, DTYPES[0]))


def test_sums_and_columns():
    """In one order on every rank, and a row's sum does not depend on how many rows there are: few and many go different
    ways."""
    cases = [(rows, dtype) for rows in COUNTS for dtype in DTYPES]
    for results, joined in in_ranks(3, sums):
        for i, (rows, dtype) in enumerate(cases):
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            first, second, third = (parts(rank, rows, dtype).to(wide) for rank in range(3))
            assert results[i].dtype == dtype, (rows, dtype)
            assert torch.equal(results[i], (first + second + third).to(dtype)), (rows, dtype)
        few, many = results[COUNTS.index(7) * len(DTYPES)], results[COUNTS.index(200) * len(DTYPES)]
        assert torch.equal(few, many[:7])
        assert torch.equal(joined, torch.cat([parts(rank, 4, DTYPES[0]) for rank in range(3)], -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_parts_are_added_in_their_order(size, dtype):
    """Rows that one kernel adds, and rows of a width that none takes."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 9, 16, generator=generator).mul(10.0 ** (torch.arange(size)[:, None, None] % 4)).to(dtype)
    total = x[0].float()
    for part in x[1:].float():
        total = total + part
    with torch.inference_mode():
        assert torch.equal(Ranks(0, size).sum_parts(x), total.to(dtype))
        own = x.flip(0, 1)[:2]
        for width in (16, 15):  # of one kernel, and of none
            more = own[0] + (total + own[1].float()).to(dtype)
            found = Ranks(0, size).sum_parts(x[..., :width], own[1, :, :width], own[0, :, :width])
            assert torch.equal(found, more[:, :width])
            found = Ranks(0, size).sum_parts(x[..., :width], None, own[0, :, :width])
            assert torch.equal(found, (own[0] + total.to(dtype))[:, :width])
        assert torch.equal(Ranks(0, size).sum_parts(x[:, :, :15]), total[:, :15].to(dtype))
        assert Ranks(0, size).sum_parts(x[:, :0]).shape == (0, 16)


def test_one_rank_says_nothing():
    x = torch.ones(3, 2)
    assert Ranks(0, 1).sum(x) is x and Ranks(0, 1).join_columns(x) is x


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"group: torch\.distributed is not initialised"):
        Ranks.of()


def test_a_process_outside_the_mesh_is_refused(monkeypatch):
    """torch.distributed gives it the rank -1."""
    outside = SimpleNamespace(rank=-1, size=2)
    monkeypatch.setattr(ranks, "_of_mesh", lambda mesh: outside)
    with pytest.raises(ValueError, match="mesh: this process must be one of its ranks, got rank -1 of 2"):
        ranks.ranks_of(object())
