"""The bridge of the collapse with norm and cast: the ops that it joins, and the kernel for each number of channels."""

import pytest
import torch

import dsa
from dsa.kernels.elementwise.hyper_fusion_limits import HYPER_NORM_TILES
from dsa.kernels.elementwise.limits import HYPER_TILES


def arguments(tokens=5, n=4, d=256):
    count = (2 + n) * n
    streams = torch.randn(tokens, n, d).bfloat16()
    parameters = {"base": torch.randn(count), "scale": torch.randn(3), "weight": torch.randn(d)}
    return {"streams": streams, "mix": torch.randn(tokens, count), **parameters}


def same(got, expected):
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, expected, strict=True))


def test_is_the_ops_one_after_the_other():
    given = arguments()
    *first, weight = given.values()
    x, *weights = dsa.hyper_collapse(*first)
    same(dsa.hyper_collapse_norm_cast_to_fp8(**given), (*dsa.rms_norm_cast_to_fp8(x, weight), *weights))


@pytest.mark.parametrize(
    ("d", "tile"),
    [
        (128, (128, 32, 2)),
        (512, (128, 32, 2)),
        (640, (128, 32, 4)),
        (1024, (128, 32, 4)),
        (1152, (128, 64, 4)),
        (2048, (128, 64, 4)),
        (2176, (256, 128, 4)),
        (4096, (256, 128, 4)),
        (4224, (512, 256, 4)),
        (7168, (512, 256, 4)),
        (8192, (512, 256, 4)),
    ],
)
def test_channels_choose_the_kernel(launches, d, tile):
    dsa.hyper_collapse_norm_cast_to_fp8(**arguments(d=d))
    ((found, _),) = launches
    assert found == (*tile, True) and tile in HYPER_NORM_TILES and tile[0] in {t for t, _ in HYPER_TILES}
