"""Fake tensors with which this family's kernels are compiled, and the type of the lists of shipped variants."""

import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from dsa.cute.fake_tensors import fake, strides
from dsa.cute.sm90 import WARPGROUP
from dsa.kernels.training.limits import K_TILE, Q_TILE, Q_TILE_FIELDS, SPARSE_HEAD_TILE
from dsa.kernels.training.q_tiles import COLUMN_BLOCK

ShippedVariants = list[tuple[Callable[..., Any], tuple]]  # compile functions and their arguments


def fake_rows(dtype: type[cutlass.Numeric], *shape) -> cute.Tensor:
    """Contiguous rows that begin at multiples of 16 bytes; the other strides are 64-bit."""
    return fake(dtype, shape, (*strides(len(shape) - 1, 128 // dtype.width), 1))


def fake_numbers(*shape) -> cute.Tensor:
    """fp32 with any strides."""
    return fake(Float32, shape, strides(len(shape)), 4)


def fake_line(dtype: type[cutlass.Numeric], extent=None) -> cute.Tensor:
    """[extent], contiguous, of a 4-byte dtype. extent: a symbol, if other tensors share it."""
    return fake(dtype, (cute.sym_int() if extent is None else extent,), (1,), 4)


def fake_indices(queries) -> cute.Tensor:
    """int32 [queries, K] with contiguous rows."""
    return fake(Int32, (queries, cute.sym_int()), (*strides(1), 1), 4)


def fake_head_terms(queries) -> cute.Tensor:
    """fp32 [queries, blocks of 64 heads, 128]: two terms per head for attention's gradients."""
    width = 2 * SPARSE_HEAD_TILE
    return fake(Float32, (queries, cute.sym_int(), width), (cute.sym_int64(divisibility=4), width, 1))


def fake_q_tiles() -> cute.Tensor:
    """int32 [S, 8]"""
    return fake(Int32, (cute.sym_int(), Q_TILE_FIELDS), (Q_TILE_FIELDS, 1))


def fake_tiles(*extents: int) -> cute.Tensor:
    """fp32 [S, N, *extents], one entry per q tile and 128 keys. Contiguous except for S: a view may have fewer tiles
    per q tile."""
    inner = [math.prod(extents[i:]) for i in range(len(extents) + 1)]
    return fake(Float32, (cute.sym_int(), cute.sym_int(), *extents), (cute.sym_int64(divisibility=inner[0]), *inner))


def fake_gradients() -> cute.Tensor:
    """dI, bf16 [S, N, 2, 64, 128]. It overwrites the scores: each 64 rows begin where the scores of these rows
    began."""
    half = Q_TILE * K_TILE
    shape = cute.sym_int(), cute.sym_int(), 2, Q_TILE // 2, K_TILE
    return fake(BFloat16, shape, (cute.sym_int64(divisibility=2 * half), 2 * half, half, K_TILE, 1))


def fake_active(heads: int) -> cute.Tensor:
    """Active bits (active_bits.py), uint32 [S, 2 H, 2 N, 128], one word per thread of a warpgroup."""
    shape = cute.sym_int(), Q_TILE * heads // COLUMN_BLOCK, cute.sym_int(), WARPGROUP
    return fake(Uint32, shape, (*strides(2, WARPGROUP), WARPGROUP, 1))
