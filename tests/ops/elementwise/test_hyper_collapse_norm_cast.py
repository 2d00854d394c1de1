"""Collapse, norm and cast in one op. The number of channels determines which of HYPER_NORM_TILES the kernel uses."""

import pytest

from dsa.cases import cases_of
from dsa.kernels.elementwise.limits import HYPER_NORM_TILES, HYPER_TILES, INDEPENDENT_NORM_TILES

MIXED, INDEPENDENT = cases_of("hyper_collapse_norm_cast")


@pytest.mark.parametrize(
    ("channels", "tile"),
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
def test_channels_choose_the_kernel(launches, channels, tile):
    for case in (MIXED, INDEPENDENT):
        case.run(case.arguments(channels=channels))
    (found, _), (independent, _) = launches
    assert found == (*tile, True) and tile in HYPER_NORM_TILES and tile[0] in {t for t, _ in HYPER_TILES}
    assert independent == (*max(tile, INDEPENDENT_NORM_TILES[0]), True)
