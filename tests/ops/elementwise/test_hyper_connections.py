"""The bridge of the hyper-connections: what it launches, what it refuses, and where the differentiable formula runs."""

import pytest
import torch

import dsa
from dsa.ops.elementwise import hyper_connections as op


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


def test_a_single_token_of_odd_strides(launches):
    """The stride of a dimension with one element means nothing; a kernel is given one that it takes."""

    def odd(x):
        wide = torch.zeros(1, x.numel() + 1, dtype=x.dtype)
        return wide.as_strided(x.shape, (x.numel() + 1, *x.stride()[1:]))

    dsa.hyper_collapse(**{k: odd(v) if v.shape[0] == 1 else v for k, v in collapse_arguments(tokens=1).items()})
    dsa.hyper_expand(**{k: odd(v) for k, v in expand_arguments(tokens=1).items()})
    for _, given in launches:
        for x in given:
            if isinstance(x, torch.Tensor) and x.dim() > 1:
                assert x.stride(0) * x.element_size() % 16 == 0


def test_nothing_to_do(launches):
    x, post, comb = dsa.hyper_collapse(**collapse_arguments(tokens=0))
    assert x.shape == (0, 64) and post.shape == (0, 4) and comb.shape == (0, 4, 4)
    assert dsa.hyper_expand(**expand_arguments(tokens=0)).shape == (0, 4, 64)
    assert not launches


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"n": 2}, {}, "streams: the kernel takes n 4 streams, got 2"),
        ({"d": 60}, {}, "streams: the kernel takes D a multiple of 8, got 60"),
        ({"d": 16392, "tokens": 1}, {}, "streams: the kernel takes D at most 16384 of bfloat16, got 16392"),
        ({"d": 8200, "tokens": 1, "dtype": torch.float32}, {}, "D at most 8192 of float32, got 8200"),
        ({}, {"streams": torch.randn(5, 4, 128).bfloat16()[..., ::2]}, "streams: the last dimension must be contig"),
        ({}, {"streams": torch.randn(5, 4, 65).bfloat16()[..., 1:]}, "streams: rows must start at multiples of 16"),
        ({}, {"mix": torch.randn(5, 48)[:, ::2]}, "mix: must be contiguous"),
        ({}, {"mix": torch.randn(121)[1:].view(5, 24)}, "mix: must start at a multiple of 16 bytes"),
        ({}, {"base": torch.randn(48)[::2]}, "base: must be contiguous"),
        ({}, {"base": torch.randn(25)[1:]}, "base: must start at a multiple of 16 bytes"),
        ({}, {"scale": torch.randn(6)[::2]}, "scale: must be contiguous"),
        ({}, {"mix": torch.randn(5, 24, device="meta")}, "mix: must be on streams's device cpu, got meta"),
    ],
)
def test_errors_of_collapse(launches, options, changes, message):
    with pytest.raises(ValueError, match=message):
        dsa.hyper_collapse(**(collapse_arguments(**options) | changes))
    assert not launches


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"n": 2}, {}, "streams: the kernel takes n 4 streams, got 2"),
        ({"d": 60}, {}, "streams: the kernel takes D a multiple of 8, got 60"),
        ({}, {"y": torch.randn(5, 65).bfloat16()[:, 1:]}, "y: rows must start at multiples of 16 bytes"),
        ({}, {"post": torch.randn(5, 8)[:, ::2]}, "post: must be contiguous"),
        ({}, {"post": torch.randn(21)[1:].view(5, 4)}, "post: must start at a multiple of 16 bytes"),
        ({}, {"comb": torch.randn(5, 4, 4).mT}, "comb: must be contiguous"),
        ({}, {"post": torch.randn(5, 4, device="meta")}, "post: must be on y's device cpu, got meta"),
    ],
)
def test_errors_of_expand(launches, options, changes, message):
    with pytest.raises(ValueError, match=message):
        dsa.hyper_expand(**(expand_arguments(**options) | changes))
    assert not launches


def test_too_many_channels(launches):
    """2^33 of them, in one row of memory."""
    streams = torch.zeros(8, dtype=torch.bfloat16).as_strided((2**30, 4, 8), (0, 0, 1))
    with pytest.raises(ValueError, match="streams: the kernel takes T D at most 8589926400 channels"):
        op._check_limits(streams)
