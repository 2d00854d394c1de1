"""The bridge of the FP8 cast, on the CPU: dispatch, torch.compile, and errors that name the argument."""

import pytest
import torch

import dsa
from dsa import backends
from dsa.reference.gemm import fp8_cast


def test_runs_the_reference_without_a_gpu():
    x = torch.randn(3, 5, 256).bfloat16()
    for got, expected in zip(dsa.per_token_cast_to_fp8(x, False), fp8_cast.per_token_cast_to_fp8(x, False)):
        assert got.dtype == expected.dtype and torch.equal(got.float(), expected.float())


def test_is_one_node_of_a_compiled_graph():
    x = torch.randn(4, 256).bfloat16()
    compiled = torch.compile(lambda t: dsa.per_token_cast_to_fp8(t, hadamard=True), fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(x), dsa.per_token_cast_to_fp8(x, hadamard=True)):
        assert torch.equal(got.float(), expected.float())
    torch.library.opcheck(torch.ops.dsa.per_token_cast_to_fp8.default, (x, True, 128, False))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0],), TypeError, "x: must be a torch.Tensor, got list"),
        ((torch.zeros(2, 128, dtype=torch.int32),), (TypeError, ValueError), "x: .*int32"),
        ((torch.zeros(2, 100),), ValueError, "x: the last dimension must be a multiple of gran_k=128, got 100"),
        ((torch.zeros(2, 128), 1), TypeError, "use_ue8m0: must be True or False, got int"),
        ((torch.zeros(2, 128, device="meta"),), ValueError, "x: must be on a device with memory"),
        ((torch.tensor(1.0),), ValueError, "x: the last dimension"),
        ((torch.zeros(128, 128).T,), ValueError, r"x: the last dimension must be contiguous, got strides \[1, 128\]"),
        ((torch.zeros(2, 128), True, 64), ValueError, "gran_k: must be 128, got 64"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        dsa.per_token_cast_to_fp8(*arguments)


def test_rows_the_kernel_can_read():
    """What the bridge hands to the kernel: [T, K] with one stride, or an error."""
    from dsa.ops.gemm.per_token_cast_to_fp8 import _as_rows

    assert _as_rows(torch.zeros(2, 3, 128)).shape == (6, 128)
    assert _as_rows(torch.zeros(2, 4, 384)[:, :, 128:256]).stride() == (384, 1)
    assert _as_rows(torch.zeros(7, 131)[:1, :128]).stride() == (128, 1)
    with pytest.raises(ValueError, match="x: all dimensions before the last must be mergeable"):
        _as_rows(torch.zeros(4, 6, 128)[:, :3])
    with pytest.raises(ValueError, match="x: rows must start at multiples of 16 bytes, got a row stride of 524 bytes"):
        _as_rows(torch.zeros(4, 131)[:, :128])


def test_forcing_the_kernel_without_a_gpu_is_an_error():
    if backends.why_no_kernels() is None:
        pytest.skip("there is a Hopper GPU")
    with (
        dsa.use_backend("cute"),
        pytest.raises(ValueError, match="backend 'cute' was asked for, but torch sees no CUDA"),
    ):
        dsa.per_token_cast_to_fp8(torch.zeros(1, 128))
