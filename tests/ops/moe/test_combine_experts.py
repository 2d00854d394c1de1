"""`combine_experts` on the CPU: gradients, and the arguments of the kernel."""

import pytest
import torch

import dsa
from dsa.kernels.moe import combine_experts_sm90 as kernels
from dsa.runtime.checks import dtype_name

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def inputs(dtype=torch.bfloat16, index_dtype=torch.int32, k=3):
    y, shared = torch.randn(20, 24).to(dtype), torch.randn(7, 24).to(dtype)
    return y, torch.randint(-2, 22, (7, k), dtype=index_dtype), torch.rand(7, k), shared


def test_every_dtype_has_a_kernel():
    for dtype in DTYPES:
        arguments = dtype_name(dtype), "int64", True, True, True
        assert (kernels.compile_combine_experts, arguments) in kernels.shipped_variants()


def test_gradients_come_from_the_formula(launches):
    y, rows, weights, shared = inputs(torch.float32)
    weights.requires_grad_()
    residual = torch.randn(7, 24, requires_grad=True)
    dsa.combine_experts(y, rows, weights, shared, residual).sum().backward()
    assert torch.equal(residual.grad, torch.ones(7, 24))
    valid = (rows >= 0) & (rows < 20)
    torch.testing.assert_close(weights.grad, y.sum(1)[rows.clamp(0, 19)] * valid)
    assert not launches
    with torch.no_grad():
        dsa.combine_experts(y, rows, weights, shared)
    assert len(launches) == 1


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_kernel_gets(dtype, index_dtype, launches):
    y, rows, weights, shared = inputs(dtype, index_dtype)
    wide = torch.nn.functional.pad(y, (8, 16))[:, 8:32]
    out = dsa.combine_experts(wide, rows, weights.T.contiguous().T, shared)
    dsa.combine_experts(y, rows, weights)
    dsa.combine_experts(y, rows, None, shared)
    dsa.combine_experts(y, rows, weights, None, shared)
    assert out.shape == (7, 24) and out.dtype == dtype and out.is_contiguous()
    [(variant, arguments), (plain, others), (unweighted, rest), (added, last)] = launches
    dtypes = dtype_name(dtype), dtype_name(index_dtype)
    assert variant == (*dtypes, True, True, False)
    assert plain == (*dtypes, True, False, False) and others[3] is others[4] is None
    assert unweighted == (*dtypes, False, True, False) and rest[2] is None and rest[3] is shared
    assert added == (*dtypes, True, False, True) and last[3] is None and last[4] is shared
    assert arguments[0].data_ptr() == wide.data_ptr() and arguments[0].stride() == (48, 1)
    assert arguments[1] is rows and arguments[2].stride() == (1, 7) and arguments[3] is shared and arguments[5] is out
