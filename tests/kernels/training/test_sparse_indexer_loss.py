"""SASS of the sparse stage's loss and its gradient: the assembler adds no waits between wgmma, and gathers are cp.async
copies."""

from dsa.kernels.training import sparse_indexer_grad_sm90 as grad
from dsa.kernels.training import sparse_indexer_target_sm90 as target
from dsa.kernels.training.topk_gather import CHUNK, LANE_ROWS, TILE
from tests.kernels.variants import assert_counts, shipped

K16 = 16  # channels, keys or heads of a wgmma instruction
PER_THREAD = 65536 // 128  # limit of the registers per thread, summed over the warpgroups of an SM


@shipped(target.compile_sparse_indexer_target)
def test_target_sass(sass, arguments):
    channels, row_tiles, index_channels = arguments
    chunks = channels // CHUNK
    # Tiles of keys, queries (`row_tiles`), index keys and index queries. A lane gathers a chunk with LANE_ROWS copies
    # (LDGSTS).
    gathered = (1 + row_tiles) * chunks + 2 * index_channels // CHUNK
    # FENCE: one per chunk of keys, one for the index keys, one for the queries, and one for the mbarriers.
    assert_counts(sass, HGMMA=(channels + index_channels) // K16, LDGSTS=gathered * LANE_ROWS, FENCE=chunks + 1 + 2)
    # One start per chunk, because the kernel waits for each chunk's data before its wgmma. One wait per group of
    # chunks. The limit leaves room for four more, such as those of the index product.
    groups = -(-chunks // target.RELEASE_GROUP)
    assert sass.instructions["WARPGROUP"] <= chunks + 1 + groups + 3
    assert 2 * target.ATTENTION_REGISTERS + target.INDEX_REGISTERS + target.PRODUCER_REGISTERS <= PER_THREAD


@shipped(grad.compile_sparse_indexer_grad)
def test_grad_sass(sass, arguments):
    channels, fixed = arguments
    # HGMMA: the query warpgroup computes heads x keys and dq, a key warpgroup keys x heads and dk. FENCE: the keys of
    # each warpgroup, the weighted queries, and the mbarriers.
    assert_counts(sass, HGMMA=2 * (channels + TILE) // K16, FENCE=4)
    # A lane adds its numbers of two rows to dk: four fp32 numbers per reduction, or one 64-bit integer if `fixed`.
    assert_counts(sass, REDG=2 * channels // (4 if fixed else 16))
    assert sass.instructions["WARPGROUP"] < sass.instructions["HGMMA"]
    # Gathers: queries, keys and d_scores. The compiler can duplicate the code for keys.
    copies = channels // CHUNK * LANE_ROWS
    assert sass.instructions["LDGSTS"] in (2 * copies + 1, 3 * copies + 1)
    assert grad.QUERY_REGISTERS + 2 * grad.KEY_REGISTERS + grad.PRODUCER_REGISTERS <= PER_THREAD
