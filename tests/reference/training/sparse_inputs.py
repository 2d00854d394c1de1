"""Inputs of the sparse stage in float64, with indices that are no keys."""

import torch


def sparse_inputs(tokens=5, keys=7, heads=3, index_heads=2, d=6, di=4):
    torch.manual_seed(1)
    shapes = (tokens, heads, d), (keys, 1, d), (tokens, index_heads, di), (keys, di), (tokens, index_heads)
    indices = torch.stack([torch.randperm(keys)[:4] for _ in range(tokens)]).int()[:, None]
    indices[1, 0, 2:], indices[2] = -1, -1
    indices[3, 0, 0] = keys
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes], indices
