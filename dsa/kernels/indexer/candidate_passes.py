"""Key tiles and lists of candidates of the candidate passes (candidate_lists.py), for all kernels of these passes.

A pass scores every S-th tile (S is the pass's stride). These tiles should be a fair sample of the keys, so a tile does
not consist of 64 consecutive keys. The keys that a block of queries sees, from the smallest start to the largest end,
lie in groups of 16 consecutive keys, which begin at multiples of 16. The sequence of groups is divided into four parts
of `tiles` consecutive groups, where `tiles` is the block's number of tiles. Tile r consists of the r-th group of every
part, one group per warp of a warpgroup. Key i of the group from part p is key (base + p * tiles + r) * 16 + i, where
`base` is the index of the first group. So the tiles of a pass contain every S-th group of each part. Four TMA copies
load a tile.

A query's list has CAPACITY entries. It is filled from both ends, because two CTAs can append to it. The lists of all
queries are three tensors in global memory:
- entries [queries, CAPACITY] int64: an fp32 score and its int32 key. After the first pass, a query's row contains the
  sample instead: fp32 scores without keys
- counts [queries, 2] int32: number of entries at the front, and number of entries at the back
- bounds [queries] fp32: the least score that a candidate must have
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsa.cute.fake_tensors import fake
from dsa.cute.sm90 import WARP
from dsa.kernels.indexer.candidate_lists import BATCH, CAPACITY, GROUP, LOG_GROUP, LOG_TILE, PARTS
from dsa.kernels.indexer.radix_select import LOWEST, order_of
from dsa.kernels.indexer.score_mainloop import keys_of_block


@cute.jit
def frame_of(block, block_q, starts, ends, keys, lane):
    """-> (index of the first group of keys that a block of `block_q` queries sees, number of the block's key tiles).
    The whole warp calls this."""
    low, high = keys_of_block(block, block_q, starts.shape[0], starts, ends, keys, lane)
    base = low >> LOG_GROUP
    groups = cutlass.max(((high + GROUP - 1) >> LOG_GROUP) - base, 0)
    return base, (groups + PARTS - 1) >> (LOG_TILE - LOG_GROUP)


@cute.jit
def tiles_of_pass(tiles, log_stride):
    """Return how many of the tiles 0 to `tiles` - 1 have an index that is a multiple of 2^log_stride."""
    return (tiles + (Int32(1) << log_stride) - 1) >> log_stride


@cute.jit
def load_entry(entries: cute.Tensor, query, place):
    """Load entry number `place` of the query's list. -> (score, key)"""
    return cute.arch.inline_ptx(
        "ld.global.v2.b32 {" + "{$w0}, {$w1}" + "}, [{$r0}];",
        write_only_types=[Float32, Int32],
        read_only_args=[Int64((entries[query, None].iterator + place).toint())],
    )


@cute.jit
def load_candidates(
    entries: cute.Tensor,
    query,
    front: Int32,
    count: Int32,
    first_key: Int32,
    orders: cute.Tensor,
    own_keys: cute.Tensor,
    tid,
    threads: cutlass.Constexpr,
):
    """Load a query's list of `count` entries into the registers of a CTA's threads. Entries 0 to `front` - 1 are those
    at the front of the list. The following numbers are those of the entries at the list's end, counted backwards.
    Register i of thread `tid` gets entry `tid` + i * `threads`.

    orders    gets the orders of the scores (`order_of`), and LOWEST in registers without an entry
    own_keys  gets the keys minus first_key; meaningless where `orders` is LOWEST"""
    first = Int64((entries[query, None].iterator + tid).toint())
    for base in cutlass.range_constexpr(0, cute.size(orders), BATCH):
        scores = cute.make_rmem_tensor((BATCH,), Float32)
        for i in cutlass.range_constexpr(base, base + BATCH):
            orders[i], own_keys[i] = Int32(LOWEST), Int32(0)
        if base * threads < from_warp(count, tid):
            if front >= count:
                for i in cutlass.range_constexpr(BATCH):
                    scores[i], own_keys[base + i] = _load_if_below(first, tid, count, (base + i) * threads)
            else:
                for i in cutlass.range_constexpr(BATCH):  # no branch between the loads, so that they overlap
                    place = cutlass.min(tid + (base + i) * threads, count - 1)
                    at = place if place < front else CAPACITY - 1 - (place - front)
                    scores[i], own_keys[base + i] = load_entry(entries, query, at)
                    if tid + (base + i) * threads >= count:
                        scores[i] = Float32(float("nan"))
            for i in cutlass.range_constexpr(BATCH):
                orders[base + i] = order_of(scores[i])
                own_keys[base + i] -= first_key


@cute.jit
def from_warp(count: Int32, tid) -> Int32:
    """Return `count` minus the thread index of this warp's first thread. In round b, thread t has item b * threads + t.
    So if the result is at most b * threads, this warp has no items from round b on."""
    return count - tid // WARP * WARP


@cute.jit
def _load_if_below(first: Int64, tid, count: Int32, ahead: cutlass.Constexpr):
    """Load entry `tid` + `ahead` without a branch. -> (score, key), or (NaN, the largest int32) if `tid` + `ahead` is
    not below `count`. `first` is the address of entry `tid`."""
    return cute.arch.inline_ptx(
        "{{ .reg .pred p; .reg .b32 a, s, k; "
        f"add.s32 a, {{$r1}}, {ahead}; setp.lt.s32 p, a, {{$r2}}; "
        "mov.b32 s, 0x7FFFFFFF; mov.b32 k, 0x7FFFFFFF; "
        "@p ld.global.v2.b32 {" + "s, k}" + f", [{{$r0}} + {8 * ahead}]; "
        "mov.b32 {$w0}, s; mov.b32 {$w1}, k; }}",
        write_only_types=[Float32, Int32],
        read_only_args=[first, tid, count],
    )


@cute.jit
def store_entry(entries: cute.Tensor, query, place, score: Float32, key: Int32):
    cute.arch.inline_ptx(
        "st.global.v2.b32 [{$r0}], {" + "{$r1}, {$r2}" + "};",
        read_only_args=[Int64((entries[query, None].iterator + place).toint()), score, key],
    )


def fake_lists(queries) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
    """Return fake tensors for the lists of `queries` queries: entries, counts and bounds."""
    entries = fake(Int64, (queries, CAPACITY), (CAPACITY, 1))
    return entries, fake(Int32, (queries, 2), (2, 1)), fake(Float32, (queries,), (1,))
