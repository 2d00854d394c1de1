"""`swiglu_cast_to_fp8` on the CPU: the rows that the kernel gets."""

import pytest
import torch

import dsa
from dsa.kernels.gemm import swiglu_cast_sm90 as kernels
from dsa.runtime.checks import dtype_name

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def test_every_dtype_has_a_kernel():
    for dtype in DTYPES:
        assert (kernels.compile_swiglu_cast, (dtype_name(dtype), True, False, True)) in kernels.shipped_variants()


@pytest.mark.parametrize("limit", [None, 7])
@pytest.mark.parametrize("channels", [200, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_kernel_gets(dtype, channels, limit, launches):
    halves = torch.randn(2, 3, 2 * channels).to(dtype).chunk(2, -1)
    q, scale = dsa.swiglu_cast_to_fp8(*halves, False, limit=limit)
    assert q.shape == (2, 3, channels) and q.is_contiguous() and scale.shape == (2, 3, 2) and scale.is_contiguous()
    [(variant, (gate, up, q_rows, scale_rows, bound))] = launches
    assert variant == (dtype_name(dtype), False, limit is not None, channels == 200) and bound == limit
    for got, given in zip((gate, up), halves):
        assert got.shape == (6, channels) and got.stride() == (2 * channels, 1) and got.data_ptr() == given.data_ptr()
    assert q_rows.shape == (6, channels) and q_rows.data_ptr() == q.data_ptr()
    assert scale_rows.shape == (6, 2) and scale_rows.data_ptr() == scale.data_ptr()


@pytest.mark.parametrize("channels", [200, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_kernel_of_a_gate_gets(dtype, channels, launches):
    """Attention's gate can be a part of a wider projection."""
    gate, x = torch.randn(2, 3, 2 * channels).to(dtype)[..., channels:], torch.randn(2, 3, channels).to(dtype)
    q, _ = dsa.gate_cast_to_fp8(gate, x, False)
    [(variant, (gates, values, q_rows, _, limit))] = launches
    assert variant == (dtype_name(dtype), False, channels == 200) and limit is None
    assert gates.stride() == (2 * channels, 1) and gates.data_ptr() == gate.data_ptr()
    assert values.data_ptr() == x.data_ptr() and q_rows.data_ptr() == q.data_ptr()


def test_a_single_vector(launches):
    q, scale = dsa.swiglu_cast_to_fp8(torch.zeros(128), torch.zeros(128))
    assert q.shape == (128,) and scale.shape == (1,) and launches[0][1][0].shape == (1, 128)
