"""Marlin: experts' FP4 weights by bf16 activations, as vLLM 0.33.0 runs DeepSeek-V4-Flash on Hopper (W4A16, MXFP4).

Its operators are `torch.ops._moe_C` (vllm/_moe_C_stable_libtorch.abi3.so), and the activation is of `torch.ops._C`
(vllm/_C_stable_libtorch.abi3.so). Both files must be there.

Facts:
- weights: int32 [E, K / 16, 2 N], N rows of K channels: of a tile of 16 channels and 64 rows a word has the 8 codes
  that a thread multiplies, of the rows n and n + 8 and the channels k, k + 1, k + 8 and k + 9 (`pack` says where). The
  wheel's operator that lays them out, `torch.ops._C.gptq_marlin_repack`, is PTX for sm_80 and not in a copy of the
  library that has sm_90's code alone; `pack` does the same with PyTorch, once for a layer
- scales: e8m0 [E, K / 32, N], of 64 rows those with equal n % 8 side by side, in the order that a thread reads them. A
  scale of 2^-127 counts as 0
- moe_align_block_size sorts the T k rows by expert, an expert's beginning at a multiple of a block's rows, which are 8,
  16, 32, 48 or 64: the fewest of which an expert's share is less than 0.9 blocks. A row is its place among the T k, T k
  where there is none; entries after the last block do not count. All sizes follow from T and k alone
- moe_wna16_marlin_gemm multiplies row r of the result with row r / top_k of the activations, writes [T k, N] in the
  order of tokens, not of experts, and multiplies by the router's weights before it rounds, if it is told to. The type
  of the weights is an integer made of the type's fields. N is a multiple of 64 and K of 128, or N of 128 and K of 64.
  Its locks, four int32 a multiprocessor, are zero before and after. The kernels are PTX for sm_80, which the driver
  compiles for Hopper at the first call: a copy of `_moe_C` that has sm_90's code alone does not have them
- silu_and_mul_with_clamp(result, rows, limit, 1, 0): silu of the first half, cut off above, by the second, cut off at
  both ends. moe_sum adds up a token's k rows in fp32
"""

from functools import lru_cache
from typing import NamedTuple

import torch

import dsa
from dsa_bench.peers.package import Operators

MARLIN = Operators("marlin", "vllm", ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so"))
_BLOCKS = (8, 16, 32, 48, 64)
_FULL = 0.9  # of a block's rows
_LOCKS = 4  # of a multiprocessor
# e2m1: bits of the exponent, of the fraction, a sign, no bias, no infinities and no NaN.
_E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49


class Packed(NamedTuple):
    """weight int32 [E, K / 16, 2 N], scale e8m0 [E, K / 32, N]."""

    weight: torch.Tensor
    scale: torch.Tensor


class Blocks(NamedTuple):
    """Rows by expert in blocks of `size`. rows int32 [at most so many]; experts int32 [blocks]; count int32 [1]: rows
    with those that fill up."""

    rows: torch.Tensor
    experts: torch.Tensor
    count: torch.Tensor
    size: int


def pack(weight: torch.Tensor, scale: torch.Tensor) -> Packed:
    """Of weights int8 [E, N, K / 2], two e2m1 codes a byte, the even channel's in the low nibble, and e8m0 scales
    [E, N, K / 32]."""
    count, rows, half = weight.shape
    packed = torch.empty(count, half // 8, 8 * rows, dtype=torch.uint8, device=weight.device)
    for matrix, target in zip(weight.view(torch.uint8), packed):  # one at a time, for the copies' memory
        target.copy_(_words(matrix).view_as(target))
    # n = 64 tile + 32 a + 16 b + 8 c + i -> [tile, i, a, c, b].
    turned = scale.view(torch.uint8).unflatten(1, (-1, 2, 2, 2, 8)).permute(0, 6, 1, 5, 2, 4, 3)
    scales = turned.reshape(count, -1, rows).view(torch.float8_e8m0fnu)
    return Packed(packed.view(torch.int32), scales)


def _words(matrix: torch.Tensor) -> torch.Tensor:
    """Bytes [N, K / 2] -> [K / 16, N / 64, column, row, warp, low, half]: of four bytes, a word, each has two channels
    8 apart. n = 64 tile + 16 warp + 8 half + column; k = 16 tile + 8 high + 2 row + low."""
    tiles = matrix.unflatten(0, (-1, 4, 2, 8)).unflatten(4, (-1, 2, 4))  # [tile, warp, half, column, tile, high, row]
    first, second = tiles.permute(5, 4, 0, 3, 6, 1, 2)  # by high
    return torch.stack((first & 15 | second << 4, first >> 4 | second & 240), -2)


def experts_sum(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: Packed, down: Packed, limit: float | None
) -> torch.Tensor:
    """sum_j weights[t, j] SwiGLU_{experts[t, j]}(x[t]), bf16 [T, hidden], of x bf16, experts int64 and weights fp32
    [T, k]. limit: where SwiGLU's halves are cut off."""
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
    """Rows of a block, where `count` experts have so many."""
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
    """bf16 [top_k rows of a, N]. weighted: by the router's weights."""
    (rows, channels), columns = a.shape, b.scale.shape[2]
    out = torch.empty(rows * top_k, columns, dtype=a.dtype, device=a.device)
    unused = (None, None, None)  # scales of FP8 activations, a scale of all, zero points
    routed = (*blocks[:3], weights, blocks.size, top_k, weighted)
    shape = (_E2M1, rows, columns, channels)
    reduction = (False, True, False)  # not by atomics but in fp32; zero points are no floats
    tile = (-1, -1, -1)  # as the operator chooses
    operands = (a, out, b.weight, None, b.scale, *unused, _locks(a.device))
    return torch.ops._moe_C.moe_wna16_marlin_gemm(*operands, *routed, *shape, *reduction, *tile)


@lru_cache
def _locks(device: torch.device) -> torch.Tensor:
    return torch.zeros(_LOCKS * dsa.num_sms(device), dtype=torch.int32, device=device)
