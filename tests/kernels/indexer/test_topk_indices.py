"""Every shipped variant of the top-k compiles to sm_90a without spills, with the copies and counters it should have."""

import pytest
from cutlass import BFloat16, Float32

from dsa.cute.sm90 import SHARED_BYTES
from dsa.kernels.indexer import topk_config
from dsa.kernels.indexer import topk_indices_sm90 as kernels
from dsa.kernels.indexer.topk_candidates import SAMPLE
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_topk_indices)
def test_sass(arguments):
    _, config = arguments
    sass = disassemble(cubin(kernels.compile_topk_indices, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers * config.threads <= 65536
    # The row by bulk copies, the sample's vectors by asynchronous ones, digits by shared-memory counters.
    assert sass.instructions["UBLKCP"] >= 1 and sass.instructions["LDGSTS"] == (1 if config.tile else 0)
    assert sass.instructions["ATOMS"] >= 8 and not sass.instructions["ATOMG"]
    # Nothing synchronises a cluster of one.
    assert bool(sass.instructions["UCGABAR_ARV"]) == bool(sass.instructions["UCGABAR_WAIT"]) == (config.cluster > 1)


@pytest.mark.parametrize("multiprocessors", [132, 114, 78])
@pytest.mark.parametrize("width", [32, 16])
@pytest.mark.parametrize("k", [1, 512, 2048, 2049, 4096])
def test_every_shape_has_a_variant_that_takes_it(k, width, multiprocessors):
    for rows in (1, 2, 8, 16, 17, 33, 64, 66, 67, 132, 133, 5000):
        for vectors in (1, 1024, 2048, 2049, 4096, 4097, 5000, 8192, 32768, 2**28):
            config = topk_config.choose_config(rows, vectors, k, width, multiprocessors)
            assert config in topk_config.CONFIGS and config.takes(k)
            assert config.tile or vectors <= config.resident_vectors(width)
            assert config.cluster == 1 or rows * config.cluster <= multiprocessors


@pytest.mark.parametrize("config", topk_config.CONFIGS, ids=str)
def test_variants_keep_the_rules_of_the_algorithm(config):
    for width, dtype in ((32, Float32), (16, BFloat16)):
        kernel = kernels.TopkIndicesSm90(dtype, config)
        assert kernel.shared <= SHARED_BYTES
        # A thread has 32 bits for its numbers of a row, a list or a tile.
        assert config.resident_vectors(width) * (128 // width) <= 32 * config.threads
        assert config.capacity <= 32 * config.threads and config.tile <= 32 and config.tile % (128 // width) == 0
        # Sorting and ordering happen in the list's place.
        largest = max(k for k in (512, 1024, 2048, 4096) if config.takes(k))
        assert 2 * largest <= 2 * config.capacity
        if config.tile:
            assert 4 * largest <= config.capacity * width // 8, "the columns' place reaches into the list's columns"
            assert config.stages >= 2 and SAMPLE <= config.capacity
