"""Random tensors on the GPU for benchmarks. Numbers are Gaussian with variance 1 unless the function says otherwise."""

import torch

Scaled = tuple[torch.Tensor, torch.Tensor]  # e4m3 values, fp32 scales


def f32(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def e4m3(*shape: int) -> torch.Tensor:
    return f32(*shape).to(torch.float8_e4m3fn)


def scales(*shape: int) -> torch.Tensor:
    """Return fp32 numbers, uniform from 0.5 to 1.5."""
    return torch.rand(shape, device="cuda") + 0.5


def activations(rows: int, channels: int) -> Scaled:
    return e4m3(rows, channels), scales(rows, -(-channels // 128))


def weights(*shape: int) -> Scaled:
    """Return e4m3 values of the shape [..., columns, channels] and fp32 scales, one per 128 x 128 block.

    The values are random bytes of non-negative finite numbers, because Gaussian numbers for large matrices take long to
    generate.
    """
    *leading, columns, channels = shape
    values = torch.randint(0, 127, shape, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    return values, scales(*leading, -(-columns // 128), -(-channels // 128))


def angles(tokens: int, rotated: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    x = f32(tokens, rotated // 2)
    return x.cos(), x.sin()


def causal_ranges(queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 [queries] (starts, ends): query i sees keys 0 to keys - queries + i - 1."""
    ends = torch.arange(queries, dtype=torch.int32, device="cuda") + keys - queries
    return torch.zeros_like(ends), ends


def selected_keys(queries: int, keys: int, k: int) -> torch.Tensor:
    """Return int32 [queries, k]: k different random keys per query."""
    return torch.rand(queries, keys, device="cuda").topk(k, dim=1).indices.int()
