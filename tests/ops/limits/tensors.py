"""Tensors for tests of limits. Large tensors are views of a few numbers, so they need no memory."""

import math

import torch

BF16, E4M3, F32, HALF, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float16, torch.int32
BYTES = torch.uint8


def zeros(*shape, dtype=F32, device="cpu"):
    """Return zeros. Above 2^20 elements, they are a view of a single number, with strides of 0."""
    whole = (1,) * len(shape) if math.prod(shape) > 2**20 else shape
    return torch.zeros(whole, device=device).to(dtype).expand(shape)


def bf16(*shape):
    return zeros(*shape, dtype=BF16)


def kv_b(rows, columns):
    return zeros(rows, columns, dtype=E4M3), zeros(-(-rows // 128), -(-columns // 128))


def row(x, count):
    return x[:1].expand(count, *x.shape[1:])
