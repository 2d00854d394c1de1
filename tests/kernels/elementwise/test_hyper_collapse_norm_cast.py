"""Collapse, norm and cast in one kernel: all loads of a token are in flight at the same time, and sums have the order
of the separate kernels."""

from itertools import groupby

import pytest

from dsa.kernels.elementwise import hyper_collapse_norm_cast_sm90 as kernels
from dsa.kernels.elementwise import limits, rms_norm_sm90
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_hyper_collapse_norm_cast)
def test_no_load_of_the_streams_waits_for_another(sass, in_order, arguments):
    _, lanes, vectors, use_ue8m0 = arguments
    # Loads: mix, base and scale for post and comb, by one warp; one of each per lane for pre; the streams; the norm's
    # weights.
    assert_counts(sass, LDG=2 * 6 + 3 + 4 * vectors + 2 * vectors, BAR=2 + (lanes > 32))
    # Stores: the norm, its e4m3 values and scale per vector; post and comb.
    assert_counts(sass, STG=3 * vectors + 5)
    assert bool(sass.instructions["CALL"]) == (not use_ue8m0)  # the call is the division by the scale
    # Two CTAs per SM for the longest rows, four for 4096 channels.
    assert (sass.registers + 7) // 8 * 8 * (lanes + 32) <= 65536 // (2 if lanes == 256 else 4)
    # One run of loads between two products contains all loads of the streams. The warp for post and comb has shorter
    # runs.
    (instructions,) = in_order
    runs = [[*run] for name, run in groupby(name for name in instructions if name in ("LDG", "FFMA"))]
    assert [len(run) for run in runs if run[0] == "LDG"].count(4 * vectors) == 1


@pytest.mark.parametrize("channels", range(128, 8193, 128))
def test_sums_are_in_the_order_of_the_separate_kernels(channels):
    """The norm has the same lanes and vectors, and the collapse adds a vector's squares in the same thread and step."""
    threads, lanes, vectors = next(t for t in limits.HYPER_NORM_TILES if channels <= t[1] * t[2] * 8)
    config = rms_norm_sm90.choose_config("bfloat16", channels, rms_norm_sm90.CAST_CONFIGS)
    assert (lanes, vectors) == (config.lanes, config.vectors) and config.threads % lanes == 0
    assert threads == next(t for t, steps in limits.HYPER_TILES if channels <= t * steps * 8)
    shares = threads // lanes
    for vector in range(channels // 8):
        lane, n = vector % lanes, vector // lanes
        assert lane + n % shares * lanes == vector % threads and n // shares == vector // threads
