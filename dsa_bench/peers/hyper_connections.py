"""Hyper-connections: DeepGEMM's projection, and tile-kernels' collapse and expansion.

vLLM and SGLang run V4's hyper-connections with these libraries or copies of them. Facts, on Hopper:
- `tf32_hc_prenorm_gemm`, the projection, multiplies bf16 streams with an fp32 matrix in TF32, which keeps 11 bits of
  each weight; our op keeps 24. The projection also sums the streams' squares. Both results are partial sums over
  `splits` parts of the channels
- `mhc_pre_big_fuse_fwd`, the collapse, adds up the partial sums of the products and of the squares; our collapse
  computes the squares itself. A kernel is compiled per number of channels and splits
- D, the channels of a stream, must be a multiple of 128. tilelang compiles at the first call, 4 s per kernel, and
  caches kernels in the folder that the environment variable TILELANG_CACHE_DIR names
"""

from functools import partial
from types import ModuleType

import torch

import dsa
from dsa_bench.harness.calls import Call, into, peer
from dsa_bench.peers import deep_gemm
from dsa_bench.peers.package import Library, launch_programmatically

TILE = Library("tile-kernels", ("tile_kernels",), launch_programmatically)
BOTH = f"{deep_gemm.NEW.name}, {TILE.name}"
# eps, factor of post and number of Sinkhorn iterations, as in our ops
_EPS, _POST, _ITERATIONS = 1e-6, 2.0, 20
_ROWS, _CHANNELS = 64, 64  # tile of the projection
_LEAST_TILES = 4  # least number of tiles of channels per split
Sums = tuple[torch.Tensor, torch.Tensor]


@peer(deep_gemm.NEW, "{}, TF32")
def project(module: ModuleType, streams: torch.Tensor, matrix: torch.Tensor) -> Call:
    """Return calls that compute (partial products [splits, T, C], partial sums of squares [splits, T]) from inputs
    (streams [T, n, D], matrix fp32 [C, n D])."""
    return partial(into, *_projection(module, streams, matrix))


def _projection(module: ModuleType, streams: torch.Tensor, matrix: torch.Tensor) -> tuple[Sums, Call]:
    """Return (the tensors of the sums, the call that writes them). The number of splits is that of vLLM for V4."""
    tokens, channels = len(streams), matrix.shape[1]
    fill = dsa.num_sms(streams.device) // -(-tokens // _ROWS)
    splits = max(1, min(fill, -(-channels // _CHANNELS) // _LEAST_TILES))
    products = torch.empty(splits, tokens, len(matrix), device=streams.device)
    squares = torch.empty(splits, tokens, device=streams.device)
    return (products, squares), partial(
        module.tf32_hc_prenorm_gemm, streams.flatten(1), matrix, products, squares, splits
    )


@peer(TILE)
def collapse(module: ModuleType, streams, mix, base, scale) -> Call:
    """Return calls that compute (x, post, comb) from inputs (streams, mix, base, scale). The streams' squares are
    summed outside the timing, because vLLM's projection sums them."""
    squares = streams.float().square().sum((1, 2))
    return partial(into, *_collapse(module, streams, (mix[None], squares[None]), base, scale))


def _collapse(
    module: ModuleType, streams: torch.Tensor, sums: Sums, base, scale
) -> tuple[tuple[torch.Tensor, ...], Call]:
    """Return ((x, post, comb), the call that writes them)."""
    tokens, n, channels = streams.shape
    x = torch.empty(tokens, channels, dtype=streams.dtype, device=streams.device)
    post, comb = (torch.empty(tokens, size, device=streams.device) for size in (n, n * n))
    tensors = (*sums, scale, base, streams, post, comb, x)
    numbers = (_EPS, _EPS, _EPS, _POST, _ITERATIONS, len(sums[0]))
    return (x, post, comb.view(tokens, n, n)), partial(module.mhc.mhc_pre_big_fuse_fwd, *tensors, *numbers)


@peer(TILE)
def expand(module: ModuleType, y, streams, post, comb) -> Call:
    """Return calls that compute the new streams from inputs (y, streams, post, comb)."""
    return partial(into, *_expansion(module, y, streams, post, comb))


def _expansion(module: ModuleType, y, streams, post, comb) -> tuple[torch.Tensor, Call]:
    """Return (the new streams, the call that writes them)."""
    out = torch.empty_like(streams)
    # The op's tensors begin with a batch dimension, here of size 1. post also ends with a dimension of size 1.
    return out, partial(module.mhc.mhc_post_fwd, y[None], streams[None], post[None, ..., None], comb[None], out[None])


@peer(TILE, BOTH, needs=(deep_gemm.NEW,))
def project_and_collapse(module: ModuleType, streams, matrix, base, scale) -> Call:
    """Return calls that compute (x, post, comb) from inputs (streams, matrix, base, scale)."""
    sums, project = _projection(deep_gemm.NEW.load(), streams, matrix)
    out, collapse = _collapse(module, streams, sums, base, scale)
    return partial(into, out, project, collapse)


@peer(TILE, BOTH, needs=(deep_gemm.NEW,))
def expand_and_project(module: ModuleType, y, streams, post, comb, matrix) -> Call:
    """Return calls that compute (new streams, partial products [splits, T, C]) from inputs (y, streams, post, comb,
    matrix)."""
    new, expand = _expansion(module, y, streams, post, comb)
    (products, _), project = _projection(deep_gemm.NEW.load(), new, matrix)
    return partial(into, (new, products), expand, project)
