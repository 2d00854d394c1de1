"""The bridge of the hyper-connections: the kernel for each number of channels."""

import pytest
import torch

import dsa


def collapse_arguments(tokens=5, n=4, d=64, dtype=torch.bfloat16):
    count = (2 + n) * n
    return {
        "streams": torch.randn(tokens, n, d).to(dtype), "mix": torch.randn(tokens, count), "base": torch.randn(count),
        "scale": torch.randn(3),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("d", "dtype", "tile"),
    [
        (8, torch.bfloat16, (128, 2)),
        (2048, torch.float16, (128, 2)),
        (2056, torch.float16, (256, 2)),
        (4096, torch.bfloat16, (256, 2)),
        (7168, torch.bfloat16, (512, 2)),
        (16384, torch.bfloat16, (512, 4)),
        (1024, torch.float32, (128, 2)),
        (4096, torch.float32, (512, 2)),
        (8192, torch.float32, (512, 4)),
    ],
)
def test_channels_choose_the_kernel_of_collapse(launches, d, dtype, tile):
    dsa.hyper_collapse(**collapse_arguments(d=d, dtype=dtype))
    ((found, _),) = launches
    assert found == (str(dtype).removeprefix("torch."), *tile) and tile[0] * tile[1] * 16 >= d * dtype.itemsize
