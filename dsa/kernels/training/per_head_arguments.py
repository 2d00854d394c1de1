"""Arguments of the per-head kernels, as compiling takes them."""

import cutlass.cute as cute
from cutlass import BFloat16, Float32


def fake_inputs(tokens, keys, heads, dim: int, index_dim: int) -> tuple[cute.Tensor, ...]:
    """q [Tq, H, d], k [Tk, Hk, d], q_idx [Tq, H, di], k_idx [Tk, 1, di]: rows start at multiples of 16 bytes."""
    shapes = (tokens, heads, dim), (keys, cute.sym_int(), dim), (tokens, heads, index_dim), (keys, 1, index_dim)
    return tuple(fake_rows(shape) for shape in shapes)


def fake_rows(shape: tuple) -> cute.Tensor:
    strides = cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1
    return cute.runtime.make_fake_tensor(BFloat16, shape, strides, assumed_align=16)


def fake_by_query(tokens, heads) -> cute.Tensor:
    """fp32 [Tq, H]"""
    return cute.runtime.make_fake_tensor(Float32, (tokens, heads), (cute.sym_int64(), 1), assumed_align=4)


def fake_by_head(heads, tokens) -> cute.Tensor:
    """fp32 [H, Tq]"""
    return cute.runtime.make_fake_tensor(Float32, (heads, tokens), (cute.sym_int64(), 1), assumed_align=4)


def fake_stream():
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
