"""linear_fp32 on the GPU: exact sums of small integers, comparison with float64, and bits that depend only on a token
and a row."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.gemm import linear_sums
from dsa.kernels.gemm import linear_fp32_sm90 as kernels
from dsa.kernels.gemm.linear_fp32_limits import TILE_TOKENS, choose_config
from dsa.testing import poison_free_memory
from tests.gpu.case_checks import by_sizes, check_calls_in_a_row, check_rows_alone, grid, spoiled_rows, verify

(CASE,) = cases_of("linear_fp32")
TOKENS = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 50, 63, 64]
# (rows, channels) of the matrix. Some sizes of the first line are those of models. The second line has sizes that leave
# a part of a tile empty.
SHAPES = [
    *((64, 4096), (64, 7168), (256, 7168), (512, 4096), (1024, 4096), (2048, 4096), (2624, 4096), (2624, 7168)),
    *((1, 32), (40, 2048), (999, 2080), (530, 96), (4097, 2048)),
]
CONFIGS = [(tile, ctas) for tile in TILE_TOKENS for ctas in (1, 8)]
UNSCALED = {"scale": (1.0,), "scaled_from": (0,)}


@by_sizes(
    *(grid(tokens=TOKENS, rows=[rows], channels=[channels], **UNSCALED) for rows, channels in SHAPES),
    # Slices (see dsa/cute/small_m_product.py) have no k-step, one round of loads, or several rounds. The numbers of
    # rows select kernels with and without clusters.
    grid(
        tokens=(3, 12, 50),
        rows=(100, 600),
        channels=[32, 96, 2048, 2080, 4096, 6144, 7168, 8192, 16384],
        dtype=(torch.bfloat16, torch.float16),
        **UNSCALED,
    ),
    *(
        grid(tokens=(1, 40), rows=[2624], channels=[4096], scale=[x], scaled_from=[first])
        for x, first in [(0.25, 0), (-2.0, 2560), (0.25, 2561), (4.0, 2624)]
    ),
)
def test_sums_of_small_integers_are_exact(sizes):
    given = CASE.arguments("cuda", exact=True, **sizes)
    poison_free_memory(mebibytes=64)
    assert torch.equal(dsa.linear_fp32(**given), linear_sums(given).float())


@pytest.mark.parametrize("rows, channels", SHAPES)
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_sums_are_near_float64(tokens, rows, channels, record_error):
    sizes = {"tokens": tokens, "rows": rows, "channels": channels, "scale": 0.3, "scaled_from": 0}
    verify(CASE, sizes, record_error)


@pytest.mark.parametrize("channels", [2048, 2080, 4096, 7168, 16384])
def test_bits_do_not_depend_on_other_tokens_and_rows(channels):
    """The ranges of tokens and rows select every tile size, with and without clusters."""
    given = CASE.arguments("cuda", tokens=64, rows=2624, channels=channels, scale=1.0)
    tokens = [(0, 1), (5, 1), (63, 1), (3, 8), (40, 9), (9, 16), (31, 33), (1, 63)]
    whole, weight = dsa.linear_fp32(**given), given["weight"]
    for low, high in ((0, 2624), (0, 64), (2560, 2624), (2048, 2560), (7, 1000)):
        part = given | {"weight": weight[low:high], "scaled_from": 0}
        assert torch.equal(dsa.linear_fp32(**part), whole[:, low:high])
        check_rows_alone(CASE.run, part, ("x",), tokens)
    for config in CONFIGS:
        y = torch.full_like(whole, torch.nan)
        kernels.compile_linear_fp32("bfloat16", config)(given["x"], weight, y, 1.0, 0)
        assert torch.equal(y, whole)


@pytest.mark.parametrize("rows", [64, 2048])
@pytest.mark.parametrize("tokens", [6, 60])
def test_what_is_not_finite_stays_in_its_token(tokens, rows):
    given = CASE.arguments("cuda", tokens=tokens, rows=rows, channels=2048, exact=True)
    changes = {("x", 1, 100): torch.inf, ("x", 2, 7): torch.nan, ("x", 3): 3e38, ("x", 5): -3e38}
    (y,) = spoiled_rows(CASE.run, given, changes)
    assert y[2].isnan().all() and not y[1].isfinite().all()


@pytest.mark.parametrize("tokens, rows", [(1, 64), (1, 2624), (24, 2624), (64, 512)])
def test_each_call_of_a_graph_waits_for_the_previous_one(tokens, rows):
    check_calls_in_a_row(CASE, tokens=tokens, rows=rows, channels=4096)


def test_the_sizes_of_these_tests_use_all_tiles():
    assert {choose_config(tokens, rows, channels) for tokens in TOKENS for rows, channels in SHAPES} == {*CONFIGS}
