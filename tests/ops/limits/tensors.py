"""Tensors for limits: large ones take no memory."""

import math

import torch

BF16, E4M3, F32, HALF, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float16, torch.int32
BYTES = torch.uint8


def zeros(*shape, dtype=F32, device="cpu"):
    """Large ones are one number in memory."""
    whole = (1,) * len(shape) if math.prod(shape) > 2**20 else shape
    return torch.zeros(whole, device=device).to(dtype).expand(shape)


def bf16(*shape):
    return zeros(*shape, dtype=BF16)


def e4m3(*shape):
    return zeros(*shape, dtype=E4M3)


def angles(tokens, count):
    return {"cos": zeros(tokens, count), "sin": zeros(tokens, count)}


def streams(tokens, n, d, dtype=BF16, **more):
    count = (2 + n) * n
    return {"streams": zeros(tokens, n, d, dtype=dtype), "mix": zeros(tokens, count), "base": zeros(count), **more}


def kv_b(rows, columns):
    return e4m3(rows, columns), zeros(-(-rows // 128), -(-columns // 128))


def row(x, count):
    """So many rows that are the first."""
    return x[:1].expand(count, *x.shape[1:])
