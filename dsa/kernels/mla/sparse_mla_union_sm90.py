"""Sparse MLA prefill for groups of adjacent queries that share keys, with up to 16 heads and 16-bit keys.

o[t, h] = sum_j softmax_j(scale * q[t, h] . k[j]) k[j, :512]

The sum runs over the selected keys j of query t. q and k have 576 or 512 channels. A queue lists the groups
to compute.

This is sparse_mla_sm90.py, except that the rows of a CTA (M) are the queries x heads of a group, one query after the
other, and that the keys are the union of the group's selections (selection_union_sm90.py). An entry of a group's list
is a key and its members: one bit for each query of the group that has selected the key. An entry has at least one
member, so it is never 0, and the load warps use 0 for positions past the end of the list. Each key of the union is
gathered once. The scores of queries that have not selected the key are -inf. A tile of 64 keys takes as long as it does
for one query with 64 heads.
Fallback: if O of a query has a NaN or infinity, the cause can be a key that only other queries of the group have
selected, because 0 * NaN and 0 * inf are NaN. The group's queries then go to the queue of single queries, which
sparse_mla_queued_sm90.py computes afterwards.
Constraints: limits.py; rows of q and keys start at multiples of 16 bytes.
Roofline: as sparse_mla_sm90.py, for the tiles of the union.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.kernels.mla.limits import DTYPES, GROUP_SIZES, MEMBER_SHIFT, SPARSE_HEAD_DIMS, TILE_M, TILE_N
from dsa.kernels.mla.mla_epilogue import HALF_V, Epilogue
from dsa.kernels.mla.mla_roles import QTile, Results, WorkTileInfo
from dsa.kernels.mla.mla_softmax import Exchange, SoftmaxState
from dsa.kernels.mla.mla_tiles import MASK_WORDS, KvPipeline, KvState
from dsa.kernels.mla.sparse_mla_kernel import Coord, of_prefill, queued_arguments, selections
from dsa.kernels.mla.sparse_mla_sm90 import ROPE_STAGES, V_STAGES, SparseMlaSm90
from dsa.kernels.mla.tile_scheduler import Queue
from dsa.kernels.mla.topk_gather import WARP_KEYS, Selection, TopkGather
from dsa.runtime.compile_cache import cached, compile_sm90


def member_of(row, size: int):
    """Return the query to which row `row` of a CTA belongs, as an index in the group of `size` queries."""
    return row // (TILE_M // size)


def head_of(row, size: int):
    """Return the head to which row `row` of a CTA belongs, for groups of `size` queries. Rows with a result past the
    last head are padding."""
    return row % (TILE_M // size)


@cute.jit
def entry_members(entry: Int32) -> Uint32:
    return Uint32(entry) >> MEMBER_SHIFT


@dataclass(frozen=True)
class GroupResults(Results):
    """The results of groups, and the data for the fallback, which handles groups with non-finite results.

    lengths  [g] int32: length of each group's list; -1 once the fallback has put the group's queries in `queries`
    queries  the queue of single queries
    """

    lengths: cute.Tensor | None = None
    queries: Queue | None = None


@dataclass(frozen=True)
class GroupQTile(QTile):
    """The rows of a group of `size` queries, TILE_M / size rows per query, one query after the other. queries: number
    of queries of all groups. heads: number of heads of a query, at most TILE_M / size."""

    size: cutlass.Constexpr[int]
    queries: Int32
    heads: Int32

    @cute.jit
    def coord(self, group, row):
        return group * self.size + member_of(row, self.size), Int32(0), head_of(row, self.size)

    @cute.jit
    def has_row(self, group, row):
        query, _, head = self.coord(group, row)
        return query < self.queries and head < self.heads


class UnionGather(TopkGather):
    """Gather for groups of `size` queries: a group's Q as one tile, then the keys of the group's list.

    In the methods, `query` is a group, and an `index` is an entry of the group's list: a key and its members. The valid
    mask of a tile has MASK_WORDS words per query of the group: a bit says whether the query has selected the key.
    """

    def __init__(self, dtype: type[cutlass.Numeric], head_dim: int, v_stages: int, rope_stages: int, size: int):
        super().__init__(dtype, head_dim, v_stages, rope_stages)
        self.size, self.masks = size, size

    @cute.jit
    def locate_row(self, q, query, first_row, warp, lane):
        """Return the same as `TopkGather.locate_row`, but the rows are those of group `query`. `first_row` is not
        used."""
        row = warp * WARP_KEYS + lane % WARP_KEYS
        token, head = query * self.size + member_of(row, self.size), head_of(row, self.size)
        valid = token < q.shape[0] and head < q.shape[2]
        token, head = cutlass.min(token, q.shape[0] - 1), cutlass.min(head, q.shape[2] - 1)
        return q[token, 0, head, None].iterator.toint(), valid

    @cute.jit
    def index_of(self, lists, counts, ends, query, tile, key):
        """Return the entry of a group's list for key `key` (0 to 63) of tile `tile`, or 0 past the end of the list."""
        place = tile * TILE_N + key
        entry = Int32(0)
        if place < counts[0]:
            entry = lists[0].indices[query, place]
        return entry

    @cute.jit
    def find(self, selection: Selection, index):
        address, scales, _ = TopkGather.find(self, selection, index & ((1 << MEMBER_SHIFT) - 1))
        return address, scales, entry_members(index) != 0

    @cute.jit
    def selected(self, mask: Uint32, index: Int32, lane):
        """Return, in lane m < `size`, one bit for each key of this warp: whether the group's m-th query has selected
        the key."""
        own = Uint32(0)
        for m in cutlass.range_constexpr(self.size):
            of_member = Uint32(cute.arch.vote_ballot_sync((entry_members(index) >> m) & 1 != 0)) & 0xFFFF
            if lane == m:
                own = of_member
        return own

    @cute.jit
    def write_selected(self, pipeline: KvPipeline, selected: Uint32, warp, lane, state: KvState):
        if lane < self.size:
            pipeline.valid_mask[lane * MASK_WORDS + warp, state.rope.stage] = selected
        cute.arch.sync_warp()


