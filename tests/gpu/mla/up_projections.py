"""FP8 weights of MLA's up-projection, and products with them."""

import torch

import dsa

TOKENS = [1, 2, 7, 8, 9, 32, 100]


def projection(heads, rows):
    """Weights whose blocks differ in size; every scale has all of its bits."""
    weight = torch.randn(heads * rows, 512, device="cuda") * 512**-0.5
    weight *= torch.logspace(-2, 1, heads * rows, device="cuda")[:, None]
    return dsa.per_block_cast_to_fp8(weight, use_ue8m0=False)


def with_value(kv_b, value):
    """The same weights, every seventh of which is this number."""
    weight, scale = kv_b
    weight.view(-1)[::7] = torch.tensor(value, device="cuda").to(weight.dtype)
    return weight, scale


def dequantized(kv_b, heads):
    """[heads, rows, 512] bf16"""
    return dsa.dequantize_per_block(*kv_b, torch.bfloat16).unflatten(0, (heads, -1))


def product(equation, x, w):
    """In float64; how far a sum in fp32 that is rounded to bf16 may be off; and the size of its terms."""
    x, w = x.double(), w.double()
    expected, size = torch.einsum(equation, x, w), torch.einsum(equation, x.abs(), w.abs())
    return expected, expected.abs() * 2**-8 + size * 2**-18, size
