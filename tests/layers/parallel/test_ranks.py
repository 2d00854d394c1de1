"""`Ranks`: sums add the parts in the order of the ranks and round once; columns are joined; `of` needs a group."""

import pytest
import torch

from dsa_layers.parallel.ranks import SHARED_SUM_ROWS, Ranks
from tests.layers.parallel.processes import in_ranks

COUNTS = (0, 1, 7, SHARED_SUM_ROWS * 3 - 1, SHARED_SUM_ROWS * 3, SHARED_SUM_ROWS * 3 + 1, 200)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
CASES = [(rows, dtype) for rows in COUNTS for dtype in DTYPES]


def part(rank, rows, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(max(COUNTS), 3, 5, generator=generator, dtype=torch.float64).mul(10.0**rank).to(dtype)[:rows]


def sums(ranks):
    own = part(ranks.rank, 4, torch.float32)
    return [ranks.sum(part(ranks.rank, *case)) for case in CASES], ranks.join_columns(own)


def test_sums_are_in_the_order_of_the_ranks_whatever_the_number_of_rows():
    for results, joined in in_ranks(3, sums):
        for result, (rows, dtype) in zip(results, CASES, strict=True):
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            first, second, third = (part(rank, rows, dtype).to(wide) for rank in range(3))
            assert result.dtype == dtype and torch.equal(result, (first + second + third).to(dtype)), (rows, dtype)
        assert torch.equal(joined, torch.cat([part(rank, 4, torch.float32) for rank in range(3)], -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 8])
@torch.inference_mode()
def test_parts_are_added_in_their_order(size, dtype):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 9, 16, generator=generator).mul(10.0 ** (torch.arange(size)[:, None, None] % 4)).to(dtype)
    total = x[0].float()
    for one in x[1:].float():
        total = total + one
    two, (residual, shared) = Ranks(0, size), x.flip(0, 1)[:2]
    for width in (16, 15):
        own = x[..., :width], shared[:, :width], residual[:, :width]
        assert torch.equal(two.sum_parts(own[0]), total.to(dtype)[:, :width])
        expected = residual + (total + shared.float()).to(dtype)
        assert torch.equal(two.sum_parts(*own), expected[:, :width])
        assert torch.equal(two.sum_parts(own[0], None, own[2]), (residual + total.to(dtype))[:, :width])
    assert two.sum_parts(x[:, :0]).shape == (0, 16)


def test_ranks_need_a_process_group():
    with pytest.raises(RuntimeError, match=r"group: torch\.distributed is not initialised"):
        Ranks.of()
