"""The top-k: SASS with bulk copies and counters in shared memory, and the choice of a variant."""

import itertools

import pytest
from cutlass import BFloat16, Float32

from dsa.cute.sm90 import SHARED_BYTES
from dsa.kernels.indexer import topk_config
from dsa.kernels.indexer import topk_indices_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_topk_indices)
def test_sass(sass, arguments):
    _, config = arguments
    # UBLKCP loads the row. With tiles, cp.async (LDGSTS) loads a sample of the row for the first threshold. ATOMS
    # counts the scores per digit (radix_select.py).
    assert_counts(sass, LDGSTS=1 if config.tile else 0, ATOMG=0)
    assert sass.instructions["UBLKCP"] >= 1 and sass.instructions["ATOMS"] >= 8
    assert bool(sass.instructions["UCGABAR_ARV"]) == bool(sass.instructions["UCGABAR_WAIT"]) == (config.cluster > 1)


@pytest.mark.parametrize("sms", [132, 114, 78])
@pytest.mark.parametrize("width", [32, 16])
@pytest.mark.parametrize("k", [1, 512, 2048, 2049, 4096])
def test_every_shape_has_a_variant_that_takes_it(k, width, sms):
    all_rows = (1, 2, 8, 16, 17, 33, 64, 66, 67, 132, 133, 5000)
    for rows, vectors in itertools.product(all_rows, (1, 1024, 2048, 2049, 4096, 4097, 5000, 8192, 32768, 2**28)):
        config = topk_config.choose_config(rows, vectors, k, width, sms)
        assert config in topk_config.CONFIGS and config.takes(k)
        assert config.tile or vectors <= config.resident_vectors(width)
        assert config.cluster == 1 or rows * config.cluster <= sms


@pytest.mark.parametrize("config", topk_config.CONFIGS, ids=str)
@pytest.mark.parametrize(("width", "dtype"), [(32, Float32), (16, BFloat16)])
def test_variants_keep_the_rules_of_the_algorithm(width, dtype, config):
    assert kernels.TopkIndicesSm90(dtype, config).shared <= SHARED_BYTES
    # A thread marks its elements of a row, a list or a tile in a mask of 32 bits.
    assert config.resident_vectors(width) * (128 // width) <= 32 * config.threads
    assert config.capacity <= 32 * config.threads and config.tile <= 32 and config.tile % (128 // width) == 0
    # The sort of a row's selected keys uses the list's memory.
    largest = max(k for k in (512, 1024, 2048, 4096) if config.takes(k))
    assert 2 * largest <= 2 * config.capacity
    if config.tile:
        assert 4 * largest <= config.capacity * width // 8, "the columns' place reaches into the list's columns"
        assert config.stages >= 2 and kernels.SAMPLE <= config.capacity
