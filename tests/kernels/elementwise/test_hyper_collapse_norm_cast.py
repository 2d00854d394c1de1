"""Collapse, norm and cast compile to sm_90a: all loads of a token in flight, no spills, and the orders of the sums are
those of the kernels by themselves."""

from itertools import groupby

import pytest

from dsa.kernels.elementwise import hyper_collapse_norm_cast_sm90 as kernels
from dsa.kernels.elementwise import hyper_fusion_limits, limits, rms_norm_sm90
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble, instructions_in_order
from tests.kernels.variants import shipped


@shipped(kernels.compile_hyper_collapse_norm_cast)
def test_sass(compile_function, arguments):
    sass = disassemble(cubin(compile_function, *arguments))
    _, lanes, vectors, use_ue8m0 = arguments
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert bool(sass.instructions["CALL"]) == (not use_ue8m0)  # a division by the scale
    # Two CTAs a multiprocessor of the longest rows, four of those of 4096 channels.
    assert (sass.registers + 7) // 8 * 8 * (lanes + 32) <= 65536 // (2 if lanes == 256 else 4)
    # Mix, base and scale of the warp for post and comb, whose loads of what pre needs are a lane's own; the streams;
    # the norm's weights. The norm, its bytes and a scale; post and comb.
    assert sass.instructions["LDG"] == 2 * 6 + 3 + 4 * vectors + 2 * vectors
    assert sass.instructions["STG"] == 3 * vectors + 5
    assert sass.instructions["BAR"] == 2 + (lanes > 32)


@shipped(kernels.compile_hyper_collapse_norm_cast)
def test_no_load_of_the_streams_waits_for_another(compile_function, arguments):
    """All of them are between two products. So are those of the warp for post and comb: one fewer than 16."""
    (instructions,) = instructions_in_order(cubin(compile_function, *arguments))
    vectors = arguments[2]
    runs = [[*run] for name, run in groupby(name for name in instructions if name in ("LDG", "FFMA"))]
    assert [len(run) for run in runs if run[0] == "LDG"].count(4 * vectors) == 1


@pytest.mark.parametrize("channels", range(128, 8193, 128))
def test_sums_are_in_the_order_of_the_kernels_by_themselves(channels):
    """The norm's lanes and vectors; and of the collapse which thread, and in which turn, adds a vector's squares."""
    threads, lanes, vectors = next(t for t in hyper_fusion_limits.HYPER_NORM_TILES if channels <= t[1] * t[2] * 8)
    config = rms_norm_sm90.choose_cast_config("bfloat16", channels)
    assert (lanes, vectors) == (config.lanes, config.vectors) and config.threads % lanes == 0
    alone = next(t for t, steps in limits.HYPER_TILES if channels <= t * steps * 8)
    assert alone == threads
    shares = threads // lanes
    for vector in range(channels // 8):
        lane, n = vector % lanes, vector // lanes
        assert lane + n % shares * lanes == vector % threads and n // shares == vector // threads


def test_every_tile_is_shipped_once():
    variants = [arguments for _, arguments in kernels.shipped_variants()]
    assert len(variants) == len({*variants}) == 2 * len(hyper_fusion_limits.HYPER_NORM_TILES)
