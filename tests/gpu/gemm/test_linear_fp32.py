"""Products in fp32 on the GPU: exact where rounding touches nothing, within rounding elsewhere, and the same bits
whatever the other tokens, the other rows of the matrix, and how tiles lie on CTAs."""

import math
from functools import partial
from itertools import product

import pytest
import torch

import dsa
from dsa.kernels.gemm import linear_fp32_sm90 as kernels
from dsa.kernels.gemm.linear_fp32_limits import TILE_TOKENS, choose_config
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import among_nan, replays

TOKENS = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 50, 63, 64]
# Rows, channels: the models' index weights, compressors and routers, all of a V4 layer's together, and sizes that no
# tile ends with.
SHAPES = [
    *((64, 4096), (64, 7168), (256, 7168), (512, 4096), (1024, 4096), (2048, 4096), (2624, 4096), (2624, 7168)),
    *((1, 32), (40, 2048), (999, 2080), (530, 96), (4097, 2048)),
]
# Channels: slices of no steps, of one and of several rounds; in clusters and, of many rows, without.
WIDTHS = [32, 96, 2048, 2080, 4096, 6144, 7168, 8192, 16384]


def integers(tokens, channels, rows, dtype=torch.bfloat16):
    """Operands whose products and sums, whatever their order, are exact in fp32."""
    x = torch.randint(-2, 3, (tokens, channels), device="cuda").to(dtype)
    weight = torch.randint(-1, 2, (rows, channels), device="cuda") * 2.0 ** -round(math.log2(channels) / 2)
    return x, weight.to(dtype)


def randoms(tokens, channels, rows, dtype=torch.bfloat16):
    x, weight = (torch.randn(n, channels, device="cuda").to(dtype) for n in (tokens, rows))
    return x, weight


def exact(x, weight, scale=1.0, scaled_from=0):
    y = (x.double() @ weight.double().T).float()
    y[:, scaled_from:] *= scale
    return y


def by(config, x, weight):
    """The product with tiles of so many tokens and CTAs."""
    y = torch.full((len(x), len(weight)), torch.nan, device="cuda")
    kernels.compile_linear_fp32(str(x.dtype).removeprefix("torch."), config)(x, weight, y, 1.0, 0)
    return y


@pytest.mark.parametrize(
    ("tokens", "rows", "channels", "dtype"),
    [
        *((tokens, *shape, torch.bfloat16) for tokens, shape in product(TOKENS, SHAPES)),
        *product((3, 12, 50), (100, 600), WIDTHS, (torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_exact_sums(tokens, rows, channels, dtype):
    given = integers(tokens, channels, rows, dtype)
    poison_free_memory(mebibytes=64)
    assert torch.equal(dsa.linear_fp32(*given), exact(*given))


@pytest.mark.parametrize("rows, channels", SHAPES)
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_against_float64(tokens, rows, channels, record_error):
    x, weight = randoms(tokens, channels, rows)
    poison_free_memory(mebibytes=64)
    size = x.double().abs() @ weight.double().abs().T
    error = (dsa.linear_fp32(x, weight, 0.3).double() / 0.3 - x.double() @ weight.double().T).abs() / size
    assert (error < 4e-6).all()  # a NaN is not
    record_error(error.max())


@pytest.mark.parametrize("scale, scaled_from", [(0.25, 0), (-2.0, 2560), (0.25, 2561), (4.0, 2624)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_scales_of_the_rows_behind(tokens, scale, scaled_from):
    given = integers(tokens, 4096, 2624)
    assert torch.equal(dsa.linear_fp32(*given, scale, scaled_from=scaled_from), exact(*given, scale, scaled_from))


@pytest.mark.parametrize("channels", [2048, 2080, 4096, 7168, 16384])
def test_bits_whatever_the_others(channels):
    """In every tile, at every place in it, in clusters and without."""
    x, weight = randoms(64, channels, 2624)
    whole = dsa.linear_fp32(x, weight)
    for first, tokens in ((0, 1), (5, 1), (63, 1), (3, 8), (40, 9), (9, 16), (31, 33), (1, 63)):
        part = slice(first, first + tokens)
        assert torch.equal(dsa.linear_fp32(x[part], weight), whole[part])
        for low, high in ((0, 64), (2560, 2624), (2048, 2560), (7, 1000)):
            assert torch.equal(dsa.linear_fp32(x[part], weight[low:high]), whole[part, low:high])
    for config in [(tile, ctas) for tile in TILE_TOKENS for ctas in (1, 8)]:
        assert torch.equal(by(config, x, weight), whole)


@pytest.mark.parametrize("rows", [64, 2048])
@pytest.mark.parametrize("tokens", [6, 60])
def test_what_is_not_finite_stays_in_its_token(tokens, rows):
    x, weight = integers(tokens, 2048, rows)
    clean = dsa.linear_fp32(x, weight)
    x[1, 100], x[2, 7] = torch.inf, torch.nan
    x[3], x[5] = 3e38, -3e38
    y = dsa.linear_fp32(x, weight)
    others = [t for t in range(tokens) if t not in (1, 2, 3, 5)]
    assert torch.equal(y[others], clean[others]) and y[2].isnan().all() and not y[1].isfinite().all()


@pytest.mark.parametrize("tokens, rows", [(1, 64), (5, 1024), (40, 1024)])
def test_rows_with_gaps(tokens, rows):
    given = integers(tokens, 2048, rows)
    assert torch.equal(dsa.linear_fp32(*(among_nan(x, 128, 128) for x in given)), exact(*given))


@pytest.mark.parametrize("tokens, rows", [(1, 64), (1, 2624), (24, 2624), (64, 512)])
def test_graph_replay_with_new_numbers(tokens, rows):
    """Calls one after the other, as the layers of a model: each waits for the one before, whose memory is reused."""
    given = integers(tokens, 4096, rows)

    def layers(*given):
        return [dsa.linear_fp32(*given) for _ in range(20)]

    for found in replays(layers, given, partial(integers, tokens, 4096, rows), times=5):
        expected = exact(*given)
        assert all(torch.equal(each, expected) for each in found)


def test_all_tiles_are_asked_for():
    """By the sizes of these tests."""
    asked = {choose_config(tokens, rows, channels) for tokens in TOKENS for rows, channels in SHAPES}
    assert asked == {(tile, ctas) for tile in TILE_TOKENS for ctas in (1, 8)}
