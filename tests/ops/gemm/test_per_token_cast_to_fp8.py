"""`per_token_cast_to_fp8` on the CPU: groups, strides, and the rows that the kernel gets."""

import pytest
import torch

import dsa
from dsa.kernels.gemm import per_token_cast_to_fp8_sm90 as kernels
from dsa.runtime.checks import dtype_name


def test_other_groups_and_strides_run_the_reference():
    x = torch.randn(128, 6).T
    q, scale = dsa.per_token_cast_to_fp8(x, True, 64)
    assert scale.shape == (6, 2) and q.is_contiguous()
    for got, expected in zip((q, scale), dsa.per_token_cast_to_fp8(x.contiguous(), True, 64)):
        assert torch.equal(got.float(), expected.float())
    torch.library.opcheck(torch.ops.dsa.per_token_cast_to_fp8.default, (x, True, 32, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_the_kernel_gets(dtype, launches):
    x = torch.zeros(2, 4, 384, dtype=dtype)[:, :, 128:256]
    q, scale = dsa.per_token_cast_to_fp8(x, False, hadamard=True)
    assert q.shape == x.shape and scale.shape == (2, 4, 1) and q.is_contiguous() and scale.is_contiguous()
    [(variant, (rows, places, q_rows, scale_rows))] = launches
    assert places is None
    name = dtype_name(dtype)
    assert variant == (name, False, True, kernels.choose_config(name, x.numel()))
    assert rows.shape == q_rows.shape == (8, 128) and rows.stride() == (384, 1) and rows.data_ptr() == x.data_ptr()
    assert scale_rows.shape == (8, 1)
    assert [t.data_ptr() for t in (q_rows, scale_rows)] == [t.data_ptr() for t in (q, scale)]
