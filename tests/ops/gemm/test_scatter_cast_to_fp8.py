"""`scatter_cast_to_fp8` on the CPU: the arguments of the kernel."""

import torch

import dsa
from dsa.kernels.gemm import per_token_cast_to_fp8_sm90 as kernels


def operands(tokens=5, channels=256, k=2):
    places = torch.randperm(tokens * k).view(tokens, k).to(torch.int32)
    return torch.randn(tokens, channels).bfloat16(), places


def test_what_the_kernel_gets(launches):
    x, places = operands()
    q, scale = dsa.scatter_cast_to_fp8(x, places.t().contiguous().t(), False)
    [(variant, (rows, at, values, scales))] = launches
    assert variant == ("bfloat16", False, False, kernels.choose_config("bfloat16", 5 * 256), True)
    assert rows is x and at.is_contiguous() and torch.equal(at, places) and values is q and scales is scale
    assert q.shape == (10, 256) and q.dtype == torch.float8_e4m3fn and scale.shape == (10, 2)
