"""hyper_collapse_norm_cast: all loads of a token's streams are in flight at the same time. Squares are added in the
order of the separate kernels, so the bits are equal."""

from itertools import groupby

import pytest

from dsa.kernels.elementwise import hyper_collapse_norm_cast_sm90 as kernels
from dsa.kernels.elementwise import limits, rms_norm_sm90
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_hyper_collapse_norm_cast, kernels.compile_hyper_collapse_independent_norm_cast)
def test_no_load_of_the_streams_waits_for_another(sass, in_order, compile_function, arguments):
    _, lanes, vectors, use_ue8m0 = arguments
    mixed = compile_function is kernels.compile_hyper_collapse_norm_cast
    # LDG: mix and base (24 or 8 numbers each, four per load), the scales, and the vectors of four streams. The fp32
    # norm weights need two loads per vector.
    numbers = 2 * 6 + 3 if mixed else 2 * 2 + 2
    assert_counts(sass, LDG=numbers + 4 * vectors + 2 * vectors, BAR=2 + (lanes > 32))
    # STG: per vector the norm, its e4m3 values and a scale; one for post and four for comb.
    assert_counts(sass, STG=3 * vectors + (5 if mixed else 1))
    assert bool(sass.instructions["CALL"]) == (not use_ue8m0)  # the call is the division by the scale
    # Two CTAs per SM for the longest rows, else four, or three with independent streams: their loads in flight suffice
    # for the bandwidth, too. Registers are allocated in multiples of 8.
    ctas = 2 if lanes == 256 else 4 if mixed else 3
    assert (sass.registers + 7) // 8 * 8 * (lanes + 32) <= 65536 // ctas
    # The loads of the streams are one run: no multiply-add comes between them. The warp for post and comb has shorter
    # runs.
    (instructions,) = in_order
    runs = [[*run] for name, run in groupby(name for name in instructions if name in ("LDG", "FFMA"))]
    assert [len(run) for run in runs if run[0] == "LDG"].count(4 * vectors) == 1


@pytest.mark.parametrize("channels", range(128, 8193, 128))
def test_sums_are_in_the_order_of_the_separate_kernels(channels):
    """The norm assigns vectors to threads as the separate norm does. In the separate collapse, thread `vector %
    threads` adds `vector` in step `vector // threads`. Here a thread does the additions of `shares` such threads, one
    after the other."""
    threads, lanes, vectors = next(t for t in limits.HYPER_NORM_TILES if channels <= t[1] * t[2] * 8)
    config = rms_norm_sm90.choose_config("bfloat16", channels, rms_norm_sm90.CAST_CONFIGS)
    assert (lanes, vectors) == (config.lanes, config.vectors) and config.threads % lanes == 0
    assert threads == next(t for t, steps in limits.HYPER_TILES if channels <= t * steps * 8)
    shares = threads // lanes
    for vector in range(channels // 8):
        lane, n = vector % lanes, vector // lanes
        assert lane + n % shares * lanes == vector % threads and n // shares == vector // threads
