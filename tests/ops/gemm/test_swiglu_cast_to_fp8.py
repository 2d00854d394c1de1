"""The bridge of SwiGLU with a cast, on the CPU: dispatch, what it launches, torch.compile, and errors with a name."""

import math

import pytest
import torch

import dsa
from dsa.kernels.gemm import swiglu_cast_sm90 as kernels
from dsa.ops.gemm import swiglu_cast_to_fp8 as op  # noqa: F401 -- `launches` looks at it

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def test_every_dtype_has_a_kernel():
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        assert (kernels.compile_swiglu_cast, (name, True, False, True)) in kernels.shipped_variants()


@pytest.mark.parametrize(
    ("gate", "up", "limit", "error", "message"),
    [
        ([1.0], torch.zeros(2, 8), None, TypeError, "gate: must be a torch.Tensor, got list"),
        (torch.zeros(2, 8), None, None, TypeError, "up: must be a torch.Tensor, got NoneType"),
        (torch.zeros(2, 8).int(), torch.zeros(2, 8), None, ValueError, "gate: dtype must be .*got int32"),
        (
            torch.zeros(2, 8),
            torch.zeros(2, 8).half(),
            None,
            ValueError,
            "up: dtype must be gate's float32, got float16",
        ),
        (torch.zeros(2, 8), torch.zeros(2, 9), None, ValueError, r"up: shape must be \[2, 8\], got \[2, 9\]"),
        (
            torch.tensor(1.0),
            torch.tensor(1.0),
            None,
            ValueError,
            r"gate: must have at least 1 dimension, got shape \[\]",
        ),
        (torch.zeros(2, 8), torch.zeros(2, 8), 0.0, ValueError, "limit: must be positive or None, got 0.0"),
        (torch.zeros(2, 8), torch.zeros(2, 8), math.nan, ValueError, "limit: must be finite in fp32, got nan"),
        (torch.zeros(2, 8), torch.zeros(2, 8), "7", TypeError, "limit: must be a number, got str"),
    ],
)
def test_errors(gate, up, limit, error, message):
    with pytest.raises(error, match=message):
        dsa.swiglu_cast_to_fp8(gate, up, limit=limit)


@pytest.mark.parametrize("limit", [None, 7])
@pytest.mark.parametrize("channels", [200, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_kernel_gets(dtype, channels, limit, launches):
    halves = torch.randn(2, 3, 2 * channels).to(dtype).chunk(2, -1)
    q, scale = dsa.swiglu_cast_to_fp8(*halves, False, limit=limit)
    assert q.shape == (2, 3, channels) and q.is_contiguous() and scale.shape == (2, 3, 2) and scale.is_contiguous()
    [(variant, (gate, up, q_rows, scale_rows, bound))] = launches
    assert variant == (dtype, False, limit is not None, channels == 200) and bound == limit
    for got, given in zip((gate, up), halves):
        assert got.shape == (6, channels) and got.stride() == (2 * channels, 1) and got.data_ptr() == given.data_ptr()
    assert q_rows.shape == (6, channels) and q_rows.data_ptr() == q.data_ptr()
    assert scale_rows.shape == (6, 2) and scale_rows.data_ptr() == scale.data_ptr()


@pytest.mark.parametrize("shape", [(0, 128), (4, 0), (0, 5, 200)])
def test_nothing_to_launch(shape, launches):
    q, scale = dsa.swiglu_cast_to_fp8(torch.zeros(shape), torch.zeros(shape))
    assert q.shape == shape and scale.shape == (*shape[:-1], -(-shape[-1] // 128)) and not launches


def test_a_single_vector(launches):
    q, scale = dsa.swiglu_cast_to_fp8(torch.zeros(128), torch.zeros(128))
    assert q.shape == (128,) and scale.shape == (1,) and launches[0][1][0].shape == (1, 128)


def test_what_the_kernel_does_not_take(launches):
    good = torch.zeros(4, 128)
    for gate, up, message in [
        (torch.zeros(4, 100), torch.zeros(4, 100), r"gate: the kernel takes I a multiple of 8, got \[4, 100\]"),
        (
            good,
            torch.zeros(4, 131)[:, :128],
            r"up: rows must start at multiples of 16 bytes, .* strides of \[524\] bytes",
        ),
        (torch.zeros(128, 4).T, good, r"gate: the last dimension must be contiguous, got strides \[1, 4\]"),
        (good, torch.zeros(4, 132)[:, 1:129], "up: .* an address 4 bytes past one"),
        (
            torch.zeros(4, 6, 128)[:, :3],
            torch.zeros(4, 3, 128),
            "gate: dimensions 0 to 1 must be mergeable",
        ),
        (good, good.to("meta"), "up: must be on gate's device cpu, got meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            dsa.swiglu_cast_to_fp8(gate, up)
    assert not launches
