"""The bridge of the collapse with norm and cast: what it launches, and what it refuses."""

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
def test_what_is_launched(launches, d, tile):
    given = arguments(d=d)
    options = {"iterations": 7, "eps": 0.5, "hc_eps": 0.25, "norm_eps": 0.125, "use_ue8m0": d % 256 == 0}
    results = dsa.hyper_collapse_norm_cast_to_fp8(**given, **options)
    ((found, passed),) = launches
    assert found == (*tile, d % 256 == 0) and tile in HYPER_NORM_TILES and tile[0] in {t for t, _ in HYPER_TILES}
    assert [a is b for a, b in zip(passed, given.values())] == [True] * 5 and passed[10:] == (7, 0.5, 0.25, 0.125)
    y, q, q_scale, post, comb = results
    assert [a is b for a, b in zip(passed[5:], results[:4])] == [True] * 4
    assert passed[9].shape == (5, 16) and passed[9].data_ptr() == comb.data_ptr()
    assert [tuple(x.shape) for x in results] == [(5, d), (5, d), (5, d // 128), (5, 4), (5, 4, 4)]
    dtypes = [y.dtype, q.dtype, *{x.dtype for x in (q_scale, post, comb)}]
    assert dtypes == [torch.bfloat16, torch.float8_e4m3fn, torch.float32]


def test_streams_of_wider_tensors(launches):
    """With gaps between the rows they are taken as they are."""
    wide = torch.randn(5, 6, 512).bfloat16()[:, :4, :256]
    dsa.hyper_collapse_norm_cast_to_fp8(**(arguments() | {"streams": wide}))
    assert launches[0][1][0] is wide