class SparseMlaUnionSm90(SparseMlaSm90):
    """Sparse MLA attention of query groups.

    f(q [T, h, d], kv [s_kv, 1, d], lists [g, 1, width], lengths [g], sink [m], has_sink, out [T, h, 512], lse
    [T, h], out_partial, lse_partial, max_logits [T, h], scale * log2(e), workers, queued [2], groups [g],
    queries [T]).

    q, kv and the arguments from sink to workers are as in `SparseMlaKernel` with max_logits. No query is split, so
    out_partial and lse_partial are not written. The kernel of `compile_selection_union` writes the other arguments: the
    first queued[0] entries of `groups` are the groups to compute, and group i has lengths[i] entries in lists[i]. If O
    of a group has a NaN or infinity, the kernel appends the group's queries to `queries` and increases queued[1] by
    their number. It sets the group's length to -1. A group has `size` queries; h <= TILE_M / size.
    """

    all_heads = True

    def __init__(self, head_dim: int, epilogue: Epilogue, size: int):
        self.size = size
        super().__init__(head_dim, epilogue)

    def stages(self, dtype: type[cutlass.Numeric], head_dim: int) -> UnionGather:
        return UnionGather(dtype, head_dim, V_STAGES[head_dim], ROPE_STAGES, self.size)

    def q_tile(self, results: Results, group, coord: Coord) -> GroupQTile:
        return GroupQTile(TILE_M, 0, 0, self.size, results.lse.shape[0], coord.heads)

    def head_of_row(self, row, first_head):
        return head_of(row, self.size)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        lists: cute.Tensor,
        lengths: cute.Tensor,
        sink: cute.Tensor,
        has_sink: Int32,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        max_logits: cute.Tensor,
        scale: Float32,
        workers: Int32,
        queued: cute.Tensor,
        groups: cute.Tensor,
        queries: cute.Tensor,
        stream,
    ):
        q, caches, lists, out, lse = of_prefill(q, kv, lists, out, lse)
        results = GroupResults(
            *(out, lse, out_partial, lse_partial, max_logits), lengths=lengths, queries=Queue(queries, queued, 1)
        )
        self.launch(
            *(q, selections(caches, lists, [lengths], Int32(1)), results, sink, has_sink, scale),
            *(Int32(1), workers, Int32(0), Int32(0), stream, Queue(groups, queued, 0), lengths.shape[0]),
        )

    @cute.jit
    def apply_mask(
        self,
        scores,
        softmax: SoftmaxState,
        shared,
        state: KvState,
        work: WorkTileInfo,
        q_tile: GroupQTile,
        key,
        tid,
        lane,
    ):
        layout = cute.make_layout((MASK_WORDS, self.kv.masks, self.kv.rope_stages))
        masks = cute.make_tensor(shared.pipeline.valid_mask.iterator, layout)
        mask = cute.make_rmem_tensor((MASK_WORDS,), Uint32)
        tile_row = tid // 32 * 16 + lane // 4
        for r in cutlass.range_constexpr(2):
            member = member_of(tile_row + 8 * r, q_tile.size)
            # The lane's two rows are 8 apart. With 16 rows per query they belong to the same query, so the first row's
            # mask serves both. With 8 rows per query they belong to different queries.
            if const_expr(r == 0 or q_tile.size == TILE_M // 8):
                cute.autovec_copy(masks[None, member, state.rope.stage], mask)
                for i in cutlass.range_constexpr(MASK_WORDS):
                    mask[i] >>= Uint32(lane % 4 * 2)
            for i in cutlass.range_constexpr(TILE_N // 4):
                column = i // 2 % 2 * 8 + i % 2  # index among 16 keys, minus the lane's first column
                if (mask[i // 4] >> column) & 1 == 0:
                    scores[i // 2 * 4 + 2 * r + i % 2] = -Float32(float("inf"))

    @cute.jit
    def store_whole(
        self,
        acc,
        upper,
        lower,
        results: GroupResults,
        q_tile: GroupQTile,
        group,
        row,
        rows,
        exchange: Exchange,
        p_stage,
        side,
        warp,
        lane,
    ):
        """Store O of a group. If O has a NaN or infinity, add the group's queries to the queue of single queries. Its
        kernel overwrites their results."""
        # `zero` becomes NaN if any of the lane's values of O is NaN or infinite. A warp with such a lane replaces the
        # length of the group's list by -1 and gets the old value. Only the first such warp gets the length and not -1,
        # so only this warp queues the group's queries.
        zero = Float32(0.0)
        for i in cutlass.range_constexpr(HALF_V // 2):
            zero = cute.math.fma(acc[i], Float32(0.0), zero)
        if cute.arch.vote_any_sync(not (zero == 0.0)):
            with cute.arch.elect_one():
                if cute.arch.atomic_exch(results.lengths.iterator + group, Int32(-1), sem="relaxed", scope="gpu") >= 0:
                    first = group * q_tile.size
                    results.queries.add(first, cutlass.min(q_tile.queries - first, q_tile.size))
        coords, left = [], Int32(0)
        for r in cutlass.range_constexpr(2):
            query, _, head = q_tile.coord(group, row + 8 * r)
            if query < q_tile.queries and head < q_tile.heads:
                left = Int32(8 * r + 1)  # `store` writes the lane's r-th row if 8 r < left
            query, head = cutlass.min(query, q_tile.queries - 1), cutlass.min(head, q_tile.heads - 1)
            coords.append((query, Int32(0), head))
        self.store_staged(acc, upper, lower, results, coords, left, exchange, p_stage, side, warp, lane)


@cached
def compile_sparse_mla_union(dtype: str, head_dim: int, size: int):
    """Compile f, see `SparseMlaUnionSm90`, for groups of `size` queries."""
    kind = cute_dtype(dtype)
    (q, [kv], _, _, _, *sinks), results = queued_arguments(kind, head_dim)
    groups = cute.sym_int()
    lengths, queued, items, queries = (fake(Int32, (n,), (1,), 4) for n in (groups, 2, groups, q.shape[0]))
    return compile_sm90(
        SparseMlaUnionSm90(head_dim, Epilogue(kind, with_max_logits=True), size),
        *(q, kv, fake(Int32, (groups, 1, cute.sym_int()), (*strides(2), 1), 4)),
        *(lengths, *sinks, *results),
        *(Float32(0.0), Int32(1), queued, items, queries, fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the op can ask for."""
    return [
        (compile_sparse_mla_union, (dtype, head_dim, size))
        for head_dim in SPARSE_HEAD_DIMS
        for size in sorted(GROUP_SIZES.values())
        for dtype in DTYPES
    ]
