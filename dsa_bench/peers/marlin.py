"""Marlin: experts' FP4 weights by bf16 activations, as vLLM 0.33.0 runs DeepSeek-V4-Flash on Hopper (W4A16, MXFP4).

The operators are in `torch.ops._moe_C` (vllm/_moe_C_stable_libtorch.abi3.so), the activation in `torch.ops._C`
(vllm/_C_stable_libtorch.abi3.so). Both files must be installed.

Facts, for T tokens with k of E experts each:
- weights: int32 [E, K / 16, 2 N], for N rows of K channels. In a tile of 16 channels and 64 rows, a word contains the 8
  codes that a thread multiplies: rows n and n + 8, channels c, c + 1, c + 8 and c + 9 (`pack` has the order). The
  wheel's operator for this layout, `torch.ops._C.gptq_marlin_repack`, is PTX for sm_80, which a library stripped to
  sm_90 code lacks. `pack` does the same with PyTorch, once per layer
- scales: e8m0 [E, K / 32, N]. Within 64 rows, scales with equal n % 8 are adjacent, in the order in which a thread
  reads them. A scale of 2^-127 counts as 0
- moe_align_block_size sorts the T k rows by expert. Each expert's rows begin at a multiple of the block size. The block
  size is the smallest of 8, 16, 32, 48 and 64 for which (mean rows per expert) / size is below 0.9, or else 64. An
  entry of the result is a row's index among the T k rows, or T k for padding. Entries after the last block are
  ignored. The result's sizes depend only on T, k and E
- moe_wna16_marlin_gemm computes row r of the result from row r / top_k of the activations, and writes [T k, N] in the
  order of tokens. Optionally it multiplies by the router's weights before it rounds. An integer, `_E2M1`, encodes the
  fields of the weights' type. N is a multiple of 64 and K of 128, or N of 128 and K of 64. The operator's locks, four
  int32 per SM, are zero before and after a call. The kernels are PTX for sm_80, which the driver compiles for Hopper at
  the first call; a library stripped to sm_90 code lacks them
- silu_and_mul_with_clamp(result, rows, limit, 1, 0): silu of a row's first half, clamped from above, times its second
  half, clamped at both ends. moe_sum adds a token's k rows in fp32
"""

from functools import lru_cache
from typing import NamedTuple

import torch

import dsa
from dsa_bench.peers.package import Operators

