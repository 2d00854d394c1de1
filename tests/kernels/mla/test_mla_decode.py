"""Dense MLA decoding, its plan, and the combination of the splits: the SASS has wgmma and TMA, and every configuration
that can be chosen is shipped."""

import pytest

from dsa.kernels.mla import mla_combine_sm90 as combine
from dsa.kernels.mla import mla_decode_sm90 as kernels
from dsa.kernels.mla import mla_plan_sm90 as plan
from dsa.kernels.mla.limits import HEAD_DIM, TILE_M, TILE_N
from dsa.kernels.mla.mla_tiles import K16, K_PER_V, V_CHUNK_ORDER
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_mla_decode)
def test_decode_sass(sass, arguments):
    _, box, cluster = arguments
    # Products: scores over 576 channels, and O += P V for the two v chunks (128 channels each) of an output warpgroup.
    assert_counts(sass, HGMMA=HEAD_DIM // K16 + 2 * TILE_N // K16)
    # A v chunk consists of K_PER_V k chunks. Per box of a key tile, a CTA loads the rope part and 1 / cluster of all k
    # chunks.
    assert_counts(sass, UTMALDG=(len(V_CHUNK_ORDER) * K_PER_V // cluster + 1) * (TILE_N // box))
    roles = kernels.REGISTERS
    assert (roles.score + 2 * roles.output + roles.load) * kernels.WARPGROUP <= 65536


@shipped(combine.compile_mla_combine, combine.compile_sparse_mla_combine, plan.compile_mla_plan)
def test_small_kernels_use_at_most_128_registers(sass):
    assert sass.registers <= 128


@pytest.mark.parametrize("rows", [1, 64, 65, 128, 192, 256, 1024])
def test_a_cluster_has_row_tiles_of_one_sequence(rows):
    cluster = kernels.cluster_of(rows)
    assert -(-rows // TILE_M) % cluster == 0
    assert ("bfloat16", 64, cluster) in [arguments for _, arguments in kernels.shipped_variants()]


@pytest.mark.parametrize(("splits", "rows"), [(0, 16), (1, 4096), (8, 512), (132, 1), (32, 10**6)])
def test_combine_configurations_are_shipped(splits, rows):
    config = combine.choose_config(splits, rows)
    assert ("float16", config) in [arguments for _, arguments in combine.shipped_variants()]
