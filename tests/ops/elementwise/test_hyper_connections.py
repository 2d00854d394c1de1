"""The collapses: the bytes of one stream of a token determine the kernel's tile (threads, 16-byte vectors per thread
and stream)."""

import pytest
import torch

from dsa.cases import cases_of

COLLAPSES = cases_of("hyper_connections")[:2]


@pytest.mark.parametrize("case", COLLAPSES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("channels", "dtype", "tile"),
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
def test_channels_choose_the_kernel_of_collapse(launches, channels, dtype, tile, case):
    case.run(case.arguments(channels=channels, dtype=dtype))
    ((found, _),) = launches
    assert found == (str(dtype).removeprefix("torch."), *tile) and tile[0] * tile[1] * 16 >= channels * dtype.itemsize
