"""Products in fp32 on the GPU: exact sums, float64, and the same bits for any other tokens, rows and tiles."""

from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.gemm import linear_sums
from dsa.kernels.gemm import linear_fp32_sm90 as kernels
from dsa.kernels.gemm.linear_fp32_limits import TILE_TOKENS, choose_config
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import replays

(CASE,) = cases_of("linear_fp32")
TOKENS = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 50, 63, 64]
# Rows, channels: the models' index weights, compressors and routers, all of a V4 layer together, and sizes that leave
# part of a tile empty.
SHAPES = [
    *((64, 4096), (64, 7168), (256, 7168), (512, 4096), (1024, 4096), (2048, 4096), (2624, 4096), (2624, 7168)),
    *((1, 32), (40, 2048), (999, 2080), (530, 96), (4097, 2048)),
]
# Channels: slices of no steps, of one and of several rounds; in clusters, and with many rows without clusters.
WIDTHS = [32, 96, 2048, 2080, 4096, 6144, 7168, 8192, 16384]
CONFIGS = [(tile, ctas) for tile in TILE_TOKENS for ctas in (1, 8)]


def integers(tokens, rows, channels, dtype=torch.bfloat16, scale=1.0, scaled_from=0):
    """Operands whose sums are exact in fp32."""
    sizes = {"tokens": tokens, "rows": rows, "channels": channels, "dtype": dtype}
    return CASE.arguments("cuda", **sizes, scale=scale, scaled_from=scaled_from, exact=True)


def assert_exact(given):
    poison_free_memory(mebibytes=64)
    assert torch.equal(dsa.linear_fp32(**given), linear_sums(given).float())


@pytest.mark.parametrize(
    ("tokens", "rows", "channels", "dtype"),
    [
        *((tokens, *shape, torch.bfloat16) for tokens, shape in product(TOKENS, SHAPES)),
        *product((3, 12, 50), (100, 600), WIDTHS, (torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_exact_sums(tokens, rows, channels, dtype):
    assert_exact(integers(tokens, rows, channels, dtype))


@pytest.mark.parametrize("rows, channels", SHAPES)
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_against_float64(tokens, rows, channels, record_error):
    poison_free_memory(mebibytes=64)
    record_error(CASE.verify("cuda", tokens=tokens, rows=rows, channels=channels, scale=0.3, scaled_from=0))


@pytest.mark.parametrize("scale, scaled_from", [(0.25, 0), (-2.0, 2560), (0.25, 2561), (4.0, 2624)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_scaled_rows(tokens, scale, scaled_from):
    assert_exact(integers(tokens, 2624, 4096, scale=scale, scaled_from=scaled_from))


@pytest.mark.parametrize("channels", [2048, 2080, 4096, 7168, 16384])
def test_bits_do_not_depend_on_other_tokens_and_rows(channels):
    """In every tile, at every position in a tile, with and without clusters."""
    given = CASE.arguments("cuda", tokens=64, rows=2624, channels=channels)
    x, weight = given["x"], given["weight"]
    whole = dsa.linear_fp32(x, weight)
    for first, tokens in ((0, 1), (5, 1), (63, 1), (3, 8), (40, 9), (9, 16), (31, 33), (1, 63)):
        part = slice(first, first + tokens)
        assert torch.equal(dsa.linear_fp32(x[part], weight), whole[part])
        for low, high in ((0, 64), (2560, 2624), (2048, 2560), (7, 1000)):
            assert torch.equal(dsa.linear_fp32(x[part], weight[low:high]), whole[part, low:high])
    for config in CONFIGS:
        y = torch.full_like(whole, torch.nan)
        kernels.compile_linear_fp32("bfloat16", config)(x, weight, y, 1.0, 0)
        assert torch.equal(y, whole)


@pytest.mark.parametrize("rows", [64, 2048])
@pytest.mark.parametrize("tokens", [6, 60])
def test_what_is_not_finite_stays_in_its_token(tokens, rows):
    given = integers(tokens, rows, 2048)
    clean, x = dsa.linear_fp32(**given), given["x"]
    x[1, 100], x[2, 7], x[3], x[5] = torch.inf, torch.nan, 3e38, -3e38
    y = dsa.linear_fp32(**given)
    others = [t for t in range(tokens) if t not in (1, 2, 3, 5)]
    assert torch.equal(y[others], clean[others]) and y[2].isnan().all() and not y[1].isfinite().all()


@pytest.mark.parametrize("tokens, rows", [(1, 64), (1, 2624), (24, 2624), (64, 512)])
def test_graph_of_twenty_calls_in_a_row(tokens, rows):
    """Each call waits for the call before, whose memory is reused, like the layers of a model."""
    given = integers(tokens, rows, 4096)
    x, weight = given["x"], given["weight"]
    layers, renew = lambda *x: [dsa.linear_fp32(*x) for _ in range(20)], lambda: (torch.randint_like(x, -2, 3), weight)
    for found in replays(layers, (x, weight), renew, times=5):
        expected = linear_sums(given).float()
        assert all(torch.equal(each, expected) for each in found)


def test_the_sizes_of_these_tests_use_all_tiles():
    assert {choose_config(tokens, rows, channels) for tokens in TOKENS for rows, channels in SHAPES} == {*CONFIGS}
