"""The shipped variants of dense MLA decoding, of its plan and of its end compile to sm_90a: wgmma, TMA, no spills."""

import pytest

from dsa.kernels.mla import mla_combine_sm90 as combine
from dsa.kernels.mla import mla_decode_sm90 as kernels
from dsa.kernels.mla import mla_plan_sm90 as plan
from dsa.kernels.mla.limits import HEAD_DIM, TILE_M, TILE_N
from dsa.kernels.mla.mla_tiles import K16, K_PER_V, V_CHUNK_ORDER
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_mla_decode)
def test_decode_sass(arguments):
    _, box, cluster = arguments
    sass = disassemble(cubin(kernels.compile_mla_decode, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # Scores of 576 channels, and the two v chunks of a warpgroup's half of the value.
    assert sass.instructions["HGMMA"] == HEAD_DIM // K16 + 2 * TILE_N // K16
    # The k chunks of a v chunk that this CTA loads, of each of the v chunks, and the rope part, by boxes.
    assert sass.instructions["UTMALDG"] == (len(V_CHUNK_ORDER) * K_PER_V // cluster + 1) * (TILE_N // box)
    assert sass.registers * kernels.THREADS <= 65536
    roles = kernels.REGISTERS
    assert (roles.score + 2 * roles.output + roles.load) * kernels.WARPGROUP <= 65536


@pytest.mark.parametrize("rows", [1, 64, 65, 128, 192, 256, 1024])
def test_a_cluster_has_row_tiles_of_one_sequence(rows):
    cluster = kernels.cluster_of(rows)
    assert -(-rows // TILE_M) % cluster == 0
    assert ("bfloat16", 64, cluster) in [arguments for _, arguments in kernels.shipped_variants()]


@shipped(combine.compile_mla_combine, plan.compile_mla_plan)
def test_small_kernels_sass(compile_function, arguments):
    sass = disassemble(cubin(compile_function, *arguments))
    assert sass.stack == 0 and sass.registers <= 128


@pytest.mark.parametrize(("splits", "rows"), [(0, 16), (1, 4096), (8, 512), (132, 1), (32, 10**6)])
def test_combine_configurations_are_shipped(splits, rows):
    config = combine.choose_config(splits, rows)
    assert ("float16", config) in [arguments for _, arguments in combine.shipped_variants()]
