"""Fake tensors to compile the training kernels with, and the type of the lists of shipped variants."""

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

ShippedVariants = list[tuple[Callable[..., Any], tuple]]  # a list of (compile function, arguments)


def fake_rows(dtype: type[cutlass.Numeric], *shape) -> cute.Tensor:
    """Return a fake tensor whose rows are contiguous and begin at multiples of 16 bytes. The strides of the other
    dimensions are 64-bit."""
    return fake(dtype, shape, (*strides(len(shape) - 1, 128 // dtype.width), 1))


def fake_numbers(*shape) -> cute.Tensor:
    """Return a fake fp32 tensor with any strides."""
    return fake(Float32, shape, strides(len(shape)), 4)


def fake_line(dtype: type[cutlass.Numeric], extent=None) -> cute.Tensor:
    """Return a contiguous fake vector [extent] of a 4-byte dtype. extent: the symbol of the extent if other tensors
    have the same extent. None: a new symbol."""
    return fake(dtype, (cute.sym_int() if extent is None else extent,), (1,), 4)


def fake_indices(queries) -> cute.Tensor:
    """Return fake indices, int32 [queries, K] with contiguous rows."""
    return fake(Int32, (queries, cute.sym_int()), (*strides(1), 1), 4)


def fake_head_terms(queries) -> cute.Tensor:
    """Return fake head terms, fp32 [queries, blocks of 64 heads, 128]: two numbers per head for attention's gradients
    (sparse_mla_backward_sums_sm90.py)."""
    width = 2 * SPARSE_HEAD_TILE
    return fake(Float32, (queries, cute.sym_int(), width), (cute.sym_int64(divisibility=4), width, 1))


def fake_q_tiles() -> cute.Tensor:
    return fake(Int32, (cute.sym_int(), Q_TILE_FIELDS), (Q_TILE_FIELDS, 1))


def fake_tiles(*extents: int) -> cute.Tensor:
    """Return a fake fp32 tensor [S, N, *extents] with an entry [*extents] per (q tile, key tile of 128 keys). The
    stride of the first dimension can be any multiple of an entry's size. The other dimensions are contiguous."""
    inner = [math.prod(extents[i:]) for i in range(len(extents) + 1)]
    return fake(Float32, (cute.sym_int(), cute.sym_int(), *extents), (cute.sym_int64(divisibility=inner[0]), *inner))


def fake_gradients() -> cute.Tensor:
    """Return a fake dI, the gradient of the scores, bf16 [S, N, 2, 64, 128]: 2 x 64 queries x 128 keys per (q tile, key
    tile). dI overwrites the scores, which are fp32: each block of 64 rows of dI begins where the scores of these rows
    began."""
    half = Q_TILE * K_TILE
    shape = cute.sym_int(), cute.sym_int(), 2, Q_TILE // 2, K_TILE
    return fake(BFloat16, shape, (cute.sym_int64(divisibility=2 * half), 2 * half, half, K_TILE, 1))


def fake_active(heads: int) -> cute.Tensor:
    """Return fake active bits (active_bits.py), uint32 [S, 2 H, 2 N, 128], with one word per thread of a warpgroup."""
    shape = cute.sym_int(), Q_TILE * heads // COLUMN_BLOCK, cute.sym_int(), WARPGROUP
    return fake(Uint32, shape, (*strides(2, WARPGROUP), WARPGROUP, 1))
