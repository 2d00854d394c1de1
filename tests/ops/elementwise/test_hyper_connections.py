"""The bridge of the hyper-connections: what it launches, what it refuses, and where the differentiable formula runs."""

import pytest
import torch

import dsa


def collapse_arguments(tokens=5, n=4, d=64, dtype=torch.bfloat16):
    count = (2 + n) * n
    return {
        "streams": torch.randn(tokens, n, d).to(dtype), "mix": torch.randn(tokens, count), "base": torch.randn(count),
        "scale": torch.randn(3),
    }  # fmt: skip


def expand_arguments(tokens=5, n=4, d=64, dtype=torch.bfloat16):
    return {
        "y": torch.randn(tokens, d).to(dtype), "streams": torch.randn(tokens, n, d).to(dtype),
        "post": torch.randn(tokens, n), "comb": torch.randn(tokens, n, n),
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
def test_what_collapse_launches(launches, d, dtype, tile):
    given = collapse_arguments(d=d, dtype=dtype)
    x, post, comb = dsa.hyper_collapse(**given, iterations=7, eps=0.5, hc_eps=0.25)
    (((found_dtype, *found), passed),) = launches
    assert found_dtype == dtype and tuple(found) == tile and tile[0] * tile[1] * 16 >= d * dtype.itemsize
    assert [a is b for a, b in zip(passed, given.values())] == [True] * 4 and passed[7:] == (7, 0.5, 0.25)
    assert x.shape == (5, d) and x.dtype == dtype and post.shape == (5, 4) and comb.shape == (5, 4, 4)
    assert passed[4] is x and passed[5] is post
    assert passed[6].shape == (5, 16) and passed[6].data_ptr() == comb.data_ptr()


def test_rows_of_other_tensors(launches):
    """Streams and y with gaps between the rows are taken as they are."""
    wide = torch.randn(5, 6, 128).bfloat16()[:, :4, :64]
    dsa.hyper_collapse(**(collapse_arguments() | {"streams": wide}))
    dsa.hyper_expand(**(expand_arguments() | {"streams": wide, "y": wide[:, 0]}))
    assert launches[0][1][0] is wide and launches[1][1][1] is wide
