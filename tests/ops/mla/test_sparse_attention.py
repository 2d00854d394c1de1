"""How sparse MLA attention divides its work among CTAs: heads per CTA, unsplit and split queries."""

import itertools

import pytest

from dsa.kernels.mla import sparse_mla_fp8_kv_sm90, sparse_mla_swap_ab_sm90
from dsa.kernels.mla.limits import FP8_KV_HEADS, MAX_PARTS, SWAP_AB_HEADS
from dsa.ops.mla import _sparse_attention as launch


def test_every_head_tile_has_a_kernel():
    assert set(SWAP_AB_HEADS) == {tile for _, (_, _, tile, *_) in sparse_mla_swap_ab_sm90.shipped_variants()}
    assert set(FP8_KV_HEADS) == {tile for _, (_, tile, _) in sparse_mla_fp8_kv_sm90.shipped_variants()}
    assert tuple(launch.FP8_KV_TIMES) == FP8_KV_HEADS


@pytest.mark.parametrize("queries", [1, 2, 31, 66, 100, 127, 132, 133, 264, 4097])
@pytest.mark.parametrize("head_tiles", [1, 2, 3, 200])
@pytest.mark.parametrize("tiles", [1, 2, 8, 32, 513])
def test_stream_k(queries, head_tiles, tiles):
    workers, full_waves, split_workers = launch.stream_k(queries, head_tiles, tiles, 132, may_split=True)
    assert 1 <= workers <= max(1, 132 // head_tiles) and split_workers <= min(workers, MAX_PARTS)
    rest = queries - full_waves * workers
    assert rest < workers and (split_workers > 0) == (rest > 0)
    if rest > 0:
        # Every CTA has a tile. No CTA takes longer than another wave of unsplit queries would.
        assert rest < split_workers <= rest * tiles and -(-rest * tiles // split_workers) < tiles
    workers, full_waves, split_workers = launch.stream_k(queries, head_tiles, tiles, 132, may_split=False)
    assert split_workers == 0 and workers * (full_waves - 1) < queries <= workers * full_waves


@pytest.mark.parametrize(("queries", "tiles", "splits"), [(131, 10**5, True), (131, 125_000, False), (1, 2**24, False)])
def test_queries_of_many_tiles_are_split_only_where_these_can_be_counted(queries, tiles, splits):
    """The scheduler multiplies the number of split tiles by the number of CTAs that share them, in int32."""
    assert (launch.stream_k(queries, 1, tiles, 132, may_split=True)[2] > 0) == splits


@pytest.mark.parametrize(
    ("queries", "tiles", "workers", "full_waves", "split_workers"), [(3, 10, 13, 0, 13), (5, 7, 2, 2, 2)]
)
def test_where_split_tiles_meet(queries, tiles, workers, full_waves, split_workers):
    """Check the arithmetic of `StreamKScheduler`: the range of tiles of a CTA, and the CTA of a tile."""
    rest = queries - full_waves * workers
    bounds = [min(worker, split_workers) * rest * tiles // split_workers for worker in range(split_workers + 2)]
    assert bounds[0] == 0 and bounds[split_workers] == bounds[split_workers + 1] == rest * tiles
    assert bounds[:-1] == sorted(set(bounds[:-1]))
    for tile in range(rest * tiles):
        worker = ((tile + 1) * split_workers - 1) // (rest * tiles)
        assert bounds[worker] <= tile < bounds[worker + 1]


@pytest.mark.parametrize(
    ("queries", "heads", "tiles", "head_tile"),
    [
        *[
            (1, 8, 1, 16),
            (128, 16, 32, 16),
            (128, 17, 32, 32),
            (128, 32, 32, 32),
            (128, 64, 32, 64),
            (256, 128, 32, 64),
        ],
        # Measured: fewer heads per CTA are faster if SMs would be idle otherwise. They can also be faster because
        # partial results are smaller.
        *[(1, 128, 32, 16), (4, 128, 32, 16), (8, 128, 32, 32), (32, 128, 32, 32), (64, 64, 32, 32)],
    ],
)
def test_heads_of_a_cta(queries, heads, tiles, head_tile):
    assert launch.fp8_kv_head_tile(queries, heads, tiles, 132, may_split=True) == head_tile
    of_heads = launch.fp8_kv_head_tile(queries, heads, tiles, 132, may_split=False)
    assert of_heads >= max(head_tile, min(heads, 64))


@pytest.mark.parametrize("heads", [8, 20, 128])
def test_queries_that_are_never_split_do_not_depend_on_their_number(heads):
    for tiles in range(1, launch.SPLIT_COST + 2):
        counts = (1, 2, 30, 131, 133, 5000)
        assert {launch.fp8_kv_head_tile(queries, heads, tiles, 132, may_split=True) for queries in counts} <= {16, 32}
        assert all(launch.stream_k(queries, heads // 16 + 1, tiles, 132, may_split=True)[2] == 0 for queries in counts)


def test_heads_of_a_cta_are_no_more_than_needed():
    for queries, heads, tiles, sms, may_split in itertools.product(
        (1, 7, 132, 5000), (1, 16, 17, 40, 128, 300), (1, 3, 64), (1, 132), (True, False)
    ):
        head_tile = launch.fp8_kv_head_tile(queries, heads, tiles, sms, may_split)
        assert head_tile in (16, 32, 64) and (head_tile == 16 or head_tile < 2 * heads)
