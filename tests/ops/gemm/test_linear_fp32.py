"""`linear_fp32` on the CPU: which kernel it launches, and with which arguments."""

import pytest
import torch

import dsa
from dsa.cute import slices, small_m_product
from dsa.cute.small_m_product import ROUND
from dsa.kernels.gemm import linear_fp32_sm90 as kernels
from dsa.kernels.gemm.linear_fp32_limits import (
    CLUSTERS,
    DTYPES,
    LEAST_CHANNELS,
    MAX_TOKENS,
    ROWS,
    TILE_TOKENS,
    choose_config,
)
from dsa.ops.gemm import linear_fp32 as op
from dsa.runtime import backends
from dsa.runtime.checks import dtype_name


def inputs(tokens=7, channels=64, rows=32, dtype=torch.bfloat16):
    torch.manual_seed(tokens)
    return torch.randn(tokens, channels).to(dtype), torch.randn(rows, channels).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "tokens, rows, channels, config",
    [
        (1, 32, 64, (8, 8)),
        (8, 512, 4096, (8, 8)),
        (8, 513, 4096, (8, 1)),
        (9, 512, 4096, (16, 8)),
        (16, 2624, 4096, (16, 1)),
        (17, 64, 4096, (32, 8)),
        (64, 256, 7168, (32, 8)),
        (64, 272, 7168, (32, 1)),
        (64, 272, LEAST_CHANNELS - 32, (32, 8)),
    ],
)
def test_what_the_kernel_gets(tokens, rows, channels, config, dtype, launches):
    x, weight = inputs(tokens, channels, rows, dtype)
    y = dsa.linear_fp32(x, weight, 3, scaled_from=8)
    [(variant, (*tensors, scale, scaled_from))] = launches
    assert variant == (dtype_name(dtype), config) and (scale, scaled_from) == (3.0, 8) and type(scale) is float
    assert [t.data_ptr() for t in tensors] == [t.data_ptr() for t in (x, weight, y)]
    assert y.shape == (tokens, rows) and y.dtype == torch.float32


def test_only_shipped_variants_are_chosen():
    """One CTA computes a tile if there are more than CLUSTERS tiles, and if each slice has channels. Otherwise a
    cluster of 8 CTAs computes it."""
    assert {tile for _, tile in ROUND} == set(TILE_TOKENS) and {ctas for ctas, _ in ROUND} == {1, 8}
    assert ROWS == small_m_product.ROWS
    assert LEAST_CHANNELS == slices.SLICES * small_m_product.STEP
    for tokens in range(1, MAX_TOKENS + 1):
        for rows in (1, 64, 256, 512, 2048):
            for channels in (32, LEAST_CHANNELS, 7168):
                tile, ctas = choose_config(tokens, rows, channels)
                tiles = -(-tokens // tile) * -(-rows // ROWS)
                assert (ctas, tile) in ROUND and (tokens <= tile or tile == TILE_TOKENS[-1])
                assert ctas == 8 or (tiles > CLUSTERS and channels >= LEAST_CHANNELS)
    shipped = {arguments for _, arguments in kernels.shipped_variants()}
    assert shipped == {(dtype, (tile, ctas)) for dtype in DTYPES for ctas, tile in ROUND}
    assert backends.ARCHS["linear_fp32"] == ["sm_90"] and op.__all__ == ["linear_fp32"]
