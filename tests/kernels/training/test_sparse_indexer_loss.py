"""SASS of the sparse stage's loss: wgmma without waits between them, and gathers."""

from dsa.kernels.training import sparse_indexer_grad_sm90 as grad
from dsa.kernels.training import sparse_indexer_target_sm90 as target
from dsa.kernels.training.topk_gather import CHUNK, LANE_ROWS, TILE
from tests.kernels.variants import assert_counts, shipped

K16 = 16  # channels, keys or heads of a wgmma instruction
PER_THREAD = 65536 // 128  # registers of an SM, per thread of a warpgroup


@shipped(target.compile_sparse_indexer_target)
def test_target_sass(sass, arguments):
    channels, row_tiles, index_channels = arguments
    chunks = channels // CHUNK
    # Loads: a tile of keys, of index keys, of index queries, and the tiles of queries.
    gathered = (1 + row_tiles) * chunks + 2 * index_channels // CHUNK
    # One fence before the wgmma that read each chunk of keys, and one for the index keys; the others are for the
    # queries and barriers.
    assert_counts(sass, HGMMA=(channels + index_channels) // K16, LDGSTS=gathered * LANE_ROWS, FENCE=chunks + 1 + 2)
    # An arrival per chunk, because the kernel waits for the chunk's data in between; waits only per group of chunks.
    groups = -(-chunks // target.RELEASE_GROUP)
    assert sass.instructions["WARPGROUP"] <= chunks + 1 + groups + 3
    assert 2 * target.ATTENTION_REGISTERS + target.INDEX_REGISTERS + target.PRODUCER_REGISTERS <= PER_THREAD


@shipped(grad.compile_sparse_indexer_grad)
def test_grad_sass(sass, arguments):
    channels, fixed = arguments
    # Products: scores and a sum, in both orientations. Fences: for both warpgroups' keys, the weighted queries, and the
    # barriers.
    assert_counts(sass, HGMMA=2 * (channels + TILE) // K16, FENCE=4)
    # Atomic sums for two rows of a lane: four fp32 numbers at a time, or single integers.
    assert_counts(sass, REDG=2 * channels // (4 if fixed else 16))
    assert sass.instructions["WARPGROUP"] < sass.instructions["HGMMA"]
    # One warp gathers queries, keys and d_scores; the compiler may duplicate the code for keys.
    copies = channels // CHUNK * LANE_ROWS
    assert sass.instructions["LDGSTS"] in (2 * copies + 1, 3 * copies + 1)
    assert grad.QUERY_REGISTERS + 2 * grad.KEY_REGISTERS + grad.PRODUCER_REGISTERS <= PER_THREAD
