"""The kernels of the sparse stage's loss compile to sm_90a: wgmma without waits between them, gathers, no spills."""

from dsa.kernels.training import sparse_indexer_grad_sm90 as grad
from dsa.kernels.training import sparse_indexer_target_sm90 as target
from dsa.kernels.training.topk_gather import CHUNK, LANE_ROWS, TILE
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped

K16 = 16  # channels, keys or heads of a wgmma instruction
ALL = 65536 // 128  # registers of a multiprocessor, for each thread of a warpgroup


@shipped(target.compile_sparse_indexer_target)
def test_target_sass(arguments):
    channels, row_tiles, index_channels = arguments
    sass = disassemble(cubin(target.compile_sparse_indexer_target, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.instructions["HGMMA"] == (channels + index_channels) // K16
    # An arrival for each chunk, whose wait for memory is between; waits for groups of chunks only.
    chunks = channels // CHUNK
    groups = -(-chunks // target.RELEASE_GROUP)
    assert sass.instructions["WARPGROUP"] <= chunks + 1 + groups + 3
    # A tile of keys, of index keys, of index queries and those of queries.
    gathered = (1 + row_tiles) * chunks + 2 * index_channels // CHUNK
    assert sass.instructions["LDGSTS"] == gathered * LANE_ROWS
    # wgmma reads each chunk of keys, and the index keys, after a fence; the others fence the queries and the barriers.
    assert sass.instructions["FENCE"] == chunks + 1 + 2
    assert sass.registers * target.THREADS <= 65536
    assert 2 * target.ATTENTION_REGISTERS + target.INDEX_REGISTERS + target.PRODUCER_REGISTERS <= ALL


@shipped(grad.compile_sparse_indexer_grad)
def test_grad_sass(arguments):
    channels, fixed = arguments
    sass = disassemble(cubin(grad.compile_sparse_indexer_grad, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # Scores and a sum, in both orientations.
    assert sass.instructions["HGMMA"] == 2 * (channels + TILE) // K16
    # Both warpgroups' keys, the weighted queries, and the barriers.
    assert sass.instructions["FENCE"] == 4
    assert sass.instructions["WARPGROUP"] < sass.instructions["HGMMA"]
    # Two rows of a lane: four numbers of fp32 at a time, integers one by one.
    assert sass.instructions["REDG"] == 2 * channels // (4 if fixed else 16)
    # Queries, keys and d_scores, which one warp has: the compiler may write the keys twice for it.
    assert sass.instructions["LDGSTS"] in (2 * channels // CHUNK * LANE_ROWS + 1, 3 * channels // CHUNK * LANE_ROWS + 1)
    assert sass.registers * grad.THREADS <= 65536
    assert grad.QUERY_REGISTERS + 2 * grad.KEY_REGISTERS + grad.PRODUCER_REGISTERS <= ALL


def test_every_variant_is_shipped_once():
    assert len({v for _, v in target.shipped_variants()}) == 2 * 2 * 2
    assert len({v for _, v in grad.shipped_variants()}) == 2 * 2
