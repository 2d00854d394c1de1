"""The bridge of the FP8 cast, on the CPU: dispatch, torch.compile, and errors that name the argument."""

import pytest
import torch

import dsa
from dsa.ops.gemm import per_token_cast_to_fp8 as op  # noqa: F401 -- `launches` looks at it


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0],), TypeError, "x: must be a torch.Tensor, got list"),
        ((torch.zeros(2, 128, dtype=torch.int32),), (TypeError, ValueError), "x: .*int32"),
        ((torch.zeros(2, 100),), ValueError, "x: the last dimension must be a multiple of gran_k=128, got 100"),
        ((torch.zeros(2, 128), 1), TypeError, "use_ue8m0: must be True or False, got int"),
        ((torch.zeros(2, 128, device="meta"),), ValueError, "x: must be on a device with memory"),
        ((torch.tensor(1.0),), ValueError, r"x: must have at least 1 dimension, got shape \[\]"),
        ((torch.zeros(2, 128), True, 0), ValueError, "gran_k: must be at least 1, got 0"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        dsa.per_token_cast_to_fp8(*arguments)


def test_other_groups_and_strides_run_the_reference():
    x = torch.randn(128, 6).T
    q, scale = dsa.per_token_cast_to_fp8(x, True, 64)
    assert scale.shape == (6, 2) and q.is_contiguous()
    for got, expected in zip((q, scale), dsa.per_token_cast_to_fp8(x.contiguous(), True, 64)):
        assert torch.equal(got.float(), expected.float())
    torch.library.opcheck(torch.ops.dsa.per_token_cast_to_fp8.default, (x, True, 32, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_the_kernel_gets(dtype, launches):
    """[T, K] with one stride, where x is."""
    x = torch.zeros(2, 4, 384, dtype=dtype)[:, :, 128:256]
    q, scale = dsa.per_token_cast_to_fp8(x, False, hadamard=True)
    assert q.shape == x.shape and scale.shape == (2, 4, 1) and q.is_contiguous() and scale.is_contiguous()
    [(variant, (rows, places, q_rows, scale_rows))] = launches
    assert places is None
    assert variant == (dtype, False, True, 11)
    assert rows.shape == q_rows.shape == (8, 128) and rows.stride() == (384, 1) and rows.data_ptr() == x.data_ptr()
    assert scale_rows.shape == (8, 1)
    assert [t.data_ptr() for t in (q_rows, scale_rows)] == [t.data_ptr() for t in (q, scale)]


def test_a_single_row_may_have_any_stride(launches):
    dsa.per_token_cast_to_fp8(torch.zeros(7, 131)[:1, :128])
    dsa.per_token_cast_to_fp8(torch.zeros(256))
    (_, (rows, *_)), (_, (vector, *_)) = launches
    assert rows.shape == (1, 128) and rows.stride(0) % 4 == 0 and vector.shape == (1, 256)


@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (3, 0, 0), (0, 2, 128)])
def test_nothing_to_cast(shape, launches):
    q, scale = dsa.per_token_cast_to_fp8(torch.zeros(shape))
    assert q.shape == shape and scale.shape == (*shape[:-1], shape[-1] // 128) and not launches


def test_what_the_kernel_does_not_take(launches):
    for arguments, message in [
        ((torch.zeros(2, 128), True, 64), "gran_k: the kernel takes 128, got 64"),
        ((torch.zeros(128, 128).T,), r"x: the last dimension must be contiguous, got strides \[1, 128\]"),
        ((torch.zeros(4, 6, 128)[:, :3],), "x: dimensions 0 to 1 must be mergeable"),
        ((torch.zeros(4, 131)[:, :128],), r"x: rows must start at multiples of 16 bytes, .* strides of \[524\] bytes"),
        ((torch.zeros(4, 132)[:, 1:129],), "x: rows must start at multiples of 16 bytes, got an address 4 bytes past"),
    ]:
        with pytest.raises(ValueError, match=message):
            dsa.per_token_cast_to_fp8(*arguments)
    assert not launches