MARLIN = Operators("marlin", "vllm", ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so"))
_BLOCKS = (8, 16, 32, 48, 64)
_FULL = 0.9  # a block size is chosen if the mean rows per expert fill less than this fraction of a block
_LOCKS = 4  # int32 locks per SM
# e2m1: bits of the exponent and of the fraction, a sign, no bias, no infinities, no NaN.
_E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49


class Packed(NamedTuple):
    """Experts' weights in Marlin's layout: weight int32 [E, K / 16, 2 N], scale e8m0 [E, K / 32, N]."""

    weight: torch.Tensor
    scale: torch.Tensor


class Blocks(NamedTuple):
    """Row indices sorted by expert, in blocks of `size` rows of one expert. rows int32 [largest number of rows with
    padding]: the index of each row, or T k for padding. experts int32 [blocks]: the expert of each block. count int32
    [1]: the number of entries of `rows` in use, with padding."""

    rows: torch.Tensor
    experts: torch.Tensor
    count: torch.Tensor
    size: int


def pack(weight: torch.Tensor, scale: torch.Tensor) -> Packed:
    """Convert weights int8 [E, N, K / 2], two e2m1 codes per byte with the even channel in the low nibble, and e8m0
    scales [E, N, K / 32] to Marlin's layout."""
    count, rows, half = weight.shape
    packed = torch.empty(count, half // 8, 8 * rows, dtype=torch.uint8, device=weight.device)
    for matrix, target in zip(weight.view(torch.uint8), packed):  # one at a time to limit memory
        target.copy_(_words(matrix).view_as(target))
    # Scales of row n = 64 tile + 32 a + 16 b + 8 c + i go to index [tile, i, a, c, b] among the N rows.
    permuted = scale.view(torch.uint8).unflatten(1, (-1, 2, 2, 2, 8)).permute(0, 6, 1, 5, 2, 4, 3)
    return Packed(packed.view(torch.int32), permuted.reshape(count, -1, rows).view(torch.float8_e8m0fnu))


def _words(matrix: torch.Tensor) -> torch.Tensor:
    """Reorder bytes [N, K / 2] to [K / 16, N / 64, column, row, warp, low, half]. Four bytes are a word. Each byte has
    the codes of channels k and k + 8.

    A tile has 64 matrix rows n and 16 channels k:
        n = 64 tile + 16 warp + 8 half + column
        k = 16 tile + 8 high + 2 row + low
    """
    tiles = matrix.unflatten(0, (-1, 4, 2, 8)).unflatten(4, (-1, 2, 4))  # [tile, warp, half, column, tile, high, row]
    first, second = tiles.permute(5, 4, 0, 3, 6, 1, 2)  # high 0 and 1
    return torch.stack((first & 15 | second << 4, first >> 4 | second & 240), -2)


def experts_sum(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: Packed, down: Packed, limit: float | None
) -> torch.Tensor:
    """Return sum_j weights[t, j] SwiGLU_{experts[t, j]}(x[t]), bf16 [T, hidden].

    x: bf16 [T, hidden]. experts: int64 [T, k]. weights: fp32 [T, k]. limit: clamps SwiGLU's halves.
    """
    tokens, top_k = experts.shape
    blocks = _blocks(experts, len(down.weight))
    halves = _product(x, gate_up, blocks, weights, top_k, weighted=False)
    h = halves.new_empty(len(halves), halves.shape[1] // 2)
    if limit is None:
        torch.ops._C.silu_and_mul(h, halves)
    else:
        torch.ops._C.silu_and_mul_with_clamp(h, halves, limit, 1.0, 0.0)
    outputs = _product(h, down, blocks, weights, 1, weighted=True)
    out = torch.empty_like(x)
    torch.ops._moe_C.moe_sum(outputs.view(tokens, top_k, -1), out, None, None)
    return out


def block_size(rows: int, count: int) -> int:
    """Return the rows per block as vLLM chooses them, for `rows` rows of `count` experts in all."""
    return next((size for size in _BLOCKS if rows / count / size < _FULL), _BLOCKS[-1])


def _blocks(experts: torch.Tensor, count: int) -> Blocks:
    rows = experts.numel()
    size = block_size(rows, count)
    most = rows + min(rows, count) * (size - 1)
    sizes = (most, -(-most // size), 1)
    blocks = Blocks(*(torch.empty(n, dtype=torch.int32, device=experts.device) for n in sizes), size)
    torch.ops._moe_C.moe_align_block_size(experts, count, size, *blocks[:3], None, None)
    return blocks


def _product(
    a: torch.Tensor, b: Packed, blocks: Blocks, weights: torch.Tensor, top_k: int, *, weighted: bool
) -> torch.Tensor:
    """Return the products, bf16 [top_k * rows of `a`, N]. Row r is row r / top_k of `a`, multiplied by the matrix of
    the expert in `blocks`. weighted: also multiplied by the weight of the router."""
    (rows, channels), columns = a.shape, b.scale.shape[2]
    out = torch.empty(rows * top_k, columns, dtype=a.dtype, device=a.device)
    unused = (None, None, None)  # scales of FP8 activations, a global scale, zero points
    routed = (*blocks[:3], weights, blocks.size, top_k, weighted)
    shape = (_E2M1, rows, columns, channels)
    reduction = (False, True, False)  # no atomics, fp32 sums, no float zero points
    tile = (-1, -1, -1)  # the operator chooses
    operands = (a, out, b.weight, None, b.scale, *unused, _locks(a.device))
    return torch.ops._moe_C.moe_wna16_marlin_gemm(*operands, *routed, *shape, *reduction, *tile)


@lru_cache
def _locks(device: torch.device) -> torch.Tensor:
    return torch.zeros(_LOCKS * dsa.num_sms(device), dtype=torch.int32, device=device)
